import pytest

from .records import write_chats, write_other


@pytest.fixture(scope="package")
def two(tmp_path_factory):
    """A record and another one of the same prompts."""
    folder = tmp_path_factory.mktemp("two")
    return write_chats(folder / "a", num_rows=8, num_steps=3), write_other(folder / "b")
