"""Write the models of a cut record: model files as they are, or the weights of an engine."""

import copy
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from areal_core.config import config_to_dict, masked_options
from areal_core.config.experiment import DebugConfig
from areal_core.data.batch import RAGGED, Batch, select_rows, sequence_lengths
from areal_core.engine.checkpoint.distributed import save_checkpoint
from areal_core.engine.checkpoint.hf_folder import HFFolder, saved_buffers
from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.full_weights import FullTensors
from areal_core.engine.sharding import fsdp_module
from areal_core.rollout.source import WithoutEngine
from areal_core.telemetry.loggers import GRAD_NORM, LOSS, first_of
from areal_core.trainer.observed import Observer
from areal_core.trainer.rl import PPOTrainer, train_steps
from recorder import Record, RecordedStep, RecordHeader, Recording, commit_anchor, open_record
from recorder.documents import json_bytes
from recorder.environment import environment, folder_identity
from recorder.format import STEPS_FOLDER, step_name
from recorder.header import write_header
from recorder.integrity.chain import write_end
from recorder.redact import rank_step
from recorder.step_files import RankStep, commit_step, decode_rows, write_rank
from recorder.tensors import flatten
from replayer.anchors import CHECKPOINT, anchor_folder
from replayer.bug.cut_request import CutRequest
from replayer.bug.shrink import Numbers, Row, Rows, Shrinker, Stopped, Symptom, parse_symptom
from replayer.carried import ALLOWED, CUT_FILE, MODELS, REFERENCES, Cut
from replayer.check import StepResult, number_of
from replayer.errors import ReplayError, WrongFilter
from replayer.goto import compare_weights
from replayer.preconditions import nearest_anchor
from replayer.request import Request
from replayer.run import build_trainer, check_of
from replayer.source import recorded_batch

WEIGHTS = (".safetensors", ".bin", ".index.json")
OWN_NAMES = ("_name_or_path", "name_or_path")  # members of JSON files with the folder of a model


def write_models(trainer: PPOTrainer, anchor: Path, is_first: bool) -> dict[str, str]:
    """Write what the trainer needs besides its checkpoint below an anchor; a collective.

    The actor's folder has the weights of now, unless it trains an adapter: then those of the base.

    Args:
        is_first: the weights are still those of the model files, which are copied as they are.

    Returns:
        The new path of each model in the config: "actor", "ref", "teacher", "critic", "tokenizer".
    """
    config, actor = trainer.config, trainer.actor
    source = config.actor.path
    if actor.adapter is not None and (config.actor.init_from_scratch or not Path(source).is_dir()):
        raise ReplayError(
            f"the base model of the adapter is {source!r}, which is no folder: give its folder with --model"
        )
    as_it_is = (is_first or actor.adapter is not None) and not config.actor.init_from_scratch
    paths = {"actor": f"{MODELS}/actor"}
    write_model(actor, source, anchor / paths["actor"], as_it_is, trainer.tokenizer)
    scorers = {"ref": (config.ref, trainer.reference), "teacher": (config.teacher, trainer.teacher)}
    for name, (section, engine) in scorers.items():
        if section is None:
            continue
        is_actors = section.path == source and (as_it_is or not isinstance(engine, FSDPEngine))
        paths[name] = paths["actor"]
        if isinstance(engine, FSDPEngine) and not is_actors:
            paths[name] = f"{MODELS}/{name}"
            write_model(engine, section.path, anchor / paths[name], True, None)
    if config.critic is not None and trainer.critic is not None:
        # its weights are in the checkpoint; only its architecture is read
        paths["critic"] = paths["actor"]
        if config.critic.path != source:
            paths["critic"] = f"{MODELS}/critic"
            write_model(trainer.critic, config.critic.path, anchor / paths["critic"], True, None)
    if config.tokenizer_path and config.tokenizer_path != source:
        paths["tokenizer"] = f"{MODELS}/tokenizer"
        if trainer.ranks.rank == 0:
            write_tokenizer(trainer.tokenizer, config.tokenizer_path, anchor / paths["tokenizer"])
    elif config.tokenizer_path:
        paths["tokenizer"] = paths["actor"]
    if trainer.ranks.rank == 0:
        for file in (anchor / MODELS).rglob("*.json"):
            clean(file)
    return paths


def write_model(
    engine: FSDPEngine,
    source: str,
    folder: Path,
    as_it_is: bool,
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Write a model, and its tokenizer if one is given; a collective.

    Args:
        as_it_is: copy the files of `source`, if that is a folder of safetensors files.
    """
    copies = as_it_is and Path(source).is_dir() and any(Path(source).glob("*.safetensors"))
    if copies:
        if engine.ranks.rank == 0:
            files = [path for path in sorted(Path(source).iterdir()) if is_carried_file(path)]
            copy_files([path for path in files if tokenizer is not None or is_of_model(path)], folder)
        return
    # float32: the master weights, to the bit
    tensors = FullTensors(engine.model, torch.float32, engine.ranks.device)
    weights = {name: tensor.cpu() for name, tensor in tensors if engine.ranks.rank == 0}
    if engine.ranks.rank == 0:
        HFFolder(folder, engine.model, weights | saved_buffers(engine.model), None, None).write()
        if tokenizer is not None:
            write_tokenizer(tokenizer, source, folder)


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, source: str, folder: Path) -> None:
    if not Path(source).is_dir():
        tokenizer.save_pretrained(folder)
        return
    files = [path for path in sorted(Path(source).iterdir()) if is_carried_file(path)]
    copy_files([path for path in files if not is_of_model(path)], folder)


def is_carried_file(path: Path) -> bool:
    carried = path.is_file() and path.suffix in ALLOWED
    return carried and REFERENCES.get(path.name, "") is not None


def is_of_model(path: Path) -> bool:
    return path.name.endswith(WEIGHTS) or path.name in ("config.json", "generation_config.json")


def copy_files(files: list[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, folder / file.name)


def clean(file: Path) -> None:
    """Remove from a JSON file of a model the folder that it was in, and what names code to load."""
    if file.name not in REFERENCES:
        return
    document = json.loads(file.read_text())
    unwanted = {*OWN_NAMES, REFERENCES[file.name]} & document.keys()
    if unwanted:
        kept = {name: value for name, value in document.items() if name not in unwanted}
        file.write_text(json.dumps(kept, indent=2, ensure_ascii=False))


# what a row's tokens get from the models alone, whatever the other rows


@contextmanager
def trainer_before(record: Record, step: int, model: str | None) -> Iterator[PPOTrainer]:
    """Yield the trainer with the state that it had before a step; a collective.

    Raises:
        ReplayError: a step before it does not replay to the recorded bits, so that the state would
            be another one.
    """
    start = nearest_anchor(record, step)
    request = Request(record.path, record.steps[0] if start is None else start, step, model)
    results: list[StepResult] = []

    def make_check(record: Record, trainer: PPOTrainer, request: Request) -> Observer:
        return check_of(record, trainer, request, on_step=results.append)

    with build_trainer(request, [make_check], stop_before=step) as trainer:
        trainer.train()
        different = next((result.step for result in results if not result.identical), None)
        if different is not None:
            raise ReplayError(
                f"step {different} does not replay to the recorded bits here, so the weights before step {step} cannot "
                "be made: cut on the machine that recorded, or record with an anchor (debug.anchor_every_steps)"
            )
        check_weights(record, trainer, step)
        yield trainer


def check_weights(record: Record, trainer: PPOTrainer, step: int) -> None:
    """Raise ReplayError unless the weights are those after the step before; a collective."""
    if record.header.recording.has_plans and (wrong := compare_weights(record, trainer, step)[1]):
        raise ReplayError(
            f"the anchor at step {step} has other weights than step {step - 1} left: {wrong[0]}"
        )


@dataclass(frozen=True)
class SavedEngine:
    """The state of an engine, copied."""

    engine: FSDPEngine
    tensors: list[Tensor]
    optimizer: dict[Tensor, dict[str, Any]]
    schedule: dict[str, Any] | None

    @classmethod
    def of(cls, engine: FSDPEngine) -> "SavedEngine":
        """Copy the state of an engine."""
        state = {} if engine.optimizer is None else copied(engine.optimizer.state)
        schedule = None if engine.schedule is None else copy.deepcopy(engine.schedule.state_dict())
        return cls(engine, [tensor.clone() for tensor in live_tensors(engine)], state, schedule)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the engine the copied state."""
        for live, saved in zip(live_tensors(self.engine), self.tensors, strict=True):
            live.copy_(saved)
        if self.engine.optimizer is not None:
            self.engine.optimizer.zero_grad()
            self.engine.optimizer.state.clear()
            self.engine.optimizer.state.update(copied(self.optimizer))
        if self.engine.schedule is not None and self.schedule is not None:
            self.engine.schedule.load_state_dict(copy.deepcopy(self.schedule))
            for group, lr in zip(
                self.engine.schedule.optimizer.param_groups, self.engine.schedule.get_last_lr(), strict=True
            ):
                group["lr"] = lr


def live_tensors(engine: FSDPEngine) -> list[Tensor]:
    engine.wake()
    fsdp_module(engine.model).reshard()
    parameters = [p.to_local() if isinstance(p, DTensor) else p for p in engine.model.parameters()]
    return [tensor.detach() for tensor in (*parameters, *engine.model.buffers())]


def copied(state: Any) -> dict[Tensor, dict[str, Any]]:
    """Copy the state of an optimizer, but not its parameters."""
    return {
        parameter: {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}
        for parameter, values in state.items()
    }


class FixedRows(WithoutEngine):
    """A source of one batch, with the random states that its step had."""

    def __init__(self, batch: Batch, rng: dict[str, str]) -> None:
        self.batch, self.rng = batch, rng

    def next_batch(self, step: int, version: int) -> Batch:
        """Return the batch, and restore the random states."""
        set_rng_state(self.rng)
        return dict(self.batch)


class Bench:
    """A trainer before a recorded step, which it can run on any of its rows.

    Every method is a collective, and returns alike on every rank.
    """

    def __init__(self, trainer: PPOTrainer, record: Record, step: int) -> None:
        self.trainer, self.step, self.version = trainer, step, trainer.version
        self.recorded: RecordedStep = record.step(step)
        self.rank = trainer.ranks.data_parallel_rank
        self.batch = recorded_batch(self.recorded, self.rank)
        self.has_plans = record.header.recording.has_plans
        self.rng = self.recorded.plan(self.rank).rng if self.has_plans else rng_state()
        self.saved = [SavedEngine.of(engine) for engine in trainer.engines.values()]
        self.rows = self.all_rows()

    def all_rows(self) -> Rows:
        lengths = sequence_lengths(self.batch).tolist()
        names = zip(self.batch["prompt_id"].tolist(), self.batch["sample_id"].tolist(), strict=True)
        fixed = [1] * len(lengths)
        if "mm_token_type_ids" in self.batch:  # up to the last picture
            of_picture = self.batch["mm_token_type_ids"] != 0  # [B, T]
            positions = torch.arange(1, of_picture.shape[1] + 1)
            fixed = (of_picture * positions).amax(dim=1).clamp(min=1).tolist()
        own = [
            (
                (prompt, sample),
                Row(self.rank, row, f"{prompt}.{sample}", tuple(range(lengths[row])), fixed[row]),
            )
            for row, (prompt, sample) in enumerate(names)
        ]
        everyone = [pair for of_rank in self.trainer.ranks.gather_leaders(own) for pair in of_rank]
        return tuple(row for _, row in sorted(everyone, key=lambda pair: pair[0]))

    def batch_of(self, rows: Rows) -> Batch:
        """Return the rows of this rank, with the tokens that are left."""
        own = sorted((row for row in rows if row.rank == self.rank), key=lambda row: row.row)
        batch = select_rows(self.batch, [row.row for row in own])
        if all(row.tokens == self.rows_by_place[row.rank, row.row].tokens for row in own):
            return batch
        width = max(len(row.tokens) for row in own)
        per_token = {key for key, tensor in batch.items() if tensor.dim() == 2 and key not in RAGGED}
        shorter = {key: t.new_zeros(len(own), width) if key in per_token else t for key, t in batch.items()}
        for number, row in enumerate(own):
            for key, tensor in batch.items():
                if key in per_token:
                    shorter[key][number, : len(row.tokens)] = tensor[number, list(row.tokens)]
        return shorter

    @cached_property
    def rows_by_place(self) -> dict[tuple[int, int], Row]:
        return {(row.rank, row.row): row for row in self.rows}

    def restore(self) -> None:
        """Return to the state before the step."""
        for engine in self.saved:
            engine.restore()
        trainer = self.trainer
        trainer.version, trainer.first_step, trainer.end_step = self.version, self.step, self.step + 1
        trainer.stats.export()  # of a run that failed

    def run(self, rows: Rows, symptom: Symptom | None = None) -> Numbers:
        """Run the step on rows, and return its numbers: those that the symptom uses.

        On one rank an error is a number, too; on several, the others would wait for that rank.
        """
        if {row.rank for row in rows} != {row.rank for row in self.rows}:
            return Numbers(error="a rank has no rows")  # which the trainer cannot compute
        batch = self.batch_of(rows)
        collector = Collector(self, rows, symptom)
        num_trained = sum(self.trainer.ranks.gather_leaders(int(batch["loss_mask"].sum())))
        if num_trained == 0 and len(rows) < len(self.rows):
            return Numbers(error="nothing to train on")
        self.restore()
        self.trainer.observers = [collector]
        try:
            train_steps(self.trainer, FixedRows(batch, self.rng), None, lambda step: None)
        except Exception as error:
            if self.trainer.ranks.world_size > 1:
                raise
            collector.error = " ".join(f"{type(error).__name__}: {error}".split())
        return collector.numbers(batch)

    def record(self, rows: Rows, recorder: Observer) -> None:
        """Run the step on rows as a run of its own, which a recorder observes."""
        self.restore()
        self.trainer.observers = [recorder]
        self.trainer.source = FixedRows(self.batch_of(rows), self.rng)
        self.trainer.train()
        self.restore()


class Collector:
    """An observer that collects the numbers of a step."""

    def __init__(self, bench: Bench, rows: Rows, symptom: Symptom | None) -> None:
        self.bench, self.rows = bench, rows
        self.wants = (lambda name: False) if symptom is None else symptom.uses
        self.of_tokens: dict[str, list[float]] = {"advantages": [], "logprobs": []}
        self.stats: dict[str, float] = {}
        self.error = ""

    def __call__(self, event: str, **facts: Any) -> None:
        """Handle an event (ARCHITECTURE.md)."""
        if event == "advantages" and self.wants("advantages"):
            inputs = facts["inputs"]
            self.of_tokens["advantages"] = inputs["advantages"][inputs["loss_mask"].bool()].tolist()
        elif event == "loss" and facts["flat"] and self.wants("logprobs"):
            trained = facts["flat"]["loss_mask"].bool()
            self.of_tokens["logprobs"] += facts["logprobs"].detach()[trained].tolist()
        elif event == "step":
            self.stats = facts["stats"]

    def numbers(self, batch: Batch) -> Numbers:
        """Return the numbers of all ranks; a collective."""
        own: dict[str, Any] = {
            **self.of_tokens,
            "rewards": batch["rewards"].tolist(),
            "lengths": batch["loss_mask"].sum(1).tolist(),
            "num_tokens": int(batch["attention_mask"].sum()),
        }
        ranks = self.bench.trainer.ranks.gather_leaders(own)
        lists = ("advantages", "logprobs", "rewards", "lengths")
        return Numbers(
            loss=number_of(self.stats, LOSS),
            grad_norm=number_of(self.stats, GRAD_NORM),
            stats=self.stats,
            **{name: [value for one in ranks for value in one[name]] for name in lists},
            num_rows=len(self.rows),
            num_tokens=sum(one["num_tokens"] for one in ranks),
            error=self.error,
        )


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

    on_start: Callable[[Rows, Numbers], None]
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
        rows = bench.rows
        shrinking = Shrinking(bench, watcher, request.max_s)
        if request.symptom is not None:
            rows = shrinking.shrink(rows, parse_symptom(request.symptom))
        cut = Cut(
            source=Path(record.path).name,
            step=request.step,
            num_rows=len(bench.rows),
            num_tokens=sum(len(row.tokens) for row in bench.rows),
            kept=None if request.symptom is None else tuple(row.name for row in rows),
            symptom=request.symptom,
            numbers=recorded_numbers(record, request.step),
            keeps_advantages=False,
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


def recorded_numbers(record: Record, step: int) -> dict[str, float]:
    if not record.header.recording.has_plans:
        return {}
    stats = record.step(step).outcome(0).stats
    found = {"loss": first_of(stats, LOSS), "grad_norm": first_of(stats, GRAD_NORM)}
    return {name: number for name, number in found.items() if number is not None}


class Shrinking:
    """A reduction of rows on all ranks, and its numbers."""

    def __init__(self, bench: Bench, watcher: Watcher, max_s: float) -> None:
        self.bench, self.watcher, self.max_s = bench, watcher, max_s
        self.is_first_rank = bench.trainer.ranks.rank == 0
        self.numbers = self.last = Numbers()
        self.num_runs, self.is_minimal = 0, False
        self.seconds, self.start_s = 0.0, time.monotonic()

    def shrink(self, rows: Rows, symptom: Symptom) -> Rows:
        """Return the fewest rows and tokens with the symptom; a collective.

        Raises ReplayError if it does not occur on the given rows, WrongFilter if it cannot be
        evaluated there.
        """
        self.numbers = self.bench.run(rows, symptom)
        if not symptom.occurs(self.numbers):
            if self.numbers.error:
                raise ReplayError(
                    f"the step ends with an error ({self.numbers.error}), so {symptom.text!r} is not true of it: "
                    "--shrink 'error != \"\"' reduces that"
                )
            seen = f"loss {self.numbers.loss:.6g}, grad_norm {self.numbers.grad_norm:.6g}"
            where = f"{symptom.text!r} is false of {self.numbers.num_rows} rows ({seen})"
            raise ReplayError(f"the symptom does not occur: {where}, so nothing is reduced")
        if self.is_first_rank:
            self.watcher.on_start(rows, self.numbers)
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


def write_cut(
    record: Record, bench: Bench, rows: Rows, cut: Cut, folder: Path, make_recorder: MakeRecorder
) -> None:
    """Write the step, the anchor before it, and the header; a collective."""
    trainer, ranks = bench.trainer, bench.trainer.ranks
    header = replace(record.header, recording=Recording(record.header.recording.scope, steps=(cut.step,)))
    trainer.config.debug = DebugConfig()  # else it would save anchors of its own
    if cut.kept is None and record.header.recording.has_plans:
        steps = [rank_step(bench.recorded, rank) for rank in range(ranks.data_parallel_size)]
        steps = [step if step.text is not None else with_text(step, trainer) for step in steps]
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
    without_weights = ["actor"] if trainer.actor.adapter is None else []
    save_checkpoint(anchor / CHECKPOINT, trainer.engines, state, without_weights)
    if ranks.rank == 0:
        document = asdict(cut) | {"numbers": {name: value.hex() for name, value in cut.numbers.items()}}
        (anchor / CUT_FILE).write_bytes(json_bytes(document))
        commit_anchor(anchor, cut.step)
        write_header(folder, portable_header(header, trainer, anchor, paths))
    ranks.barrier()


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
    now = masked_options(config_to_dict(trainer.config))
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
