"""Names of metrics: those that frameworks log, and those that only end like them."""

import tomllib
from pathlib import Path

import pytest

from areal_debug.doctor.names import choose_names

NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("quantity", "name"), [(known, name) for known in NAMES for name in NAMES[known]])
def test_a_quantity_is_known_by_the_words_that_its_name_ends_with(quantity, name):
    name, *beside = name.split(" beside ")
    assert choose_names([name, *beside]) == ({} if quantity == "none" else {quantity: name})
