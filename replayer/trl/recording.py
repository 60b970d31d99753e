"""Record a training of TRL."""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from recorder import open_record
from recorder.format import RECORD_FILE
from recorder.trainers.recorder import Recorder
from replayer.trl.observing import (
    Generators,
    Observer,
    TrainedStep,
    Watcher,
    count_before,
    known_name,
)


def record(trainer: Any, folder: str | os.PathLike[str], *, checksums: bool = True, **options: Any) -> None:
    """Record the next `trainer.train()` into a folder; after it the trainer has its own methods.

    A run that resumes from a checkpoint continues its record. `trainer.train()` also raises what
    `Recorder` and its `step` raise.

    Args:
        trainer: a GRPOTrainer, SFTTrainer or DPOTrainer of TRL, or of a class derived from one.
        folder: of the record.
        checksums: of the trained parameters after each optimizer step, which a replay compares.
        options: of `Recorder`, such as `overwrite`, `text`, `when_slow` and `when_failing`; `resume`
            is True after a resume.

    Raises:
        UnknownTrainer: it is none of them, or of a version of TRL with other methods.
    """
    known_name(trainer)
    train = trainer.train

    def recorded_train(*args: Any, **keywords: Any) -> Any:
        del trainer.train
        recording = Recording(trainer, folder, options)
        observer = Observer(trainer, recording, checksums)
        error: str | None = None
        try:
            with observer.observing():
                result = train(*args, **keywords)
                observer.finish()
        except BaseException as failure:
            error = type(failure).__name__
            if trainer.accelerator.num_processes == 1:  # else the other ranks may not be there
                observer.finish(failed=True)
            raise
        finally:
            recording.end(error)
        return result

    trainer.train = recorded_train


def arguments_of(trainer: Any) -> dict[str, Any]:
    """Return what acts on a run besides its options: rows of the data, which a shuffle depends on, and rewards."""
    data, names = trainer.train_dataset, getattr(trainer, "reward_func_names", None)
    of_data = {"train_dataset_rows": len(data)} if hasattr(data, "__len__") else {}
    return of_data | ({} if names is None else {"reward_funcs": list(names)})


class Recording(Watcher):
    """A Watcher that writes a record."""

    def __init__(self, trainer: Any, folder: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self.trainer, self.folder, self.options = trainer, folder, options
        self.generators = Generators(trainer.accelerator.device)
        self.recorder: Recorder | None = None

    def begin(self, optimizer_step: int, number: int) -> int:
        """Open the folder. A record keeps the steps that began before `optimizer_step`.

        TRL leaves the rest of a generation when it resumes in the middle of it.
        """
        trainer, accelerator = self.trainer, self.trainer.accelerator
        self.recorder = Recorder(
            self.folder,
            config=trainer.args.to_dict() | arguments_of(trainer),
            tokenizer=getattr(trainer.processing_class, "tokenizer", trainer.processing_class),
            model=trainer.model.config._name_or_path,
            trainer="trl",
            trainer_version=version("trl"),
            rank=accelerator.process_index,
            num_ranks=accelerator.num_processes,
            **{"resume": optimizer_step > 0, **self.options},
        )
        if not (optimizer_step and (Path(self.folder) / RECORD_FILE).exists()):
            return number
        record = open_record(self.folder)
        is_ours = record.header.trainer == "trl"  # else `Recorder` says so at the first step
        count = count_before(record, self.recorder.rank, optimizer_step) if is_ours else 0
        return max(number, record.steps[count - 1] + 1) if count else number

    def at(self, step: TrainedStep, place: str) -> None:
        """Keep the states of random generators that are not what the last pass left."""
        if changes := self.generators.changes():
            step.rng[place] = changes

    def left(self) -> None:
        """Remember the states of random generators."""
        self.generators.leave()

    def finished(self, step: TrainedStep) -> None:
        assert self.recorder is not None
        exact = {}  # unrounded
        if step.updates:
            loss = sum(map(float, step.losses)) / len(step.updates)
            exact = {"loss": loss, "grad_norm": step.updates[-1].grad_norm}
        self.recorder.step(
            step.number,
            step.samples,
            version=step.optimizer_step + len(step.updates),
            stats=step.stats | exact,
            checksums=step.updates[-1].weights if step.updates else None,
            details=self.details(step),
        )

    def details(self, step: TrainedStep) -> dict[str, Any]:
        """Return what a replay needs besides the samples, as JSON."""
        return {
            "trainer": known_name(self.trainer),
            "optimizer_step": step.optimizer_step,
            "functions": list(step.functions),
            "use_vllm": getattr(self.trainer, "use_vllm", False),
            "has_old_logps": step.has_old_logps,
            "has_images": step.has_images,
            "not_recorded": ["images"] if step.has_images and not any(s.images for s in step.samples) else [],
            "is_complete": step.is_complete,
            "rng": step.rng,
            "work": [item.document() for item in step.work],
            "weights_before": step.weights_before,
        }

    def end(self, error: str | None) -> None:
        """Close the folder, if training began."""
        if self.recorder is not None:
            self.recorder.end(error)
            if error is None and self.recorder.rank == 0:
                last, folder = self.recorder.last_step, self.recorder.folder
                print(f"recorded up to step {last}: areal-debug open {folder}", file=sys.stderr)
