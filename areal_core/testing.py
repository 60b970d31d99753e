"""A model, a tokenizer and an engine that are tiny, real and quick: for our tests, the demo, and users' own tests."""

import asyncio
import hashlib
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from areal_core.rollout.types import ModelRequest, ModelResponse

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character, five special tokens, and a chat template."""
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
) -> Path:
    """Write a random Llama and its tokenizer to `folder` in Hugging Face format, float32.

    The same arguments give the same bytes.
    """
    folder = Path(folder)
    tokenizer = make_tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class ScriptedEngine:
    """An inference engine that follows a script: the completion of a prompt is a pure function of its tokens.

    `completions` maps prompt tokens to the tokens to answer with; other prompts get one pseudo-random token. `duration_s` says how
    long each answer takes.
    """

    completions: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    vocabulary_size: int = 100
    version: int = 0
    requests: list[ModelRequest] = field(default_factory=list)
    duration_s: Callable[[ModelRequest], float] | None = None
    is_paused: bool = False

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Answer from the script, with the logprob -1 for each token."""
        self.requests.append(req)
        if self.duration_s is not None:
            await asyncio.sleep(self.duration_s(req))
        prompt = tuple(req.input_ids)
        digest = int.from_bytes(hashlib.sha256(repr(prompt).encode()).digest()[:4], "big")
        tokens = self.completions[prompt] if prompt in self.completions else [digest % self.vocabulary_size]
        return ModelResponse(
            input_tokens=list(prompt),
            output_tokens=list(tokens),
            output_logprobs=[-1.0] * len(tokens),
            output_versions=[self.version] * len(tokens),
            stop_reason="stop",
        )

    def set_version(self, version: int) -> None:
        """Tell which weights answer from now on."""
        self.version = version

    def pause(self) -> None:
        """Answers go on all the same."""
        self.is_paused = True

    def resume(self) -> None:
        """Nothing was stopped."""
        self.is_paused = False

    def close(self) -> None:
        """Nothing is held."""
