"""Credentials are masked by name, by shape and by value; ordinary options and text stay."""

import dataclasses
import time

import pytest

from areal_core.config import experiment, generation, services, train_engine
from areal_core.safety.secrets import Masker, names_secret, num_masked, secret_values

TOKEN = "S3CRETx9"
COMMANDS = [
    (["train", f"stats_logger.wandb.wandb_api_key={TOKEN}"], ["train", "stats_logger.wandb.wandb_api_key=***"]),
    (["serve", "--api-key", TOKEN], ["serve", "--api-key", "***"]),
    (["serve", f"--api-key={TOKEN}"], ["serve", "--api-key=***"]),
    (["serve", "--apikey", TOKEN], ["serve", "--apikey", "***"]),
    (["serve", f"--wandbkey={TOKEN}"], ["serve", "--wandbkey=***"]),
    (["env", f"HF_TOKEN={TOKEN}", "python"], ["env", "HF_TOKEN=***", "python"]),
    (["bash", "-c", f"HF_TOKEN={TOKEN} python t.py"], ["bash", "-c", "HF_TOKEN=*** python t.py"]),
    (["bash", "-c", f"x --apikey '{TOKEN} z' -n 1"], ["bash", "-c", "x --apikey '***' -n 1"]),
    (["curl", "--header", f"Authorization: Bearer {TOKEN}"], ["curl", "--header", "Authorization: ***"]),
    (["curl", "-u", f"me:{TOKEN}"], ["curl", "-u", "***"]),
    (["t", f"s3://KEY:{TOKEN}/+x@bucket/rows"], ["t", "s3://***@bucket/rows"]),
    (["t", f"https://h/x?n=1&token={TOKEN}"], ["t", "https://h/x?n=1&token=***"]),
    (["t", f'{{"api_key": "{TOKEN}", "n": 1}}'], ["t", '{"api_key": "***", "n": 1}']),
    (["t", f'{{"e": "{{\\"HF_TOKEN\\": \\"{TOKEN}\\"}}"}}'], ["t", '{"e": "{\\"HF_TOKEN\\": \\"***\\"}"}']),
    (["t", f"launcher.trainer_env_vars=A=1,HF_TOKEN={TOKEN},B=2"],
     ["t", "launcher.trainer_env_vars=A=1,HF_TOKEN=***,B=2"]),
]  # fmt: skip
SHAPES = [
    "hf_" + "aB3" * 12,
    "sk-" + "aB3" * 12,
    "sk-ant-api03-" + "aB3-" * 12,
    "ghp_" + "aB3" * 12,
    "github_pat_" + "aB3_" * 12,
    "AKIAIOSFODNN7EXAMPLE",
    "ASIAIOSFODNN7EXAMPLE: " + "aB3/" * 10,
    "xoxb-1234-5678-abcdef",
    "glpat-" + "aB3" * 7,
    "AIza" + "aB3-x" * 7,
    "eyJhbGciOiJI.eyJzdWIiOiIx.abc-DEF_1",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz",  # its end is cut off
]
HARMLESS = [
    "--max-tokens 5",
    "max_tokens=5 eos_token=</s> num_tokens: 1234 tokenizer_path=/models/x",
    "next token: 1234",
    "prompt_key=question",
    "basic information about things",
    "http://127.0.0.1:8080/path@x and a@b.c",
    "ssh://git@github.com/x",
    "token = tokenizer.decode(ids)",
    "api_key=os.environ['KEY']",
    "password: None",
    "WANDB_API_KEY=$WANDB_API_KEY",
    "api_key: ${oc.env:WANDB_API_KEY}",
    "give --api-key or set it",
    "std::token::value x.token==5",
    "commit 0123456789012345678901234567890123456789",
]


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=lambda value: value[-1][:40])
def test_command_lines_lose_their_secrets_and_nothing_else(command, shown):
    mask = Masker()
    assert mask.command(command) == shown
    assert mask.count == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [*((f"got {one}", "got ***") for one in SHAPES), *((one, one) for one in HARMLESS)],
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


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "token", "--hf-token", "apiKey", "authToken", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD_2", "SIGN_KEY",
             "a.b.private_key", "Authorization", "GOOGLE_CREDENTIALS", "DB_PWD", "SWANLAB_API_KEY"],
)  # fmt: skip
def test_names_of_credentials(name):
    assert names_secret(name)


@pytest.mark.parametrize(
    "name", ["max_tokens", "tokenizer_path", "eos_token", "num_tokens", "eos_token_id", "token_level", "secret_path", "PWD",
             "OLDPWD", "SSH_AUTH_SOCK", "sort_key", "key", "password_file", "author", "forward_pass", "token_type"],
)  # fmt: skip
def test_names_that_only_look_like_credentials(name):
    assert not names_secret(name)


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
