"""The areal-debug command, its pages, the wiring into a training run, and names to import."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recorder.trainers.recorder import Recorder
    from recorder.trainers.sample import Sample

__all__ = ["Recorder", "Sample"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import areal_debug` stays fast."""
    if name == "Recorder":
        from recorder.trainers.recorder import Recorder

        return Recorder
    if name == "Sample":
        from recorder.trainers.sample import Sample

        return Sample
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
