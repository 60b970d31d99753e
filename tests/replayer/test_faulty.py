"""A rank that computes wrongly is named: during the run, and from its record."""

import json
import subprocess
from functools import partial
from operator import itemgetter
from pathlib import Path

import pytest

from areal_debug.replay import faulty
from benchmarks import faulty_run
from recorder import open_record
from replayer.errors import ReplayError
from replayer.faulty import find_faulty
from tests.forks import COMMAND
from tests.marks import late

DOWN = "model.layers.0.mlp.down_proj"
QUERY = "model.layers.1.self_attn.q_proj"
WRONG_OUTPUT = {"kind": "output", "module": DOWN, "call": 1, "element": 77, "bit": 30}
WRONG_GRADIENT = {"kind": "gradient", "module": QUERY, "call": 1, "element": 100, "bit": 22}
WRONG_STATE = {"kind": "state", "module": DOWN, "call": 1, "element": 5, "bit": 29}
SUMS = {"debug.record_bit_sums": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model):
    """`runs(flip, ...)` trains here, two steps; a flip is in the second one, on rank 0.

    A run is made once: tests read what it left.
    """
    made = {}

    def run(*flips, **given):
        key = json.dumps([flips, given])
        if key not in made:
            made[key] = train(*flips, **given)
        return made[key]

    def train(*flips, num_steps=2, **changes):
        folder = tmp_path_factory.mktemp("run")
        recorded = {"debug.dump_rollout_data": True, "debug.path": str(folder / "record")}
        flips = [{"step": 1, "rank": 0} | flip for flip in flips]
        found = faulty_run.run(str(folder), str(tiny_model), num_steps, flips, recorded | changes)
        return found | {"record": open_record(folder / "record")}

    return run


@pytest.fixture(scope="module")
def sound(runs):
    """Two sound runs with sums: what replays give."""
    return [runs(**SUMS, num_steps=2)["record"], runs(**SUMS)["record"]]


def find(record, replays):
    """Find who is wrong, the n-th replay given; later ones are like the first."""
    return find_faulty(record, lambda n: replays[n if n < len(replays) else 0], [0, 1])


def test_a_run_that_verifies_each_step_has_the_bits_of_one_that_does_not(runs, sound):
    verified = runs(**{"debug.verify_every": 1})
    assert verified["error"] is None
    for step in (0, 1):
        outcomes = [record.step(step).outcome(0) for record in (sound[0], verified["record"])]
        assert outcomes[0].checksums == outcomes[1].checksums
        assert outcomes[0].micro_batches == outcomes[1].micro_batches
        names = [name for name in outcomes[0].stats if not name.startswith("timeperf")]
        assert [outcomes[0].stats[name] for name in names] == [outcomes[1].stats[name] for name in names]


@pytest.mark.parametrize(
    ("flip", "place"),
    [
        (WRONG_OUTPUT, f"micro-batch 1, output of {DOWN}, element [0, 1, 13], bit 30"),
        late(WRONG_GRADIENT, f"micro-batch 1, gradient of {QUERY}.weight, element [1, 36], bit 22"),
    ],
)
def test_a_step_that_is_computed_wrongly_once_stops_the_run_before_its_update(runs, flip, place):
    found = runs(flip, **{"debug.verify_every": 1})
    assert "step 1, actor, minibatch 0: rank 0 (x86_64 processor, host" in found["error"]
    assert place in found["error"]
    assert f"areal-debug replay {found['record'].path} --find-faulty --step 1" in found["error"]
    assert found["record"].steps == (0, 1)
    plan = found["record"].step(1).plan(0).details["minibatches"][0]
    assert (plan["fault"]["kind"], plan["fault"]["ranks"]) == ("corruption", [0])


@pytest.mark.long
def test_with_warn_the_wrong_update_is_skipped_and_the_run_goes_on(runs, caplog):
    found = runs(WRONG_OUTPUT, num_steps=3, **{"debug.verify_every": 1, "debug.verify_action": "warn"})
    assert found["error"] is None
    assert found["record"].steps == (0, 1, 2)
    assert "this update is skipped" in caplog.text
    assert found["record"].step(1).outcome(0).stats["ppo_actor/update/update_successful"] == 0.5


def test_nothing_is_accused_in_a_sound_record(sound):
    report = find(sound[0], [sound[1]])
    assert (report.kind, report.exit_code, report.num_replays) == ("sound", 0, 2)
    assert report.num_compared > 500


@pytest.mark.parametrize(
    ("flip", "what", "element", "bit"),
    [
        (WRONG_OUTPUT, f"output of {DOWN}", (0, 1, 13), 30),
        (WRONG_GRADIENT, f"gradient of {QUERY}.weight", (1, 36), 22),
        (WRONG_STATE, f"updated weight {DOWN}.weight", (0, 5), None),
    ],
)
def test_a_flipped_bit_is_located_in_a_record_with_sums(runs, sound, flip, what, element, bit):
    report = find(runs(flip, **SUMS)["record"], sound)
    assert (report.kind, report.step, report.rank, report.exit_code) == ("corruption", 1, 0, 1)
    assert (report.place.what, report.element, report.bit) == (what, element, bit)
    assert report.place.minibatch == (1 if flip is WRONG_STATE else 0)
    shown = faulty.report_of_faulty(report)
    assert shown.verdict == "Corruption on rank 0"
    assert what in shown.blocks[0].rows[0].text


def test_without_sums_a_record_gives_micro_batch_or_weight_and_says_what_it_lacks(runs, sound):
    report = find(runs(WRONG_OUTPUT)["record"], sound)
    assert (report.kind, report.rank, report.place.micro_batch) == ("corruption", 0, 1)
    assert report.place.what == "loss"
    assert report.missing[0].startswith("debug.record_bit_sums=true names the layer")
    report = find(runs(WRONG_STATE)["record"], sound)
    assert report.place.what == f"weight {DOWN}.weight"


def test_a_wrong_gradient_without_sums_accuses_nobody(runs, sound):
    report = find(runs(WRONG_GRADIENT)["record"], sound)
    assert (report.kind, report.rank, report.exit_code) == ("unclear", None, 2)
    assert report.confidence == "low"


def test_replays_that_differ_from_each_other_are_nondeterminism_not_corruption(runs, sound):
    varying = [runs(flip, **SUMS)["record"] for flip in (WRONG_OUTPUT, WRONG_GRADIENT, WRONG_STATE)]
    report = find(sound[0], varying)
    assert (report.kind, report.rank, report.num_replays) == ("nondeterminism", None, 3)


def test_one_replay_that_differs_accuses_this_machine(runs, sound):
    report = find(sound[0], [runs(WRONG_OUTPUT, **SUMS)["record"], *sound])
    assert (report.kind, report.bit) == ("corruption here", 30)


def test_other_numbers_everywhere_are_another_environment(runs, sound):
    report = find(runs(**SUMS | {"actor.dtype": "bfloat16"})["record"], sound)
    assert (report.kind, report.step, report.rank) == ("environment", 0, None)
    assert report.confidence == "high"  # an option differs
    assert any(said.startswith("actor.dtype") for said in report.evidence)


def test_a_vote_of_other_processes_needs_a_divisor_of_the_ranks(sound):
    with pytest.raises(ReplayError, match="--find-faulty needs the bits of the record"):
        faulty.find(sound[0], 0, 1, None, num_ranks=2, as_json=False)


def on_ranks(torchrun, num_ranks, folder, model, flips, changes):
    path = {"debug.dump_rollout_data": True, "debug.path": str(folder / "record")}
    asked = {"folder": str(folder), "model": str(model), "flips": flips, "changes": path | changes}
    return torchrun(Path(__file__).with_name("faulty_program.py"), num_ranks, json.dumps(asked))


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_of_a_job_name_the_one_that_computed_wrongly(torchrun, tmp_path, tiny_model, num_ranks):
    for number, flip in enumerate((WRONG_OUTPUT, WRONG_GRADIENT, {"kind": "sent", "call": 1, "bit": 20})):
        planted = [{"step": 1, "rank": 1} | flip]
        folder = tmp_path / str(number)
        found = on_ranks(torchrun, num_ranks, folder, tiny_model, planted, {"debug.verify_every": 1})
        assert "minibatch" in found["error"]
        assert ": rank 1 (" in found["error"]


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "who"), [(2, "rank 0 or 1 ("), (4, "rank 1 (")])
def test_a_neighbour_finds_a_rank_that_is_wrong_in_the_same_way_each_time(
    torchrun, tmp_path, tiny_model, num_ranks, who
):
    always = [WRONG_OUTPUT | {"step": 1, "rank": 1, "call": 0, "repeats": True}]
    options = {"debug.verify_every": 1, "debug.verify_on": "neighbour"}
    found = on_ranks(torchrun, num_ranks, tmp_path / "wrong", tiny_model, always, options)
    assert who in found["error"]
    found = on_ranks(torchrun, num_ranks, tmp_path / "right", tiny_model, [], options)
    assert found["error"] is None


CRITIC = {"dtype": "float32", "optimizer": {"lr": 1e-3}, "mb_spec": {"max_tokens_per_mb": 24}}
CLIPPED = {"actor.optimizer.gradient_clipping": 0.5, "debug.anchor_every_steps": 1}
ONE_SUM = {"actor.fsdp.sync_every_micro_batch": False, "actor.dtype": "bfloat16"}
UNEVEN = {"actor.mb_spec.max_tokens_per_mb": 17, "actor.ppo_n_minibatches": 3}


def run(verb, record, *options):
    """Return the exit code and the report of a command."""
    done = subprocess.run([COMMAND, verb, str(record), *options, "--json"], capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


replay = partial(run, "replay")


@pytest.mark.long
@pytest.mark.parametrize("reduction", ["fixed", "library"])
@pytest.mark.parametrize(
    ("num_ranks", "processes", "changes"),
    [
        (2, (1,), CLIPPED),
        (3, (1,), UNEVEN),
        (4, (2, 1), CLIPPED | {"critic": CRITIC}),
        (4, (2, 1), ONE_SUM),
        (8, (4, 2, 1), UNEVEN),
    ],
)
def test_fewer_processes_repeat_the_bits_of_all_ranks(
    torchrun, tmp_path, tiny_model, num_ranks, processes, changes, reduction
):
    if "critic" in changes:
        changes = changes | {"critic": CRITIC | {"path": str(tiny_model)}}
    on_ranks(torchrun, num_ranks, tmp_path, tiny_model, [], changes | {"debug.reduction": reduction})
    for count in processes:
        code, report = replay(tmp_path / "record", "--nproc", str(count))
        assert (code, report["result"], len(report["steps"])) == (0, "identical", 2)
        assert report["steps"][0]["num_compared"] > 60 * num_ranks
    code, report = replay(tmp_path / "record", "--nproc", "1", "--from-step", "1", "--filter", "reward > 0.3")
    assert (code, report["guarantee"]["kind"], report["first_different"]) == (0, "changed", 1)


@pytest.mark.long
def test_one_process_answers_for_four_ranks_what_they_answer(torchrun, tmp_path, tiny_model):
    planted = [{"step": 1, "rank": 3} | WRONG_GRADIENT]
    on_ranks(torchrun, 4, tmp_path / "wrong", tiny_model, planted, SUMS)
    code, report = replay(tmp_path / "wrong" / "record", "--find-faulty", "--nproc", "1")
    assert (code, report["kind"], report["rank"], report["bit"]) == (1, "corruption", 3, 22)
    on_ranks(torchrun, 4, tmp_path, tiny_model, [], {})
    for question in ("--anatomy", "--layouts"):
        one, two, four = (
            replay(tmp_path / "record", "--step", "1", question, "--nproc", n)[1] for n in "124"
        )
        assert one["faithful"] == two["faithful"] == four["faithful"] is True
        if question == "--layouts":
            assert one["variants"] == two["variants"] == four["variants"] == []
            continue
        by_place = itemgetter("minibatch", "rank", "row")
        norms = [[s["gradient_norm"] for s in sorted(r["samples"], key=by_place)] for r in (one, two, four)]
        assert [pytest.approx(norms[0], rel=1e-5)] * 2 == norms[1:]
        of_shards = pytest.approx(one["grad_norms"], rel=1e-14)  # float64 sums of one, two and four shards
        assert (two["grad_norms"], four["grad_norms"], len(norms[0])) == (of_shards, of_shards, 32)
    for n in "124":
        code, report = run("goto", tmp_path / "record", "--step", "1", "--nproc", n, "-o", tmp_path / n)
        assert (code, report["faithful"], report["num_parameters"]) == (0, True, 20)
    assert len({(tmp_path / n / "model.safetensors").read_bytes() for n in "124"}) == 1


@pytest.mark.long
@pytest.mark.parametrize("layout", ["d1c2", "d1t2"])
def test_ranks_that_share_rows_are_refused_by_name(torchrun, tmp_path, tiny_model, layout):
    on_ranks(torchrun, 2, tmp_path, tiny_model, [], {"allocation_mode": f"embedded|fsdp:{layout}"})
    for verb in (["replay"], ["replay", "--explain", "1"], ["replay", "--find-faulty"], ["goto"]):
        argv = [COMMAND, verb[0], str(tmp_path / "record"), *verb[1:], "--nproc", "1"]
        done = subprocess.run(argv, capture_output=True, text=True)
        assert done.returncode == 2
        assert f"share rows by sequence or tensor parallelism (embedded|fsdp:{layout})" in done.stderr
