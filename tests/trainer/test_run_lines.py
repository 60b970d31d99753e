"""The lines of a run, and signals that end it in order."""

import os
import signal

import pytest

from areal_core.config import SFTConfig
from areal_core.engine.checkpoint.files import Checkpoint, write_checkpoint_file
from areal_core.trainer.run_lines import RunLines


@pytest.fixture
def config(tmp_path):
    config = SFTConfig(experiment_name="sums", trial_name="first")
    config.cluster.fileroot = str(tmp_path)
    return config


@pytest.fixture(autouse=True)
def interrupts_are_handled():
    """Handle SIGINT even if the tests were started with it ignored.

    A shell does that for background jobs.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_and_last_lines_name_the_folders_of_the_results(config, capsys):
    with RunLines(config, 0, 2, prints=True) as lines:
        lines.checkpoints.mkdir(parents=True)
        for step in (0, 1):
            lines(step, {"sft/loss/avg": 0.5})
    first, *steps, last = capsys.readouterr().out.splitlines()
    assert first == f"sums/first: steps 0 to 1; results in {lines.logs}"
    assert steps == ["step 0 (1 of 2)  loss 0.5", "step 1 (2 of 2)  loss 0.5"]
    assert last.startswith("sums/first: done, 2 steps in ")
    assert last.endswith(f"statistics in {lines.logs}/stats.jsonl, checkpoints in {lines.checkpoints}")


def test_the_last_line_names_the_options_that_save_models_if_none_was_saved(config, capsys):
    with RunLines(config, 0, 1, prints=True) as lines:
        lines(0, {})
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("and no model was kept: saver.save_last is false and no saver.freq_* is set")


def test_the_last_line_names_the_folder_of_the_last_model(config, capsys):
    with RunLines(config, 0, 1, prints=True) as lines:
        for step, seconds in ((9, 1), (10, 2)):
            model = lines.checkpoints / "default" / f"globalstep{step}"
            model.mkdir(parents=True)
            os.utime(model, (seconds, seconds))
        lines(0, {})
    assert capsys.readouterr().out.endswith(f", the model in {model}\n")


def test_a_complete_run_reports_that_nothing_is_left(config, capsys):
    with RunLines(config, 3, 3, prints=True):
        pass
    assert capsys.readouterr().out.startswith("sums/first: all 3 steps were trained before; nothing is left to do\n")  # fmt: skip


def test_other_ranks_print_nothing(config, capsys):
    with RunLines(config, 0, 2, prints=False) as lines:
        lines(0, {})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")])
def test_a_signal_ends_the_loop_by_an_exception_and_is_reported(config, capsys, number, name):
    def run():
        with RunLines(config, 0, 9, prints=True) as lines:
            lines(0, {})
            os.kill(os.getpid(), number)
            raise AssertionError("the signal did not end the loop")

    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is before
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        f"sums/first: ended by {name} after 1 of 9 steps; there is no checkpoint to continue from"
    )


def test_a_second_signal_ends_the_process_at_once(config):
    child = os.fork()
    if child == 0:
        try:
            with RunLines(config, 0, 5, prints=False):
                try:
                    os.kill(os.getpid(), signal.SIGINT)
                finally:
                    os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_an_exception_is_reported_with_the_checkpoint_to_continue_from(config, capsys, monkeypatch, tmp_path):
    def run(lines):
        with lines:
            raise ValueError("no reward")

    monkeypatch.chdir(tmp_path)
    lines = RunLines(config, 0, 9, prints=True)
    for step in (2, 4, 6):
        folder = lines.checkpoints / f"recover/step-{step:06d}"
        folder.mkdir(parents=True)
        if step < 6:  # the last one was cut off
            write_checkpoint_file(folder, Checkpoint({}, [], {}, {}))
    with pytest.raises(ValueError, match="no reward"):
        run(lines)
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        "ended by ValueError after 0 of 9 steps; with recover.mode=auto it continues at step 4, "
        "from checkpoints/"
    ) in last
