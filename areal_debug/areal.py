"""Upstream AReaL 1.x: `trainer.train(workflow=Recorded(workflow, "runs/r"))`, and `Replayed("runs/r")`."""

from recorder.trainers.areal_workflow import Recorded, Replayed

__all__ = ["Recorded", "Replayed"]
