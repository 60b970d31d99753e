"""Two scripted records with one change: reports of `diff` and `bisect-step`."""

import json
from dataclasses import replace

import numpy as np
import pytest

from recorder import Recording, RecordingOptions, open_record
from recorder.difference import Difference
from recorder.testing import SCRIPTED_HEADER, scripted_batch, scripted_learning
from replayer.check import HeaderComparison
from replayer.commits.first_step import bisect_steps
from replayer.compare.stages import StageDifference
from replayer.diff import acts_from, diff_records, judge_difference, settle_stage
from tests.command_line import invoke
from tests.recorder.ranks import begin, on_ranks

LENGTHS = [3, 8, 6, 4]
UPDATE = {"loss": (0.5).hex(), "grad_norm": (1.5).hex(), "lr": (1e-6).hex()}


class Script:
    """One step of a rank of a record: change a member, record it, compare."""

    def __init__(self, step, rank=0):
        self.batch = scripted_batch(LENGTHS, seed=step)
        self.learning = scripted_learning(self.batch)
        self.losses = [0.5, 0.25]
        self.updates = [dict(UPDATE), dict(UPDATE)]
        self.stats = {"ppo_actor/advantages/avg": 0.125, "timeperf/step": 1.0}
        self.weights = {"embed": f"{step:08x}", "head": f"{step + 1:08x}"}

    def micro_batches(self, minibatch):
        """Return rows and loss of each."""
        return [([0, 1], self.losses[minibatch])]

    def gradients(self, minibatch):
        """Return their checksums."""
        return {"embed": "0" * 8, "head": f"{int(self.losses[minibatch] * 1e6):08x}"}


def record(
    folder,
    num_steps=3,
    change=lambda step, script: None,
    header=SCRIPTED_HEADER,
    scope="full",
    num_ranks=1,
    script_of=Script,
):
    """Write a record of what `script_of(step, rank)` says, each changed before; open it."""
    writers = begin(folder, num_ranks, RecordingOptions(Recording(scope)), header)

    def run(rank):
        for step in range(num_steps):
            script = script_of(step, rank)
            change(step, script)
            send(writers[rank], step, script, scope)

    assert on_ranks(num_ranks, run) == [None] * num_ranks
    return open_record(folder)


def send(writer, step, script, scope):
    writer("batch", step=step, version=step, batch=script.batch, rng={})
    writer("advantages", step=step, inputs=script.batch | script.learning)
    for minibatch in range(len(script.updates)):
        for number, (rows, loss) in enumerate(script.micro_batches(minibatch)):
            facts = {"micro_batch": number, "rows": rows, "num_tokens": 21, "loss": loss, "weight": 4.0}
            writer("micro_batch", step=step, minibatch=minibatch, **facts)
        if scope == "full":
            writer("checksums", step=step, of="gradients", values=script.gradients(minibatch))
            writer("checksums", step=step, of="weights", values=script.weights)
    plan = {"minibatches": script.updates}
    writer("step", step=step, version=step + 1, plan=plan, stats=script.stats, checksums=script.weights)


def compare(tmp_path, change, at=1, **options):
    """Return the report on two records of which the right one is changed in one step."""
    left = record(tmp_path / "left", **options)
    right = record(
        tmp_path / "right", change=lambda step, script: change(script) if step == at else None, **options
    )
    return diff_records(left, right)


def test_two_records_of_the_same_run_are_the_same_whatever_the_clock_showed(tmp_path):
    def slower(script):
        script.stats["timeperf/step"] = 9.0

    report = compare(tmp_path, slower)
    assert (report.same, report.num_compared, report.differences, report.verdict) == (True, 3, (), None)


def test_a_changed_logprob_is_named_by_row_and_token(tmp_path):
    def change(script):
        script.batch["logprobs"][1, 5] -= np.float32(0.5)

    report = compare(tmp_path, change)
    first = report.first
    assert (report.step, first.stage, first.name, first.num_different, first.num_compared) == (
        1,
        "batch",
        "logprobs",
        1,
        21,
    )
    place = first.place
    assert (place.rank, place.row, place.prompt_id, place.sample_id, place.token) == (0, 1, 1000, 1, 5)
    assert first.largest == pytest.approx(0.5)
    assert report.verdict.cause == "input"
    assert report.num_compared == 2


def test_the_stages_are_reported_in_the_order_of_computation(tmp_path):
    def change(script):
        script.learning["prox_logp"][2, 3] += np.float32(0.001)
        script.learning["advantages"][2, 3] += np.float32(0.1)
        script.losses[0] = 0.5001
        script.updates[0]["grad_norm"] = (1.75).hex()
        script.weights["head"] = "ffffffff"

    report = compare(tmp_path, change)
    stages = [difference.stage for difference in report.differences]
    assert stages[:3] == ["logprobs", "advantages", "loss"]
    assert [name for name, after in zip(stages, ["", *stages], strict=False) if name != after] == [
        *("logprobs", "advantages", "loss", "gradient", "weights")
    ]
    gradients = [d for d in report.differences if d.stage == "gradient"]
    assert [(d.name, d.minibatch) for d in gradients] == [("grad_norm", 0), ("head", 0)]


def test_rows_are_matched_by_name_and_not_by_position(tmp_path):
    def swap(script):
        for key, array in script.batch.items():
            script.batch[key] = array[[0, 2, 1, 3]]
        script.learning = scripted_learning(script.batch)

    report = compare(tmp_path, swap)
    first = report.first
    assert (first.name, first.left, first.right, first.num_different) == (
        "order of rows",
        (1000, 1),
        (1001, 0),
        2,
    )
    assert [difference.stage for difference in report.differences] == ["batch"]


class Half(Script):
    """The rows of one of two ranks."""

    def __init__(self, step, rank):
        super().__init__(step)
        half = slice(2 * rank, 2 * rank + 2)
        self.batch = {key: array[half] for key, array in self.batch.items()}
        self.learning = scripted_learning(self.batch)


def test_the_same_rows_on_other_ranks_are_the_same_step(tmp_path):
    one = record(tmp_path / "one", num_steps=1, scope="plan")
    two = record(tmp_path / "two", num_steps=1, scope="plan", num_ranks=2, script_of=Half)
    report = diff_records(one, two)
    assert (report.same, report.num_compared) == (True, 1)


@pytest.mark.parametrize(
    ("option", "stage"),
    [
        ("seed", "batch"),
        ("gconfig.temperature", "batch"),
        ("actor.dtype", "batch"),
        ("ref.path", "logprobs"),
        ("actor.kl_ctl", "advantages"),
        ("actor.kl_loss_coef", "loss"),
        ("actor.loss_aggregation", "loss"),
        ("actor.eps_clip_higher", "loss"),
        ("actor.optimizer.lr", "weights"),
    ],
)
def test_an_option_acts_from_its_stage_on(option, stage):
    assert acts_from(option) == stage


def found(stage, **members):
    return StageDifference(stage, "x", 1.0, 1.0, **members)


def header(*options, environment=(), model=()):
    config = tuple(Difference(name, 1, 2) for name in options)
    return HeaderComparison(config, tuple(Difference(name, 1, 2) for name in environment), model)


def test_the_environment_explains_numbers_but_not_which_rows_there_are():
    config = {"actor": {"dtype": "float32"}}
    other_cpu = header(environment=("cpu",))
    assert judge_difference(found("logprobs"), other_cpu, config).cause == "environment"
    assert judge_difference(replace(found("batch"), name="rows"), other_cpu, config).cause == "input"
    assert (
        judge_difference(
            replace(found("batch"), name="rewards"), header(environment=("code.commit",)), config
        ).cause
        == "environment"
    )


@pytest.mark.parametrize(
    ("dtype", "largest", "cause"),
    [
        ("float32", 1e-6, "kernel noise"),
        ("float32", 1e-3, "unknown"),
        ("bfloat16", 1e-3, "kernel noise"),
        ("float32", None, "kernel noise"),
    ],
)
def test_noise_is_what_the_precision_explains(dtype, largest, cause):
    assert (
        judge_difference(found("logprobs", largest=largest), header(), {"actor": {"dtype": dtype}}).cause
        == cause
    )


def test_a_later_loss_is_attributed_to_the_weights_when_only_the_optimizer_was_set_differently():
    differences = (found("loss", minibatch=1), found("weights"))
    assert settle_stage(differences, header("actor.optimizer.weight_decay"))[0].stage == "weights"
    assert settle_stage(differences, header("actor.eps_clip"))[0].stage == "loss"
    assert settle_stage((found("loss", minibatch=0),), header("actor.optimizer.eps"))[0].stage == "loss"


def diverge_at(step):
    def change(number, script):
        if number >= step:
            script.weights["head"] = f"{number + 77:08x}"

    return change


@pytest.mark.parametrize("step", [0, 1, 7, 12])
def test_the_first_step_with_other_weights_is_found_by_few_comparisons(tmp_path, step):
    left = record(tmp_path / "left", num_steps=13)
    found = bisect_steps(left, record(tmp_path / "right", num_steps=13, change=diverge_at(step)))
    assert (found.step, found.last_same) == (step, step - 1 if step else None)
    assert found.num_read <= 5


def test_the_commands_report_it_in_words_and_as_json_and_end_with_the_code_of_diff(tmp_path):
    same, left = tmp_path / "same", tmp_path / "left"
    record(same)
    record(left)
    record(tmp_path / "right", change=diverge_at(1))
    result = invoke("why", left, same, "--all")
    assert result.exit_code == 0
    assert "Same: 3 steps compared, all bit-identical." in result.output
    result = invoke("why", left, tmp_path / "right", "--all")
    assert result.exit_code == 1
    assert "the records diverge first in step 1, stage weights" in result.output
    assert "head, minibatch 0: 00000002 in A, 0000004e in B; 1 of 2 differ" in result.output
    facts = json.loads(invoke("why", left, tmp_path / "right", "--all", "--json").output)
    assert (facts["same"], facts["step"], facts["stage"]) == (False, 1, "weights")
    assert facts["verdict"]["cause"] == "kernel noise"
    result = invoke("why", left, tmp_path / "right", "--layers", "--no-replay")
    assert result.exit_code == 1
    assert "The weights differ after step 1; they were the same after step 0." in result.output
    facts = json.loads(invoke("why", left, tmp_path / "right", "--layers", "--no-replay", "--json").output)
    assert (facts["step"], facts["last_same"], facts["diff"]["stage"]) == (1, 0, "weights")
    assert invoke("why", left, same, "--layers", "--no-replay").exit_code == 0


def test_runs_without_a_common_prompt_and_with_models_of_other_sizes_are_unrelated(tmp_path):
    def other(step, script):
        script.batch = scripted_batch(LENGTHS, seed=step + 50)

    def header(size, crc="00000000"):
        files = {"model.safetensors": {"size_bytes": size, "crc32c": crc}}
        return replace(SCRIPTED_HEADER, model={"path": "model", "files": files})

    left = record(tmp_path / "left", header=header(10))
    smaller = record(tmp_path / "smaller", change=other, header=header(9))
    assert (
        diff_records(left, smaller).unrelated == "no prompt of one is in the other, and models of other sizes"
    )
    # other data for one model, and one set of prompts for two models, are experiments
    assert diff_records(left, record(tmp_path / "data", change=other, header=header(10))).unrelated is None
    assert diff_records(left, record(tmp_path / "model", header=header(9))).unrelated is None
    result = invoke("why", left.path, smaller.path, "--all")
    assert "unrelated runs: no prompt of one is in the other" in result.output


def test_another_tokenizer_at_another_place_is_named_and_a_moved_one_is_not(tmp_path):
    files = {"model.safetensors": {"size_bytes": 10, "crc32c": "00000000"}}

    def header(path, crc):
        tokenizer = {"path": path, "files": {"tokenizer.json": {"size_bytes": 5, "crc32c": crc}}}
        config = {"actor": {"path": "m", "dtype": "float32"}, "tokenizer_path": path}
        return replace(
            SCRIPTED_HEADER, model={"path": "m", "files": files}, tokenizer=tokenizer, config=config
        )

    left = record(tmp_path / "left", header=header("t", "00000000"))
    moved = diff_records(left, record(tmp_path / "moved", header=header("u", "00000000")))
    assert moved.set_differently.config == ()
    other = diff_records(left, record(tmp_path / "other", header=header("u", "11111111")))
    assert [item.where for item in other.set_differently.config] == ["tokenizer_path"]
