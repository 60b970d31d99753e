"""Two engines around one forward pass: in waves for a trainer, and interruptible for a server.

`EmbeddedEngine` samples in the trainer's process. Concurrent requests form waves, one batch each:

agenerate x N          waves task (same event loop)                                    a thread        trainer's thread
request ------------>  waits until a few turns of the loop bring no new request
                       sorts by episode, so that arrival order changes nothing ------> generates
awaits its future      resolves every future  <--------------------------------------- completions

Its pause() waits for the running batch and blocks the next one until resume(). So the weights never
change in the middle of a batch, and all tokens of a batch have one version. The event loop is never
blocked.

`InterruptibleSampler` samples in a thread of its own, so that requests can be aborted or held
between two tokens:

callers (any thread)                   sampling thread
submit(request) -> Future -----------> waits for requests while not paused; runs up to `max_rows` of
them as one wave
pause("abort")     waits until ......> the wave is aborted; all requests, queued ones too, return their tokens so far
pause("retract")   waits until ......> the wave is aborted; its requests are queued first again, with their tokens so far
pause("in_place")  waits until ......> the wave stops between two tokens, and keeps its cache
resume() ----------------------------> continues
load(weights)      waits until ......> no token is being sampled; without a pause it pauses by itself ("retract")

One condition variable guards all its state; the thread stops only in `_between_tokens`.
"""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from areal_core.embedded.generate import Completion, Forward, generate, refuse_unsupported
from areal_core.embedded.replica import Replica
from areal_core.rollout.types import ModelRequest, ModelResponse

QUIET_TURNS = 3  # of the event loop, without a new request
Waiting = tuple[ModelRequest, "asyncio.Future[tuple[Completion, int]]"]
PauseMode = Literal["abort", "retract", "in_place"]


class EmbeddedEngine:
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
        self.is_paused = False
        self.forward = forward
        self.vocab_size = vocab_size
        self.seed = seed
        self.end_token_ids = end_token_ids
        self.pad_token_id = pad_token_id
        self.max_rows = max_rows
        self.device = device
        self._waiting: list[Waiting] = []
        self._waves: asyncio.Task[None] | None = None
        self._sampling = threading.Lock()  # held by the running batch, or by the caller of pause

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

    def set_version(self, version: int) -> None:
        """Set the version that the tokens of the next batch get."""
        self.version = version

    def pause(self) -> None:
        """Wait until no batch is being generated, and block the next one."""
        self._sampling.acquire()
        self.is_paused = True

    def resume(self) -> None:
        """Let the next batch start."""
        self.is_paused = False
        self._sampling.release()

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

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

    def _generate(self, requests: Sequence[ModelRequest]) -> tuple[list[Completion], int]:
        """Return the completions, and the version of the weights that sampled them."""
        with self._sampling:
            version = self.version
            completions = generate(
                self.forward,
                [req.input_ids for req in requests],
                [req.sampling for req in requests],
                [req.num_new_tokens() for req in requests],
                [row_seed(self.seed, version, req) for req in requests],
                vocab_size=self.vocab_size,
                end_token_ids=self.end_token_ids,
                pad_token_id=self.pad_token_id,
                device=self.device,
                images=[req.images for req in requests],
            )
        return completions, version


def row_seed(seed: int, version: int, req: ModelRequest) -> int:
    """Return a 63-bit seed from the run's seed, the weights' version and the episode's name.

    The episode's name is the request's metadata, or its id where there is none.
    """
    name = sorted(req.metadata.items()) if req.metadata else req.rid
    digest = hashlib.sha256(repr((seed, version, name)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


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


class LoadableModel(Protocol):
    """A forward pass (`generate.Forward`) whose weights can be replaced."""

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: DynamicCache
    ) -> Tensor: ...

    def load(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None: ...


@dataclass(frozen=True)
class Sampled:
    """The tokens of a request until it ended or was aborted."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[str]  # name of the weights that sampled each token
    finish: str  # "stop", "length" or "abort"
    cached_tokens: int  # of the prompt: those that the prefix cache had


@dataclass(eq=False)
class Job:
    """A request in progress."""

    request: ModelRequest
    future: Future[Sampled] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    cached_tokens: int | None = None  # None until its first wave
    is_aborted: bool = False

    def rest(self) -> ModelRequest:
        """Return the request for the remaining tokens; its id seeds different random numbers."""
        done = len(self.tokens)
        sampling = replace(
            self.request.sampling,
            max_new_tokens=self.request.num_new_tokens() - done,
            min_new_tokens=max(0, self.request.sampling.min_new_tokens - done),
        )
        ids = self.request.input_ids + self.tokens
        return replace(
            self.request, input_ids=ids, sampling=sampling, rid=f"{self.request.rid}+{done}", metadata={}
        )

    def add(self, completion: Completion, versions: list[str]) -> None:
        """Append the tokens of a wave; `versions` are those of the wave's steps."""
        self.tokens += completion.tokens
        self.logprobs += completion.logprobs
        self.versions += versions[: len(completion.tokens)]
        if self.cached_tokens is None:  # later waves find its own tokens
            self.cached_tokens = completion.cached_tokens

    def answer(self, finish: str) -> None:
        """Resolve the future with the tokens so far."""
        cached_tokens = self.cached_tokens or 0
        self.future.set_result(Sampled(self.tokens, self.logprobs, self.versions, finish, cached_tokens))


class InterruptibleSampler:
    """Sample waves of requests with one model.

    Args:
        model: see `LoadableModel`.
        vocab_size: width of its logits.
        version: name of the weights that it holds.
        seed: with a request's id it determines the request's random numbers.
        end_token_ids: the model's stop tokens.
        max_rows: maximum number of requests of one wave.
    """

    def __init__(
        self,
        model: LoadableModel,
        vocab_size: int,
        *,
        version: str = "default",
        seed: int = 0,
        end_token_ids: tuple[int, ...] = (),
        max_rows: int = 256,
    ) -> None:
        self.version = version
        self._model = model
        self._vocab_size = vocab_size
        self._seed = seed
        self._end_token_ids = end_token_ids
        self._max_rows = max_rows
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._wave: list[Job] = []
        self._step_versions: list[str] = []
        self._paused: PauseMode | None = None
        self._is_held = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def submit(self, request: ModelRequest) -> Future[Sampled]:
        """Queue a request. Raises `PromptTooLong` or `UnsupportedSampling`."""
        request.num_new_tokens()
        refuse_unsupported(request.sampling)
        job = Job(request)
        job.future.set_running_or_notify_cancel()  # a waiter must not cancel it any more
        with self._changed:
            self._waiting.append(job)
            self._changed.notify_all()
        return job.future

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling between two tokens, and queue new requests."""
        with self._changed:
            self._paused = mode
            self._changed.notify_all()
            self._changed.wait_for(self._at_rest)
            if mode == "abort":
                self._answer_waiting(lambda job: True)

    def resume(self) -> None:
        """Continue sampling."""
        with self._changed:
            self._paused = None
            self._changed.notify_all()

    def abort(self, rid: str | None) -> None:
        """End the requests whose id starts with `rid`, or all (None), with their tokens so far."""
        with self._changed:
            for job in self._wave:
                job.is_aborted = job.is_aborted or rid is None or job.request.rid.startswith(rid)
            self._answer_waiting(lambda job: rid is None or job.request.rid.startswith(rid))

    def load(
        self,
        named_tensors: Iterator[tuple[str, Tensor]],
        version: str | None,
        in_flight: PauseMode = "retract",
    ) -> None:
        """Copy weights in, by name, and set their version unless `version` is None.

        Without a pause the requests in flight are treated as in a pause of mode `in_flight`. Raises
        the model's exception for a tensor that does not fit; the tensors before it are loaded.
        """
        with self._changed:
            was_paused = self._paused
            self._paused = was_paused or in_flight
            self._changed.notify_all()
            self._changed.wait_for(self._at_rest)
            try:
                self._model.load(named_tensors)
                self.version = version or self.version
            finally:
                self._paused = was_paused
                self._changed.notify_all()

    def num_unfinished(self) -> int:
        """Return the number of requests that are running or queued."""
        with self._changed:
            return len(self._wave) + len(self._waiting)

    def close(self) -> None:
        """End the thread; unfinished requests return their tokens so far."""
        self.pause("abort")
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _at_rest(self) -> bool:
        return not self._wave or self._is_held

    def _answer_waiting(self, chosen: Callable[[Job], bool]) -> None:
        for job in [job for job in self._waiting if chosen(job)]:
            self._waiting.remove(job)
            job.answer("abort")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or (self._waiting and not self._paused))
                if self._is_closed:
                    return
                self._wave, self._waiting = self._waiting[: self._max_rows], self._waiting[self._max_rows :]
                self._step_versions = [self.version]
            completions: list[Completion] | Exception
            try:
                completions = self._sample_wave()
            except Exception as error:  # of any type: the requests must not wait indefinitely
                completions = error
            with self._changed:
                wave, self._wave = self._wave, []
                self._finish(wave, completions)
                self._changed.notify_all()

    def _sample_wave(self) -> list[Completion]:
        rests = [job.rest() for job in self._wave]
        return generate(
            self._model,
            [rest.input_ids for rest in rests],
            [rest.sampling for rest in rests],
            [rest.num_new_tokens() for rest in rests],
            [row_seed(self._seed, 0, rest) for rest in rests],
            vocab_size=self._vocab_size,
            end_token_ids=self._end_token_ids,
            cut_rows=self._between_tokens,
            images=[rest.images for rest in rests],
        )

    def _between_tokens(self) -> Collection[int]:
        """Wait here while paused in place; return the rows to abort."""
        with self._changed:
            while self._paused == "in_place":
                self._is_held = True
                self._changed.notify_all()
                self._changed.wait()
            self._is_held = False
            self._step_versions.append(self.version)
            if self._paused:
                return range(len(self._wave))
            return [row for row, job in enumerate(self._wave) if job.is_aborted]

    def _finish(self, wave: list[Job], completions: list[Completion] | Exception) -> None:
        """Resolve the requests of a wave; those that a "retract" has aborted are queued again."""
        if isinstance(completions, Exception):
            for job in wave:
                job.future.set_exception(completions)
            return
        again = []
        for job, completion in zip(wave, completions, strict=True):
            job.add(completion, self._step_versions)
            if completion.finish == "abort" and self._paused != "abort" and not job.is_aborted:
                again.append(job)
            else:
                job.answer(completion.finish)
        self._waiting = again + self._waiting
