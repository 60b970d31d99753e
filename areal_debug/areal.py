"""Upstream AReaL 1.x: `train(workflow=Recorded(workflow, "runs/r"))`, `Replayed("runs/r")`."""

from recorder.trainers.areal_workflow import Recorded, Replayed

__all__ = ["Recorded", "Replayed"]
