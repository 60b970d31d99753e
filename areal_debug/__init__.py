"""The areal-debug command, its pages, the wiring into a training run, and names to import.

A name is imported when it is first used: `import areal_debug` stays fast.
"""

from typing import TYPE_CHECKING

from areal_debug.installation import lazy_names

if TYPE_CHECKING:
    from areal_debug.watching.block import watch as watch
    from recorder.trainers.recorder import Recorder as Recorder
    from recorder.trainers.sample import Sample as Sample

__getattr__, __all__ = lazy_names(
    {
        "areal_debug.watching.block": ["watch"],
        "recorder.trainers.recorder": ["Recorder"],
        "recorder.trainers.sample": ["Sample"],
    },
    __name__,
)
