"""`areal-debug record ls|show|verify` on the command line."""

import json
import os
import pty
import shutil
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_debug.cli import main
from recorder import RecordingOptions, RecordWriter
from recorder.environment import folder_identity
from recorder.header import write_header
from recorder.testing import SCRIPTED_HEADER, scripted_batch, send_step, write_scripted_record
from tests.forks import COMMAND, run_forked


def run(*arguments):
    return CliRunner().invoke(main, ["record", *map(str, arguments)])


@pytest.fixture
def bytes_tokenizer(tmp_path):
    """A tokenizer with one token a byte, so that `é` takes two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    return tokenizer


def record_of_one_row(folder, tokenizer, text, logprobs=()):
    """One step with one row, whose first four tokens are the prompt."""
    ids = tokenizer.encode(text).ids
    batch = scripted_batch([len(ids)], prompt_length=4)
    batch["input_ids"] = np.array([ids], np.int32)
    batch["logprobs"][0, 4 : 4 + len(logprobs)] = logprobs
    writer = RecordWriter(folder / "record")
    (folder / "record").mkdir()
    write_header(folder / "record", replace(SCRIPTED_HEADER, model=folder_identity(str(folder / "model"))))
    send_step(writer, 0, batch)
    return folder / "record"


@pytest.fixture
def record_of_text(tmp_path, bytes_tokenizer):
    """Prompt `2+2=`, completion ` café` with known logprobs."""
    return record_of_one_row(tmp_path, bytes_tokenizer, "2+2= café", [-0.01, -0.3, -1.0, -3.0, -6.0, -0.01])


def test_ls_gives_one_line_a_step_and_names_the_unfinished(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=3, num_ranks=2)
    (tmp_path / "record/steps/000002/step.json").unlink()
    (tmp_path / "record/end.json").unlink()
    result = run("ls", tmp_path / "record")
    assert result.exit_code == 0
    lines = [line.split() for line in result.output.splitlines()]
    assert lines[0][:2] == ["2", "steps,"]
    assert ["0", "1", "8", "42"] in [line[:4] for line in lines]
    assert "step 2 was not finished and is not in the record" in result.output


def test_ls_as_json_has_the_same_facts(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=2)
    facts = json.loads(run("ls", tmp_path / "record", "--json").output)
    rewards = [scripted_batch([3, 8, 6, 4], seed=100 * step)["rewards"].mean() for step in (0, 1)]
    assert [step["mean_reward"] for step in facts["steps"]] == rewards
    assert [step["num_tokens"] for step in facts["steps"]] == [21, 21]
    assert facts["uncommitted"] == []
    assert facts["header"]["config"] == {"seed": 1, "actor": {"lr": 1e-06}}


def test_ls_of_a_long_record_shows_its_two_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("areal_debug.verbs.record.MAX_LINES", 4)
    write_scripted_record(tmp_path / "record", num_steps=9)
    lines = [line.split() for line in run("ls", tmp_path / "record").output.splitlines()]
    first = [
        line[0]
        for line in lines[lines.index(["step", "weights", "rows", "tokens", "size", "mean", "reward"]) :]
    ]
    assert first == ["step", "0", "1", "...", "7", "8", "5"]
    assert "5 steps left out: --all lists them" in " ".join(lines[-1])
    assert "..." not in run("ls", tmp_path / "record", "--all").output


def test_show_prints_the_decoded_text_plain_when_piped(record_of_text):
    result = run("show", record_of_text)
    assert result.exit_code == 0
    assert "2+2= café" in result.output
    assert "\x1b[" not in result.output
    assert "6 of 10 tokens in the loss mask" in result.output


def test_show_colours_tokens_by_probability_and_dims_the_untrained_on_a_terminal(record_of_text):
    reader, terminal = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    for no_color, coloured in ((None, True), ("1", False)):
        extra = {"TERM": "xterm", **({"NO_COLOR": no_color} if no_color else {})}
        run_forked([COMMAND, "record", "show", str(record_of_text)], environment | extra, terminal=terminal)
        output = os.read(reader, 65536).decode()
        assert ("\x1b[32m \x1b[0m\x1b[36mc\x1b[0m" in output) == coloured  # 99 %: green, 74 %: cyan
        assert ("\x1b[1;31m" in output) == coloured  # 0.2 %
    os.close(reader)
    os.close(terminal)


def test_show_as_json_gives_every_token(record_of_text):
    [sample] = json.loads(run("show", record_of_text, "--json").output)
    assert [token["text"] for token in sample["tokens"]] == ["2", "+", "2", "=", " ", "c", "a", "f", "", "é"]
    assert [token["trained"] for token in sample["tokens"]] == [False] * 4 + [True] * 6
    assert sample["tokens"][7]["logprob"] == -3.0


def test_show_falls_back_to_ids_when_the_tokenizer_is_another_one(record_of_text, tmp_path, bytes_tokenizer):
    (tmp_path / "model/tokenizer.json").write_text("{}")
    result = run("show", record_of_text)
    assert "tokenizer.json differs from the recorded one: showing ids" in result.stderr
    assert "".join(f"<{token}>" for token in bytes_tokenizer.encode("2+2= café").ids) in result.stdout


def test_show_falls_back_to_the_recorded_text_when_the_tokenizer_is_gone(tmp_path):
    class Words:
        name_or_path = "gone"

        def decode(self, ids):
            return " ".join(f"w{token}" for token in ids)

    writer = RecordWriter(tmp_path / "record", options=RecordingOptions(text=True))
    writer.tokenizer = Words()
    (tmp_path / "record").mkdir()
    write_header(tmp_path / "record", SCRIPTED_HEADER)
    batch = scripted_batch([4])
    send_step(writer, 0, batch)
    assert f"w{batch['input_ids'][0, 0]} w" in run("show", tmp_path / "record").output


def test_show_finds_all_answers_to_a_prompt_on_any_rank(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=2, num_ranks=2)
    samples = json.loads(
        run("show", tmp_path / "record", "--step", 1, "--prompt-id", 101001, "--json").output
    )
    assert [(s["step"], s["rank"], s["row"], s["sample_id"]) for s in samples] == [
        (1, 1, 2, 0),
        (1, 1, 3, 1),
    ]


def test_verify_reports_intact_with_exit_0_and_names_damage_with_exit_1(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=2)
    result = run("verify", tmp_path / "record")
    assert (result.exit_code, result.output) == (0, "intact: every byte of 2 steps is as written\n")
    file = tmp_path / "record/steps/000001/batch-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    result = run("verify", tmp_path / "record")
    assert result.exit_code == 1
    assert (
        "steps/000001/batch-00000-of-00001.safetensors, tensor versions: bytes do not match" in result.output
    )
    report = json.loads(run("verify", tmp_path / "record", "--json").output)
    assert (report["intact"], report["steps_ok"], report["steps_missing"]) == (False, [0], [])
    assert report["problems"][0]["tensor"] == "versions"


def test_show_reports_a_record_without_steps(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=1)
    shutil.rmtree(tmp_path / "record/steps")
    result = run("show", tmp_path / "record")
    assert (result.exit_code, "holds no committed step" in result.stderr) == (2, True)
