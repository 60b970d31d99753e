"""Import of what other versions of frameworks write: each value, and absent ones unknown."""

import numpy as np
import pytest

from recorder import open_record, verify
from recorder.trainers.importing import import_record

from . import dataproto, eras, pickled
from .known import KNOWN, padded


def imported(source, folder):
    result = import_record(source, folder)
    assert verify(folder).problems == ()
    record = open_record(folder)
    (number,) = record.steps
    step = record.step(number)
    return result, step, [step.rows(0, row) for row in range(step.num_rows(0))]


def check_tokens(rows):
    for row, one in zip(rows, KNOWN, strict=True):
        assert row["input_ids"].tolist() == one.tokens
        assert row["prompt_length"] == len(one.prompt)
        assert row["loss_mask"].tolist() == one.full_mask
        assert row["logprobs"].tolist() == one.full_logprobs


def of_tokens(step, name):
    """Return the values of a name for the tokens themselves: those of completions, by row."""
    values = step.learning(0, [name, "cu_seqlens"])
    bounds = values["cu_seqlens"]
    return [
        values[name][bounds[n] + len(one.prompt) - 1 : bounds[n + 1] - 1].tolist()
        for n, one in enumerate(KNOWN)
    ]


ADVANTAGES = [[one.advantage] * len(one.completion) for one in KNOWN]


@pytest.mark.parametrize("version", eras.MICRO_BATCHES)
def test_micro_batches_of_every_version_of_prime_rl(version, tmp_path):
    _, step, rows = imported(eras.write_micro_batches(tmp_path / "run", version), tmp_path / "record")
    check_tokens(rows)
    assert of_tokens(step, "advantages") == ADVANTAGES
    other, value = ("ref_logp", -0.5) if version > "0.6" else ("teacher_logp", -0.25)
    assert of_tokens(step, other) == [[value] * len(one.completion) for one in KNOWN]
    rewards = [one.reward for one in KNOWN]
    assert step.known(0, "rewards").all() == (version == "0.6")
    assert version != "0.6" or [row["rewards"] for row in rows] == rewards
    if version >= "0.5":
        expected = [eras.experts(15)[begin:end] for begin, end in ((0, 5), (5, 9))]
        assert [rows[n]["routed_experts"].tolist() for n in (0, 1)] == [e.tolist() for e in expected]


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (eras.write_verl_single, "exp_proj_GBS2__N2"),
        (eras.write_verl_prompts, "genstep_000001"),
        (eras.write_verl_queue, "5"),
    ],
)
def test_verl_of_every_version(write, name, tmp_path):
    result, step, rows = imported(write(tmp_path / "run"), tmp_path / "record")
    check_tokens(rows)
    assert result.steps == (name,)
    assert [row["rewards"] for row in rows] == [one.reward for one in KNOWN]
    assert [int(row["prompt_id"]) for row in rows] == [0, 0, 1, 1]
    assert step.known(0, "versions").all() == (name == "5")
    left_out = "images and other inputs that are not text are not imported: 2 of the samples"
    assert (left_out in result.notes) == (name == "5")
    assert step.known(0, "prompt_id").all()


@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.int64])
def test_routed_experts_of_slime_are_kept_and_unknown_for_the_last_token(kind, tmp_path):
    routed = np.arange(16, dtype=kind).reshape(4, 2, 2)
    source = pickled.write_slime(tmp_path / "a", KNOWN[:1], rollout_routed_experts=routed)
    (source / "rollout_data" / "10.pt").unlink()
    _, _, (row,) = imported(source, tmp_path / "record")
    assert row["routed_experts"].dtype == kind
    assert row["routed_experts"][:4].tolist() == routed.tolist()
    unknown = np.iinfo(kind).max if kind is np.uint8 else -1
    assert row["routed_experts"][4].tolist() == [[unknown] * 2] * 2


def test_verl_keeps_experts_old_and_reference_logprobs_and_unknown_versions(tmp_path):
    routed = np.arange(4 * 9 * 2, dtype=np.int16).reshape(4, 9, 1, 2)
    logprobs = padded([one.logprobs for one in KNOWN], 5, dtype=np.float32)
    tensors = dataproto.verl_tensors() | {
        "routed_experts": routed,
        "old_log_probs": logprobs - 1,
        "ref_log_prob": logprobs - 2,
    }
    others = dataproto.verl_others() | {"max_global_steps": np.array([3, 4, 3, 3], object)}
    source = dataproto.write_verl(tmp_path / "run", tensors=tensors, others=others)
    _, step, rows = imported(source, tmp_path / "record")
    kept = [slice(4 - len(one.prompt), 4 + len(one.completion)) for one in KNOWN]
    assert [row["routed_experts"].tolist() for row in rows] == [
        routed[n][part].tolist() for n, part in enumerate(kept)
    ]
    for name, less in (("prox_logp", 1), ("ref_logp", 2)):
        assert of_tokens(step, name) == [
            (np.float32(one.logprobs) - np.float32(less)).tolist() for one in KNOWN
        ]
    assert step.known(0, "versions").tolist() == [True, False, True, True]


@pytest.mark.parametrize("per_rank", [False, True])
def test_inputs_to_the_loss_beside_the_rollouts_of_slime_are_joined(per_rank, tmp_path):
    source = eras.write_slime_training(tmp_path / "run", per_rank)
    result = import_record(source, tmp_path / "record")
    assert result.steps == ("rollout 9", "rollout 10")
    record = open_record(tmp_path / "record")
    assert of_tokens(record.step(0), "advantages") == ADVANTAGES
    assert of_tokens(record.step(0), "prox_logp") == [[-0.5] * len(one.completion) for one in KNOWN]
    assert any("advantages are not in the file" in note for note in result.notes)  # of rollout 10
    cut = source / "train_data" / "10.pt"
    cut.write_bytes(b"PK\x03\x04")
    result = import_record(source, tmp_path / "again")
    assert any(f"{cut} is cut off" in note for note in result.notes)
