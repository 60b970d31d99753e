"""Marks of single cases of parametrised tests."""

from functools import partial

import pytest

late = partial(pytest.param, marks=pytest.mark.long)
