"""Anchors: checkpoints in a record, saved during recording, to start replays from.

    training ─> `weights` of step 39 ─> due? ─yes─> save_checkpoint (all ranks) ─> anchors/000040 ─(rank 0)─> too many bytes? thin out
    recovery ─> `checkpoint` of step 40 ───────────> hard links to its files ────> anchors/000040

An anchor of step N is the state before step N: weights, optimizer, schedule, RNG states, in the
format of recovery checkpoints. Short replays cost disk space; the policy limits both.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recorder import commit_anchor
from recorder.format import ANCHOR_FILE, ANCHORS_FOLDER, step_name

CHECKPOINT = "checkpoint"  # folder inside an anchor
# Phases of a step that a replay repeats; equal on all ranks, as statistics are reduced.
REPLAYED = ("critic_values", "compute_advantage", "train_step", "critic_train_step")


@dataclass(frozen=True)
class AnchorPolicy:
    """When anchors are saved, and how much disk they may use; None is no limit.

    Args:
        every_steps: save one before each step that it divides.
        max_replay_s: save one as soon as the replay from the last one would take longer.
        max_bytes: of all anchors together; above it, anchors are removed that keep the gaps
            smallest.
        at_start: also save one before the first step.
    """

    every_steps: int | None = None
    max_replay_s: float | None = None
    max_bytes: int | None = None
    at_start: bool = False

    def is_due(self, next_step: int, replay_s: float) -> bool:
        """Return whether to save an anchor `replay_s` seconds of replay after the last one."""
        by_steps = self.every_steps is not None and next_step % self.every_steps == 0
        by_cost = self.max_replay_s is not None and replay_s >= self.max_replay_s
        return by_steps or by_cost


class AnchorTaker:
    """An observer on every rank that saves anchors into the record in `folder`."""

    def __init__(self, folder: Path, rank: int, policy: AnchorPolicy) -> None:
        self.folder, self.rank, self.policy = folder, rank, policy
        self.replay_s = 0.0
        self.save: Callable[[Path, int], None] | None = None

    def __call__(self, event: str, **facts: Any) -> None:
        """Handle an event (ARCHITECTURE.md)."""
        if event == "start":
            self.save = facts["save_checkpoint"]
            # A resumed run starts from weights that are in no model folder.
            if self.policy.at_start or facts["version"] > 0:
                self.save_anchor(facts["version"])
        elif event == "step":
            timings = [f"timeperf/{name}" for name in REPLAYED]
            self.replay_s += sum(facts["stats"][name] for name in timings if name in facts["stats"])
        elif event == "weights" and self.policy.is_due(facts["step"] + 1, self.replay_s):
            self.save_anchor(facts["step"] + 1)
        elif event == "checkpoint" and self.rank == 0:
            adopt_checkpoint(self.folder, facts["step"], Path(facts["folder"]))

    def save_anchor(self, step: int) -> None:
        assert self.save is not None
        if self.rank == 0:  # invalidate an anchor of an earlier attempt before rewriting it
            (anchor_folder(self.folder, step) / ANCHOR_FILE).unlink(missing_ok=True)
        self.save(anchor_folder(self.folder, step) / CHECKPOINT, step)
        self.replay_s = 0.0
        if self.rank == 0:
            commit_anchor(anchor_folder(self.folder, step), step)
            if self.policy.max_bytes is not None:
                thin_out(self.folder, self.policy.max_bytes)


def anchor_folder(record: Path, step: int) -> Path:
    return record / ANCHORS_FOLDER / step_name(step)


def adopt_checkpoint(record: Path, step: int, checkpoint: Path) -> None:
    """Make an anchor of a recovery checkpoint by hard links, or by copies if necessary.

    Does nothing if the record has an anchor of that step.
    """
    from areal_core.engine.checkpoint.hf_folder import link_missing  # imports torch

    folder = anchor_folder(record, step)
    if (folder / ANCHOR_FILE).exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    (folder / CHECKPOINT).mkdir(parents=True)
    link_missing(checkpoint, folder / CHECKPOINT)
    commit_anchor(folder, step)


def thin_out(record: Path, max_bytes: int) -> None:
    """Remove anchors until the rest fits, anchor.json first: a partial anchor is not read.

    The first stays, because it may be the only start, and so does the newest, to which a run can
    return. Of the others, the one in the narrowest gap is removed, repeatedly.
    """
    folders = {
        int(path.parent.name): path.parent for path in (record / ANCHORS_FOLDER).glob(f"*/{ANCHOR_FILE}")
    }
    files = {step: [path for path in folder.rglob("*") if path.is_file()] for step, folder in folders.items()}
    sizes = {step: sum(path.stat().st_size for path in paths) for step, paths in files.items()}
    kept = sorted(sizes)
    while len(kept) > 2 and sum(sizes[step] for step in kept) > max_bytes:
        inner = range(1, len(kept) - 1)
        step = kept.pop(min(inner, key=lambda i: (kept[i + 1] - kept[i - 1], i)))
        (folders[step] / ANCHOR_FILE).unlink()
        shutil.rmtree(folders[step])
