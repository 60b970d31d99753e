"""Import of files of other frameworks: tokens, masks, logprobs, groups, rewards, reported gaps."""

import json
import os
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from recorder import open_record, verify
from recorder.errors import RecordError, StepNotRecorded
from recorder.tables.formats import export_record, layout_of_steps, read_rows
from recorder.testing import write_scripted_record
from recorder.trainers.importing import import_record
from tests.command_line import invoke, printed

from . import dataproto, lines, pickled
from .known import KNOWN

# format, writer, what the format has besides tokens, masks and log-probs
CASES = {
    "slime": ("slime", pickled.write_slime, "reward groups finish versions text"),
    "miles": ("slime", pickled.write_miles, "reward groups finish versions text"),
    "verl": ("verl", dataproto.write_verl, "reward groups versions"),
    "verl in numpy": ("verl", lambda folder: dataproto.write_verl(folder, "numpy"), "reward groups versions"),
    "prime-rl": ("prime-rl", lines.write_prime_rl, "advantages"),
    "prime-rl export": ("prime-rl", lines.write_prime_rl_export, "advantages"),
    "nemo-rl": ("nemo-rl", lines.write_nemo_rl, "reward groups advantages"),
    "skyrl": ("skyrl", pickled.write_skyrl, "groups advantages"),
    "roll, rlvr": ("roll", dataproto.write_roll_rlvr, "reward groups"),
    "roll, agentic": ("roll", dataproto.write_roll_agentic, "reward groups"),
    "xtuner": ("xtuner", pickled.write_xtuner, "reward groups finish"),
    "open-instruct": ("open-instruct", lines.write_open_instruct, "reward groups finish advantages no-mask"),
    "areno": ("areno", lines.write_areno, "reward groups advantages"),
    "areal, padded": ("areal", pickled.write_areal_padded, "reward groups versions"),
    "areal, a list": ("areal", pickled.write_areal_list, "reward groups versions"),
    "areal, an older TensorDict": ("areal", pickled.write_areal_older_tensordict, "reward groups versions"),
    "areal, a TensorDict": ("areal", pickled.write_areal_tensordict, "reward groups versions"),
}
TEXT = {
    "areal-text": lines.write_areal_text,
    "verl-text": lines.write_verl_text,
    "roll-text": lines.write_roll_text,
    "trl": lines.write_trl,
}
VERSION = 3


def rows_of(record, step=0):
    recorded = record.step(step)
    return [recorded.rows(0, row) for row in range(recorded.num_rows(0))]


def known_keys(record, step, row):
    """Return what is known of a row, of what a format may lack."""
    names = {
        "rewards": "reward",
        "prompt_id": "groups",
        "finish_reason": "finish",
        "versions": "versions",
        "loss_mask": "mask",
    }
    return {name for key, name in names.items() if record.step(step).known(0, key)[row]}


@pytest.mark.parametrize("case", CASES)
def test_every_format_is_found_and_gives_the_known_samples(case, tmp_path):
    name, write, words = CASES[case]
    has = set(words.split())
    source = write(tmp_path)
    imported = import_record(source, tmp_path / "record")
    assert (imported.format, verify(tmp_path / "record").problems) == (name, ())
    record = open_record(tmp_path / "record")
    step = record.steps[-1]
    rows = rows_of(record, step)
    exported = read_rows(record, [step], layout_of_steps(record, [step]))
    assert [row["logprobs"][row["prompt_len"] :] for row in exported] == [one.logprobs for one in KNOWN]
    for number, (row, one) in enumerate(zip(rows, KNOWN, strict=True)):
        has_mask = "no-mask" not in has or 0 not in one.mask
        expected = (has & {"reward", "groups", "finish", "versions"}) | ({"mask"} if has_mask else set())
        assert known_keys(record, step, number) == expected
        assert row["input_ids"].tolist() == one.tokens
        assert row["prompt_length"] == len(one.prompt)
        assert row["loss_mask"].tolist() == (one.full_mask if has_mask else [0] * len(one.tokens))
        assert row["logprobs"].tolist() == one.full_logprobs
        if "reward" in has:
            assert row["rewards"] == np.float32(one.reward)
        if "versions" in has:
            assert row["versions"].tolist() == [VERSION if m else -1 for m in one.full_mask]
        if "finish" in has:
            assert row["finish_reason"] == one.finish_reason
    groups = [one.group if "groups" in has else number for number, one in enumerate(KNOWN)]
    first = int(rows[0]["prompt_id"])  # prompts are numbered over all steps
    assert [int(row["prompt_id"]) - first for row in rows] == groups
    assert advantages_of(record, step) == (
        [one.advantage for one in KNOWN] if "advantages" in has else [None] * len(KNOWN)
    )
    assert any("weights and optimizer" in note for note in imported.notes)
    if "text" in has:
        assert record.step(0).text(0)[1] == {"row": 1, "prompt": "ab", "completion": "fg", "reward": 0.0}


def advantages_of(record, step):
    """Return the advantage of the first token of each completion; None without any."""
    recorded = record.step(step)
    rows = rows_of(record, step)
    try:
        values = recorded.learning(0, ["advantages", "cu_seqlens"])
    except StepNotRecorded:
        return [None] * len(rows)
    bounds = values["cu_seqlens"]  # next-token aligned: one before the token itself
    return [float(values["advantages"][bounds[n] + row["prompt_length"] - 1]) for n, row in enumerate(rows)]


def test_what_samples_lack_is_counted_and_unknown(tmp_path):
    source = pickled.write_slime(tmp_path, rollout_log_probs=None, weight_versions=["1", "2"], reward=None)
    notes = import_record(source, tmp_path / "record").notes
    assert "8 of 8 samples have no logprobs: recorded as unknown" in notes
    assert "8 of 8 samples have no reward: recorded as unknown" in notes
    assert "8 of 8 samples have no versions: recorded as unknown" in notes
    record = open_record(tmp_path / "record")
    assert known_keys(record, 0, 0) == {"groups", "finish", "mask"}
    (row, *_) = rows_of(record)
    assert np.isnan(row["rewards"])
    assert np.isnan(row["logprobs"][2:]).all()
    assert np.isnan(record.step(0).batch(0)["rewards"]).all()


@pytest.mark.parametrize("name", TEXT)
def test_dumps_of_text_can_be_read_and_report_that_they_cannot_be_replayed(name, tmp_path):
    (tmp_path / "dump").mkdir()
    imported = import_record(TEXT[name](tmp_path / "dump"), tmp_path / "record")
    assert imported.format == name
    assert any("for inspection only" in note for note in imported.notes)
    record = open_record(tmp_path / "record")
    assert [line["completion"] for line in record.step(0).text(0)] == [one.text[1] for one in KNOWN]
    assert record.step(0).batch(0)["rewards"].tolist() == [one.reward for one in KNOWN]
    assert not record.step(0).known(0, "input_ids").any()
    assert record.step(0).batch(0)["prompt_id"].tolist() == [0, 0, 1, 1]
    assert verify(tmp_path / "record").intact
    done = invoke("record", "show", tmp_path / "record", "--sample", "1")
    assert "fg" in done.output


def test_a_dump_of_text_is_redacted_without_a_tokenizer_into_a_folder_that_is_made(tmp_path):
    import_record(lines.write_verl_text(tmp_path), tmp_path / "record")
    words = ["record", "redact", tmp_path / "record", "--to", tmp_path / "new" / "copy", "--pattern", "fg"]
    done = invoke(*words)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "fg" not in open_record(tmp_path / "new" / "copy").step(0).text(0)[1]["completion"]


def test_a_file_of_the_current_folder_is_found_by_its_name_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = {"input": "1 + 1 =", "output": "2", "score": 1.0, "step": 1}
    (tmp_path / "1.jsonl").write_text(json.dumps(row))
    assert import_record(Path("1.jsonl"), Path("record")).format == "verl-text"


class Touch:
    """An object as an attacker would pickle it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def evil_pickles(target):
    yield "posix.mkdir", pickle.dumps({"rollout_id": 0, "samples": [Touch(target)]})
    yield "builtins.eval", b"cbuiltins\neval\n(S'1'\ntR."
    yield "builtins.getattr", b"cbuiltins\ngetattr\n(cos\nsystem\nS'x'\ntR."
    yield "torch.load", b"ctorch\nload\n(S'x'\ntR."
    yield "numpy.load", b"cnumpy\nload\n(S'x'\ntR."
    # a dotted name would reach the attributes of a stand-in
    yield (
        "slime.utils.__builtins__.eval",
        pickle.dumps(None)[:2] + b"\x8c\x0bslime.utils\x8c\x11__builtins__.eval\x93.",
    )


@pytest.mark.parametrize("number", range(6))
def test_malicious_pickles_do_nothing_and_are_refused_by_name(number, tmp_path):
    name, data = list(evil_pickles(tmp_path / "made"))[number]
    (tmp_path / "0.pt").write_bytes(data)
    with pytest.raises(ValueError, match=f"0.pt is refused: it needs {name}"):
        import_record(tmp_path / "0.pt", tmp_path / "record", "slime")
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "record").exists()


def test_a_malicious_pickle_inside_a_torch_file_and_inside_a_pickle_is_refused(tmp_path):
    torch.save({"rollout_id": 0, "samples": [Touch(tmp_path / "made")]}, tmp_path / "0.pt")
    state = (pickle.dumps(Touch(tmp_path / "made")), {}, {})
    dataproto.pickle_proto("verl.protocol", state, tmp_path / "gen_batch.dp")
    for source, name in (("0.pt", "slime"), ("gen_batch.dp", "verl")):
        with pytest.raises(ValueError, match=r"refused: it needs posix.mkdir"):
            import_record(tmp_path / source, tmp_path / "record", name)
    assert not (tmp_path / "made").exists()


def test_a_tensor_beyond_its_storage_is_refused(tmp_path):
    torch.save({"rollout_id": 0, "samples": [torch.zeros(4)]}, tmp_path / "good.pt")
    data = (tmp_path / "good.pt").read_bytes()
    assert data.count(b"K\x04\x85") == 1  # K\x04 is the number 4: size (4,) becomes (9,)
    (tmp_path / "0.pt").write_bytes(data.replace(b"K\x04\x85", b"K\x09\x85"))
    with pytest.raises(ValueError, match="cut off or damaged"):
        import_record(tmp_path / "0.pt", tmp_path / "record", "slime")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"response_length": 1}, "loss_mask has 3 values: give 5 or 1"),
        ({"reward": "x"}, "reward is 'x': give a number"),
        ({"loss_mask": [1, 2, 1]}, "loss_mask: a value is 2, 0 or 1 expected"),
        ({"tokens": [-1, 5, 6]}, "token ids from -1 to 6"),
        ({"reward": {"a": 1.0, "b": 2.0}}, "--reward-key"),
    ],
)
def test_a_file_that_contradicts_itself_is_reported_with_its_position(changes, words, tmp_path):
    source = pickled.write_slime(tmp_path, KNOWN[:1], **changes)
    with pytest.raises(RecordError, match=r"9\.pt, sample 0.*") as caught:
        import_record(source, tmp_path / "record")
    assert words in str(caught.value)


def test_the_verb_imports_reports_what_is_lost_and_reads_miles_as_slime(tmp_path):
    run = partial(printed, "record", "import")
    source = pickled.write_miles(tmp_path)
    message = run(source, "--from", "miles", "--to", tmp_path / "a")
    assert "1 steps of slime: 4 samples, 20 tokens" in message
    assert "weights and optimizer are not in the file" in message
    assert json.loads(run(source, "--to", tmp_path / "b", "--json"))["num_tokens"] == 20
    assert "already holds a record" in run(source, "--to", tmp_path / "a", code=2)
    assert "1 steps" in run(source, "--to", tmp_path / "a", "--force")


@pytest.mark.parametrize("name", ["slime", "pt"])
def test_what_is_exported_imports_to_the_same_batch(name, tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=2)
    export_record(tmp_path / "record", name, tmp_path / "{step}.pt")
    import_record(tmp_path, tmp_path / "back", {"slime": "slime", "pt": "areal"}[name])
    first, back = open_record(tmp_path / "record"), open_record(tmp_path / "back")
    for step in (0, 1):
        ours, theirs = first.step(step).batch(0), back.step(step).batch(0)
        assert theirs.keys() - ours.keys() == {"prompt_length", "unknown"}
        for key in ours.keys() - {"prompt_id"}:
            assert ours[key].tobytes() == theirs[key].tobytes()
