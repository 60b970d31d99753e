"""A real run that was given credentials leaves none behind, and nothing that others can read."""

import json
import os
import stat
from pathlib import Path

import pytest

from recorder import open_record

TOKEN, PASSWORD, KEY = "S3CRETtoken1", "S3CRETpass2", "S3CRETkey3"
GIVEN = (
    f"stats_logger.wandb.wandb_api_key={KEY}",
    f"stats_logger.wandb.wandb_base_url=https://me:{PASSWORD}@wandb.example",
    f"stats_logger.wandb.notes=token {TOKEN} of the environment",
    f"launcher.trainer_env_vars=SOME=1,HF_TOKEN={TOKEN}",
)


def modes_below(folder: Path) -> set[int]:
    return {stat.S_IMODE(os.lstat(path).st_mode) for path in (folder, *folder.rglob("*"))}


@pytest.fixture(scope="module")
def run(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("private")
    saves = ("saver.freq_steps=1", "recover.mode=auto", "recover.freq_steps=1", "perf_tracer={enabled: true}")
    options = ("--dump-rollout", folder / "record", "total_train_steps=2", *saves, *GIVEN)
    done = train(*options, to=folder / "files", HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_file_of_a_run_has_a_credential(run):
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if b"S3CRET" in path.read_bytes()] == []
    (config,) = run.glob("files/logs/*/tiny/test/config.json")
    for options in (json.loads(config.read_text()), open_record(run / "record").header.config):
        wandb = options["stats_logger"]["wandb"]
        assert wandb["wandb_api_key"] == "***"
        assert wandb["wandb_base_url"] == "https://***@wandb.example"
        assert wandb["notes"] == "token *** of the environment"
        assert options["launcher"]["trainer_env_vars"] == "SOME=1,HF_TOKEN=***"
        assert options["gconfig"]["max_tokens"] == 32768


def test_everything_that_a_run_leaves_is_its_users_only(run):
    (logs,), (checkpoints,) = run.glob("files/logs/*"), run.glob("files/checkpoints/*")
    for folder in (logs, checkpoints, run / "record"):
        assert modes_below(folder) <= {0o600, 0o700}


def test_what_verbs_write_is_private_too(areal_debug, run, tmp_path):
    for verb in (["record", "archive", run / "record", "--to", tmp_path / "a.zip"],
                 ["record", "extract", tmp_path / "a.zip", "--to", tmp_path / "extracted"],
                 ["open", run / "record", "-o", tmp_path / "page.html"]):  # fmt: skip
        done = areal_debug(*verb)
        assert done.returncode == 0, done.stdout + done.stderr
    assert modes_below(tmp_path / "extracted") == {0o600, 0o700}
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.zip", "page.html")} == {0o600}


@pytest.mark.long
def test_the_group_reads_a_run_that_is_group_readable(train, tmp_path):
    options = ("--dump-rollout", tmp_path / "record", "total_train_steps=1", "debug.group_readable=true")
    done = train(*options, to=tmp_path / "files")
    assert done.returncode == 0, done.stdout + done.stderr
    (logs,) = tmp_path.glob("files/logs/*/tiny/test")
    found = {
        path.name: modes_below(path) for path in (*logs.iterdir(), tmp_path / "record", *logs.parents[:2])
    }
    assert {name: modes for name, modes in found.items() if not modes <= {0o640, 0o750}} == {}


def test_an_error_does_not_show_the_password_of_a_url(train):
    done = train(f"actor.path=https://me:{PASSWORD}@models.example/m")
    assert done.returncode == 2
    assert "https://***@models.example/m" in done.stdout + done.stderr
    assert PASSWORD not in done.stdout + done.stderr
