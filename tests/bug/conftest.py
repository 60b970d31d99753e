"""A recorded step with a bad sample, and its cuts, made in this process."""

import pytest
import torch

from areal_debug.rank_tasks.shrink import make_recorder
from recorder.archive.pack import archive_record
from replayer.bug.cut import Watcher, cut_step
from replayer.bug.cut_request import CutRequest
from tests.replayer.conftest import TinyRun, train_and_record

BAD = (2, 9)  # step and row whose reward is NaN: prompt 202, sample 1


def plant(batch, step):
    """Number prompts by their step, and plant the bad sample."""
    batch = batch | {"prompt_id": batch["prompt_id"] + 100 * step}
    if step == BAD[0]:
        batch["rewards"] = batch["rewards"].clone()
        batch["rewards"][BAD[1]] = float("nan")
    return batch


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="package")
def bad_run(tmp_path_factory, tiny_model) -> TinyRun:
    """Three steps without an anchor; the last one has a bad sample. Not to be changed."""
    options = {"actor__nonfinite": "skip"}
    return train_and_record(tmp_path_factory.mktemp("bad"), tiny_model, 3, plant, **options)


@pytest.fixture(scope="session")
def cut_to():
    """Cut a step into a zip file: `cut_to(file, record, step, symptom=...)` returns the report."""

    def cut(file, record, step, stops=lambda: False, seen=None, **settings):
        folder = file.with_suffix("")
        seen = [] if seen is None else seen
        watcher = Watcher(lambda *facts: None, lambda rows, *facts: seen.append(rows), stops)
        report = cut_step(CutRequest(str(record), step, str(folder), **settings), make_recorder, watcher)
        archive_record(folder, file)
        return report

    return cut
