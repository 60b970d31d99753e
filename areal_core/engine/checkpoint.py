"""Two kinds of checkpoint: a Hugging Face folder for use, and one from which training goes on to the same bits.

```
FOLDER/
  tensors/shard-*.safetensors   what each rank holds of weights and optimizer states, float32
  checkpoint.json                   schedule, RNG states of each rank, whatever the loop adds, crc32c of every file; written last
```

The latter is written beside its place and renamed into it, so that a folder of that name is a whole one. torch's distributed
checkpoint does the sharding and resharding; its safetensors form is used because the usual one holds a pickle.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from crc32c import crc32c
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedTokenizerBase

from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.engine.errors import CheckpointError
from areal_core.engine.fsdp import FSDPEngine

CHECKPOINT_FORMAT = 1
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save_hf(folder: str | Path, engine: FSDPEngine, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Write weights in the compute dtype, config and tokenizer in Hugging Face format; a collective."""
    weights = {name: tensor.cpu() for name, tensor in engine.named_full_tensors()}
    if engine.ranks.rank == 0:
        engine.model.save_pretrained(folder, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    engine.ranks.barrier()


def save_checkpoint(folder: str | Path, engine: FSDPEngine, state: dict[str, Any]) -> None:
    """Write a checkpoint that `load_checkpoint` goes on from; a collective.

    Args:
        state: what the loop needs besides, as JSON types.
    """
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    rng_states = engine.ranks.gather_objects(rng_state())
    if engine.ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    engine.ranks.barrier()
    optimizer = _optimizer_state(engine) if _has_optimizer_state(engine) else {}
    dcp.save(
        _weights(engine) | _tensors_of(optimizer),
        storage_writer=dcp.HuggingFaceStorageWriter(str(partial / "tensors"), save_distributed=True),
    )
    if engine.ranks.rank == 0:
        content = {
            "format": CHECKPOINT_FORMAT,
            "has_optimizer": bool(optimizer),
            "schedule": engine.schedule.state_dict() if engine.schedule else None,
            "rng": rng_states,
            "state": state,
            "files": {file.name: _file_checksum(file) for file in sorted((partial / "tensors").iterdir())},
        }
        _write_durably(partial / "checkpoint.json", json.dumps(content, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
    engine.ranks.barrier()


def load_checkpoint(folder: str | Path, engine: FSDPEngine) -> dict[str, Any]:
    """Restore weights, optimizer, schedule and RNG states; a collective.

    On another number of ranks tensors are sharded anew, and each rank keeps the random stream that its seed gave it.

    Returns:
        The `state` that was saved.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or of another format.
    """
    content = read_checkpoint(folder)
    optimizer = _optimizer_state(engine) if content["has_optimizer"] else {}
    dcp.load(
        _weights(engine) | _tensors_of(optimizer),
        storage_reader=dcp.HuggingFaceStorageReader(str(Path(folder) / "tensors")),
    )
    if optimizer:
        set_optimizer_state_dict(engine.model, engine.optimizer, optimizer, options=FLAT)
    if content["schedule"] is not None:
        engine.schedule.load_state_dict(content["schedule"])
        for group, lr in zip(engine.optimizer.param_groups, engine.schedule.get_last_lr(), strict=True):
            group["lr"] = lr  # a schedule writes the rate only when it steps
    if len(content["rng"]) == engine.ranks.world_size:
        set_rng_state(content["rng"][engine.ranks.rank])
    return content["state"]


def read_checkpoint(folder: str | Path) -> dict[str, Any]:
    """Read checkpoint.json and check every file that it names.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another format.
    """
    file = Path(folder) / "checkpoint.json"
    if not file.is_file():
        raise CheckpointError(
            f"{folder} holds no checkpoint.json: it is no checkpoint, or its writing was cut off"
        )
    try:
        content = json.loads(file.read_text())
        seen, files = content["format"], content["files"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError) as error:
        raise CheckpointError(f"{file} is damaged ({error}): use another one") from error
    if seen != CHECKPOINT_FORMAT:
        raise CheckpointError(
            f"{file} has format {seen}, this version reads {CHECKPOINT_FORMAT}: update areal-debug"
        )
    for name, checksum in files.items():
        path = Path(folder) / "tensors" / name
        if not path.is_file() or _file_checksum(path) != checksum:
            raise CheckpointError(f"{path} is missing or damaged: use another one")
    return content


def _weights(engine: FSDPEngine) -> dict[str, Tensor]:
    # Parameters, not the model's state dict: that lists tied weights twice, which safetensors refuses.
    return {"model." + name: parameter.detach() for name, parameter in engine.model.named_parameters()}


def _optimizer_state(engine: FSDPEngine) -> dict[str, Any]:
    return get_optimizer_state_dict(engine.model, engine.optimizer, options=FLAT)


def _tensors_of(optimizer_state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        "optimizer." + name: value for name, value in optimizer_state.items() if isinstance(value, Tensor)
    }


def _has_optimizer_state(engine: FSDPEngine) -> bool:
    # Asking torch for the states of an optimizer that has none makes it take a step of length 0, which counts.
    return engine.optimizer is not None and len(engine.optimizer.state) > 0


def _file_checksum(file: Path) -> str:
    checksum = 0
    with open(file, "rb") as stream:
        while block := stream.read(1 << 24):
            checksum = crc32c(block, checksum)
    return f"{checksum:08x}"


def _write_durably(file: Path, text: str) -> None:
    with open(file, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
