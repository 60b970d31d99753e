"""Samples in the trainer's own process: concurrent requests are gathered into waves, and each wave is one batch.

agenerate x N          wave task (same event loop)
request ------------>  waits until a few turns of the loop bring no new request
awaits its future      sorts by episode, so that arrival order changes nothing; generates; resolves every future
"""

import asyncio
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from areal_core.engine.replica import Replica
from areal_core.rollout.generate import Completion, Forward, generate
from areal_core.rollout.types import ModelRequest, ModelResponse

QUIET_TURNS = 3


class EmbeddedEngine:
    """An `InferenceEngine` around a forward pass.

    Args:
        forward: see `generate.Forward`. It must not be a collective: ranks sample different numbers of tokens.
        vocab_size: width of its logits.
        seed: of the run; with version, prompt, sample and turn it fixes each row's random numbers.
        end_token_ids: the model's stop tokens.
        pad_token_id: any token id.
        max_rows: most rows of one batch; a larger wave is run in parts.
        device: of the forward pass.
    """

    def __init__(
        self,
        forward: Forward,
        vocab_size: int,
        *,
        seed: int = 0,
        end_token_ids: tuple[int, ...] = (),
        pad_token_id: int = 0,
        max_rows: int = 256,
        device: torch.device | str = "cpu",
        version: int = 0,
    ) -> None:
        self.version = version
        self.forward = forward
        self.vocab_size = vocab_size
        self.seed = seed
        self.end_token_ids = end_token_ids
        self.pad_token_id = pad_token_id
        self.max_rows = max_rows
        self.device = device
        self._waiting: list[tuple[ModelRequest, asyncio.Future[Completion]]] = []
        self._wave: asyncio.Task | None = None

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Samples one completion. Raises `PromptTooLong` or `UnsupportedSampling`."""
        req.num_new_tokens()
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((req, future))
        if len(self._waiting) == 1:
            self._wave = asyncio.create_task(self._run_wave())
        completion = await future
        return ModelResponse(
            input_tokens=req.input_ids,
            output_tokens=completion.tokens,
            output_logprobs=completion.logprobs,
            output_versions=[self.version] * len(completion.tokens),
            stop_reason=completion.finish,
        )

    def set_version(self, version: int) -> None:
        self.version = version

    def pause(self) -> None:
        """Nothing to do: a wave runs to its end before the trainer's thread can push weights."""

    def resume(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to release."""

    async def _run_wave(self) -> None:
        seen, quiet = 0, 0
        while quiet < QUIET_TURNS:
            quiet = quiet + 1 if len(self._waiting) == seen else 0
            seen = len(self._waiting)
            await asyncio.sleep(0)
        wave = sorted(self._waiting, key=lambda pair: sorted(pair[0].metadata.items()))
        self._waiting = []
        try:
            for start in range(0, len(wave), self.max_rows):
                self._run_batch(wave[start : start + self.max_rows])
        except Exception as error:
            for _, future in wave:
                if not future.done():
                    future.set_exception(error)

    def _run_batch(self, batch: list[tuple[ModelRequest, asyncio.Future[Completion]]]) -> None:
        requests = [req for req, _ in batch]
        completions = generate(
            self.forward,
            [req.input_ids for req in requests],
            [req.sampling for req in requests],
            [req.num_new_tokens() for req in requests],
            [row_seed(self.seed, self.version, req) for req in requests],
            vocab_size=self.vocab_size,
            end_token_ids=self.end_token_ids,
            pad_token_id=self.pad_token_id,
            device=self.device,
        )
        for (_, future), completion in zip(batch, completions, strict=True):
            if not future.done():
                future.set_result(completion)


def row_seed(seed: int, version: int, req: ModelRequest) -> int:
    """A 63-bit seed from the run's seed, the weights' version and the episode's name; the request's id stands in for a missing name."""
    name = sorted(req.metadata.items()) if req.metadata else req.rid
    digest = hashlib.sha256(repr((seed, version, name)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class ReplicaPush:
    """A `WeightPush` into the model that the engine samples with: every rank loads the full tensors into its own copy."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    def push(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.replica.load(weights)

    def close(self) -> None:
        """Nothing to release."""
