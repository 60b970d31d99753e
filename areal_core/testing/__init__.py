"""A tiny model, tokenizer and inference engine, for our tests, the demo, and users' own tests."""

import asyncio
import hashlib
import string
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from areal_core.data.batch import Batch
from areal_core.rollout.types import LocalEngine, ModelRequest, ModelResponse, Sampling, TokenSampler
from areal_core.rollout.workflow import episode_tensors

if TYPE_CHECKING:
    from areal_core.engine.fsdp import FSDPEngine, LossFunction, TrainResult

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]

# Options of a family besides the common sizes; both values of `tie_word_embeddings` occur.
TINY_FAMILIES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("families.toml").read_text(encoding="utf-8")
)


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of printable characters and five special tokens, with a chat template."""
    characters = sorted(set(string.printable))
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="?",
        additional_special_tokens=SPECIAL_TOKENS[2:],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_tiny_model(
    folder: str | Path,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **changes: Any,
) -> Path:
    """Write a random Llama and its tokenizer to `folder` in Hugging Face format, float32.

    The same arguments give the same bytes.

    Args:
        tokenizer: by default `make_tiny_tokenizer`.
        changes: further options of the Llama, such as `initializer_range`.
    """
    folder = Path(folder)
    tokenizer = tokenizer or make_tiny_tokenizer()
    options: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    special = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(vocab_size=len(tokenizer), **special, **(options | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_family(folder: str | Path, family: str, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random float32 model of one of `TINY_FAMILIES` to `folder`, without a tokenizer.

    Every weight is random, biases and norms too, so that a missing one is detected.

    Args:
        family: `model_type` in Transformers.
        changes: options of the model's config.
    """
    sizes = {
        "vocab_size": 103,  # odd, so that no number of ranks divides it
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "dtype": "float32",
    }
    config = AutoConfig.for_model(family, **sizes | TINY_FAMILIES[family] | changes)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return Path(folder)


def likelihood_with_entropy(logprobs: torch.Tensor, entropy: torch.Tensor, flat: Batch) -> torch.Tensor:
    return -((logprobs + 0.1 * entropy) * flat["loss_mask"]).sum()


def step_with_gradients(
    engine: "FSDPEngine", batch: Batch, loss_fn: "LossFunction" = likelihood_with_entropy
) -> tuple["TrainResult", dict[str, torch.Tensor]]:
    from areal_core.engine.lora import trained_parameters
    from areal_core.engine.sharding import full_tensor

    gradients: dict[str, torch.Tensor] = {}

    def keep(event: str, **_: object) -> None:
        if event == "gradients":
            for name, parameter in trained_parameters(engine.model).items():
                assert parameter.grad is not None, name
                gradients[name] = full_tensor(parameter.grad).clone()

    result = engine.train_batch(
        batch,
        loss_fn,
        lambda part: part["loss_mask"].sum(),
        keep,
    )
    return result, gradients


def complete_response(
    req: ModelRequest, tokens: Sequence[int], version: int = 0, logprob: float = -0.5
) -> ModelResponse:
    """Return an answer that ended by a stop token, with one log-prob for all of its tokens."""
    return ModelResponse(
        input_tokens=list(req.input_ids),
        output_tokens=list(tokens),
        output_logprobs=[logprob] * len(tokens),
        output_versions=[version] * len(tokens),
        stop_reason="stop",
    )


@dataclass
class ScriptedEngine(LocalEngine):
    """An inference engine that follows a script: completions are a pure function of prompt tokens.

    Args:
        completions: from prompt tokens to completion tokens; other prompts get one pseudo-random
            token.
        duration_s: returns the latency of each answer.
    """

    completions: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    vocabulary_size: int = 100
    version: int = 0
    requests: list[ModelRequest] = field(default_factory=list)
    duration_s: Callable[[ModelRequest], float] | None = None

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Answer from the script, with the logprob -1 for each token."""
        self.requests.append(req)
        if self.duration_s is not None:
            await asyncio.sleep(self.duration_s(req))
        prompt = tuple(req.input_ids)
        digest = int.from_bytes(hashlib.sha256(repr(prompt).encode()).digest()[:4], "big")
        tokens = self.completions[prompt] if prompt in self.completions else [digest % self.vocabulary_size]
        return complete_response(req, tokens, self.version, logprob=-1.0)


@dataclass(frozen=True)
class TokensWorkflow:
    """A workflow of one completion of the tokens in `data["tokens"]`; every reward is 0."""

    sampling: Sampling

    async def arun_episode(self, engine: TokenSampler, data: dict[str, Any]) -> Batch:
        """Sample one completion. Returns one row."""
        request = ModelRequest(input_ids=data["tokens"], sampling=self.sampling)
        return episode_tensors(await engine.agenerate(request), reward=0.0)
