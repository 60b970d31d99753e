"""Effect of continuing a run on another number of ranks: a table for docs/recovery.md.

    python benchmarks/resume_on_other_ranks.py [--method sft] [--steps 16]
                                               [--write docs/recovery.md]

Data are the same for every number of ranks (`async`: a scripted engine answers); the order in which
gradients are summed differs. `--write` replaces the table between the markers of the file.
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
    """Run a plan, or continue from the checkpoint in `folder`."""
    config = folder.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(config_of(plan, model)))
    environment = {} if stop_after is None else {"STOP_AFTER": str(stop_after)}
    job = Job(plan, config, folder, **environment)
    job.start()
    job.wait()


def weights(folder: Path, step: int) -> Tensor:
    """Return all weights of a checkpoint, concatenated, float64 [parameters]."""
    [checkpoint] = folder.glob(f"checkpoints/*/killed/*/recover/step-{step:06d}/actor")
    reader = dcp.HuggingFaceStorageReader(str(checkpoint))
    saved = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.zeros(item.size) for name, item in saved.items() if name.startswith("model.")}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def table(plan: Plan, model: Path, folder: Path) -> str:
    """Run everything; return the table as Markdown."""
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
        f"{plan.steps} steps of {plan.method}, moved after {half}; in the second half the weight that changes "
        f"most changes by {path:.1e}.",
        "",
        "| ranks | compared with a run on | largest difference of a weight | relative to that change |",
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
