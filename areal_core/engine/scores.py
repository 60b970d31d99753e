"""A reward model: a transformer with a score per position, of which a sequence's last counts.

In Transformers it is a sequence classifier with one label, so that other tools can use a saved
model. Its own forward finds the last position by the padding token, which a packed batch does not
have: here its forward returns the scores of all positions.
"""

from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import logging as transformers_logging

from areal_core.engine.attention import PACKED
from areal_core.engine.logits import output_layer
from areal_core.engine.model import without_dropout
from areal_core.errors import ModelError, load_failure

HEAD = "score"


def load_score_model(
    path: str,
    *,
    attn_implementation: str = PACKED,
    init_from_scratch: bool = False,
    disable_dropout: bool = False,
    without_weights: bool = False,
) -> PreTrainedModel:
    """Load a reward model, or a language model as one, on the CPU with float32 weights.

    A head that the checkpoint does not have is initialised to 0: all scores are equal, on any
    number of ranks. Arguments are those of `load_model`.

    Raises:
        ModelError: there is no readable model at `path`, its head has several labels, or its family
            has no such head.
    """
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path, num_labels=1)
        if disable_dropout:
            without_dropout(config)
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attn_implementation}
        if without_weights:
            with torch.device("meta"):
                model, is_new = AutoModelForSequenceClassification.from_config(config, **options), False
        elif init_from_scratch:
            model, is_new = AutoModelForSequenceClassification.from_config(config, **options), True
        else:
            model, report = AutoModelForSequenceClassification.from_pretrained(
                path, config=config, output_loading_info=True, **options
            )
            is_new = f"{HEAD}.weight" in report["missing_keys"]
    except Exception as error:  # of any type, see `load_model`
        raise load_failure(path, error) from error
    if HEAD not in dict(model.named_children()):
        raise ModelError(
            f"{type(model).__name__} has no head called {HEAD!r}: use a decoder such as Llama or Qwen"
        )
    if is_new:
        torch.nn.init.zeros_(score_head(model).weight)
    score_every_position(model)
    return model


def load_reward_model(path: str, **options: Any) -> PreTrainedModel:
    """Load a trained reward model; arguments are those of `load_score_model`.

    Raises:
        ModelError: as `load_score_model`, and if the checkpoint has no trained head.
    """
    model = load_score_model(path, **options)
    head = score_head(model).weight
    if not head.is_meta and not head.any():
        raise ModelError(
            f"{path!r} has no trained score head, so that every score would be 0: give a model that RWTrainer wrote"
        )
    return model


def score_every_position(model: PreTrainedModel) -> None:
    """Make the model return the scores of all positions, float32 [1, tokens, 1].

    Its head computes in float32: in bfloat16 two scores near 4 would have to be 1/32 apart to
    differ.
    """
    head = model.get_submodule(HEAD)

    def score(self: nn.Linear, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden.float(), self.weight.float())

    def forward(self: PreTrainedModel, **inputs: object) -> Tensor:
        return head(self.base_model(**inputs).last_hidden_state)  # from [1, tokens, dim]

    head.forward, model.forward = MethodType(score, head), MethodType(forward, model)


def score_head(model: PreTrainedModel) -> nn.Linear:
    """Return the layer that computes scores. Raises AttributeError for a model that has none."""
    return cast(nn.Linear, model.get_submodule(HEAD))


def is_score_model(model: PreTrainedModel) -> bool:
    return output_layer(model) is None
