"""What `why` says of scripted records: every kind of cause, and none where nothing proves one."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areal_debug import Recorder
from recorder import open_record
from recorder.testing import SCRIPTED_HEADER, scripted_batch, scripted_learning
from replayer.why.chain import Options, explain
from tests.command_line import git, invoke

from ..replayer.test_commits import commit_edit
from ..replayer.test_diff import LENGTHS, record

ROOT = Path(__file__).parents[2]
KEYS = ["verdict", "step", "stage", "tensor", "row", "token", "pattern", "cause", "confidence", "next"]
CONFIG = {"seed": 1, "actor": {"dtype": "float32", "eps_clip": 0.2, "optimizer": {"lr": 1e-6}}}
OURS = replace(SCRIPTED_HEADER, config=CONFIG)


def header(environment=None, **options):
    """The header of a run with other options of the actor, and other members of the environment."""
    config = CONFIG | {"actor": CONFIG["actor"] | options}
    return replace(OURS, config=config, environment=OURS.environment | (environment or {}))


def ask(tmp_path, change=lambda script: None, right=OURS, left=OURS, at=1, **options):
    """Return the answer on two records, the right one changed in a step; no replays."""
    here = record(tmp_path / "left", header=left, **options)
    there = record(
        tmp_path / "right", header=right, change=lambda step, s: change(s) if step == at else None, **options
    )
    return explain(here, there, Options(ROOT))


def other_loss(script):
    script.losses[1] = 0.75


def other_advantages(script):
    script.learning["advantages"][1, 3] += np.float32(0.5)


def test_equal_records_are_identical_whatever_was_set_differently(tmp_path):
    answer = ask(tmp_path, right=header(eps_clip=0.1))
    assert (answer.verdict, answer.exit_code, answer.finding) == ("identical", 0, None)
    assert [(s.where, s.acts) for s in answer.settings] == [("actor.eps_clip", False)]
    assert answer.sentence == "Identical: 3 of 3 common steps compared, all have the same bits."
    assert list(answer.to_dict())[: len(KEYS)] == KEYS
    assert answer.to_dict()["cause"] is None


def test_the_option_that_acts_on_the_stage_is_the_cause_and_a_later_one_is_not(tmp_path):
    answer = ask(tmp_path, other_loss, header(eps_clip=0.1, optimizer={"lr": 1e-5}))
    found = answer.to_dict()
    assert [found[key] for key in ("verdict", "step", "stage", "tensor", "row", "token")] == [
        *("same weights, other numbers", 1, "loss", "loss of rank 0, micro-batch 0", None, None)
    ]
    assert found["cause"] == {
        "kind": "config",
        "what": "actor.eps_clip is 0.2 in A and 0.1 in B",
        "file": None,
        "line": None,
        "commit": None,
    }
    assert found["confidence"] == "high"
    assert found["next"].endswith("--from-step 1 --to-step 1 actor.eps_clip=0.1")
    assert [(s.where, s.acts) for s in answer.settings] == [
        ("actor.eps_clip", True),
        ("actor.optimizer.lr", False),
    ]
    assert answer.sentence == (
        "Same weights, other numbers: loss of rank 0, micro-batch 0 in minibatch 1 differs first, in step 1, "
        "stage loss, because actor.eps_clip is 0.2 in A and 0.1 in B."
    )


def test_an_option_that_acts_later_explains_nothing(tmp_path):
    answer = ask(tmp_path, other_advantages, header(optimizer={"lr": 1e-5}))
    assert answer.to_dict()["cause"]["kind"] == "unknown"
    assert answer.finding.confidence == "low"
    assert "why is not known" in answer.sentence
    assert (answer.difference.place.row, answer.difference.place.token) == (1, 3)


def test_an_option_of_the_rollouts_that_only_watches_is_no_setting(tmp_path):
    def other_tokens(script):
        script.batch["input_ids"][1, 3] += 1

    options = {"enable_rollout_tracing": True, "setup_timeout": 9.0}
    here = replace(OURS, config={**OURS.config, "rollout": {"max_head_offpolicyness": 2}})
    there = replace(OURS, config={**OURS.config, "rollout": {"max_head_offpolicyness": 0} | options})
    answer = ask(tmp_path, other_tokens, there, here)
    assert [s.where for s in answer.settings] == ["rollout.max_head_offpolicyness"]


def test_an_option_that_one_version_lacks_is_not_the_cause_at_its_default(tmp_path):
    answer = ask(tmp_path, other_loss, header(c_clip=None, eps_clip=0.1))
    assert answer.finding.cause.what == "actor.eps_clip is 0.2 in A and 0.1 in B"
    answer = ask(tmp_path / "again", other_loss, header(c_clip=None))
    assert answer.finding.cause.kind == "unknown"


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({"libraries": {"transformers": "5.6.0"}}, "transformers 5.5.0 in A, 5.6.0 in B"),
        ({"variables": {"MKL_CBWR": "COMPATIBLE"}}, "MKL_CBWR is not set in A, COMPATIBLE in B"),
    ],
)
def test_what_differs_around_the_code_is_the_environment(tmp_path, environment, what):
    both = {"libraries": {"transformers": "5.5.0"}, "variables": {}}
    answer = ask(tmp_path, other_advantages, header(both | environment), header(both))
    assert (answer.finding.cause.kind, answer.finding.cause.what) == ("environment", what)
    assert answer.finding.confidence == "high"


def test_a_file_that_one_run_alone_uses_is_behind_a_library_of_another_version(tmp_path):
    def environment(version, **files):
        code = {"commit": None, "dirty_sha256": None, "local_files": files}
        code |= {"script": {"path": "train.py", "sha256": "1"}}
        return {"libraries": {"transformers": version}, "code": code}

    def other_logprobs(script):
        script.batch["logprobs"][3] *= np.float32(1.001)

    launched = header(environment("5.6.0", **{"launch.py": "2"}))
    answer = ask(tmp_path / "a", other_logprobs, launched, header(environment("5.5.0")))
    assert answer.finding.cause.what == "transformers 5.5.0 in A, 5.6.0 in B"
    answer = ask(tmp_path / "b", other_logprobs, launched, header(environment("5.6.0")))
    assert answer.finding.cause.what == "only B uses launch.py"


def test_a_variable_of_kernels_changes_no_reward(tmp_path):
    def rewarded(script):
        script.batch["rewards"][2] += np.float32(0.25)

    both = {"libraries": {}, "variables": {}}
    answer = ask(tmp_path, rewarded, header(both | {"variables": {"MKL_CBWR": "COMPATIBLE"}}), header(both))
    assert (answer.finding.cause.kind, answer.finding.confidence) == ("unknown", "low")
    assert "the code of A and B is not recorded" in answer.finding.evidence[1]
    assert answer.to_dict()["row"] == 2
    code = {"commit": "0" * 40, "dirty_files": {}}
    known, dirty = (header({"code": code | {"dirty_files": d}}) for d in ({}, {"a.md": "1", "b.json": "2"}))
    answer = ask(tmp_path / "known", rewarded, known, known)
    assert (answer.finding.cause.kind, answer.finding.confidence) == ("nondeterminism", "medium")
    cause = ask(tmp_path / "dirty", rewarded, dirty, known).finding.cause
    assert (cause.kind, cause.what) == ("data", "B alone has uncommitted changes of b.json")
    agents = (replace(known, config=CONFIG | {"rollout": {"agent": {"turn_discount": x}}}) for x in (1, 2))
    assert ask(tmp_path / "agent", rewarded, *agents).finding.cause.kind == "config"


def test_a_last_bit_with_equal_settings_is_nondeterminism_and_more_is_unknown(tmp_path):
    def rounded(script):
        script.learning["advantages"][1, 3] = np.nextafter(script.learning["advantages"][1, 3], np.float32(9))

    answer = ask(tmp_path / "bit", rounded)
    assert (answer.finding.cause.kind, answer.finding.confidence) == ("nondeterminism", "medium")
    answer = ask(tmp_path / "more", other_advantages)
    assert answer.finding.cause.kind == "unknown"


def test_prompts_of_other_content_are_data_and_another_order_is_not_determined(tmp_path):
    def edited(script):
        script.batch["input_ids"][0, 0] += 1

    answer = ask(tmp_path / "data", edited)
    assert (answer.finding.cause.kind, answer.to_dict()["token"]) == ("data", 0)
    assert answer.finding.cause.what == "1 of 4 rows have another prompt in B"

    def shuffled(script):
        order = [2, 3, 0, 1]
        names = {key: script.batch[key] for key in ("prompt_id", "sample_id")}
        script.batch = {key: value[order] for key, value in script.batch.items()} | names
        script.learning = scripted_learning(script.batch)

    answer = ask(tmp_path / "order", shuffled)
    assert answer.finding.cause.kind == "nondeterminism"
    assert "order of the prompts" in answer.finding.cause.what
    answer = ask(tmp_path / "size", shuffled, *(header({"num_rows": size}) for size in (63, 64)))
    assert answer.finding.cause.what.startswith("the data set has 64 rows in A and 63 in B, and")
    in_order = replace(OURS, config=CONFIG | {"train_dataset": {"shuffle": False}})
    answer = ask(tmp_path / "in order", shuffled, in_order, in_order)
    assert answer.finding.cause.what == "the rows of B's data set have another order"


@pytest.mark.parametrize(
    ("order", "what"),
    [
        ([0, 1, 3, 4, 5, 6, 7, 8], "has 1 prompt less than A's, and every later one comes earlier"),
        ([0, 1, 1, 2, 3, 4, 5, 6], "has 1 prompt more than A's, and every later one comes later"),
        ([0, 1, 3, 4, 5, 2, 6, 7], "1 prompt of A's data set moved to another place in B's"),
    ],
)
@pytest.mark.parametrize("is_sampled", [True, False])
def test_rows_that_are_missing_added_or_moved_in_the_data_are_told_apart(tmp_path, order, what, is_sampled):
    for name, prompts in (("a", range(8)), ("b", order)):
        with Recorder(tmp_path / name, trainer="trl", config={"beta": 0.1}) as recorder:
            for step in range(4):
                rows = [
                    {"prompt_tokens": [1, prompt], "completion_tokens": [step + is_sampled * at], "group": at}
                    | ({"reward": 1.0} if is_sampled else {})
                    for at, prompt in enumerate(prompts[2 * step : 2 * step + 2])
                ]
                recorder.step(step, rows, stats={"loss": 0.6})
    found = explain(*(open_record(tmp_path / name) for name in "ab"), Options(ROOT)).finding
    assert found.cause.kind == "data"
    assert what in found.cause.what


def test_weights_do_not_choose_prompts_where_another_seed_does(tmp_path):
    def with_weights(crc, **config):
        files = {"model.safetensors": {"size_bytes": 9, "crc32c": crc}}
        return replace(OURS, model={"path": "model", "files": files}, config=CONFIG | config)

    def drawn(script):
        script.batch["input_ids"][:, 0] += 1

    answer = ask(tmp_path / "seed", drawn, with_weights("2" * 8, seed=2), with_weights("1" * 8), at=0)
    assert answer.finding.cause.what == "seed is 1 in A and 2 in B"
    answer = ask(tmp_path / "weights", drawn, with_weights("2" * 8), with_weights("1" * 8), at=0)
    assert "other model files" in answer.finding.cause.what


def test_another_loss_mask_is_no_other_data_set(tmp_path):
    def on_the_prompt(script):
        script.batch["loss_mask"][0, 1] = 1

    answer = ask(tmp_path, on_the_prompt)
    assert (answer.difference.name, answer.difference.place.in_prompt) == ("loss_mask", True)
    assert answer.finding.cause.kind == "unknown"
    assert answer.finding.cause.what.startswith("the loss mask of 1 of ")
    assert "what makes the mask is not the same" in answer.finding.evidence[0]


@pytest.mark.parametrize("trainer", ["trl", "other"])
@pytest.mark.parametrize(
    ("answers", "what"),
    [
        ([[9, 9], [3, 4, 5]], "the chosen and the rejected answer are exchanged in 2 of 2 rows"),
        ([[3, 4, 5], [9, 8]], "1 of 2 rows have another answer in B"),
    ],
)
def test_other_answers_of_a_data_set_are_no_engines(tmp_path, trainer, answers, what):
    for name, pair in (("a", [[3, 4, 5], [9, 9]]), ("b", answers)):
        rows = [{"prompt_tokens": [1, 2], "completion_tokens": tokens, "group": 0} for tokens in pair]
        with Recorder(tmp_path / name, trainer=trainer, config={"beta": 0.1}) as recorder:
            recorder.step(0, rows, stats={"loss": 0.6})
    found = explain(*(open_record(tmp_path / name) for name in "ab"), Options(ROOT)).finding
    assert (found.cause.kind, found.cause.what) == ("data", what)


def test_records_of_other_runs_and_without_a_common_step_are_not_comparable(tmp_path):
    files = {"model.safetensors": {"size_bytes": 10, "crc32c": "00000000"}}
    other = {"model.safetensors": {"size_bytes": 11, "crc32c": "00000000"}}
    left, right = (replace(OURS, model={"path": "m", "files": each}) for each in (files, other))

    def unrelated(script):
        script.batch = scripted_batch(LENGTHS, seed=99)

    here = record(tmp_path / "left", header=left)
    there = record(tmp_path / "right", header=right, change=lambda step, script: unrelated(script))
    answer = explain(here, there, Options(ROOT))
    assert (answer.verdict, answer.exit_code, answer.finding) == ("not comparable", 2, None)
    assert "no prompt of one is in the other, and models of other sizes" in answer.sentence
    empty = record(tmp_path / "empty", num_steps=0)
    assert explain(here, empty, Options(ROOT)).verdict == "not comparable"


def test_weights_that_diverge_for_another_reason_later_are_the_answer(tmp_path):
    def change(step, script):
        if step == 0:
            script.losses.reverse()
        if step >= 1:
            script.batch["rewards"][0] += np.float32(0.5)
            script.weights["head"] = "ffffffff"

    answer = explain(
        record(tmp_path / "left", header=OURS),
        record(tmp_path / "right", header=OURS, change=change),
        Options(ROOT),
    )
    assert (answer.verdict, answer.step, answer.diverged_at) == ("diverged", 1, 1)
    assert (answer.difference.stage, answer.difference.name) == ("batch", "rewards")
    assert answer.also[0].startswith("step 0 has other numbers before that, with equal weights")


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """A clone with three commits after the first: only the second acts on advantages."""
    clone = tmp_path_factory.mktemp("history") / "clone"
    git(ROOT, "clone", "--quiet", "--shared", str(ROOT), str(clone))
    losses, norms = "areal_core/algorithm/losses.py", "areal_core/algorithm/normalization.py"
    first = commit_edit(clone, losses, '"""The losses', '"""All losses')
    bad = commit_edit(clone, norms, "self.count - int(unbiased)", "self.count - 0")
    last = commit_edit(clone, losses, '"""All losses', '"""The losses')
    return clone, first, bad, last


def records_of_commits(tmp_path, *commits):
    """Write the records of two commits, the second with other advantages."""
    here, there = (header({"code": {"commit": commit, "dirty_sha256": None}}) for commit in commits)
    right = record(tmp_path / "right", header=there, change=lambda step, script: other_advantages(script))
    return record(tmp_path / "left", header=here), right


def test_the_commit_file_and_line_that_act_on_the_stage_are_named(tmp_path, history):
    clone, first, bad, last = history
    here, there = records_of_commits(tmp_path, first, last)
    answer = explain(here, there, Options(clone))
    cause = answer.to_dict()["cause"]
    lines = (clone / "areal_core/algorithm/normalization.py").read_text().splitlines()
    assert (cause["kind"], cause["commit"]) == ("code", bad)
    assert cause["file"] == "areal_core/algorithm/normalization.py"
    assert "self.count - 0" in lines[cause["line"] - 1]
    assert answer.finding.next == f"git -C {clone} show {bad[:10]} -- {cause['file']}"
    backwards = explain(there, here, Options(clone))
    assert backwards.to_dict()["cause"]["commit"] == bad
    assert "only A has it" in backwards.sentence


def test_commits_that_do_not_act_on_the_stage_are_not_accused(tmp_path, history):
    clone, _, bad, last = history
    answer = explain(*records_of_commits(tmp_path, bad, last), Options(clone))
    assert answer.finding.cause.kind == "unknown"
    assert any("none changed what the advantages runs" in line for line in answer.finding.evidence)


def test_the_command_prints_the_sentence_first_and_writes_a_page_and_json(tmp_path):
    record(tmp_path / "left", header=OURS)
    record(
        tmp_path / "right", header=header(gamma="<b>&"), change=lambda step, script: other_advantages(script)
    )
    arguments = ["why", str(tmp_path / "left"), str(tmp_path / "right"), "--no-replay"]
    result = invoke(*arguments, "--html", tmp_path / "why.html")
    assert result.exit_code == 1
    assert result.output.splitlines()[0].startswith(
        "Same weights, other numbers: advantages at token 3 of prompt 0, sample 1 differs first, in step 0"
    )
    page = (tmp_path / "why.html").read_text()
    assert "differs first, in step 0, stage advantages" in page
    assert "<b>&" not in page
    assert "&lt;b&gt;&amp;" in page
    result = invoke(*arguments, "--json")
    assert list(json.loads(result.stdout))[: len(KEYS)] == KEYS
