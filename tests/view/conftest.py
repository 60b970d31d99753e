import pytest

from ..browser.chromium import browser_page


@pytest.fixture(scope="package")
def page(tmp_path_factory):
    """One tab for all tests of pages: a browser takes seconds to start."""
    with browser_page(tmp_path_factory.mktemp("profile")) as page:
        yield page
