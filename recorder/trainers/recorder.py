"""Record a training loop that is not ours, a step at a time.

    with Recorder("runs/r", config=config, tokenizer=tokenizer) as recorder:
        for step in range(steps):
            ...
            recorder.step(step, samples, stats={"loss": loss})

The files are those of our own trainer's runs, written by its writer: in the background, a step
complete or not at all.
"""

import argparse
import atexit
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_core.safety.printable import printable
from areal_core.safety.secrets import masker
from recorder.errors import RecordError
from recorder.format import RECORD_FILE, Outcome, Plan, Recording
from recorder.reader import open_record
from recorder.step_files import RankStep
from recorder.trainers.batches import check_kinds, content_of, number_groups
from recorder.trainers.sample import parse_sample
from recorder.writer import RecordingOptions, RecordWriter, alone, print_to_stderr

FOLDER_VARIABLE = "AREAL_DEBUG_RECORD"
DEEPEST = 16  # levels of a config
NOT_ENDED = "the process ended before Recorder.end()"


class Recorder:
    """Write a record of a training loop into a folder, as a context manager.

    Args:
        folder: of the record: new or empty, unless `overwrite` or `resume` is given.
        config: options of the trainer: a dict, a dataclass, an argparse namespace, or anything with
            `to_dict()`. Credentials are masked. What JSON lacks is stored as text.
        tokenizer: decodes prompts and completions, unless samples have text. The record has the
            names, sizes and checksums of its files.
        model: path of the model that the first step starts from; the same of its files.
        trainer: name of the framework, as `record show` prints it.
        trainer_version: its version.
        rank: of this process, if several record, each its own samples.
        num_ranks: their number. With several, building a recorder, `step` and `end` are
            collectives.
        gather: returns every rank's value in rank order; with several ranks the default is that of
            torch.distributed, over gloo.
        text: store text.
        overwrite: replace a record in the folder.
        resume: continue a record in the folder, if there is one: the first step that is given, and
            all after it, are removed from it. If none is before that step, this is a new run, and
            the record is refused unless `overwrite` is given.
        queue_steps: steps that may wait for the disk; 0 writes each step before `step` returns.
        when_slow: what a full queue does: "wait", or "drop" the step.
        when_failing: "stop" raises an error on every rank; "continue" prints one sentence and
            records no more.

    Raises:
        RecordExists: the folder holds anything, or a record that this run cannot resume; with
            `resume`, the first `step` raises it.
        RecordInUse: another run writes there.
        RecordError: `rank` is not below `num_ranks`, `config` is of another type, or
            torch.distributed does not have `num_ranks` ranks.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        config: Any = None,
        tokenizer: Any = None,
        model: str | os.PathLike[str] | None = None,
        trainer: str = "other",
        trainer_version: str | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        gather: Callable[[Any], list[Any]] | None = None,
        text: bool = True,
        overwrite: bool = False,
        resume: bool = False,
        queue_steps: int = 2,
        when_slow: str = "wait",
        when_failing: str = "stop",
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise RecordError(f"rank {rank} of {num_ranks} ranks: ranks count from 0")
        self.facts = {
            "config": masker().tree(plain(config)),
            "tokenizer": tokenizer,
            "model_path": None if model is None else os.fspath(model),
            "world_size": num_ranks,
            "data_parallel_rank": rank,
            "data_parallel_size": num_ranks,
            "trainer": {"name": trainer, "version": trainer_version},
            "code": script_folder(),
        }
        self.folder, self.rank, self.num_ranks = Path(folder), rank, num_ranks
        self.gather = gather or (alone if num_ranks == 1 else gather_by_torch(num_ranks))
        options = RecordingOptions(
            recording=Recording(scope="given"),
            text=text,
            overwrite=overwrite,
            first_step=int(resume and (self.folder / RECORD_FILE).exists()),
            queue_steps=queue_steps,
            when_slow=when_slow,
            when_failing=when_failing,
        )
        self.writer = RecordWriter(self.folder, rank, num_ranks, self.gather, options)
        self.last_step, self.num_prompts = -1, 0
        self.version: int | None = None  # after the last step
        self.ended, self.started, self.left_out = False, False, set[str]()
        if not options.first_step:
            self._start()

    @classmethod
    def from_environment(cls, trainer: str, trainer_version: str | None = None, **options: Any) -> "Recorder":
        """Return a recorder whose folder AREAL_DEBUG_RECORD names, and which continues its record.

        Args:
            trainer: name of the framework.
            trainer_version: its version.
            options: of `Recorder`; by default `resume` is True and `when_failing` is "continue".

        Raises:
            RecordError: the variable is not set; and as `Recorder` does.
        """
        options = {"resume": True, "when_failing": "continue", **options}
        return cls(
            folder_of_environment(trainer), trainer=trainer, trainer_version=trainer_version, **options
        )

    def _start(self) -> None:
        """Begin the record; a collective."""
        self.started = True
        self.writer("start", **self.facts)
        # last: what the writer registered for the exit, the release of its lock, runs after it
        atexit.register(self.end, NOT_ENDED)

    def step(
        self,
        step: int,
        samples: Sequence[Any],
        *,
        version: int | None = None,
        stats: Mapping[str, Any] | None = None,
        checksums: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
        rng: Mapping[str, str] | None = None,
    ) -> None:
        """Record a step of this rank, which may have no samples. Everything is copied.

        Args:
            step: its number, from 0; numbers ascend.
            samples: `Sample`s, or mappings with the members that docs/recording_api.md lists. Rows
                are sorted by group. Samples of equal group, on any rank, answer one prompt.
            version: weight version after the step; unless given, one more than after the last one,
                and `step + 1` after the first.
            stats: numbers by name, or tensors with one; others are left out, which is said once.
            checksums: crc32c of each parameter after the step, as in FORMAT.md.
            details: what the trainer needs for training on the step again, as JSON types.
            rng: states of random generators before the step, as text by name.

        Raises:
            RecordError: one rank records, and a sample cannot be recorded, or step or version
                descend; nothing of the step is written.
            RecordingFailed: recording failed on any rank, for the same reasons where several
                record. Both only if `when_failing` is "stop".
            RecordExists: the first step of a resumed run, and the record is another run's.
        """
        if self.writer.ended is not None:
            return
        try:
            self._check_order(step, version)
            parsed = [parse_sample(sample, f"step {step}, sample {n}") for n, sample in enumerate(samples)]
            check_kinds(parsed)
            groups: Any = [sample.group for sample in parsed]
        except Exception as error:
            if self.num_ranks == 1 and self.writer.options.when_failing == "stop":
                raise
            groups = f"{type(error).__name__}: {error}"
        gathered = self.gather(groups)
        for rank, found in enumerate(gathered):
            if isinstance(found, str):
                self.writer.drain()  # the steps before it are whole
                if self.writer.ended is None:
                    self.writer.fail(rank, found)
                return
        if not self.started:
            self._resume(step)
        places, num_prompts = number_groups(gathered, self.num_prompts)
        before = step if self.version is None else self.version
        after = before + 1 if version is None else version
        plan = outcome = None
        if details is not None or rng is not None:
            plan = Plan(step, before, dict(rng or {}), plain(details))
        if stats is not None or checksums is not None:
            numbers = {str(name): to_number(value) for name, value in (stats or {}).items()}
            known = {name: value for name, value in numbers.items() if value is not None}
            left = sorted(numbers.keys() - known - self.left_out)
            self.left_out.update(left)
            if left and self.writer.options.when_failing == "stop":  # a framework's are no mistake
                print_to_stderr(f"stats that are not one number: left out {printable(', '.join(left), 200)}")
            outcome = Outcome(step, after, (), known, dict(checksums or {}))
        self.last_step, self.version, self.num_prompts = step, after, num_prompts

        def made() -> RankStep:
            content = content_of(parsed, places[self.rank])
            text = content.text if self.writer.options.text else None
            return RankStep(step, after, content.batch, plan, outcome, content.learning, text)

        self.writer.record_step(step, made)

    def _check_order(self, step: int, version: int | None) -> None:
        """Raise RecordError unless the step may follow."""
        if self.ended:
            raise RecordError(f"{self.folder}: step {step} comes after the end of the recording")
        if step <= self.last_step:
            raise RecordError(
                f"{self.folder}: step {step} comes after step {self.last_step}: give steps in ascending order"
            )
        if version is not None and self.version is not None and version < self.version:
            raise RecordError(f"step {step} has weight version {version}, and the step before {self.version}")

    def _resume(self, step: int) -> None:
        """Continue the record in the folder with a step; a collective. Raises RecordExists."""
        record = open_record(self.folder)
        before = [number for number in record.steps if number < step]
        # without an earlier step this is a new run, which must not replace the record
        self.writer.options = replace(self.writer.options, first_step=step if before else 0)
        if before:
            last = record.step(before[-1])
            ids = [last.batch(rank, ["prompt_id"])["prompt_id"] for rank in last.ranks]
            self.num_prompts = max(int(column.max(initial=-1)) for column in ids) + 1
            self.version = last.manifest.version
        self._start()

    def end(self, error: str | None = None) -> None:
        """Wait for the last steps and end the record; once, later calls do nothing.

        Args:
            error: why the run failed; None after a good run.

        Raises:
            RecordingFailed: the last steps could not be written, and `when_failing` is "stop".
        """
        if not self.ended:
            self.ended = True
            atexit.unregister(self.end)
            if self.started:
                self.writer("end", error=error)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.end(None if kind is None else kind.__name__)


def folder_of_environment(trainer: str) -> str:
    """Return the folder that AREAL_DEBUG_RECORD names. Raises RecordError if it is not set."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise RecordError(
            f"no folder to record {trainer} into: set {FOLDER_VARIABLE}, such as {FOLDER_VARIABLE}=runs/r"
        )
    return folder


def gather_by_torch(num_ranks: int) -> Callable[[Any], list[Any]]:
    """Return the exchange over gloo of torch.distributed; a collective. Raises RecordError."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() == num_ranks):
        raise RecordError(
            f"{num_ranks} ranks record, and torch.distributed has not {num_ranks}: initialise it first, or give `gather`"
        )
    group: Any = dist.new_group(backend="gloo")

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * num_ranks
        dist.all_gather_object(values, value, group=group)
        return values

    return gather


def script_folder() -> Path:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(main).resolve().parent if main else Path.cwd()


def to_number(value: Any) -> float | None:
    """Return a float of a number, or of a tensor with one; None for everything else."""
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        return None


def plain(value: Any, level: int = 0) -> Any:
    """Return options as JSON types; dicts have text keys."""
    if value is None and level == 0:
        return {}
    if level and (value is None or type(value) in (bool, int, float, str)):
        return value
    if level == DEEPEST:
        return printable(str(value), 1000)
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    elif callable(getattr(value, "to_dict", None)) and not isinstance(value, type):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(name): plain(item, level + 1) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, level + 1) for item in value]
    if level == 0:
        raise RecordError(f"the config is {type(value).__name__}: give a dict, a dataclass or a namespace")
    return printable(str(value), 1000)
