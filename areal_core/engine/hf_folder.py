"""A model in Hugging Face format, for use: a folder that anybody can load, without what training would need to go on.

Taking the weights is a collective; writing them is not, and may be done by a thread of rank 0 while training goes on. A new
folder gets its name when it is whole.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from areal_core.engine.errors import CheckpointNotWritten
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.lora import Adapter, write_adapter


@dataclass(frozen=True)
class HFFolder:
    """A model, or its adapter alone, in Hugging Face format, to be written by rank 0; `weights` are empty on the others."""

    folder: Path
    model: PreTrainedModel
    weights: dict[str, Tensor]
    adapter: Adapter | None
    tokenizer: PreTrainedTokenizerBase | None

    def write(self) -> None:
        """Write it; not a collective. Where there is a folder already, its files are replaced.

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
            else:
                write_adapter(partial, self.weights.items(), self.adapter)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(partial)
            if not self.folder.exists():
                os.rename(partial, self.folder)
                return
            for file in partial.iterdir():
                os.replace(file, self.folder / file.name)
            partial.rmdir()
        except OSError as error:
            raise CheckpointNotWritten(f"cannot write the model {self.folder}: {error}") from error


def take_hf(
    folder: str | Path,
    engine: FSDPEngine,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    merged: bool = False,
) -> HFFolder:
    """Weights in the compute dtype, copied, with config and tokenizer; a collective.

    Of an adapted model the adapter alone, in float32, as peft loads it; with `merged` the model with its adapter in it.
    """
    adapter = None if merged else engine.adapter
    tensors = engine.named_full_tensors() if adapter is None else engine.named_adapter_tensors()
    weights = {}
    for name, tensor in tensors:  # on every rank to the end
        if engine.ranks.rank == 0:
            weights[name] = tensor.to("cpu", copy=True)
    return HFFolder(Path(folder), engine.model, weights, adapter, tokenizer)


def save_hf(
    folder: str | Path,
    engine: FSDPEngine,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    merged: bool = False,
) -> None:
    """Write what `take_hf` takes; a collective."""
    take_hf(folder, engine, tokenizer, merged=merged).write()
    engine.ranks.barrier()
