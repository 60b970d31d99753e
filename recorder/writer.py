"""Record a run while it trains: an observer on every data-parallel rank; ranks agree on each step.

    training thread   `batch` ─> copy ─> ... ─> `step` ─> agree with all ranks ─> queue ─> training continues
                                                            │ a rank failed: stop, or continue without recording
                                                            │ a queue is full: wait and agree again, or drop the step
    writer thread     queue ─> this rank's files ─ fsync ─> manifest ─(rank 0)─> waits for all manifests ─> step.json ─> retention

Only training threads meet in a collective; writer threads meet in the folder. So all ranks record
the same steps, and all ranks learn of a failed rank at the next step, which also ends rank 0's wait
for its files. A step without step.json is not part of the record, so a process may die at any byte.

The queue is bounded (`Background`), and putting a job into it never blocks: a rank that needs a
free slot waits with a timeout and exchanges states with the other ranks in between. An error of the
writer thread ends it, empties the queue, and is kept for the training thread. Without a queue the
training thread does the work of both.
"""

import copy
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from areal_core.safety.lock import Lock, Lost, check, new_token
from recorder.errors import RecordError, RecordExists, RecordingFailed
from recorder.format import (
    END_FILE,
    LOCK_FILE,
    RECORD_FILE,
    STEPS_FOLDER,
    Outcome,
    Plan,
    Recording,
    StepLink,
    has_pictures,
    step_name,
)
from recorder.header import check_contents, check_folder, clear_record, describe_run, write_header
from recorder.integrity.chain import link_to, write_end
from recorder.lock import lock_folder
from recorder.outcome import OutcomeObserver
from recorder.pictures.named import with_pixels
from recorder.reader import RecordedStep
from recorder.resume import resume_record
from recorder.retention import KeptSteps, Retention
from recorder.step_files import (
    RankStep,
    collect_rank_manifest,
    commit_step,
    decode_rows,
    learning_tensors,
    manifest_of,
    write_rank,
    write_rank_manifest,
)
from recorder.storage import FolderStorage
from recorder.tensors import flatten, with_unknown
from recorder.transcripts import call_lines, without_calls

if TYPE_CHECKING:
    from recorder.archive.live_archive import LiveArchive

Job = TypeVar("Job")

STEP_EVENTS = frozenset({"batch", "advantages", "checksums", "micro_batch", "step"})

POLL_S = 0.005  # how often rank 0 polls for the other ranks' manifests
AGREE_INTERVAL_S = 1.0  # how long a rank waits for its own disk before it syncs again
SHUTDOWN_TIMEOUT_S = 20.0  # wait of a failed run for its last steps, which a rank may never write


@dataclass(frozen=True)
class RecordingOptions:
    """How a run is recorded.

    Attributes:
        text: also store decoded prompts and completions, and the calls of agents.
        images: "original", the files of pictures, or "pixels", what the trainer's processor makes
            of them; pixels that the batch has are stored in either case.
        overwrite: replace an existing record, unless the run resumes it.
        first_step: not 0 for a resumed run, which then resumes its record if there is one.
        queue_steps: how many steps may be queued for the disk; 0 writes each step synchronously.
        when_slow: what a full queue does: "wait" or "drop" the step.
        when_failing: "stop" the run, or "continue" without recording.
    """

    recording: Recording = field(default_factory=Recording)
    text: bool = False
    images: str = "original"
    overwrite: bool = False
    first_step: int = 0
    queue_steps: int = 0
    when_slow: str = "wait"
    when_failing: str = "stop"
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True)
class RankState:
    """State of a rank's recording, exchanged between the ranks.

    On rank 0 `token` is that of its lock, and `refusal` says why the run may not write into the folder.
    """

    failure: str | None
    has_room: bool
    idle: bool
    token: str
    refusal: RecordExists | None


def alone(value: Job) -> list[Job]:
    """The `gather` of a run with one rank."""
    return [value]


def print_to_stderr(sentence: str) -> None:
    """Print a message for the user."""
    print(f"recording: {sentence}", file=sys.stderr, flush=True)


class Background(Generic[Job]):
    """Call `work` on each job, one after another, in a separate thread. `depth` is at least 1."""

    def __init__(self, work: Callable[[Job], None], depth: int) -> None:
        assert depth >= 1
        self.work, self.depth = work, depth
        self.error: Exception | None = None
        self.jobs: deque[Job] = deque()
        self.changed = threading.Condition()
        self.closing = False
        # a daemon: a process that fails elsewhere must not wait for the disk
        self.thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self.thread.start()

    @property
    def has_room(self) -> bool:
        return len(self.jobs) < self.depth

    @property
    def idle(self) -> bool:
        """True if every job is done, or will never run because of an error."""
        return not self.jobs

    def put(self, job: Job) -> None:
        """Queue a job; does nothing after an error."""
        with self.changed:
            assert self.has_room
            if self.error is None:
                self.jobs.append(job)
                self.changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Wait until a job has finished or failed, at most `timeout_s`; return if idle."""
        with self.changed:
            pending = len(self.jobs)
            self.changed.wait_for(lambda: len(self.jobs) < pending or self.idle, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """End the thread after the last job, waiting at most `timeout_s`.

        Return whether it has ended.
        """
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: bool(self.jobs) or self.closing)
                if not self.jobs:
                    return
                job = self.jobs[0]
            try:
                self.work(job)
            except Exception as error:
                self._fail(error)
                return
            with self.changed:
                self.jobs.popleft()
                self.changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self.changed:
            self.error = error
            self.jobs.clear()
            self.changed.notify_all()


class RecordWriter:
    """An observer that records a run into `folder`, which all ranks share.

    Args:
        rank, num_ranks: data-parallel rank, and their number.
        gather: return every rank's value in rank order; a collective, called from the training
            thread only.
        notify: called with messages for the user that are not errors, one sentence each.
        archive: on rank 0, the archive into which committed steps move; the folder is then a
            staging folder.

    Raises RecordExists if the folder contains a record (unless `overwrite`) or anything else, and
    RecordInUse, also from `start`, if another run writes there. Events raise RecordingFailed when
    recording failed on any rank and `when_failing` is "stop".
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int = 0,
        num_ranks: int = 1,
        gather: Callable[[RankState], list[RankState]] = alone,
        options: RecordingOptions = RecordingOptions(),
        notify: Callable[[str], None] = print_to_stderr,
        archive: "LiveArchive | None" = None,
    ) -> None:
        self.folder, self.archive = Path(folder), archive
        self.rank, self.num_ranks, self.gather, self.options, self.notify = (
            rank,
            num_ranks,
            gather,
            options,
            notify,
        )
        self.tokenizer: Any = None
        self.processor: Any = None  # of pictures, in a run that records pixels
        self.current: RankStep | None = None
        self.outcome = OutcomeObserver(self.end_step)
        self.kept = KeptSteps(
            self.folder, options.retention, ahead=options.queue_steps if num_ranks > 1 else 0
        )
        self.background = Background(self.record, options.queue_steps) if options.queue_steps else None
        self.stop_waiting = threading.Event()  # ends rank 0's wait for the others
        self.failure: str | None = None  # of this rank, in the training thread
        self.last: StepLink | None = None  # on rank 0, the step that was committed last
        self.dropped: list[int] = []
        self.ended: str | None = None  # why recording has ended
        self.token = new_token()
        self.lock: Lock | None = None  # on rank 0
        self.refusal: RecordExists | None = None
        self.lock_token: str | None = None  # rank 0's, once it has the lock
        check_folder(self.folder, options.overwrite or options.first_step > 0)

    def __call__(self, event: str, **facts: Any) -> None:
        """Handle an event (ARCHITECTURE.md).

        `start`, `step` and the `end` of a good run are collectives.
        """
        if event == "start":
            self.start(**facts)
        elif event == "end":
            self.end(facts["error"])
        elif event in STEP_EVENTS and self.wants(facts["step"]):
            if event == "batch":
                plan = Plan(facts["step"], facts["version"], dict(facts["rng"]), {})
                # flatten copies: the trainer may change its tensors afterwards
                batch = flatten(with_unknown(without_calls(facts["batch"])))
                calls = call_lines(facts["batch"]) if self.options.text else None
                self.current = RankStep(facts["step"], facts["version"], batch, plan, calls=calls)
            elif event == "advantages" and self.current and self.options.recording.scope == "full":
                learning = learning_tensors(facts["inputs"], self.current.batch)
                self.current = replace(self.current, learning=learning)
            elif event == "step" and self.current and self.current.plan:
                plan = replace(self.current.plan, details=facts["plan"])
                self.current = replace(self.current, plan=plan)
            self.outcome(event, **facts)

    def wants(self, step: int) -> bool:
        """Return whether the step is recorded, as far as it is known before it ends."""
        return self.ended is None and self.options.recording.wants(step)

    def start(self, **facts: Any) -> None:
        """On rank 0, clear the folder and write record.json; a collective."""
        if facts["data_parallel_size"] != self.num_ranks or facts["data_parallel_rank"] != self.rank:
            raise RecordError(
                f"the run is data-parallel rank {facts['data_parallel_rank']} of {facts['data_parallel_size']}, "
                f"its RecordWriter {self.rank} of {self.num_ranks}: build it with the run's numbers"
            )
        if self.options.text:
            # a copy: the writer thread decodes while the run encodes, and a fast tokenizer is not
            # thread-safe
            self.tokenizer = copy.deepcopy(facts["tokenizer"])
        if self.options.images == "pixels" and "processor" in facts:
            self.processor = facts["processor"]
        self.agree()  # every rank has checked the folder before rank 0 writes into it
        if self.rank == 0 and self.ended is None:
            try:
                self.attempt(lambda: self.begin(facts))
            except RecordExists as refusal:
                self.refusal = refusal
        for state in self.agree()[:1]:  # no rank writes a step before the folder is cleared
            self.lock_token = state.token

    def begin(self, facts: dict[str, Any]) -> None:
        """Lock the folder, then create an empty record of the run, or resume its existing one."""
        config = facts["config"]
        name = "/".join(str(config[key]) for key in ("experiment_name", "trial_name") if config.get(key))
        self.lock = lock_folder(self.folder, name, self.token)
        # again, because another run may have recorded here since this writer was built
        check_contents(self.folder, self.options.overwrite or self.options.first_step > 0)
        header = describe_run(facts, self.options.recording)
        # the steps of an archive are not in the folder any more
        if self.options.first_step and self.archive is None and (self.folder / RECORD_FILE).exists():
            try:
                sizes, gaps = resume_record(self.folder, self.options.first_step, header)
                self.kept.resume(sizes, gaps)
                self.last = link_to(self.folder, max(sizes)) if sizes else None
                return
            except RecordExists:  # of another run
                if not self.options.overwrite:
                    raise
        clear_record(self.folder)
        write_header(self.folder, header)
        if self.archive is not None:
            self.archive.begin()

    def end_step(self, outcome: Outcome) -> None:
        """Record the step that just ended."""
        step, self.current = self.current, None
        if step is None or step.step != outcome.step:
            raise RecordError(f"step {outcome.step} ended without a `batch` event: send one before `step`")
        step = replace(step, version=outcome.version, outcome=outcome)
        if not self.options.recording.has_plans:
            step = replace(step, plan=None, outcome=None)
        self.record_step(step.step, lambda: step)

    def record_step(self, number: int, made: Callable[[], RankStep]) -> None:
        """Make and write, queue or drop a step of this rank, as all ranks agree; a collective."""
        if self.background is None:
            steps: list[RankStep] = []
            self.attempt(lambda: steps.append(self.write(made())))
            self.agree()
            if self.rank == 0 and self.ended is None:
                self.attempt(lambda: self.commit(steps[0]))
            self.agree()
        elif self.agree_on_room():
            self.background.put(made)
        elif self.ended is None:
            self.drop(number)

    def agree_on_room(self) -> bool:
        """Return whether all ranks can queue a step; wait for it unless `when_slow` is "drop"."""
        assert self.background is not None
        while not all(state.has_room for state in self.agree()):
            if self.options.when_slow == "drop":
                return False
            self.background.wait(AGREE_INTERVAL_S)
        return self.ended is None

    def drop(self, step: int) -> None:
        """Count a step that was not recorded, and report the first one."""
        self.dropped.append(step)
        if self.rank == 0 and len(self.dropped) == 1:
            self.notify(f"the disk is slower than the run: step {step} is dropped, and more may follow")

    def record(self, made: Callable[[], RankStep]) -> None:
        """Make, write and, on rank 0, commit one step; runs in the writer thread."""
        step = self.write(made())
        if self.rank == 0:
            self.commit(step)

    def write(self, step: RankStep) -> RankStep:
        """Write this rank's files, and their checksums for rank 0; return the step."""
        if self.rank == 0:
            self.kept.check_room()
        if self.tokenizer is not None and step.text is None:
            step = replace(step, text=decode_rows(step.batch, self.tokenizer))
        if self.processor is not None:
            step = replace(step, batch=with_pixels(step.batch, self.processor))
        folder = self.step_folder(step)
        self.check_lock(f"step {step.step}")
        folder.mkdir(parents=True, exist_ok=True)
        write_rank_manifest(
            folder, self.rank, self.num_ranks, write_rank(folder, self.rank, self.num_ranks, step)
        )
        return step

    def commit(self, step: RankStep) -> None:
        """On rank 0, commit the step when all ranks have written theirs, then apply the limits."""
        folder = self.step_folder(step)
        ranks = [
            collect_rank_manifest(folder, rank, self.num_ranks, lambda: self.stop_waiting.wait(POLL_S))
            for rank in range(self.num_ranks)
        ]
        self.check_lock(f"step {step.step}")
        self.kept.add_dropped(self.dropped)
        manifest = manifest_of(step.step, step.version, ranks, self.last)
        pictures = {}
        if has_pictures(manifest.batches.values()):
            pictures = RecordedStep(FolderStorage(self.folder), manifest).named_pictures()
        if self.archive is None:
            self.kept.pictures.check(pictures)
        committed = commit_step(folder, step.step, step.version, ranks, self.last)
        self.last = committed.link
        if self.archive is None:
            self.kept.add(step.step, committed.size_bytes, pictures)
        else:
            self.archive.move_step(step.step)

    def check_lock(self, what: str) -> None:
        """Raise RecordError unless this run still is the folder's only writer."""
        if self.lock_token is None:
            return
        try:
            check(self.folder / LOCK_FILE, self.lock_token)
        except Lost as lost:
            raise RecordError(f"{lost}: {what} is not committed, to leave that record whole") from None

    def step_folder(self, step: RankStep) -> Path:
        return self.folder / STEPS_FOLDER / step_name(step.step)

    def attempt(self, work: Callable[[], object]) -> None:
        """Run work of this rank and keep its error until all ranks know of it.

        Raises RecordExists: a refusal, which is no failure of the disk.
        """
        try:
            work()
        except RecordExists:
            raise
        except Exception as error:
            self.failure = describe(error)

    def agree(self) -> list[RankState]:
        """Return the states of all ranks if none has failed; [] once recording has ended.

        A collective until then.
        """
        if self.ended is not None:
            return []
        failure, background = self.failure, self.background
        if background is not None and background.error is not None:
            failure = describe(background.error)
        state = RankState(
            failure,
            background is None or background.has_room,
            background is None or background.idle,
            self.token,
            self.refusal,
        )
        states = self.gather(state)
        for rank, state in enumerate(states):
            if state.refusal is not None:
                self.close_refused()
                raise state.refusal
            if state.failure is not None:
                self.fail(rank, state.failure)
                return []
        return states

    def close_refused(self) -> None:
        """End the recording before it began: the folder belongs to another run."""
        self.ended = f"{self.folder} was not recorded into"
        if self.background is not None:
            self.background.close(SHUTDOWN_TIMEOUT_S)
        if self.lock is not None:
            self.lock.release()

    def fail(self, rank: int, failure: str) -> None:
        """End the recording, on every rank alike, and also the run if `when_failing` is "stop"."""
        self.stop_waiting.set()
        if self.background is not None:
            self.background.close(SHUTDOWN_TIMEOUT_S)
        self.ended = f"recording into {self.folder} failed on rank {rank}: {failure}"
        if self.options.when_failing == "stop":
            raise RecordingFailed(self.ended)
        if self.rank == 0:
            self.notify(f"{self.ended}; the run continues without recording")

    def end(self, error: str | None) -> None:
        """Wait for the last steps, and report the steps that are missing from the record."""
        if error is None:
            self.drain()
        if self.background is not None and self.ended is None:
            self.finish_without_collectives(self.background)
        if self.rank == 0:
            try:
                self.report_missing_steps(error)
            finally:
                self.unlock(error)
            if self.archive is not None and self.ended is None:
                with suppress(OSError):  # not empty: ranks may still write
                    self.folder.rmdir()

    def drain(self) -> None:
        """Wait until all ranks have written what is queued, or recording ends; a collective."""
        while not all(state.idle for state in self.agree()):
            assert self.background is not None
            self.background.wait(AGREE_INTERVAL_S)

    def unlock(self, error: str | None) -> None:
        if self.lock is None:
            return
        others_ended = self.num_ranks == 1 or (error is None and self.ended is None)
        if others_ended and (self.background is None or self.background.close(0)):
            self.lock.release()
        else:
            self.lock.leave()

    def finish_without_collectives(self, background: Background[Callable[[], RankStep]]) -> None:
        """End the writer thread without a collective: in a failed run another rank may be dead."""
        if not background.close(SHUTDOWN_TIMEOUT_S):
            self.notify(
                f"rank {self.rank} stopped waiting for the last steps: another rank did not write its files"
            )
        elif background.error is not None:
            self.notify(f"rank {self.rank} could not write the last steps: {describe(background.error)}")
        self.stop_waiting.set()

    def commit_end(self, error: str | None) -> None:
        self.check_lock("the end of the run")
        self.kept.add_dropped(self.dropped)
        if self.last is not None:  # without a step the folder may be another run's
            write_end(self.folder, error is None, self.last)

    def report_missing_steps(self, error: str | None) -> None:
        if self.dropped:
            self.notify(f"{len(self.dropped)} steps were dropped because the disk was slower than the run")
        # a writer thread that did not end may still commit a step
        is_idle = self.background is None or not self.background.thread.is_alive()
        if self.ended is None and is_idle:
            self.attempt(lambda: self.commit_end(error))
            if self.failure is not None:
                self.notify(f"{END_FILE} could not be written: {self.failure}")
        if self.archive is not None and self.ended is None:
            self.failure = None
            self.attempt(self.archive.end)
            if self.failure is not None:
                self.fail(self.rank, self.failure)
        if self.ended is not None and error is None:
            self.notify(f"the record is not complete: {self.ended}")


def describe(error: Exception) -> str:
    """The error with its type: an OSError's message does not name it."""
    return f"{type(error).__name__}: {error}"
