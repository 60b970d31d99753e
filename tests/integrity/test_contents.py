"""Files whose bytes are as sealed and that do not agree with each other are found and named."""

import json
import tracemalloc

import pytest

from recorder import DamagedRecord, open_record, verify
from recorder.documents import checksum

PLAN, OUTCOME, TEXT = "plan-00000-of-00001.json", "outcome-00000-of-00001.json", "text-00000-of-00001.jsonl"
STEP = "steps/000003"


def problem_in(record, name):
    return [problem.what for problem in verify(record).problems if problem.file == f"{STEP}/{name}"]


@pytest.mark.parametrize(
    ("name", "edit", "what"),
    [
        (PLAN, {"step": 4}, "belongs to step 4"),
        (PLAN, {"version": 9}, "begins with weight version 9, and step.json ends with 4"),
        (OUTCOME, {"step": 4}, "belongs to step 4"),
        (OUTCOME, {"version": 9}, "has weight version 9, and step.json 4"),
        (
            PLAN,
            {"details": {"minibatches": [{"rows": [0, 1, 2, 9], "micro_batches": [[0, 1, 2, 9]]}]}},
            "has a minibatch 0 with row 9, but the batch has 4 rows",
        ),
        (
            PLAN,
            {"details": {"minibatches": [{"rows": [0, 1], "micro_batches": [[0], [2]]}]}},
            "divides minibatch 0 into micro-batches with other rows",
        ),
    ],
)
def test_members_that_contradict_are_found(full_record, change, name, edit, what):
    change(full_record / STEP / name, lambda document: document.update(edit))
    assert problem_in(full_record, name) == [what]


def test_an_outcome_with_other_rows_or_tokens_is_found(full_record, change):
    def tokens(document):
        document["micro_batches"][0]["num_tokens"] += 1

    change(full_record / STEP / OUTCOME, tokens)
    assert problem_in(full_record, OUTCOME) == ["has a micro-batch of 22 tokens, whose rows have 21"]
    change(full_record / STEP / OUTCOME, lambda document: document["micro_batches"][0].update(rows=[1, 1]))
    assert problem_in(full_record, OUTCOME) == ["has a micro-batch with row 1 2 times"]


def test_an_outcome_that_does_not_follow_its_plan_is_found(full_record, change):
    minibatches = [{"rows": [0, 1, 2, 3], "micro_batches": [[0, 1], [2, 3]]}]
    change(full_record / STEP / PLAN, lambda plan: plan.update(details={"minibatches": minibatches}))
    assert problem_in(full_record, OUTCOME) == ["has other micro-batches than the plan"]


def test_text_with_another_reward_is_found(full_record, change):
    file = full_record / STEP / TEXT
    reward = json.loads(file.read_text().splitlines()[2])["reward"]
    lines = file.read_text().splitlines()
    lines[2] = lines[2].replace(f'"reward": {reward}', '"reward": 0.25')
    file.write_text("\n".join(lines) + "\n")
    entry = {"size_bytes": file.stat().st_size, "crc32c": checksum(file.read_bytes())}
    change(full_record / STEP / "step.json", lambda step: step["files"].update({TEXT: entry}))
    assert problem_in(full_record, TEXT) == [f"has reward 0.25 in row 2, the batch {reward:g}"]


def test_a_tensor_larger_than_its_file_is_refused_before_it_is_allocated(full_record, change):
    def enlarge(step):
        tensors = step["batches"]["batch-00000-of-00001.safetensors"]["tensors"]
        tensors["rewards"].update(size_bytes=3_000_000_000, shape=[750_000_000])

    change(full_record / STEP / "step.json", enlarge)
    tracemalloc.start()
    with pytest.raises(DamagedRecord, match=r"tensor rewards, which has shape \[750000000\] along axis row"):
        open_record(full_record).step(3)
    assert not verify(full_record).intact
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    "name",
    ["../../x", "/etc/passwd", "batch-00001-of-00001.safetensors", "plan-00000-of-00002.json", "x.json"],
)
def test_a_name_that_no_rank_writes_is_refused(full_record, change, name):
    def rename(step):
        step["files"][name] = step["files"].pop(PLAN)

    change(full_record / STEP / "step.json", rename)
    with pytest.raises(DamagedRecord, match=r"a file name, but it|which no rank writes"):
        open_record(full_record).step(3)


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("num_ranks", True, "num_ranks is True, expected an integer from 1"),
        ("step", 10**12, "step is 1000000000000, expected an integer from 0 to 999999999"),
        ("version", -1, "version is -1, expected an integer from 0"),
        ("batches", [], r"batches is \[\], expected an object"),
        ("previous", {"step": 2}, r"previous lacks \['sha256'\]"),
        ("previous", {"step": 2, "sha256": "0"}, "previous.sha256 is '0', expected a sha256, 64 lower-case"),
    ],
)
def test_a_member_of_another_type_or_range_is_named_with_what_is_expected(
    full_record, change, member, value, message
):
    change(full_record / STEP / "step.json", lambda step: step.update({member: value}))
    with pytest.raises(DamagedRecord, match=message):
        open_record(full_record).step(3)
