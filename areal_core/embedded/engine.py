"""An engine around a forward pass in the trainer's process: requests form waves, a batch each.

agenerate x N          waves task (same event loop)                                    a thread        trainer's thread
request ------------>  waits until a few turns of the loop bring no new request
                       sorts by episode, so that arrival order changes nothing ------> generates
awaits its future      resolves every future  <--------------------------------------- completions

Its pause() waits for the running batch and blocks the next one until resume(). So the weights never
change in the middle of a batch, and all tokens of a batch have one version. The event loop is never
blocked.
"""

import asyncio
import threading
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from areal_core.embedded.generate import Completion, Forward, generate
from areal_core.embedded.replica import Replica
from areal_core.rollout.types import LocalEngine, ModelRequest, ModelResponse, row_seed, seed_of

QUIET_TURNS = 3  # of the event loop, without a new request
Waiting = tuple[ModelRequest, "asyncio.Future[tuple[Completion, int]]"]


@dataclass(eq=False)
class EmbeddedEngine(LocalEngine):
    """An `InferenceEngine` around a forward pass.

    Args:
        forward: see `generate.Forward`. It must not be a collective, because ranks sample
            different numbers of tokens.
        vocab_size: width of its logits.
        seed: seed of the run; with version, prompt, sample and turn it determines each row's
            random numbers.
        end_token_ids: the model's stop tokens.
        pad_token_id: any token id.
        max_rows: maximum rows of one batch; a larger wave is split.
        device: device of the forward pass.
        version: version of the weights that `forward` holds.
    """

    forward: Forward
    vocab_size: int
    _: KW_ONLY
    seed: int = 0
    end_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    max_rows: int = 256
    device: torch.device | str = "cpu"
    version: int = 0
    _waiting: list[Waiting] = field(default_factory=list, init=False)
    _waves: asyncio.Task[None] | None = field(default=None, init=False)
    # Held by the running batch, or by the caller of pause.
    _sampling: threading.Lock = field(default_factory=threading.Lock, init=False)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one completion. Raises `PromptTooLong` or `UnsupportedSampling`."""
        req.num_new_tokens()
        future: asyncio.Future[tuple[Completion, int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((req, future))
        if self._waves is None or self._waves.done():
            self._waves = asyncio.create_task(self._run_waves())
        completion, version = await future
        return ModelResponse(
            input_tokens=req.input_ids,
            output_tokens=completion.tokens,
            output_logprobs=completion.logprobs,
            output_versions=[version] * len(completion.tokens),
            stop_reason=completion.finish,
            routed_experts=None if completion.experts is None else completion.experts.numpy(),
        )

    def pause(self) -> None:
        """Wait until no batch is being generated, and block the next one."""
        self._sampling.acquire()
        self.is_paused = True

    def resume(self) -> None:
        """Let the next batch start."""
        self.is_paused = False
        self._sampling.release()

    async def _run_waves(self) -> None:
        """Run one wave after the other; requests that arrive meanwhile form the next one."""
        while self._waiting:
            seen, quiet = 0, 0
            while quiet < QUIET_TURNS:
                quiet = quiet + 1 if len(self._waiting) == seen else 0
                seen = len(self._waiting)
                await asyncio.sleep(0)
            wave = sorted(self._waiting, key=lambda pair: sorted(pair[0].metadata.items()))
            self._waiting = []
            try:
                for start in range(0, len(wave), self.max_rows):
                    await self._run_batch(wave[start : start + self.max_rows])
            except Exception as error:
                for _, future in wave:
                    if not future.done():
                        future.set_exception(error)

    async def _run_batch(self, batch: list[Waiting]) -> None:
        completions, version = await asyncio.to_thread(self._generate, [req for req, _ in batch])
        for (_, future), completion in zip(batch, completions, strict=True):
            if not future.done():
                future.set_result((completion, version))

    def _row_seed(self, req: ModelRequest, version: int) -> int:
        own = seed_of(req)
        return row_seed(self.seed, version, req) if own is None else own

    def _generate(self, requests: Sequence[ModelRequest]) -> tuple[list[Completion], int]:
        """Return the completions, and the version of the weights that sampled them."""
        with self._sampling:
            version = self.version
            completions = generate(
                self.forward,
                [req.input_ids for req in requests],
                [req.sampling for req in requests],
                [req.num_new_tokens() for req in requests],
                [self._row_seed(req, version) for req in requests],
                vocab_size=self.vocab_size,
                end_token_ids=self.end_token_ids,
                pad_token_id=self.pad_token_id,
                device=self.device,
                images=[req.images for req in requests],
            )
        return completions, version


class ReplicaUpdate:
    """A `WeightUpdate` of the engine's replica of the model: each rank loads its own copy."""

    def __init__(self, replica: Replica, engine: EmbeddedEngine) -> None:
        self.replica = replica
        self.engine = engine

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the weights between two batches. Collective, see `WeightUpdate.send`."""
        self.engine.pause()
        try:
            self.replica.load(weights)
            self.engine.set_version(version)
        finally:
            self.engine.resume()

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
