"""The engine that an agent under test calls: a server, an in-process model, or a script."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from areal_core.errors import ModelError
from areal_core.rollout.errors import NoServers
from areal_core.rollout.types import InferenceEngine, LocalEngine, ModelRequest, ModelResponse

MAX_LATENCY_MEANS = 3


class TimedEngine:
    """An engine that reports each response, with the seconds that it took, to `notify`."""

    def __init__(self, engine: InferenceEngine, notify: Callable[[ModelResponse, float], None]) -> None:
        self._engine, self._notify = engine, notify

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one completion."""
        began = time.monotonic()
        response = await self._engine.agenerate(req)
        self._notify(response, time.monotonic() - began)
        return response


@dataclass(frozen=True)
class EngineChoice:
    """The engine that the user chose: a server address, a model folder, or scripted answers.

    `model` also names the tokenizer.
    """

    server: str | None = None
    model: str | None = None
    say: tuple[str, ...] = ()
    latency_s: float = 0.0  # mean latency of a scripted answer

    def __post_init__(self) -> None:
        if self.server and self.say:
            raise ValueError("--server and --say are both given: choose one engine")
        if not (self.server or self.say or self.model):
            raise ValueError(
                "no engine: give --model FOLDER (in this process), --server HOST:PORT, or --say TEXT (a script)"
            )


def open_engine(choice: EngineChoice) -> tuple[InferenceEngine, PreTrainedTokenizerBase, str]:
    """Open the chosen engine; return it with its tokenizer and a name for the report.

    Raises:
        NoServers: nothing answers at the address.
        ModelError: the model or its tokenizer cannot be loaded.
    """
    if choice.server:
        return open_server(choice.server, choice.model)
    if choice.say:
        from areal_core.testing import make_tiny_tokenizer

        tokenizer = load_tokenizer(choice.model) if choice.model else make_tiny_tokenizer()
        name = f"script of {len(choice.say)} lines, {choice.latency_s:g} s each"
        return ScriptedEngine(tokenizer, choice.say, choice.latency_s), tokenizer, name
    assert choice.model is not None
    tokenizer = load_tokenizer(choice.model)
    return open_model(choice.model, tokenizer), tokenizer, f"embedded, {choice.model}"


def open_server(address: str, model: str | None) -> tuple[InferenceEngine, PreTrainedTokenizerBase, str]:
    """Connect to a running server; the tokenizer is that of `model` or of the served model.

    Raises:
        NoServers: nothing answers at the address.
    """
    from areal_core.servers.client import FleetClient
    from areal_core.servers.server import Server
    from areal_core.servers.sglang import SGLANG

    server = Server(address.removeprefix("http://").rstrip("/"))
    try:
        identity = SGLANG.ask_identity(server)
    except OSError as error:
        raise NoServers(
            f"nothing answers at {address}: {error}; start a server with areal-debug serve --model FOLDER"
        ) from error
    tokenizer = load_tokenizer(model or identity.model_path)
    return FleetClient([server], SGLANG), tokenizer, f"{address}, {identity.model_path}"


def open_model(path: str, tokenizer: PreTrainedTokenizerBase) -> InferenceEngine:
    """Load a model into this process: bfloat16 on a GPU, float32 on a CPU."""
    import torch

    from areal_core.embedded.engine import EmbeddedEngine
    from areal_core.embedded.replica import Replica

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    replica = Replica(path, dtype, device)
    return EmbeddedEngine(
        replica,
        replica.model.config.vocab_size,
        end_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id or 0,
        device=device,
    )


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer for conversations.

    Raises ModelError if there is none, or if it has no chat template.
    """
    from areal_core.engine.model import load_tokenizer_at

    tokenizer = load_tokenizer_at(path)
    if not tokenizer.chat_template:
        raise ModelError(f"the tokenizer at {path!r} has no chat template: give an instruction-tuned model")
    return tokenizer


class ScriptedEngine(LocalEngine):
    """An engine without a model: call n of an episode gets line n, later calls get the last line.

    A latency is drawn from an exponential distribution, capped at `MAX_LATENCY_MEANS` means and the
    same in every run: completions of a real engine have a long tail, too. The logprob of every
    token is -1.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, lines: Sequence[str], latency_s: float) -> None:
        self._latency_s = latency_s
        self._answers = [
            [*tokenizer.encode(line, add_special_tokens=False), tokenizer.eos_token_id] for line in lines
        ]

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Return the line of the turn. Raises PromptTooLong."""
        max_tokens = req.num_new_tokens()
        if self._latency_s:
            drawn_s = random.Random(repr(dict(req.metadata))).expovariate(1 / self._latency_s)
            await asyncio.sleep(min(drawn_s, MAX_LATENCY_MEANS * self._latency_s))
        answer = self._answers[min(req.metadata["turn"], len(self._answers) - 1)]
        tokens = answer[:max_tokens]
        return ModelResponse(
            input_tokens=req.input_ids,
            output_tokens=tokens,
            output_logprobs=[-1.0] * len(tokens),
            output_versions=[self.version] * len(tokens),
            stop_reason="stop" if len(tokens) == len(answer) else "length",
        )
