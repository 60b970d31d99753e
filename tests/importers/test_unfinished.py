"""Folders as runs leave them: evaluations, half-written files, steps of some ranks."""

import os
import shutil
from pathlib import Path

import pytest

from recorder.errors import ForeignFormat
from recorder.trainers.importing import import_record

from . import dataproto, eras, lines, pickled
from .known import KNOWN


def two_steps(write, folder: Path, name: str, step: int) -> Path:
    """Write a dump, and its file again under the name of the next step; return the second file."""
    first, second = (name.format(number) for number in (step, step + 1))
    folder.mkdir()
    write(folder)
    (folder / second).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / first, folder / second)
    return folder / second


def write_one_of_queue(folder: Path) -> None:
    shutil.rmtree(eras.write_verl_queue(folder) / "exp_proj/GBS2_N2_in4_out5/5/1")


def write_one_of_slime(folder: Path) -> None:
    (pickled.write_slime(folder) / "rollout_data/10.pt").unlink()


def write_first_of_areal(folder: Path) -> None:
    pickled.write_areal_padded(folder).rename(folder / "batch_data_1.pt")


# format -> writer, file of a step, number of that step
FILES = {
    "verl": (dataproto.write_verl, "exp_proj/GBS4_N2_in4_out5/{}/gen_batch.dp", 7),
    "verl, a queue": (write_one_of_queue, "exp_proj/GBS2_N2_in4_out5/{}/0/tq_batch.pt", 5),
    "nemo-rl": (lines.write_nemo_rl, "exp_001/train_data_step{}.jsonl", 5),
    "skyrl": (pickled.write_skyrl, "dumped_data/global_step_{}_training_input.pkl", 12),
    "roll": (dataproto.write_roll_rlvr, "train/step_{:06}.pkl", 3),
    "xtuner": (pickled.write_xtuner, "debug_rollout_{}.pt", 2),
    "slime": (write_one_of_slime, "rollout_data/{}.pt", 9),
    "areal": (write_first_of_areal, "batch_data_{}.pt", 1),
    "areno": (lines.write_areno, "step_{:06}.jsonl", 7),
    "trl": (lines.write_trl, "completions/completions_{:05}.parquet", 1),
    "verl-text": (lines.write_verl_text, "{}.jsonl", 1),
    "roll-text": (lines.write_roll_text, "rollout_dump_data.step_{}.jsonl", 1),
}


# One of each kind of file: tensors, a queue, lines, pickles, Parquet, text.
EVERYDAY = {"verl", "verl, a queue", "nemo-rl", "skyrl", "trl", "verl-text"}


@pytest.mark.parametrize("kept", [0.9, pytest.param(0.02, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in EVERYDAY)) for name in FILES]
)
def test_a_file_that_was_not_written_to_its_end_is_left_out_and_named(name, kept, tmp_path):
    second = two_steps(FILES[name][0], tmp_path / "run", *FILES[name][1:])
    whole = import_record(tmp_path / "run", tmp_path / "whole")
    assert len(whole.steps) == 2
    os.truncate(second, int(second.stat().st_size * kept))
    cut = import_record(tmp_path / "run", tmp_path / "cut")
    assert (cut.steps, cut.num_samples) == (whole.steps[:1], whole.num_samples // 2)
    (note,) = [note for note in cut.notes if str(second) in note]
    assert "cut off" in note
    with pytest.raises(ForeignFormat, match="cut off"):
        import_record(second, tmp_path / "none", name.split(",")[0])


def test_cut_lines_of_files_with_several_steps_are_left_out_and_named(tmp_path):
    source = lines.write_open_instruct(tmp_path)
    last = source / "run_rollouts_000001.jsonl"
    os.truncate(last, last.stat().st_size - 20)
    imported = import_record(source, tmp_path / "record")
    assert imported.num_samples == 2 * len(KNOWN) - 1
    assert any(f"{last}, line 3 is cut off" in note for note in imported.notes)


def test_steps_that_only_some_ranks_wrote_are_left_out_and_every_cut_file_is_named(tmp_path):
    source = lines.write_prime_rl(tmp_path / "run")
    (step,) = source.rglob("step_4")
    steps = {number: step.with_name(f"step_{number}") for number in (5, 6, 7)}
    for folder in steps.values():
        shutil.copytree(step, folder)
    for folder in (steps[5], steps[7]):
        (folder / "rank_1.bin").rename(folder / "rank_1.bin.tmp")
    cut = [steps[6] / "rank_0.bin", steps[6] / "rank_1.bin", steps[7] / "rank_0.bin"]
    for file in cut:
        os.truncate(file, file.stat().st_size - 30)
    imported = import_record(source, tmp_path / "record")
    assert imported.steps == ("step_4",)
    notes = "\n".join(imported.notes)
    assert f"{steps[5]} has 1 files, and other steps have 2: it is left out" in notes
    assert all(str(file) in notes for file in (*cut, steps[5] / "rank_1.bin.tmp"))
