"""Loading of a Hugging Face causal language model on the CPU, with float32 master weights."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from areal_core.engine.attention import PACKED
from areal_core.engine.errors import ModelError


def load_model(
    path: str,
    *,
    dtype: torch.dtype | str = torch.float32,
    attn_implementation: str = PACKED,
    init_from_scratch: bool = False,
    disable_dropout: bool = False,
    without_weights: bool = False,
) -> PreTrainedModel:
    """Load a causal language model on the CPU.

    Args:
        path: a folder in Hugging Face format, or a hub name.
        dtype: of the parameters, "auto" for the checkpoint's own. Training loads float32, the
            master weights; the sharding policy casts for compute.
        attn_implementation: `PACKED` for training; "sdpa" for generation.
        init_from_scratch: initialise random weights from the config, with torch's current seed.
        without_weights: build it on "meta", for weights from another source.

    Raises:
        ModelError: there is no readable model at `path`.
    """
    transformers_logging.disable_progress_bar()  # a bar per rank and load would bury the run's own output
    try:
        config = AutoConfig.from_pretrained(path)
        if disable_dropout:
            without_dropout(config)
        options = {"dtype": dtype, "attn_implementation": attn_implementation}
        if without_weights:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config, **options)
        if init_from_scratch:
            return AutoModelForCausalLM.from_config(config, **options)
        return AutoModelForCausalLM.from_pretrained(path, config=config, **options)
    except (OSError, ValueError) as error:
        raise load_failure(path, error) from error


def load_failure(path: str, error: Exception) -> ModelError:
    """Return the error for a model that Transformers could not read."""
    where = "is not a folder here" if not Path(path).is_dir() else "has no model that Transformers can read"
    return ModelError(f"cannot load the model: {path!r} {where} ({str(error).splitlines()[0]})")


def without_dropout(config: PretrainedConfig) -> None:
    """Set every dropout probability to 0, before the model is built: its modules keep copies."""
    for name, value in config.to_dict().items():
        if isinstance(value, float) and name.endswith(("dropout", "pdrop", "dropout_prob", "dropout_p")):
            setattr(config, name, 0.0)
