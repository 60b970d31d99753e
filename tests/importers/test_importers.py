"""Import of files of other frameworks: tokens, masks, logprobs, groups, rewards, reported gaps."""

import json
import os
import pickle

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from areal_debug.cli import main
from recorder import RecordError, RecordExists, RecordNotFound, open_record, verify
from recorder.errors import ForeignFormat
from recorder.importers.importing import FORMATS, find_format, import_record

from . import dataproto, lines, pickled
from .known import KNOWN

# format, writer, what the rewards are, whether groups, finish reasons and versions are known
CASES = {
    "slime": ("slime", pickled.write_slime, "reward", {"groups", "finish", "versions", "text"}),
    "miles": ("slime", pickled.write_miles, "reward", {"groups", "finish", "versions", "text"}),
    "verl": ("verl", dataproto.write_verl, "reward", {"groups"}),
    "verl in numpy": ("verl", lambda folder: dataproto.write_verl(folder, "numpy"), "reward", {"groups"}),
    "prime-rl": ("prime-rl", lines.write_prime_rl, "advantage", set()),
    "prime-rl export": ("prime-rl", lines.write_prime_rl_export, "advantage", set()),
    "nemo-rl": ("nemo-rl", lines.write_nemo_rl, "reward", {"groups"}),
    "skyrl": ("skyrl", pickled.write_skyrl, "advantage", {"groups"}),
    "roll, rlvr": ("roll", dataproto.write_roll_rlvr, "reward", {"groups"}),
    "roll, agentic": ("roll", dataproto.write_roll_agentic, "reward", {"groups"}),
    "xtuner": ("xtuner", pickled.write_xtuner, "reward", {"groups", "finish"}),
    "open-instruct": (
        "open-instruct",
        lines.write_open_instruct,
        "reward",
        {"groups", "finish", "no masks"},
    ),
    "areal, padded": ("areal", pickled.write_areal_padded, "reward", {"groups", "versions"}),
    "areal, a list": ("areal", pickled.write_areal_list, "reward", {"groups", "versions"}),
    "areal, an older TensorDict": (
        "areal",
        pickled.write_areal_older_tensordict,
        "reward",
        {"groups", "versions"},
    ),
    "areal, a TensorDict": ("areal", pickled.write_areal_tensordict, "reward", {"groups", "versions"}),
}


def rows_of(record, step=0):
    recorded = record.step(step)
    return [recorded.rows(0, row) for row in range(recorded.num_rows(0))]


@pytest.mark.parametrize("case", CASES)
def test_every_format_is_found_and_gives_the_known_samples(case, tmp_path):
    name, write, reward, has = CASES[case]
    source = write(tmp_path)
    assert find_format(source) == name
    imported = import_record(source, tmp_path / "record")
    assert (imported.format, verify(tmp_path / "record").problems) == (name, ())
    record = open_record(tmp_path / "record")
    rows = rows_of(record, record.steps[-1])
    assert len(rows) == len(KNOWN)
    for row, known in zip(rows, KNOWN, strict=True):
        mask = [0] * len(known.prompt) + [1] * len(known.completion) if "no masks" in has else known.full_mask
        logprobs = [0.0] * len(known.prompt) + known.logprobs if "no masks" in has else known.full_logprobs
        assert row["input_ids"].tolist() == known.tokens
        assert row["loss_mask"].tolist() == mask
        assert row["logprobs"].tolist() == logprobs
        assert row["rewards"] == np.float32(getattr(known, reward))
        version = 3 if "versions" in has else record.steps[-1]
        assert row["versions"].tolist() == [version if m else -1 for m in mask]
        assert row["finish_reason"] == (known.finish_reason if "finish" in has else 0)
    groups = [known.group if "groups" in has else number for number, known in enumerate(KNOWN)]
    first = int(rows[0]["prompt_id"])  # prompts are numbered over all steps
    assert [int(row["prompt_id"]) - first for row in rows] == groups
    assert any("weights and optimizer" in note for note in imported.notes)
    if "text" in has:
        assert record.step(0).text(0)[1] == {"row": 1, "prompt": "ab", "completion": "fg", "reward": 0.0}


def test_every_format_has_a_case_or_is_text():
    assert {name for name, *_ in CASES.values()} | {"areal-text", "verl-text"} == set(FORMATS)


def test_steps_are_numbered_from_zero_in_their_own_order(tmp_path):
    imported = import_record(pickled.write_slime(tmp_path), tmp_path / "record")
    assert imported.steps == ("rollout 9", "rollout 10")
    record = open_record(tmp_path / "record")
    assert record.steps == (0, 1)
    assert record.header.environment["imported"]["steps"] == ["rollout 9", "rollout 10"]
    assert record.header.recording.scope == "rollout"


def test_interleaved_samples_are_sorted_into_their_groups(tmp_path):
    known = [KNOWN[0], KNOWN[2], KNOWN[1], KNOWN[3]]
    import_record(pickled.write_slime(tmp_path, known), tmp_path / "record")
    rows = rows_of(open_record(tmp_path / "record"))
    assert [(int(row["prompt_id"]), int(row["sample_id"])) for row in rows] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert [row["input_ids"].tolist() for row in rows] == [one.tokens for one in KNOWN]


def test_what_single_samples_lack_is_counted(tmp_path):
    source = pickled.write_slime(tmp_path, rollout_log_probs=None, weight_versions=["1", "2"])
    notes = import_record(source, tmp_path / "record").notes
    assert "8 of 8 samples have no logprobs: 0 is recorded: replay with actor.recompute_logprob=true" in notes
    assert any(note.startswith("8 of 8 samples have no versions") for note in notes)


def test_a_removed_sample_is_not_trained_and_a_reward_may_be_a_dict_of_one(tmp_path):
    import_record(
        pickled.write_slime(tmp_path, remove_sample=True, reward={"score": 0.25}), tmp_path / "record"
    )
    (row, *_) = rows_of(open_record(tmp_path / "record"))
    assert row["loss_mask"].sum() == 0
    assert row["rewards"] == 0.25


def test_verl_without_uid_groups_by_prompt_and_reports_missing_scores(tmp_path):
    tensors = {key: value for key, value in dataproto.verl_tensors().items() if key != "rm_scores"}
    imported = import_record(dataproto.write_verl(tmp_path, tensors=tensors, others={}), tmp_path / "record")
    assert any("no uid" in note for note in imported.notes)
    assert any("no rm_scores" in note for note in imported.notes)
    assert [int(row["prompt_id"]) for row in rows_of(open_record(tmp_path / "record"))] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("name", "write"), [("areal-text", lines.write_areal_text), ("verl-text", lines.write_verl_text)]
)
def test_dumps_of_text_can_be_read_and_report_that_they_cannot_be_replayed(name, write, tmp_path):
    (tmp_path / "dump").mkdir()
    source = write(tmp_path / "dump")
    assert find_format(source) == name
    imported = import_record(source, tmp_path / "record")
    assert any("but not replayed" in note for note in imported.notes)
    record = open_record(tmp_path / "record")
    assert [line["completion"] for line in record.step(0).text(0)] == [one.text[1] for one in KNOWN]
    assert record.step(0).batch(0)["rewards"].tolist() == [one.reward for one in KNOWN]
    assert verify(tmp_path / "record").intact
    done = CliRunner().invoke(main, ["record", "show", str(tmp_path / "record"), "--sample", "1"])
    assert "fg" in done.output
    done = CliRunner().invoke(main, ["replay", str(tmp_path / "record")])
    assert done.exit_code == 2
    assert "no config" in done.output


def test_a_padded_batch_of_areal_keeps_its_values_through_bfloat16(tmp_path):
    batch = pickled.areal_batch(KNOWN)
    batch["logprobs"] = batch["logprobs"].to(torch.bfloat16)
    torch.save(batch, tmp_path / "batch.pt")
    import_record(tmp_path / "batch.pt", tmp_path / "record")
    (row, *_) = rows_of(open_record(tmp_path / "record"))
    want = [0.0, 0.0, *torch.tensor(KNOWN[0].logprobs, dtype=torch.bfloat16).float().tolist()]
    assert row["logprobs"].tolist() == want


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


def test_a_pickle_that_unfolds_into_billions_of_values_is_refused(tmp_path):
    bomb = [0] * 10
    for _ in range(9):
        bomb = [bomb] * 10
    (tmp_path / "0.pt").write_bytes(pickle.dumps(bomb))
    with pytest.raises(ValueError, match="more values"):
        import_record(tmp_path / "0.pt", tmp_path / "record", "slime")


def test_a_tensor_beyond_its_storage_is_refused(tmp_path):
    torch.save({"rollout_id": 0, "samples": [torch.zeros(4)]}, tmp_path / "good.pt")
    data = (tmp_path / "good.pt").read_bytes()
    # size (4,) becomes (9,): K\x04 is the number 4
    assert data.count(b"K\x04\x85") == 1
    changed = data.replace(b"K\x04\x85", b"K\x09\x85")
    (tmp_path / "0.pt").write_bytes(changed)
    with pytest.raises(ValueError, match="refused"):
        import_record(tmp_path / "0.pt", tmp_path / "record", "slime")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"response_length": 1}, "3 loss mask for 1 tokens"),
        ({"tokens": [-1, 5, 6]}, "token ids from -1 to 6"),
        ({"reward": {"a": 1.0, "b": 2.0}}, "--reward-key"),
    ],
)
def test_a_file_that_contradicts_itself_is_reported_with_its_position(changes, words, tmp_path):
    source = pickled.write_slime(tmp_path, KNOWN[:1], **changes)
    with pytest.raises(ForeignFormat, match=r"9\.pt, sample 0.*") as caught:
        import_record(source, tmp_path / "record")
    assert words in str(caught.value)


def test_unknown_sources_are_reported(tmp_path):
    with pytest.raises(RecordNotFound, match="missing"):
        import_record(tmp_path / "missing", tmp_path / "record")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("hello")
    with pytest.raises(ForeignFormat, match=r"no known format.*slime"):
        import_record(tmp_path / "other", tmp_path / "record")
    with pytest.raises(ForeignFormat, match="'trl' is not a known format"):
        import_record(tmp_path / "other", tmp_path / "record", "trl")
    (tmp_path / "cut.bin").write_bytes(b"\x92\x01")
    (tmp_path / "rank_0.bin").write_bytes(b"\xdd\x00\x00\x00\x05\x01")
    with pytest.raises(ForeignFormat, match=r"rank_0.bin.*cut off"):
        import_record(tmp_path / "rank_0.bin", tmp_path / "record")
    with pytest.raises(RecordExists):
        import_record(pickled.write_slime(tmp_path / "s"), tmp_path / "other")
    assert issubclass(ForeignFormat, RecordError)


def test_the_verb_imports_reports_what_is_lost_and_reads_miles_as_slime(tmp_path):
    def run(*arguments, code=0):
        done = CliRunner().invoke(main, ["record", "import", *map(str, arguments)])
        assert done.exit_code == code, done.output
        return done.output

    source = pickled.write_miles(tmp_path)
    message = run(source, "--from", "miles", "--to", tmp_path / "a")
    assert "1 steps of slime: 4 samples, 20 tokens" in message
    assert "weights and optimizer are not in the file" in message
    assert json.loads(run(source, "--to", tmp_path / "b", "--json"))["num_tokens"] == 20
    assert "already holds a record" in run(source, "--to", tmp_path / "a", code=2)
    assert "1 steps" in run(source, "--to", tmp_path / "a", "--force")
