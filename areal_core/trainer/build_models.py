"""Builders of the models besides the actor: the critic and models that only compute log-probs.

The reference model of a LoRA policy needs no second copy: it is the policy, adapter disabled.
"""

from dataclasses import dataclass, replace

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from areal_core.batch import Batch
from areal_core.config import PPOConfig, TrainEngineConfig
from areal_core.config.checks import is_base_of
from areal_core.engine.errors import ModelError
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.lora import adapters_off
from areal_core.engine.ranks import Ranks
from areal_core.engine.scores import load_score_model
from areal_core.trainer.build import build_engine


@dataclass(frozen=True)
class BaseReference:
    """The frozen base model of an adapted policy; bitwise the log-probs of a separate engine."""

    actor: FSDPEngine

    def compute_logprobs(self, batch: Batch) -> Tensor:
        """Compute log-probs as `FSDPEngine` does; a collective."""
        with adapters_off(self.actor.model):
            return self.actor.compute_logprobs(batch)


def build_critic(config: PPOConfig, ranks: Ranks, total_steps: int) -> FSDPEngine | None:
    """Build the value model of the section `critic`, with an optimizer; None without it."""
    if config.critic is None:
        return None
    return build_engine(config.critic, ranks, total_steps, load=load_score_model)


def build_reference(config: PPOConfig, ranks: Ranks, actor: FSDPEngine) -> FSDPEngine | BaseReference | None:
    """Build the reference model of the KL penalty or loss; None without either."""
    if config.ref is None or not config.actor.uses_reference():
        return None
    return BaseReference(actor) if is_base_of(config.ref, config.actor) else build_scorer(config.ref, ranks)


def build_teacher(config: PPOConfig, ranks: Ranks, tokenizer: PreTrainedTokenizerBase) -> FSDPEngine | None:
    """Build the model that is distilled; None without the section `teacher`.

    Raises:
        ModelError: its token ids differ from those of the run's tokenizer.
    """
    if config.teacher is None:
        return None
    path = config.teacher.path
    teacher = build_scorer(config.teacher, ranks)
    vocab_size = teacher.model.config.get_text_config().vocab_size
    if vocab_size < len(tokenizer):
        raise ModelError(
            f"teacher.path {path!r} has a vocabulary of {vocab_size} tokens and the run's tokenizer {len(tokenizer)}: "
            "a teacher scores the same token ids, use one of the same family"
        )
    try:
        teacher_tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError):
        return teacher  # a folder of weights without a tokenizer: there is nothing to compare
    if teacher_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"teacher.path {path!r} has another tokenizer than the run: a teacher scores the same token ids, "
            "use one of the same family"
        )
    return teacher


def build_scorer(options: TrainEngineConfig, ranks: Ranks) -> FSDPEngine:
    """Build a model that is never trained, even if its section has an optimizer."""
    return build_engine(replace(options, optimizer=None), ranks, total_steps=1)
