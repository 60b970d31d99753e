"""A reward model: a transformer whose head gives each position one number, of which a sequence's last is its score.

It is what Transformers calls a sequence classifier with one label, so that what is saved can be used by anyone. Its own forward
looks for the last position by the padding token, of which a packed batch has none: here it gives the scores of all positions.
"""

from types import MethodType

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import logging as transformers_logging

from areal_core.engine.attention import PACKED
from areal_core.engine.errors import ModelError
from areal_core.engine.model import load_failure, without_dropout

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

    A head that the checkpoint does not have begins at 0: all scores are equal, on any number of ranks. Arguments as of `load_model`.

    Raises:
        ModelError: there is no readable model at `path`, its head has several labels, or its family has no such head.
    """
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path, num_labels=1)
        if disable_dropout:
            without_dropout(config)
        options = {"dtype": torch.float32, "attn_implementation": attn_implementation}
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
    except (OSError, ValueError, RuntimeError) as error:
        raise load_failure(path, error) from error
    if HEAD not in dict(model.named_children()):
        raise ModelError(
            f"{type(model).__name__} has no head called {HEAD!r}: take a decoder such as Llama or Qwen"
        )
    if is_new:
        torch.nn.init.zeros_(model.get_submodule(HEAD).weight)
    score_every_position(model)
    return model


def score_every_position(model: PreTrainedModel) -> None:
    """Make the model give the scores of all positions, float32 [1, tokens, 1]; the head is computed in float32.

    In bfloat16 two scores near 4 would have to be 1/32 apart to differ.
    """

    head = model.get_submodule(HEAD)

    def score(self: torch.nn.Module, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden.float(), self.weight.float())

    def forward(self: PreTrainedModel, **inputs: object) -> Tensor:
        return head(self.base_model(**inputs).last_hidden_state)  # from [1, tokens, dim]

    head.forward, model.forward = MethodType(score, head), MethodType(forward, model)


def is_score_model(model: PreTrainedModel) -> bool:
    """Whether the model has a head of scores, and none of tokens."""
    return model.get_output_embeddings() is None
