"""Checkpoints from which training goes on to the same bits.

```
FOLDER/
  actor/rank-00000-of-00002.safetensors    what that rank holds of an engine's weights and optimizer states, float32
  critic/...                               another engine, if the run has one
  checkpoint.json                          schedules, RNG states of each rank, whatever the loop adds, crc32c of every file

training threads, collective              any thread
take_snapshot ------------------------->  write_snapshot: of rank r: its files, then FOLDER.partial/rank-r.json
  RNG states, pieces of tensors                           of rank 0: waits for every rank-r.json, writes checkpoint.json,
  rank 0 empties FOLDER.partial                                      renames FOLDER.partial to FOLDER
```

A folder gets its name last, so one of that name is whole. torch's distributed checkpoint reads it, onto any number of ranks; its
safetensors form is used because the usual one holds a pickle.
"""

import json
import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from areal_core.engine.checkpoint_file import (
    Checkpoint,
    SavedEngine,
    check_files,
    read_checkpoint_file,
    sync_folder,
    write_checkpoint_file,
    write_durably,
)
from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.engine.errors import CheckpointError, CheckpointNotWritten
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.lora import trained_parameters
from areal_core.engine.ranks import Ranks
from areal_core.engine.shard_files import Piece, local_pieces, write_pieces

POLL_S = 0.005  # how often rank 0 looks for the other ranks' files: a folder that machines share tells nobody
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

Engines = Mapping[str, FSDPEngine]  # what a run trains, by name: "actor", "critic"


@dataclass(frozen=True)
class Snapshot:
    """A rank's part of a checkpoint, to be written to `folder`, and what rank 0 writes for all."""

    folder: Path
    rank: int
    world_size: int
    pieces: dict[str, list[Piece]]
    checkpoint: Checkpoint  # but for `files`

    @property
    def partial(self) -> Path:
        """The folder while it is not whole."""
        return self.folder.with_name(self.folder.name + ".partial")


def save_checkpoint(folder: str | Path, engines: Engines, state: dict[str, Any]) -> None:
    """Write a checkpoint that `load_checkpoint` goes on from; a collective.

    Args:
        state: what the loop needs besides, as JSON types.

    Raises:
        CheckpointNotWritten: it cannot be written.
    """
    write_snapshot(take_snapshot(folder, engines, state, copy=False), threading.Event())
    _ranks_of(engines).barrier()


def take_snapshot(
    folder: str | Path,
    engines: Engines,
    state: dict[str, Any],
    *,
    with_optimizer: bool = True,
    copy: bool = True,
) -> Snapshot:
    """What `write_snapshot` needs, for a checkpoint in `folder`; a collective.

    Args:
        state: what the loop needs besides, as JSON types.
        with_optimizer: also the optimizers' states.
        copy: own the memory, because training goes on while the snapshot is written.
    """
    ranks = _ranks_of(engines)
    saved, pieces = {}, {}
    for name, engine in engines.items():
        _reshard(engine)
        optimizer = _optimizer_state(engine) if with_optimizer and _has_optimizer_state(engine) else {}
        schedule = engine.schedule.state_dict() if engine.schedule else None
        saved[name] = SavedEngine(name, bool(optimizer), schedule)
        pieces[name] = local_pieces(_weights(engine) | _tensors_of(optimizer), ranks.rank, copy=copy)
    found = Snapshot(Path(folder), ranks.rank, ranks.world_size, pieces, Checkpoint(saved, [], state, {}))
    if ranks.rank == 0:
        shutil.rmtree(found.partial, ignore_errors=True)
        for name in engines:
            (found.partial / name).mkdir(parents=True)
    # After this no rank finds what an earlier attempt has left.
    found.checkpoint.rng.extend(ranks.gather_objects(rng_state()))
    return found


def write_snapshot(snapshot: Snapshot, given_up: threading.Event) -> None:
    """Write this rank's files; on rank 0, wait for those of the others and commit the checkpoint. Not a collective.

    Args:
        given_up: set when nobody waits for the checkpoint any more.

    Raises:
        CheckpointNotWritten: it cannot be written, or was given up.
    """
    partial, rank = snapshot.partial, snapshot.rank
    try:
        files = {}
        for name, pieces in snapshot.pieces.items():
            file = f"{name}/rank-{rank:05d}-of-{snapshot.world_size:05d}.safetensors"
            files[file] = write_pieces(partial / file, pieces)
            sync_folder(partial / name)
        write_durably(_rank_file(partial, rank), json.dumps(files))
        if rank == 0:
            _commit(snapshot, given_up)
    except OSError as error:
        raise CheckpointNotWritten(f"cannot write the checkpoint {snapshot.folder}: {error}") from error


def _commit(snapshot: Snapshot, given_up: threading.Event) -> None:
    partial, folder, files = snapshot.partial, snapshot.folder, {}
    for rank in range(snapshot.world_size):
        while not _rank_file(partial, rank).exists():
            if given_up.wait(POLL_S):
                raise CheckpointNotWritten(f"gave {folder} up before rank {rank} had written its part")
        files.update(json.loads(_rank_file(partial, rank).read_text()))
    for rank in range(snapshot.world_size):
        _rank_file(partial, rank).unlink()
    snapshot.checkpoint.files.update(files)
    write_checkpoint_file(partial, snapshot.checkpoint)
    sync_folder(partial)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)
    sync_folder(folder.parent)


def _rank_file(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank:05d}.json"


def load_checkpoint(folder: str | Path, engines: Engines, *, with_optimizer: bool = True) -> dict[str, Any]:
    """Restore weights, optimizers, schedules and RNG states; a collective.

    On another number of ranks tensors are sharded anew, and each rank keeps the random stream that its seed gave it.

    Args:
        with_optimizer: False for optimizers that start afresh.

    Returns:
        The `state` that was saved.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, of another model or of another format.
    """
    folder, ranks = Path(folder), _ranks_of(engines)
    checkpoint = read_checkpoint_file(folder)
    _check_together(folder, checkpoint, ranks)
    for name, engine in engines.items():
        if name not in checkpoint.engines:
            held = ", ".join(checkpoint.engines)
            raise CheckpointError(f"{folder} holds {held}, and this run has a {name}, too: use another one")
        _load_engine(folder, engine, checkpoint.engines[name], with_optimizer)
    if len(checkpoint.rng) == ranks.world_size:
        set_rng_state(checkpoint.rng[ranks.rank])
    return checkpoint.state


def _check_together(folder: Path, checkpoint: Checkpoint, ranks: Ranks) -> None:
    """Each rank reads every so-many-th file; what one finds, all raise."""
    files = sorted(checkpoint.files.items())[ranks.rank :: ranks.world_size]
    found = None
    try:
        check_files(folder, files)
    except CheckpointError as error:
        found = error
    for error in ranks.gather_objects(found):
        if error is not None:
            raise error


def _load_engine(folder: Path, engine: FSDPEngine, saved: SavedEngine, with_optimizer: bool) -> None:
    _reshard(engine)
    optimizer = _optimizer_state(engine) if saved.has_optimizer and with_optimizer else {}
    tensors = _weights(engine) | _tensors_of(optimizer)
    reader = dcp.HuggingFaceStorageReader(str(folder / saved.folder))
    there = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        shape = list(there[name].size) if name in there else None
        if shape != list(tensor.shape):
            is_there = "is not there" if shape is None else f"has shape {shape} there"
            raise CheckpointError(
                f"{folder} is of another model or optimizer: {name} {is_there}, and {list(tensor.shape)} here"
            )
    dcp.load(tensors, storage_reader=reader)
    if optimizer:
        set_optimizer_state_dict(engine.model, engine.optimizer, optimizer, options=FLAT)
    if saved.schedule is not None and engine.schedule is not None:
        engine.schedule.load_state_dict(saved.schedule)
        for group, lr in zip(engine.optimizer.param_groups, engine.schedule.get_last_lr(), strict=True):
            group["lr"] = lr  # a schedule writes the rate only when it steps


def _ranks_of(engines: Engines) -> Ranks:
    return next(iter(engines.values())).ranks


def _reshard(engine: FSDPEngine) -> None:
    # A forward without a backward leaves the outermost parameters whole, in the compute dtype, and unknown to the optimizer.
    engine.model.reshard()


def _weights(engine: FSDPEngine) -> dict[str, Tensor]:
    # Parameters, not the model's state dict: that lists tied weights twice, which safetensors refuses.
    return {
        "model." + name: parameter.detach() for name, parameter in trained_parameters(engine.model).items()
    }


def _optimizer_state(engine: FSDPEngine) -> dict[str, Any]:
    return get_optimizer_state_dict(engine.model, engine.optimizer, options=FLAT)


def _tensors_of(optimizer_state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        "optimizer." + name: value for name, value in optimizer_state.items() if isinstance(value, Tensor)
    }


def _has_optimizer_state(engine: FSDPEngine) -> bool:
    # Asking torch for the states of an optimizer that has none makes it take a step of length 0, which counts.
    return engine.optimizer is not None and len(engine.optimizer.state) > 0
