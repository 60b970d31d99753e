"""`goto`, `preflight`, `bisect` and the what-ifs of `replay` on the command line, on real ranks."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.command_line import git
from tests.forks import COMMAND

ROOT = Path(__file__).parents[2]


def call(*arguments, typed="", timeout_s=420):
    """Run the command with `typed` on its standard input; return the finished process."""
    return subprocess.run(
        [COMMAND, *map(str, arguments)],
        input=typed,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["goto", "RECORD", "--step", 7], "steps 7 to 7 were requested, the record has 0 to 2"),
        (["goto", "RECORD", "--step", 1, "--shell", "--pdb"], "exclude each other"),
        (["goto", "RECORD", "--step", 1, "--at", "loss"], "add --shell or --pdb"),
        (["goto", "RECORD", "--step", 1, "--pdb", "--rank", 3], "ranks 0 to 0"),
        (["goto", "/no/such", "--step", 1], "/no/such does not exist"),
        (["replay", "RECORD", "--filter", "__import__('os')"], "is not allowed"),
        (["replay", "RECORD", "actor.eps_clp=0.3"], "did you mean 'actor.eps_clip'"),
        (["replay", "RECORD", "actor.eps_clip=-1"], "actor.eps_clip is -1"),
        (["replay", "RECORD", "--edit", "/no/such.py"], "there is no edit script"),
        (["replay", "RECORD", "-o", "RECORD"], "already holds a record"),
        (["replay", "RECORD", "--explain", 9], "has 0 to 2"),
        (["check", "run", "--config", "/no/such.yaml"], "/no/such.yaml cannot be read"),
        (["why", "RECORD", "--commits", "nowhere..HEAD"], "nowhere"),
        (["why", "RECORD", "--commits", "HEAD..HEAD", "--repository", "/"], "not a git repository"),
    ],
)
def test_wrong_input_is_one_sentence(recorded, areal_debug, arguments, words):
    done = areal_debug(*[recorded if argument == "RECORD" else argument for argument in arguments])
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("Error: ") == 1
    assert words in done.stderr


@pytest.mark.long
def test_a_shell_runs_each_line_on_both_ranks(anchored):
    typed = "print(trainer.ranks.rank)\nlen(trainer.actor.checksums())\ninputs['advantages'].shape[0]\n"
    done = call("goto", anchored, "--step", 3, "--shell", "--at", "advantages", typed=typed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"0\n\[rank 1\] 1\n", done.stdout)
    assert "20\n" in done.stdout
    assert "from the anchor of step 2, 1 step replayed, all bit-identical" in done.stdout


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


@pytest.mark.long
def test_several_minibatches_on_other_ranks_are_compared_statistically(anchored):
    done = call("replay", anchored, "--nproc", 1, "allocation_mode=fsdp:d1")
    assert done.returncode in (0, 2), done.stdout + done.stderr
    assert "Expect agreement over many steps, not of single steps" in done.stdout
    assert "the standard error over steps" in done.stdout


@pytest.mark.long
def test_a_what_if_on_two_ranks_is_recorded_next_to_the_record(anchored, tmp_path):
    before = {path: path.read_bytes() for path in sorted(anchored.rglob("*")) if path.is_file()}
    options = ("actor.eps_clip=0.0001", "--filter", "reward > 0.4", "--output", tmp_path / "new")
    done = call("replay", anchored, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rows are filtered by reward > 0.4" in done.stdout
    assert re.search(r"ppo_actor/task_reward/avg +[▁-█]+ +[▁-█]+", done.stdout)
    assert {path: path.read_bytes() for path in sorted(anchored.rglob("*")) if path.is_file()} == before
    assert call("record", "verify", tmp_path / "new").returncode == 0


@pytest.mark.long
def test_samples_of_all_ranks_are_explained(anchored):
    done = call("replay", anchored, "--step", 2, "--anatomy", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert {sample["rank"] for sample in found["samples"]} == {0, 1}
    assert len(found["samples"]) == 16
    for minibatch in (0, 1):
        shares = [s["gradient_share"] for s in found["samples"] if s["minibatch"] == minibatch]
        assert sum(shares) == pytest.approx(1, abs=1e-4)
    for kind in ("term", "class"):
        assert sum(p["gradient_share"] for p in found["parts"] if p["kind"] == kind) == pytest.approx(
            2, abs=1e-4
        )
    done = call("replay", anchored, "--explain", 2)
    assert re.search(r"rank [01], row \d+", done.stdout)
    assert "completion" in done.stdout


@pytest.mark.long
def test_preflight_reports_whether_two_ranks_are_deterministic(tiny_model, tmp_path):
    options = ("--config", ROOT / "tests/debug/tiny.yaml", "--nproc", 2, f"cluster.fileroot={tmp_path}")
    done = call("check", "run", *options, f"actor.path={tiny_model}", "deterministic=true", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["identical"], report["problems"], report["noise"]) == (True, 0, [])
    done = call("check", "run", *options, f"actor.path={tiny_model}", "deterministic=true", "--as-is")
    assert done.returncode == 1
    assert "CUBLAS_WORKSPACE_CONFIG is None" in done.stdout


PLANT = ("-advantages * clipped_ratio", "-advantages * clipped_ratio * 1.0001")


@pytest.mark.long
def test_one_changed_line_of_a_loss_is_found_among_thirty_two_commits(recorded, tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    git(clone, "tag", "good")
    loss = clone / "areal_core/algorithm/losses.py"
    for number in range(32):
        if number == 19:
            assert PLANT[0] in loss.read_text()
            loss.write_text(loss.read_text().replace(*PLANT))
        else:
            (clone / "NOTES.md").write_text(f"note {number}\n")
            git(clone, "add", "NOTES.md")
        git(clone, "commit", "--quiet", "-am", f"Change {number}")
    done = call("why", recorded, "--commits", "good..HEAD", "--repository", clone, "--json", timeout_s=900)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert [commit["subject"] for commit in report["culprits"]] == ["Change 19"]
    assert "areal_core/algorithm/losses.py" in report["files"]
    assert report["num_replays"] <= 8
    assert report["changes"][0]["where"].startswith("loss minibatch 0")
