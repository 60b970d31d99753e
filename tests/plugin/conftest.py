"""The environment of a pytest in a pytest."""

import pytest


@pytest.fixture(autouse=True)
def outside_ci(monkeypatch):
    """In CI, pytest repeats each message in full in its summary, which the tests would count."""
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)
