"""Checkpoints from which training resumes with bitwise identical results.

```
FOLDER/
  actor/rank-00000-of-00002.safetensors    that rank's shards of an engine's weights and optimizer states, float32
  critic/...                               another engine, if the run has one
  checkpoint.json                          schedules, RNG states of each rank, the loop's state, crc32c of every file

training threads, collective              any thread
take_snapshot ------------------------->  write_snapshot: of rank r: its files, then FOLDER.partial/rank-r.json
  RNG states, pieces of tensors                           of rank 0: waits for every rank-r.json, writes checkpoint.json,
  rank 0 empties FOLDER.partial                                      renames FOLDER.partial to FOLDER
```

A folder gets its name last, so a folder of that name is complete. torch's distributed checkpoint
reads it onto any number of ranks; its safetensors format is used because its default contains a
pickle. Functions import it, because most processes neither read nor write a checkpoint.
"""

import functools
import json
import shutil
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from areal_core.engine.checkpoint.files import (
    Checkpoint,
    SavedEngine,
    check_files,
    read_checkpoint_file,
    write_checkpoint_file,
)
from areal_core.engine.checkpoint.shards import Piece, local_pieces, write_pieces
from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.lora import trained_parameters
from areal_core.engine.ranks import Ranks
from areal_core.engine.sharding import fsdp_module
from areal_core.errors import CheckpointError, CheckpointNotWritten
from areal_core.safety.durable import commit_file, commit_folder, sentence_of

POLL_S = 0.005  # of rank 0 for the other ranks' files: a shared folder sends no events
WITHOUT_WEIGHTS = "without_weights"  # in the state: engines whose weights their model folder has

Engines = Mapping[str, FSDPEngine]  # the trained engines of a run by name: "actor", "critic"


@dataclass(frozen=True)
class Snapshot:
    """A rank's part of a checkpoint in `folder`, and the content of checkpoint.json."""

    folder: Path
    rank: int
    world_size: int
    pieces: dict[str, list[Piece]]
    checkpoint: Checkpoint  # without `files`

    @property
    def partial(self) -> Path:
        """The folder's name while it is incomplete."""
        return self.folder.with_name(self.folder.name + ".partial")


def save_checkpoint(
    folder: str | Path, engines: Engines, state: dict[str, Any], without_weights: Sequence[str] = ()
) -> None:
    """Write a checkpoint that `load_checkpoint` restores; a collective.

    Args:
        state: of the training loop, as JSON types.
        without_weights: engines whose model folder already has the weights that they have now.

    Raises:
        CheckpointNotWritten: it cannot be written.
    """
    snapshot = take_snapshot(folder, engines, state, copy=False, without_weights=without_weights)
    write_snapshot(snapshot, threading.Event())
    _ranks_of(engines).barrier()


def take_snapshot(
    folder: str | Path,
    engines: Engines,
    state: dict[str, Any],
    *,
    with_optimizer: bool = True,
    copy: bool = True,
    without_weights: Sequence[str] = (),
) -> Snapshot:
    """Collect what `write_snapshot` writes for a checkpoint in `folder`; a collective.

    Args:
        state: of the training loop, as JSON types.
        with_optimizer: include the optimizers' states.
        copy: own the memory, because training continues while the snapshot is written.
        without_weights: engines whose weights are left out, which the state then lists.
    """
    ranks = _ranks_of(engines)
    saved, pieces = {}, {}
    for name, engine in engines.items():
        engine.wake()
        _reshard(engine)
        # torch gives states to an optimizer without any by a step of length 0, which counts as a step
        has_state = engine.optimizer is not None and len(engine.optimizer.state) > 0
        optimizer = _optimizer_state(engine) if with_optimizer and has_state else {}
        schedule = engine.schedule.state_dict() if engine.schedule else None
        saved[name] = SavedEngine(name, bool(optimizer), schedule)
        weights = {} if name in without_weights else _weights(engine)
        pieces[name] = local_pieces(weights | _tensors_of(optimizer), ranks.rank, copy=copy)
    if without_weights:
        state = state | {WITHOUT_WEIGHTS: list(without_weights)}
    snapshot = Snapshot(Path(folder), ranks.rank, ranks.world_size, pieces, Checkpoint(saved, [], state, {}))
    failed = make_partial(snapshot) if ranks.rank == 0 else None
    # After this collective no rank can find files of an earlier attempt.
    states = ranks.gather_objects((rng_state(), failed))
    if (failed := states[0][1]) is not None:
        raise failed
    snapshot.checkpoint.rng.extend(rng for rng, _ in states)
    return snapshot


def make_partial(snapshot: Snapshot) -> CheckpointNotWritten | None:
    try:
        shutil.rmtree(snapshot.partial, ignore_errors=True)
        for name in snapshot.pieces:
            (snapshot.partial / name).mkdir(parents=True)
    except OSError as error:
        return not_written(snapshot, error)
    return None


def not_written(snapshot: Snapshot, error: OSError) -> CheckpointNotWritten:
    return CheckpointNotWritten(f"cannot write the checkpoint {snapshot.folder}: {sentence_of(error)}")


def write_snapshot(snapshot: Snapshot, cancelled: threading.Event) -> None:
    """Write this rank's files; rank 0 waits for those of the others and commits the checkpoint.

    Not a collective.

    Args:
        cancelled: ends rank 0's wait for the other ranks.

    Raises:
        CheckpointNotWritten: it cannot be written, or was cancelled.
    """
    try:
        files = _write_files(snapshot)
        commit_file(_rank_file(snapshot.partial, snapshot.rank), json.dumps(files))
        if snapshot.rank == 0:
            _commit(snapshot, cancelled)
    except OSError as error:
        raise not_written(snapshot, error) from error


def _write_files(snapshot: Snapshot) -> dict[str, str]:
    """Write this rank's tensors; return the crc32c of each file. None are left after an error."""
    files = {}
    for name, pieces in snapshot.pieces.items():
        file = f"{name}/rank-{snapshot.rank:05d}-of-{snapshot.world_size:05d}.safetensors"
        try:
            files[file] = write_pieces(snapshot.partial / file, pieces)
        except OSError:
            for written in files:
                (snapshot.partial / written).unlink(missing_ok=True)
            raise
    return files


def _commit(snapshot: Snapshot, cancelled: threading.Event) -> None:
    partial, folder, files = snapshot.partial, snapshot.folder, {}
    for rank in range(snapshot.world_size):
        while not _rank_file(partial, rank).exists():
            if cancelled.wait(POLL_S):
                raise CheckpointNotWritten(f"{folder} was cancelled before rank {rank} had written its files")
        files.update(json.loads(_rank_file(partial, rank).read_text()))
    try:
        for rank in range(snapshot.world_size):
            _rank_file(partial, rank).unlink()
        snapshot.checkpoint.files.update(files)
        write_checkpoint_file(partial, snapshot.checkpoint)
        commit_folder(partial, folder)
    except OSError:  # no rank writes any more: the space can be freed
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _rank_file(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank:05d}.json"


def load_checkpoint(folder: str | Path, engines: Engines, *, with_optimizer: bool = True) -> dict[str, Any]:
    """Restore weights, optimizers, schedules and RNG states; a collective.

    On a different number of ranks tensors are resharded, and each rank keeps its RNG state, which
    follows from its seed.

    Args:
        with_optimizer: False to keep the optimizers' initial states.

    Returns:
        The `state` that was saved.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, of another model or of another format.
    """
    folder, ranks = Path(folder), _ranks_of(engines)
    checkpoint = read_checkpoint_file(folder)
    _check_files_on_all_ranks(folder, checkpoint, ranks)
    for name, engine in engines.items():
        if name not in checkpoint.engines:
            saved = ", ".join(checkpoint.engines)
            raise CheckpointError(
                f"{folder} has only {saved}, and this run also has a {name}: use another one"
            )
        with_weights = name not in checkpoint.state.get(WITHOUT_WEIGHTS, ())
        saved_engine = checkpoint.engines[name]
        ranks.once(
            functools.partial(_load_engine, folder, engine, saved_engine, with_optimizer, with_weights)
        )
    if len(checkpoint.rng) == ranks.world_size:
        set_rng_state(checkpoint.rng[ranks.rank])
    return checkpoint.state


def _check_files_on_all_ranks(folder: Path, checkpoint: Checkpoint, ranks: Ranks) -> None:
    files = sorted(checkpoint.files.items())[ranks.rank :: ranks.world_size]
    found = None
    try:
        check_files(folder, files)
    except CheckpointError as error:
        found = error
    for of_rank in ranks.gather_objects(found):
        if of_rank is not None:
            raise of_rank


def _load_engine(
    folder: Path, engine: FSDPEngine, saved: SavedEngine, with_optimizer: bool, with_weights: bool
) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    _reshard(engine)
    reader = HuggingFaceStorageReader(str(folder / saved.folder))
    stored = reader.read_metadata().state_dict_metadata
    optimizer = {}
    if saved.has_optimizer and with_optimizer:
        _forget_partial_state(engine)
        optimizer = _optimizer_state(engine)
    tensors = (_weights(engine) if with_weights else {}) | _tensors_of(optimizer)
    unseen = _without_state(engine, stored) if optimizer else {}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(unseen))}
    for name, tensor in tensors.items():
        metadata = stored.get(name)
        shape = list(metadata.size) if isinstance(metadata, TensorStorageMetadata) else None
        if shape != list(tensor.shape):
            seen = "is missing" if shape is None else f"has shape {shape}"
            raise CheckpointError(
                f"{folder} is of another model or optimizer: {name} {seen} there and has shape "
                f"{list(tensor.shape)} here"
            )
    load(tensors, storage_reader=reader)
    if optimizer:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        set_optimizer_state_dict(engine.model, _optimizer_of(engine), optimizer, options=options)
        for parameter in unseen.values():
            del _optimizer_of(engine).state[parameter]
    if saved.schedule is not None and engine.schedule is not None:
        engine.schedule.load_state_dict(saved.schedule)
        rates = engine.schedule.get_last_lr()
        for group, lr in zip(_optimizer_of(engine).param_groups, rates, strict=True):
            group["lr"] = lr  # a schedule writes the rate only when it steps


def _without_state(engine: FSDPEngine, stored: Iterable[str]) -> dict[str, Tensor]:
    """Return parameters without state in a checkpoint, by the prefix of the names of states.

    A vision tower has none before the first picture.
    """
    if engine.vision is None:
        return {}
    prefixes = {f"optimizer.state.{name}.": p for name, p in trained_parameters(engine.model).items()}
    seen = {name.rpartition(".")[0] + "." for name in stored}
    return {prefix: parameter for prefix, parameter in prefixes.items() if prefix not in seen}


def _forget_partial_state(engine: FSDPEngine) -> None:
    """Drop states unless every parameter has one: torch adds all of them, or none."""
    state = _optimizer_of(engine).state
    if any(parameter not in state for parameter in trained_parameters(engine.model).values()):
        state.clear()


def _ranks_of(engines: Engines) -> Ranks:
    return next(iter(engines.values())).ranks


def _reshard(engine: FSDPEngine) -> None:
    # A forward without a backward leaves the root's parameters gathered, in the compute dtype, and
    # not those of the optimizer.
    fsdp_module(engine.model).reshard()


def _weights(engine: FSDPEngine) -> dict[str, Tensor]:
    # Parameters, not the model's state dict: that lists tied weights twice, which safetensors
    # refuses.
    return {
        "model." + name: parameter.detach() for name, parameter in trained_parameters(engine.model).items()
    }


def _optimizer_of(engine: FSDPEngine) -> Optimizer:
    assert engine.optimizer is not None, "an engine without an optimizer has no optimizer state"
    return engine.optimizer


def _optimizer_state(engine: FSDPEngine) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return get_optimizer_state_dict(engine.model, _optimizer_of(engine), options=options)


def _tensors_of(optimizer_state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        "optimizer." + name: value for name, value in optimizer_state.items() if isinstance(value, Tensor)
    }
