"""Log an exported record into files of Weights & Biases or Trackio, and send a dataset to the Hub.

The lines come from `recorder.tables.formats`, which a confined process wrote; nothing here opens
the record. Both services write local files only: sending them is a command of theirs.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from areal_core.telemetry.loggers import masked_arguments
from areal_debug.render import hidden_output
from recorder.documents import parse_document
from recorder.errors import RecordError

PROJECT = "areal-debug"
Samples = list[dict[str, Any]]


def log_lines(lines: Path, service: str, folder: Path, run_name: str) -> str:
    """Log the lines of a record as a run of a service below a folder.

    Return the command that shows or sends it.
    """
    with hidden_output():
        return SERVICES[service](lines, folder, run_name)


def log_to_wandb(lines: Path, folder: Path, run_name: str) -> str:
    """Write an offline run; each step has its numbers and a table `samples`."""
    wandb = importlib.import_module("wandb")
    folder.mkdir()
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        x_disable_meta=True,
        x_disable_stats=True,
    )
    with masked_arguments():
        run = wandb.init(project=PROJECT, name=run_name, dir=str(folder), mode="offline", settings=settings)
    for step, stats, samples in steps_of(lines):
        columns = list(samples[0]) if samples else []
        rows = [list(sample.values()) for sample in samples]
        # a column may have numbers in one step and nothing known in another
        table = wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
        run.log({**stats, "samples": table}, step=step)
    run.finish()
    return f"wandb sync {folder / 'wandb'}/offline-run-*"


def log_to_trackio(lines: Path, folder: Path, run_name: str) -> str:
    """Write a local run; each step has its numbers and a table `samples`."""
    os.environ["TRACKIO_DIR"] = str(folder.absolute())  # read when the package is imported
    for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID"):
        os.environ.pop(variable, None)
    trackio = importlib.import_module("trackio")
    folder.mkdir(exist_ok=True)
    run = trackio.init(project=PROJECT, name=run_name, auto_log_gpu=False, auto_log_cpu=False, embed=False)
    for step, stats, samples in steps_of(lines):
        columns = list(samples[0]) if samples else []
        table = trackio.Table(columns=columns, data=[list(sample.values()) for sample in samples])
        run.log({**stats, "samples": table}, step=step)
    trackio.finish()  # run.finish() alone would be repeated, and print, when the process ends
    return f"TRACKIO_DIR={folder} trackio show --project {PROJECT}"


SERVICES: dict[str, Callable[[Path, Path, str], str]] = {"wandb": log_to_wandb, "trackio": log_to_trackio}


def steps_of(lines: Path) -> Iterator[tuple[int, dict[str, float], Samples]]:
    with lines.open("rb") as file:
        documents = (parse_document(line, lines.name) for line in file)
        for step, group in groupby(documents, lambda document: document["step"]):
            first, *rest = group
            yield step, first["stats"], [document["sample"] for document in rest]


def send_to_hub(folder: Path, repository: str, public: bool) -> str:
    """Send a saved dataset to the Hugging Face Hub; return where it is. Raises RecordError."""
    import httpx
    from datasets import Dataset, load_from_disk

    dataset = load_from_disk(str(folder))
    assert isinstance(dataset, Dataset)
    try:
        info = dataset.push_to_hub(repository, private=not public)
    except (OSError, httpx.HTTPError) as error:
        raise RecordError(
            f"{repository} was not sent to the Hugging Face Hub: {' '.join(str(error).split())}; the dataset is in {folder}"
        ) from error
    return str(info.repo_url)
