"""How close a run that continues on another number of ranks comes to one that was never moved: a table for docs/recovery.md.

    python benchmarks/resume_on_other_ranks.py [--method sft] [--steps 16] [--write docs/recovery.md]

Data are the same for every number of ranks (`async`: a scripted engine answers). What differs is the order in which gradients are
summed. `--write` puts the table between the markers of the file.
"""

import argparse
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import yaml
from kill_and_resume import Job, Plan, config_of
from torch import Tensor

from areal_core.testing import make_tiny_model

MOVES = ((2, 1), (1, 2), (2, 4))
MARKERS = ("<!-- resume_on_other_ranks.py -->\n", "<!-- end -->")


def train(plan: Plan, folder: Path, model: Path, stop_after: int | None = None) -> None:
    """Runs a plan, or goes on with what lies in `folder`."""
    config = folder.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(config_of(plan, model)))
    environment = {} if stop_after is None else {"STOP_AFTER": str(stop_after)}
    job = Job(plan, config, folder, **environment)
    job.start()
    job.wait()


def weights(folder: Path, step: int) -> Tensor:
    """All weights of a checkpoint, one after the other, float64 [parameters]."""
    [checkpoint] = folder.glob(f"checkpoints/*/killed/*/recover/step-{step:06d}/actor")
    reader = dcp.HuggingFaceStorageReader(str(checkpoint))
    there = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.zeros(item.size) for name, item in there.items() if name.startswith("model.")}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def table(plan: Plan, model: Path, folder: Path) -> str:
    """Runs everything; the table, in Markdown."""
    half, whole = plan.steps // 2, {}
    for ranks in (1, 2, 4):
        train(replace(plan, ranks=ranks), folder / f"whole-{ranks}", model)
        whole[ranks] = weights(folder / f"whole-{ranks}", plan.steps)
    for ranks in {before for before, _ in MOVES}:
        train(replace(plan, ranks=ranks), folder / f"half-{ranks}", model, stop_after=half - 1)
    began = weights(folder / "half-1", half)
    path = (whole[1] - began).abs().max()
    rows = [(f"{one}, never moved", f"{other}", whole[one] - whole[other]) for one, other in ((1, 2), (2, 4))]
    for before, after in MOVES:
        moved = folder / f"moved-{before}-{after}"
        shutil.copytree(folder / f"half-{before}", moved)
        train(replace(plan, ranks=after), moved, model)
        ended = weights(moved, plan.steps)
        rows += [
            (f"{before}, then {after}", f"{against}", ended - whole[against]) for against in (before, after)
        ]
    lines = [
        f"{plan.steps} steps of {plan.method}, moved after {half}; in the second half the farthest weight goes {path:.1e}.",
        "",
        "| ranks | against a run on | farthest weight | of the way |",
        "|---|---|---|---|",
    ]
    for ranks, against, difference in rows:
        farthest = difference.abs().max()
        lines.append(f"| {ranks} | {against} | {farthest:.1e} | {farthest / path:.1e} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="sft", choices=("sft", "async"))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--write", type=Path, help="the file whose table is replaced")
    options = parser.parse_args()
    plan = Plan(options.method, 1, options.steps, "sync", "all")
    with tempfile.TemporaryDirectory() as name:
        found = table(plan, make_tiny_model(Path(name) / "model"), Path(name))
    print(found)
    if options.write:
        before, _, rest = options.write.read_text().partition(MARKERS[0])
        after = rest.partition(MARKERS[1])[2]
        options.write.write_text(before + MARKERS[0] + found + MARKERS[1] + after)


if __name__ == "__main__":
    main()
