"""Record every step of verl: `AREAL_DEBUG_RECORD=runs/r python -m verl.trainer.main_ppo ...`.

verl imports this module in each of its processes (entry point `verl.plugins`). If the variable is
set, the update of the actor is wrapped in the classes of TRAINERS as soon as verl imports them: the
batch is complete then, and in one process. `recorder.trainers.verl`, which needs NumPy, is imported
when a step is recorded. docs/trainers/verl.md says what is recorded.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recorder.trainers.verl import record_step

__all__ = ["record_step"]

FOLDER = os.environ.get("AREAL_DEBUG_RECORD")
# module -> class: the trainer of DataProto, and that of TransferQueue, which is 0.9's default
TRAINERS = {
    "verl.trainer.ppo.ray_trainer": "RayPPOTrainer",
    "verl.trainer.ppo.v1.trainer_base": "PPOTrainer",
}


def __getattr__(name: str) -> Any:
    """Return a name of `recorder.trainers.verl`, such as `record_step`."""
    from recorder.trainers import verl

    return getattr(verl, name)


def recorded(update: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_update_actor` of a trainer, to record its batch and what the update measured.

    Where an update fails, the batch that it failed on is recorded as well.
    """

    @functools.wraps(update)
    def update_actor(trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = None
        try:
            result = update(trainer, batch, *args, **kwargs)
        finally:
            from recorder.trainers.verl import record_update, recorder_in

            recorder = recorder_in(FOLDER or "", trainer)
            recorder.attempt(
                "an update", lambda: record_update(recorder, trainer, batch, result, *args, **kwargs)
            )
        return result

    return update_actor


class Wrapping(MetaPathFinder):
    """Wraps the trainers of TRAINERS when they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a trainer's module, and None for every other name."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in TRAINERS else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                wrap(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def wrap(module: ModuleType) -> None:
    trainer: Any = getattr(module, TRAINERS[module.__name__], None)
    if hasattr(trainer, "_update_actor"):
        trainer._update_actor = recorded(trainer._update_actor)
    else:
        print(
            f"areal-debug: {module.__name__} has no {TRAINERS[module.__name__]}._update_actor: nothing is recorded",
            file=sys.stderr,
        )


def install() -> None:
    """Wrap the trainers that are imported, and those that will be."""
    for name in TRAINERS.keys() & sys.modules.keys():
        wrap(sys.modules[name])
    sys.meta_path.insert(0, Wrapping())


if FOLDER:
    install()
