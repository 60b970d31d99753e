"""The lines of a run, and signals that end it in order."""

import os
import signal

import pytest

from areal_core.config import SFTConfig
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_loop_by_an_exception_and_is_reported(config, capsys, number):
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
        "sums/first: interrupted after 1 of 9 steps; there is no checkpoint to continue from"
    )
    config.recover.mode, config.recover.freq_steps = "auto", 10
    with pytest.raises(SystemExit):
        run()
    last = capsys.readouterr().out.splitlines()[-1]
    due = "no checkpoint was written yet: the next was due after step 9"
    assert last.endswith(f"; {due}. To save more often: recover.freq_steps=1")


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
