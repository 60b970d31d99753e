"""Credentials are masked by name, by shape and by value; ordinary options and text stay."""

import dataclasses
import time
import tomllib
from pathlib import Path

import pytest

from areal_core.config import experiment, generation, services, train_engine
from areal_core.safety.secrets import Masker, names_secret, num_masked, secret_values

TABLE = tomllib.loads(Path(__file__).with_name("secrets.toml").read_text())


@pytest.mark.parametrize(("command", "shown"), TABLE["commands"], ids=lambda value: value[-1][:40])
def test_command_lines_lose_their_secrets_and_nothing_else(command, shown):
    mask = Masker()
    assert mask.command(command) == shown
    assert mask.count == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [(f"got {one}", "got ***") for one in TABLE["shapes"]] + [(one, one) for one in TABLE["harmless"]],
    ids=lambda value: value[:16],
)
def test_known_shapes_are_masked_without_a_name_and_ordinary_text_stays(text, shown):
    mask = Masker()
    assert mask.text(text) == shown
    assert mask.count == (text != shown)


def test_of_all_options_only_the_keys_are_secret():
    options = {
        field.name
        for module in (experiment, generation, services, train_engine)
        for config in vars(module).values()
        if dataclasses.is_dataclass(config)
        for field in dataclasses.fields(config)
    }
    assert len(options) > 300
    assert {name for name in options if names_secret(name)} == {"admin_api_key", "api_key", "wandb_api_key"}


@pytest.mark.parametrize("name", TABLE["credentials"] + TABLE["no_credentials"])
def test_names_of_credentials_and_those_that_only_look_so(name):
    assert names_secret(name) == (name in TABLE["credentials"])


def test_values_of_the_environment_are_found_wherever_they_reappear():
    values = secret_values({"MY_TOKEN": "plain-Value1", "OTHER": "visible-value", "PIN_TOKEN": "1"})
    assert values == {"plain-Value1"}
    mask = Masker(values)
    assert mask.text("step 1: /cache/plain-Value1/x 1") == "step 1: /cache/***/x 1"
    assert mask.count == 1


def test_a_password_of_a_url_and_the_token_of_a_header_are_found_elsewhere():
    mask = Masker()
    texts = [
        "s3://KEY:aB3/aB3-aB3@b",
        "Authorization: Bearer xY7-xY7-xY7",
        "got aB3/aB3-aB3, then xY7-xY7-xY7",
    ]
    assert [mask.text(text) for text in texts] == ["s3://***@b", "Authorization: ***", "got ***, then ***"]
    assert mask.count == 4


def test_a_secret_of_a_tree_is_masked_in_its_other_values_too():
    mask = Masker()
    tree = {
        "wandb": {"api_key": "aB3aB3aB3", "name": "run"},
        "path": "/data/aB3aB3aB3/rows",
        "env": ["A=1,HF_TOKEN=short"],
        "credentials": {"user": "me", "list": ["x1"]},
        "max_tokens": 512,
        "token": 123456789,
        "api_key": None,
    }
    assert mask.tree(tree) == {
        "wandb": {"api_key": "***", "name": "run"},
        "path": "/data/***/rows",
        "env": ["A=1,HF_TOKEN=***"],
        "credentials": {"user": "***", "list": ["***"]},
        "max_tokens": 512,
        "token": "***",
        "api_key": None,
    }
    assert mask.count == 6 == num_masked(mask.tree(tree))


@pytest.mark.long
@pytest.mark.parametrize(
    "unit", ["a", "sk-", "eyJ-", "s3://a:", "://a:", "a=", "token='", "token=\\", "-----BEGIN PRIVATE KEY-----", "--token ",
             "authorization: ", "?token=", "&a", "bearer ", "wandb login ", "a."],
)  # fmt: skip
def test_hostile_logs_take_linear_time(unit):
    text = unit * (2**18 // len(unit))
    started = time.process_time()
    Masker(["averylongsecret-1"]).text(text)
    assert time.process_time() - started < 10


def test_a_log_of_many_secrets_takes_linear_time():
    text = "".join(f"token=Secret-value-{number} " for number in range(12_000))
    mask = Masker()
    started = time.process_time()
    assert mask.text(text) == "token=*** " * 12_000
    mask.text(text.replace("token=", ""))
    assert time.process_time() - started < 10


def test_a_text_that_was_clean_is_masked_once_its_secret_is_known():
    mask = Masker()
    text = "job of tr0ub4dor-and-3"
    assert [mask.text(text), mask.text(text), mask.count] == [text, text, 0]
    mask.learn(["tr0ub4dor-and-3"])
    assert [mask.text(text), mask.text(text), mask.count] == ["job of ***", "job of ***", 2]
    assert [mask.text("--token=***"), mask.text("")] == ["--token=***", ""]
