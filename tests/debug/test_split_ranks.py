"""`goto`, what-if and `--explain` on runs with sequence and tensor parallelism, on real ranks.

Each run samples the same tokens as one rank does, so its numbers are compared with that rank's.
"""

import json

import pytest

from recorder import open_record

pytestmark = pytest.mark.long

LAYOUTS = {"d1c2": 2, "d1t2": 2, "d1c2t2": 4}
# Parameters differ by rounding between layouts: float32, after two steps.
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def run_of(train, tmp_path_factory):
    """Record three steps as a layout, with an anchor before step 2: `run_of("d1c2")`."""
    records = {}

    def record(layout):
        if layout not in records:
            folder = tmp_path_factory.mktemp("split") / layout
            options = ("debug.anchor_every_steps=2", f"allocation_mode=embedded|fsdp:{layout}")
            done = train("--dump-rollout", folder, *options)
            assert done.returncode == 0, done.stdout + done.stderr
            records[layout] = open_record(folder)
        return records[layout]

    return record


@pytest.fixture(scope="module", params=LAYOUTS)
def split(request, run_of):
    record = run_of(request.param)
    assert (record.header.world_size, record.header.num_ranks) == (LAYOUTS[request.param], 1)
    return record


@pytest.fixture(scope="module")
def report(areal_debug):
    """Run the command with `--json` and return its report."""

    def run(*arguments):
        done = areal_debug(*arguments, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    return run


def test_goto_reaches_the_recorded_weights(split, report, tmp_path):
    found = report("goto", split.path, "--step", 2, "-o", tmp_path / "model")
    assert (found["faithful"], found["anchor"], found["wrong_parameters"]) == (True, 2, [])
    assert found["num_parameters"] == len(split.step(1).outcome(0).checksums)
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_what_if_that_changes_nothing_has_the_recorded_bits(split, report, tmp_path):
    found = report("replay", split.path, "actor.eps_clip=0.2", "-o", tmp_path / "same")
    assert (found["guarantee"]["kind"], found["verdict"]["finding"]) == ("bitwise", "identical")
    again = open_record(tmp_path / "same")
    for step in (0, 1, 2):
        assert again.step(step).outcome(0).checksums == split.step(step).outcome(0).checksums


def test_one_rank_replays_it_within_noise(split, areal_debug):
    done = areal_debug("replay", split.path, "--nproc", 1, "allocation_mode=fsdp:d1")
    assert done.returncode == 0, done.stdout + done.stderr
    recorded = f"recorded with {split.header.world_size} ranks as fsdp:d1"
    assert f"1 ranks as fsdp:d1, {recorded}" in done.stdout


def test_a_what_if_trains_on_what_one_rank_would(split, run_of, report):
    change = ("actor.eps_clip=0.0001", "--filter", "reward > 0.4", "--to-step", 0)
    ours, alone = (report("replay", record.path, *change) for record in (split, run_of("d1")))
    assert ours["guarantee"]["kind"] == alone["guarantee"]["kind"] == "changed"
    (ours,), (alone,) = ours["steps"], alone["steps"]
    for name in ("ppo_actor/n_seqs", "ppo_actor/update/loss", "ppo_actor/update/grad_norm"):
        assert ours["replayed"][name] == pytest.approx(alone["replayed"][name], rel=1e-5), name
    assert ours["replayed"]["ppo_actor/n_seqs"] < ours["recorded"]["ppo_actor/n_seqs"]


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_aggregations_do_not_depend_on_ranks_or_micro_batches(train, report, tmp_path, aggregation):
    options = (f"actor.loss_aggregation={aggregation}", "actor.max_new_tokens=8")
    done = train("--dump-rollout", tmp_path / "record", *options, "actor.ppo_n_minibatches=1")
    assert done.returncode == 0, done.stdout + done.stderr
    for division in (("--nproc", 2), ("actor.mb_spec.max_tokens_per_mb=1024",)):
        found = report("replay", tmp_path / "record", "--to-step", 0, *division)
        assert (found["guarantee"]["kind"], found["verdict"]["finding"]) == ("noise", "within")
        recorded, replayed = (found["steps"][0][side] for side in ("recorded", "replayed"))
        for name in ("ppo_actor/update/loss", "ppo_actor/update/grad_norm"):
            assert replayed[name] == pytest.approx(recorded[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("step", [0, 2])
def test_shares_of_samples_add_up_and_are_those_of_one_rank(split, run_of, report, step):
    ours, alone = (report("replay", record.path, "--explain", step) for record in (split, run_of("d1")))
    assert ours["faithful"]
    for index, minibatch in enumerate(split.step(step).plan(0).details["minibatches"]):
        samples = [s for s in ours["samples"] if s["minibatch"] == index]
        assert sorted(s["row"] for s in samples) == sorted(minibatch["rows"])
        assert sum(s["gradient_share"] for s in samples) == pytest.approx(1, abs=ROUNDING)
        assert sum(s["loss"] for s in samples) == pytest.approx(
            float.fromhex(minibatch["loss"]), abs=ROUNDING
        )
        recorded = float.fromhex(minibatch["grad_norm"])
        assert ours["grad_norms"][index] == pytest.approx(recorded, rel=ROUNDING)
    theirs = {(s["minibatch"], s["row"]): s for s in alone["samples"]}
    for sample in ours["samples"]:
        other = theirs[sample["minibatch"], sample["row"]]
        for name in ("loss", "gradient_share", "gradient_norm", "loss_share"):
            assert sample[name] == pytest.approx(other[name], abs=ROUNDING), (sample["row"], name)
