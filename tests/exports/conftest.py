"""Records of which exports are read."""

from pathlib import Path

import pytest

from .given import write_foreign_record, write_full_record


@pytest.fixture(scope="package")
def full(tmp_path_factory) -> Path:
    return write_full_record(tmp_path_factory.mktemp("full") / "record")


@pytest.fixture(scope="package")
def foreign(tmp_path_factory) -> Path:
    return write_foreign_record(tmp_path_factory.mktemp("foreign") / "record")
