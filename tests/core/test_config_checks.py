"""Options that must agree: each conflict, and each option without effect, is one sentence.

`config_sentences.yaml` has the options and what is said of them.
"""

from copy import deepcopy
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml

from areal_core.config import PPOConfig, check_config
from areal_core.config.loading import config_from_dict
from areal_core.errors import ConfigError

TABLE = yaml.load(Path(__file__).with_name("config_sentences.yaml").read_text(), yaml.CSafeLoader)
SOUND = config_from_dict(TABLE["sound"], PPOConfig)


def config_with(options: dict[str, object]) -> PPOConfig:
    config = deepcopy(SOUND)
    for name, value in options.items():
        section, (*sections, leaf) = config, name.split(".")
        for part in sections:
            section = getattr(section, part)
        kind = get_type_hints(type(section))[leaf]
        cls = next((each for each in (kind, *get_args(kind)) if is_dataclass(each)), None)
        setattr(section, leaf, value if cls is None or value is None else config_from_dict(value, cls))
    return config


def rows(part: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", TABLE[part], ids=lambda row: ", ".join(row["set"]))


def test_sound_config_passes_without_notes():
    assert check_config(config_with({})) == []


@rows("refused")
def test_disagreement_is_named_with_both_values(row):
    with pytest.raises(ConfigError) as error:
        check_config(config_with(row["set"]))
    assert str(error.value) == row["says"]


@rows("noted")
def test_an_option_without_effect_has_one_note(row):
    assert check_config(config_with(row["set"])) == [row["says"]]


@pytest.mark.parametrize("options", TABLE["agrees"])
def test_options_that_agree_pass(options):
    check_config(config_with(options))
