"""Cut a record to one step, and to a part of it: `areal-debug record cut`.

replay to the step ─> rows ─> fewer rows and tokens ─> step on them, recorded ─┬─> FOLDER: a record of one step
                      └── the whole step: files as they were recorded ─────────┘    and an anchor with the models
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from areal_core.config import config_to_dict, masked_options
from areal_core.config.experiment import DebugConfig
from areal_core.engine.checkpoint.distributed import save_checkpoint
from areal_core.trainer.rl import Observer, PPOTrainer
from recorder import Record, RecordHeader, Recording, commit_anchor, open_record
from recorder.documents import json_bytes
from recorder.environment import environment, folder_identity
from recorder.format import STEPS_FOLDER, step_name
from recorder.header import write_header
from recorder.integrity.chain import write_end
from recorder.redact import rank_step
from recorder.step_files import RankStep, commit_step, decode_rows, write_rank
from recorder.tensors import flatten
from replayer.anchors import CHECKPOINT, anchor_folder
from replayer.bug.bench import Bench, trainer_before
from replayer.bug.carried import CUT_FILE, Cut
from replayer.bug.cut_request import CutRequest, rows_of_micro_batch
from replayer.bug.models import engines_without_weights, write_models
from replayer.bug.shrink import Numbers, Rows, Shrinker, Stopped, Symptom, parse_symptom, shown
from replayer.check import GRAD_NORM, LOSS
from replayer.errors import ReplayError, WrongFilter
from replayer.preconditions import nearest_anchor

# (trainer, folder, what is recorded) -> an observer that records a run there
MakeRecorder = Callable[[PPOTrainer, Path, Recording], Observer]


@dataclass(frozen=True)
class CutReport:
    """What was cut, and how it was reduced.

    Attributes:
        cut: the content of cut.json. rows, tokens: that are left. numbers: loss and gradient norm.
        num_runs: of the step, to reduce it. is_minimal: no single row or token can be left out.
    """

    cut: Cut
    rows: int
    tokens: int
    numbers: dict[str, float]
    num_runs: int
    seconds: float
    is_minimal: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class Watcher:
    """What a cut calls on rank 0: `on_start` with the numbers of the rows that are reduced,
    `on_smaller` with fewer rows and their numbers, `stops` for whether the user has interrupted.
    """

    on_start: Callable[[Rows, Numbers, bool], None]
    on_smaller: Callable[[Rows, Numbers, int], None]
    stops: Callable[[], bool]


def cut_step(request: CutRequest, make_recorder: MakeRecorder, watcher: Watcher) -> CutReport:
    """Write the record of one step into `request.folder`; a collective.

    Raises:
        ReplayError: the symptom does not occur, or the weights before the step cannot be made.
    """
    record = open_record(request.record)
    with trainer_before(record, request.step, request.model) as trainer:
        bench = Bench(trainer, record, request.step)
        rows = chosen_rows(bench, request)
        keeps = not request.is_whole and (
            request.symptom is None if request.keep_advantages is None else request.keep_advantages
        )
        if keeps:
            keep_advantages(bench)
        shrinking = Shrinking(bench, watcher, request.max_s)
        if request.symptom is not None:
            rows = shrinking.shrink(rows, parse_symptom(request.symptom), keeps)
        cut = Cut(
            source=Path(record.path).name,
            step=request.step,
            num_rows=len(bench.rows),
            num_tokens=sum(len(row.tokens) for row in bench.rows),
            kept=None if request.is_whole else tuple(row.name for row in rows),
            symptom=request.symptom,
            numbers=recorded_numbers(record, request.step),
            keeps_advantages=keeps,
            error=shrinking.numbers.error or None,
        )
        write_cut(record, bench, rows, cut, Path(request.folder), make_recorder)
        return CutReport(
            cut,
            len(rows),
            sum(len(row.tokens) for row in rows),
            recorded_numbers(open_record(request.folder), request.step),
            shrinking.num_runs,
            shrinking.seconds,
            shrinking.is_minimal,
        )


def chosen_rows(bench: Bench, request: CutRequest) -> Rows:
    """Return the rows of the requested micro-batch or sample, or all. Raises ReplayError."""
    rows = bench.rows
    if request.micro_batch is not None:
        places = rows_of_micro_batch(bench.recorded, request.micro_batch)
        rows = tuple(row for row in rows if row.row in places[row.rank])
    if request.sample is not None:
        rows = tuple(row for row in rows if row.name == request.sample)
        if not rows:
            names = ", ".join(row.name for row in bench.rows[:4])
            raise ReplayError(f"step {request.step} has no row {request.sample}: its first ones are {names}")
    return rows


def recorded_numbers(record: Record, step: int) -> dict[str, float]:
    if not record.header.recording.has_plans:
        return {}
    stats = record.step(step).outcome(0).stats
    return {name: stats[full] for name, full in (("loss", LOSS), ("grad_norm", GRAD_NORM)) if full in stats}


def keep_advantages(bench: Bench) -> None:
    """Make the advantages of the complete step the rewards, and switch normalisation off.

    Then a row has its advantage whatever other rows are there, by the trainer's own computation.

    Raises:
        ReplayError: the tokens of a row have different advantages.
    """
    before = bench.inputs_of_all()
    advantages, mask = before["advantages"], before["loss_mask"].bool()
    first = [row[kept][:1] for row, kept in zip(advantages, mask, strict=True)]
    rewards = [float(value[0]) if len(value) else 0.0 for value in first]
    bench.batch = bench.batch | {"rewards": bench.batch["rewards"].new_tensor(rewards)}
    options, critic = bench.trainer.config.actor, bench.trainer.config.critic
    options.reward_norm = options.adv_norm = None
    options.reward_bias, options.reward_scaling, options.reward_clip = 0.0, 1.0, float("inf")
    options.overlong_reward_penalty = options.mask_no_eos_with_zero = False
    options.discount = options.gae_lambda = 1.0
    if critic is not None:
        critic.mask_no_eos_with_zero = False
    after = bench.inputs_of_all()["advantages"]
    same = (after == advantages) | (after.isnan() & advantages.isnan())
    if bench.trainer.ranks.maximum(int((~same)[mask].sum())):
        raise ReplayError(
            "tokens of one row have different advantages, which rewards cannot stand for: cut with "
            "--recompute-advantages"
        )


class Shrinking:
    """A reduction of rows on all ranks, and its numbers."""

    def __init__(self, bench: Bench, watcher: Watcher, max_s: float) -> None:
        self.bench, self.watcher, self.max_s = bench, watcher, max_s
        self.is_first_rank = bench.trainer.ranks.rank == 0
        self.numbers = self.last = Numbers()
        self.num_runs, self.is_minimal = 0, False
        self.seconds, self.start_s = 0.0, time.monotonic()

    def shrink(self, rows: Rows, symptom: Symptom, keeps: bool) -> Rows:
        """Return the fewest rows and tokens with the symptom; a collective.

        Raises ReplayError if it does not occur on the given rows, WrongFilter if it cannot be
        evaluated there.
        """
        self.numbers = self.bench.run(rows, symptom)
        if not symptom.occurs(self.numbers):
            raise ReplayError(does_not_occur(symptom, self.numbers, keeps))
        if self.is_first_rank:
            self.watcher.on_start(rows, self.numbers, keeps)
        if symptom.uses("difference"):  # a token has its recorded number after its recorded tokens only
            rows = tuple(replace(row, fixed=len(row.tokens)) for row in rows)
        symptom = replace(symptom, like=self.numbers)
        shrinker = Shrinker(rows, lambda rows: self.occurs(rows, symptom), self.on_smaller)
        self.shrinker = shrinker
        rows = shrinker.shrink()
        self.num_runs, self.is_minimal = shrinker.num_runs + 1, shrinker.is_minimal
        self.seconds = time.monotonic() - self.start_s
        return rows

    def occurs(self, rows: Rows, symptom: Symptom) -> bool:
        """Return whether a symptom occurs on rows. Raises Stopped, on every rank."""
        is_over = time.monotonic() - self.start_s > self.max_s or self.watcher.stops()
        if self.bench.trainer.ranks.maximum(int(is_over)):
            raise Stopped
        self.last = self.bench.run(rows, symptom)
        try:
            return symptom.occurs(self.last)
        except WrongFilter:  # as of `rewards[3]` on three rows
            return False

    def on_smaller(self, rows: Rows) -> None:
        """Keep the numbers of fewer rows that have the symptom."""
        self.numbers = self.last
        if self.is_first_rank:
            self.watcher.on_smaller(rows, self.numbers, self.shrinker.num_runs)


def does_not_occur(symptom: Symptom, numbers: Numbers, keeps: bool) -> str:
    if numbers.error:
        return (
            f"the step ends with an error ({numbers.error}), so {symptom.text!r} is not true of it: "
            "--shrink 'error != \"\"' reduces that"
        )
    seen = f"loss {shown(numbers.loss)}, grad_norm {shown(numbers.grad_norm)}"
    if symptom.uses("difference"):
        seen = f"the largest difference of a token is {shown(numbers.difference)}"
    advantages = "with the recorded advantages" if keeps else "with advantages computed from these rows"
    return (
        f"the symptom does not occur: {symptom.text!r} is false of {numbers.num_rows} rows {advantages} ({seen}), so "
        "nothing is reduced"
    )


def write_cut(
    record: Record, bench: Bench, rows: Rows, cut: Cut, folder: Path, make_recorder: MakeRecorder
) -> None:
    """Write the step, the anchor before it, and the header; a collective."""
    trainer, ranks = bench.trainer, bench.trainer.ranks
    header = replace(record.header, recording=Recording(record.header.recording.scope, steps=(cut.step,)))
    trainer.config.debug = DebugConfig()  # else it would save anchors of its own
    if cut.kept is None and record.header.recording.has_plans:
        steps = [as_recorded(bench, rank) for rank in range(ranks.data_parallel_size)]
        write_steps(folder, header, steps, ranks.rank)
    elif cut.error is not None:
        header = replace(header, recording=Recording("rollout", steps=(cut.step,)), environment=environment())
        step = RankStep(cut.step, bench.version + 1, flatten(bench.batch_of(rows)))
        write_steps(folder, header, ranks.gather_leaders(with_text(step, trainer)), ranks.rank)
    else:
        scope = "full" if record.header.recording.scope == "full" else "plan"
        bench.record(rows, make_recorder(trainer, folder, Recording(scope, steps=(cut.step,))))
        now = open_record(folder).header if ranks.rank == 0 else header
        header = replace(header, recording=now.recording, environment=now.environment)
    ranks.barrier()
    anchor = anchor_folder(folder, cut.step)
    is_first = nearest_anchor(record, cut.step) is None and cut.step == record.steps[0]
    paths = write_models(trainer, anchor, is_first)
    state = {"step": cut.step, "version": bench.version}
    save_checkpoint(anchor / CHECKPOINT, trainer.engines, state, engines_without_weights(trainer))
    if ranks.rank == 0:
        document = asdict(cut) | {"numbers": {name: value.hex() for name, value in cut.numbers.items()}}
        (anchor / CUT_FILE).write_bytes(json_bytes(document))
        commit_anchor(anchor, cut.step)
        write_header(folder, portable_header(header, trainer, anchor, paths))
    ranks.barrier()


def as_recorded(bench: Bench, rank: int) -> RankStep:
    found = rank_step(bench.recorded, rank)
    return found if found.text is not None else with_text(found, bench.trainer)


def with_text(step: RankStep, trainer: PPOTrainer) -> RankStep:
    """Add the text of the rows: the file may be read where their tokenizer is not."""
    return replace(step, text=decode_rows(step.batch, trainer.tokenizer))


def write_steps(folder: Path, header: RecordHeader, steps: list[RankStep], rank: int) -> None:
    """Write a record of one step, on rank 0; `steps` has the data of each data-parallel rank."""
    if rank != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_header(folder, header)
    place = folder / STEPS_FOLDER / step_name(steps[0].step)
    place.mkdir()
    files = [write_rank(place, number, len(steps), step) for number, step in enumerate(steps)]
    committed = commit_step(place, steps[0].step, steps[0].version, files, None)
    write_end(folder, True, committed.link)


def portable_header(
    header: RecordHeader, trainer: PPOTrainer, anchor: Path, paths: dict[str, str]
) -> RecordHeader:
    """Return the header with the paths of the carried models, and no folder of this machine."""
    now = masked_options(config_to_dict(trainer.config))  # `keep_advantages` has changed some
    learning = {name: now[name] for name in ("actor", "critic") if name in header.config}
    config: dict[str, Any] = without_folders(header.config | learning)
    for name in ("actor", "ref", "teacher", "critic"):
        if config.get(name) is not None:
            config[name]["path"] = paths.get(name, paths["actor"])
    config["actor"]["init_from_scratch"] = False
    config["reward_model"] = None  # the rows have their rewards
    config["tokenizer_path"] = paths.get("tokenizer", "")
    config["cluster"]["fileroot"] = ""
    model = carried_identity(anchor, paths["actor"])
    tokenizer = carried_identity(anchor, paths.get("tokenizer", paths["actor"]))
    return replace(header, config=config, model=model, tokenizer=tokenizer)


def carried_identity(anchor: Path, path: str) -> dict[str, Any]:
    return {"path": path, "files": folder_identity(str(anchor / path))["files"]}


def without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(item) for item in value]
    if isinstance(value, str) and value.startswith(("/", "~")):
        return Path(value).name
    return value
