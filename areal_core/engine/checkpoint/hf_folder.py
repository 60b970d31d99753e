"""A trained model in Hugging Face format: a folder for use, without the state to resume training.

Taking a snapshot of the weights is a collective; writing it is not, and a thread of rank 0 may do
it while training continues. A new folder gets its name when it is complete.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from areal_core.data.processor import VisionProcessor
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.lora import Adapter, write_adapter
from areal_core.engine.model import config_to_save
from areal_core.errors import CheckpointNotWritten
from areal_core.safety.durable import commit_folder, os_error_of, sentence_of


@dataclass(frozen=True)
class HFFolder:
    """A snapshot of a model, or of its adapter only; `weights` are empty except on rank 0."""

    folder: Path
    model: PreTrainedModel
    weights: dict[str, Tensor]
    adapter: Adapter | None
    tokenizer: PreTrainedTokenizerBase | VisionProcessor | None

    def write(self) -> None:
        """Write the folder, or replace it if it exists; not a collective.

        Files of an existing folder that the model does not have stay.

        Raises:
            CheckpointNotWritten: it cannot be written.
        """
        if not self.weights:
            return
        partial = self.folder.with_name(self.folder.name + ".partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            if self.adapter is None:
                self.model.save_pretrained(partial, state_dict=self.weights)
                config_to_save(self.model, self.weights.values()).save_pretrained(partial)
            else:
                write_adapter(partial, self.weights.items(), self.adapter)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(partial)
            if self.folder.exists():
                link_missing(self.folder, partial)
            commit_folder(partial, self.folder)
        except Exception as error:  # tokenizers and safetensors have errors of their own
            shutil.rmtree(partial, ignore_errors=True)
            if (of_disk := os_error_of(error)) is None:
                raise
            reason = f"cannot write the model {self.folder}: {sentence_of(of_disk)}"
            raise CheckpointNotWritten(reason) from error


def link_missing(folder: Path, to: Path) -> None:
    """Link what `to` does not have from `folder`; the files are the same ones."""
    # deterministic: links every file, in any order
    for entry in folder.iterdir():
        if entry.is_dir():
            (to / entry.name).mkdir(exist_ok=True)
            link_missing(entry, to / entry.name)
        elif not (to / entry.name).exists():
            try:
                os.link(entry, to / entry.name)
            except OSError:  # a file system without links
                shutil.copy2(entry, to / entry.name)


def take_hf(
    folder: str | Path,
    engine: FSDPEngine,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    merged: bool = False,
) -> HFFolder:
    """Copy the weights in the compute dtype, with config and tokenizer; a collective.

    A vision model's processor is written in place of `tokenizer`, which it includes.

    For a model with an adapter, only the adapter in float32, as peft loads it; with `merged`, the
    model with its adapter merged into it.
    """
    adapter = None if merged else engine.adapter
    tensors = engine.named_full_tensors() if adapter is None else engine.named_adapter_tensors()
    own = {name: own for own, name in engine.names.items()}  # Transformers renames what it writes
    weights = {}
    for name, tensor in tensors:  # a collective: every rank reaches its end
        if engine.ranks.rank == 0:
            weights[own.get(name, name)] = tensor.to("cpu", copy=True)
    if adapter is None and engine.ranks.rank == 0:
        weights |= saved_buffers(engine.model)
    return HFFolder(Path(folder), engine.model, weights, adapter, engine.processor or tokenizer)


def saved_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint has, as DeepSeek's correction of its router."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
    return {name: tensor.to("cpu", copy=True) for name, tensor in buffers.items()}


def save_hf(
    folder: str | Path,
    engine: FSDPEngine,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    merged: bool = False,
) -> None:
    """Write the snapshot of `take_hf`; a collective."""
    take_hf(folder, engine, tokenizer, merged=merged).write()
    engine.ranks.barrier()
