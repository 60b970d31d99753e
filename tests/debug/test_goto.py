"""`goto`, `preflight`, `bisect` and the what-ifs of `replay` on the command line, on real ranks."""

import json
from pathlib import Path

import pytest

from areal_core.testing import make_tiny_model
from tests.forks import COMMAND, run_forked


def call(*arguments, typed=""):
    """Run the command with `typed` on its standard input; return the finished process."""
    return run_forked([COMMAND, *map(str, arguments)], typed=typed, timeout_s=420)


@pytest.fixture(scope="module")
def anchored(train, tmp_path_factory) -> Path:
    """Record five steps of two ranks, with an anchor before steps 2 and 4."""
    folder = tmp_path_factory.mktemp("record") / "anchored"
    options = ("total_train_steps=5", "debug.anchor_every_steps=2", "allocation_mode=embedded|fsdp:d2")
    done = train("--dump-rollout", folder, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_shell_at_a_step_has_the_complete_state(recorded):
    typed = (
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"  # as Ctrl-C does
        "print('rows', len(batch['rewards']), 'of step', step)\n"
        "print(float(loss) == outcome.micro_batches[0].loss)\n"
    )
    done = call("goto", recorded, "--step", 2, "--shell", "--at", "loss", typed=typed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rows 16 of step 2\n" in done.stdout
    assert "True\n" in done.stdout
    assert (
        "At step 2 (loss): from the run's first weights, 2 steps replayed, all bit-identical" in done.stdout
    )
    assert "KeyboardInterrupt" in done.stderr
    assert "model" in done.stderr  # the banner lists the available names


def test_weights_of_another_step_are_refused_by_their_checksums(recorded, tmp_path):
    after, other = tmp_path / "after", make_tiny_model(tmp_path / "other", seed=9)
    assert call("goto", recorded, "--step", 1, "-o", after).returncode == 0
    for verb in ("consistency", "crosscheck"):
        assert call(verb, recorded, "--step", 1, "--model", after).returncode == 0
        use = {"consistency": "it was sampled with", "crosscheck": "the step starts from"}[verb]
        for model, which in (
            (after, f"of version 1, those after step 0, and {use} version 2"),
            (other, "those of no recorded step"),
        ):
            done = call(verb, recorded, "--step", 2, "--model", model)
            assert done.returncode == 2
            assert f"{model} is not the model of step 2: its weights are {which}; write it" in done.stderr


@pytest.mark.long
def test_the_debugger_opens_in_the_trainer(anchored):
    typed = "p total_weight\np outcome.step, len(plan.details['minibatches'])\nn\nc\n"
    done = call("goto", anchored, "--step", 2, "--pdb", "--at", "backward", typed=typed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fsdp.py" in done.stdout
    assert "(Pdb) (2, 2)" in done.stdout
    assert "from the anchor of step 2, 1 step replayed, all bit-identical" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "as_ranks"), [(1, ["allocation_mode=fsdp:d1"]), (3, [])])
def test_another_number_of_ranks_states_its_guarantee_and_meets_it(train, tmp_path, num_ranks, as_ranks):
    options = ("allocation_mode=embedded|fsdp:d2", "actor.ppo_n_minibatches=1", "debug.anchor_every_steps=1")
    done = train("--dump-rollout", tmp_path / "record", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    done = call("replay", tmp_path / "record", "--from-step", 1, "--nproc", num_ranks, *as_ranks, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["guarantee"]["kind"] == "noise"
    assert report["guarantee"]["reasons"] == [f"{num_ranks} ranks, recorded with 2"]
    assert report["verdict"]["finding"] == "within"
    assert 0 < report["verdict"]["k"] <= 10
