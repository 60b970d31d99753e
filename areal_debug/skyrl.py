"""Record every step of SkyRL: `callbacks=[areal_debug.skyrl.Record("runs/r")]`."""

from recorder.trainers.skyrl import Record

__all__ = ["Record"]
