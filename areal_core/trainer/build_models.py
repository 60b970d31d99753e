"""Builders of the models besides the actor: the critic and models that only score.

The reference model of a LoRA policy needs no second copy: it is the policy, adapter disabled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from areal_core.config import PPOConfig, TrainEngineConfig
from areal_core.config.servers import is_base_of
from areal_core.data.batch import Batch
from areal_core.data.routed_experts import ROUTED_EXPERTS
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.lora import adapters_off
from areal_core.engine.model import load_model
from areal_core.engine.ranks import Ranks
from areal_core.engine.scores import load_reward_model, load_score_model
from areal_core.errors import ModelError
from areal_core.trainer.build import build_engine
from areal_core.trainer.scored_rollouts import RewardModel


@dataclass(frozen=True)
class BaseReference:
    """The frozen base model of an adapted policy; bitwise the log-probs of a separate engine."""

    actor: FSDPEngine

    def compute_logprobs(self, batch: Batch) -> Tensor:
        """Compute log-probs as `FSDPEngine` does; a collective."""
        own_experts = {key: tensor for key, tensor in batch.items() if key != ROUTED_EXPERTS}
        with adapters_off(self.actor.model):
            return self.actor.compute_logprobs(own_experts)


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
    teacher = build_scorer(config.teacher, ranks)
    require_same_tokens("teacher", config.teacher.path, teacher, tokenizer)
    return teacher


def build_reward_model(
    config: PPOConfig, ranks: Ranks, tokenizer: PreTrainedTokenizerBase
) -> RewardModel | None:
    """Build the model that scores rows; None without the section `reward_model`.

    Raises:
        ModelError: it has no trained head, or other token ids than the run's tokenizer.
    """
    if config.reward_model is None:
        return None
    engine = build_scorer(config.reward_model, ranks, load_reward_model)
    require_same_tokens("reward_model", config.reward_model.path, engine, tokenizer)
    return RewardModel(engine, config.reward_model.weight)


def require_same_tokens(
    section: str, path: str, engine: FSDPEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check that a model that scores the run's tokens knows them by the same ids.

    Raises:
        ModelError: its vocabulary is smaller, or its tokenizer another one.
    """
    vocab_size = engine.model.config.get_text_config().vocab_size
    if vocab_size < len(tokenizer):
        raise ModelError(
            f"{section}.path {path!r} has a vocabulary of {vocab_size} tokens and the run's tokenizer {len(tokenizer)}: "
            f"a {section} scores the same token ids, use one of the same family"
        )
    try:
        own = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError):
        return  # a folder of weights without a tokenizer: there is nothing to compare
    if own.get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"{section}.path {path!r} has another tokenizer than the run: a {section} scores the same token ids, "
            "use one of the same family"
        )


def build_scorer(
    options: TrainEngineConfig, ranks: Ranks, load: Callable[..., PreTrainedModel] = load_model
) -> FSDPEngine:
    """Build a model that is never trained, even if its section has an optimizer."""
    return build_engine(replace(options, optimizer=None), ranks, total_steps=1, load=load)
