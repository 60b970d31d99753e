"""The embedded engine behind SGLang's HTTP routes: starts in seconds, for development and tests.

    python -m areal_core.testing.embedded_server --model-path M --port P

event loop (aiohttp)                          sampling thread
/generate ---- submit, await the future ----> waves of requests, up to `max_rows` each
/pause_generation "abort"     waits until ..> all requests, queued ones too, return their tokens so far
/pause_generation "retract"   waits until ..> the wave is aborted; its requests are queued again, with their tokens
/pause_generation "in_place"  waits until ..> the wave stops between two tokens, and keeps its cache
weights: waits until .......................> no token is being sampled; without a pause it pauses
("retract")

It has the routes of SGLang 0.5.23, and refuses what it does not support with 400. An adapter is
merged into the weights, so there is one at a time: requests that name another are refused.
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import torch
import torch.distributed as dist
from aiohttp import web
from msgspec import Meta
from torch import Tensor
from transformers import AutoTokenizer

from areal_core.data.images import bytes_of_url
from areal_core.data.processor import VisionProcessor, load_processor
from areal_core.embedded.generate import Completion, generate, refuse_unsupported
from areal_core.embedded.replica import Replica
from areal_core.engine.lora import FILE_PREFIX, merged_weight
from areal_core.engine.model import is_vision
from areal_core.errors import ImageError, ModelError
from areal_core.rollout.errors import PromptTooLong, UnsupportedSampling
from areal_core.rollout.http_thread import refuse_web_pages
from areal_core.rollout.types import TOP_K_OFF, ModelRequest, Sampling, row_seed
from areal_core.servers.sglang import CACHE, WEIGHTS
from areal_core.servers.update_group import form_group
from areal_core.servers.verification import sha256_of
from areal_core.servers.weight_update import read_safetensors

SPEAKS = "0.5.23"  # the SGLang whose routes these are
MAX_BODY_BYTES = 64 << 20
GROUP_TIMEOUT = timedelta(seconds=300)
PauseMode = Literal["abort", "retract", "in_place"]
Body = TypeVar("Body", bound=msgspec.Struct)


class BadRequest(ValueError):
    """A request that this server refuses."""


class Params(msgspec.Struct, forbid_unknown_fields=True):
    """`sampling_params` of a request."""

    max_new_tokens: Annotated[int, Meta(ge=0)] | None = 128
    min_new_tokens: Annotated[int, Meta(ge=0)] | None = 0
    temperature: Annotated[float, Meta(ge=0)] | None = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = -1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = 0.0
    sampling_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None


class Generate(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `/generate`."""

    input_ids: list[int] | None = None
    text: str | None = None
    image_data: list[str] | None = None
    sampling_params: Params | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None
    logprob_start_len: int | None = None
    stream: bool | None = False
    rid: str | None = None
    lora_path: str | None = None


class Control(msgspec.Struct):
    """The fields of all other routes."""

    mode: PauseMode = "abort"
    abort_all: bool = False
    rid: str | None = None
    tags: list[Literal["weights", "kv_cache"]] | None = None
    action: Literal["checksum"] = "checksum"
    model_path: str = ""
    weight_version: str | None = None
    new_version: str = ""
    lora_name: str = ""
    lora_path: str = ""
    group_name: str = ""
    master_address: str = ""
    master_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    rank_offset: int = 0
    world_size: int = 0
    backend: str = "gloo"
    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[list[int]] = []


@dataclass(eq=False)
class Job:
    """A request in progress; its future gets it when it ends, with `finish`."""

    request: ModelRequest
    future: "Future[Job]" = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)  # name of the weights that sampled each token
    cached_tokens: int | None = None  # of the prompt: those that the prefix cache had
    is_aborted: bool = False
    finish: str = ""

    def rest(self) -> ModelRequest:
        """Return the request for the remaining tokens; its id seeds different random numbers."""
        done, request = len(self.tokens), self.request
        sampling = replace(
            request.sampling,
            max_new_tokens=request.num_new_tokens() - done,
            min_new_tokens=max(0, request.sampling.min_new_tokens - done),
        )
        ids, rid = request.input_ids + self.tokens, f"{request.rid}+{done}"
        return replace(request, input_ids=ids, sampling=sampling, rid=rid, metadata={})

    def end(self, finish: str) -> None:
        self.finish = finish
        self.future.set_result(self)


class Sampler:
    """Sample waves of requests with one model, interruptible between two tokens.

    One condition variable guards all its state; its thread stops only in `_between_tokens`.
    """

    def __init__(
        self, model: Any, vocab_size: int, seed: int, end_token_ids: tuple[int, ...], max_rows: int
    ) -> None:
        self.version = "default"
        self._model, self._seed, self._max_rows = model, seed, max_rows
        self._options = {"vocab_size": vocab_size, "end_token_ids": end_token_ids}
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._wave: list[Job] = []
        self._step_versions: list[str] = []
        self._paused: PauseMode | None = None
        self._is_held = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def submit(self, request: ModelRequest) -> "Future[Job]":
        """Queue a request. Raises `PromptTooLong` or `UnsupportedSampling`."""
        request.num_new_tokens()
        refuse_unsupported(request.sampling)
        job = Job(request)
        job.future.set_running_or_notify_cancel()  # a waiter must not cancel it any more
        with self._changed:
            self._waiting.append(job)
            self._changed.notify_all()
        return job.future

    def pause(self, mode: PauseMode | None) -> None:
        """Stop between two tokens and queue new requests; None continues."""
        with self._changed:
            self._paused = mode
            self._changed.notify_all()
            if mode is not None:
                self._changed.wait_for(self._at_rest)
            if mode == "abort":
                self._end_waiting("")

    def abort(self, rid: str) -> None:
        """End the requests whose id starts with `rid`, with their tokens so far."""
        with self._changed:
            for job in self._wave:
                job.is_aborted |= job.request.rid.startswith(rid)
            self._end_waiting(rid)

    def load(
        self, tensors: Iterable[tuple[str, Tensor]], version: str | None, in_flight: PauseMode = "retract"
    ) -> None:
        """Copy weights in, by name, and set their version unless it is None.

        Raises the model's exception for a tensor that does not fit; those before it are loaded.
        """
        with self._changed:
            before = self._paused
            self._paused = before or in_flight
            self._changed.notify_all()
            self._changed.wait_for(self._at_rest)
            try:
                self._model.load(tensors)
                self.version = version or self.version
            finally:
                self._paused = before
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

    def _end_waiting(self, rid: str) -> None:
        for job in [job for job in self._waiting if job.request.rid.startswith(rid)]:
            self._waiting.remove(job)
            job.end("abort")

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
                completions = self._sample([job.rest() for job in self._wave])
            except Exception as error:  # of any type: the requests must not wait indefinitely
                completions = error
            with self._changed:
                wave, self._wave = self._wave, []
                self._finish(wave, completions)
                self._changed.notify_all()

    def _sample(self, rests: list[ModelRequest]) -> list[Completion]:
        return generate(
            self._model,
            [rest.input_ids for rest in rests],
            [rest.sampling for rest in rests],
            [rest.num_new_tokens() for rest in rests],
            [
                row_seed(self._seed, 0, rest) if rest.sampling.seed is None else rest.sampling.seed
                for rest in rests
            ],
            **self._options,  # type: ignore[arg-type]
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
            return [row for row, job in enumerate(self._wave) if job.is_aborted or self._paused]

    def _finish(self, wave: list[Job], completions: list[Completion] | Exception) -> None:
        """Resolve the requests of a wave; those that a "retract" has aborted are queued again."""
        if isinstance(completions, Exception):
            for job in wave:
                job.future.set_exception(completions)
            return
        again = []
        for job, found in zip(wave, completions, strict=True):
            job.tokens += found.tokens
            job.logprobs += found.logprobs
            job.versions += self._step_versions[: len(found.tokens)]
            if job.cached_tokens is None:  # later waves find its own tokens
                job.cached_tokens = found.cached_tokens
            if found.finish == "abort" and self._paused != "abort" and not job.is_aborted:
                again.append(job)
            else:
                job.end(found.finish)
        self._waiting = again + self._waiting


class Adapters:
    """The adapter that is merged into the weights, and the next one."""

    def __init__(self, replica: Replica, sampler: Sampler) -> None:
        self._replica, self._sampler = replica, sampler
        self.beneath: dict[str, Tensor] = {}  # the weights that the adapter was merged into
        self._merged: str | None = None
        self._of_version: dict[str, str | None] = {}
        self._next: tuple[str | None, dict[str, Tensor]] | None = None  # loaded, not merged yet

    def load(self, name: str, folder: Path) -> None:
        if name == self._merged:
            raise BadRequest(f"Failed to load LoRA adapter {name} because it is already loaded")
        layers, scaling = read_adapter(folder)
        held = dict(self._replica.model.named_parameters())
        if unknown := set(layers) - set(held):
            raise BadRequest(
                f"the model has no {', '.join(sorted(unknown))}, of which {folder} is an adapter"
            )
        self.beneath |= {n: held[n].detach().clone() for n in layers if n not in self.beneath}
        merged = {n: merged_weight(self.beneath[n], *parts, scaling) for n, parts in layers.items()}
        self._next = name, merged

    def unload(self, name: str) -> None:
        if name != self._merged:
            raise BadRequest(f"LoRA with name {name} does not exist")
        self._next = None, {}
        self.merge(None)

    def merge(self, version: str | None) -> None:
        """Merge what was loaded, if anything was, and name the weights."""
        if self._next is None:
            self._sampler.load((), version)
        else:
            name, merged = self._next
            self._next = None
            if version is not None:  # from the moment at which the server has this version
                self._of_version[version] = name
            self._sampler.load((self.beneath | merged).items(), version, in_flight="abort")
            self._merged = name
        self._of_version[self._sampler.version] = self._merged

    def check(self, name: str | None, versions: Collection[str] = ()) -> None:
        """Raise `BadRequest` unless the adapter is merged now, or was in all of `versions`."""
        if self._next is not None and self._next[0] == name:
            self.merge(None)
        held = {self._of_version.get(version) for version in versions or (self._sampler.version,)}
        if held != {name}:
            raise BadRequest(f"the request names the LoRA adapter {name}, and the server has {self._merged}")

    def forget(self) -> None:
        """Take the weights as they are: they were replaced."""
        self.beneath, self._merged, self._next = {}, None, None
        self._of_version[self._sampler.version] = None


def expanded(processor: VisionProcessor, ids: list[int], images: tuple[bytes, ...]) -> list[int]:
    """Return ids with a placeholder for each vision token, as SGLang expands them."""
    token = processor.image_token_id
    if ids.count(token) != len(images):
        raise BadRequest(f"input_ids have {ids.count(token)} image tokens and there are {len(images)} images")
    message = {"role": "user", "content": [{"type": "image"}]}
    sizes = iter([sum(processor.prompt([message], [image]).mm_token_type_ids) for image in images])
    return [one for id in ids for one in ([token] * next(sizes) if id == token else [id])]


class EmbeddedServer:
    """The routes. `application` is what aiohttp serves.

    Args:
        model_path: checkpoint folder.
        dtype: of weights and compute; None for the checkpoint's own.
        seed: of the sampling.
        context_length: maximum tokens of prompt and completion; None for the model's own.
        max_rows: maximum requests in one batch.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        context_length: int | None = None,
        max_rows: int = 256,
    ) -> None:
        self._path = model_path
        self._replica = Replica(model_path, dtype or "auto", torch.device("cpu"))
        self._config = self._replica.model.config
        if is_vision(self._config):
            self._replica.processor = load_processor(model_path)
        text = self._config.get_text_config()
        self._tokenizer = AutoTokenizer.from_pretrained(model_path)
        self._vocab_size = text.vocab_size
        self._context_length = context_length or text.max_position_embeddings
        ends = () if self._tokenizer.eos_token_id is None else (self._tokenizer.eos_token_id,)
        self.sampler = Sampler(self._replica, text.vocab_size, seed, ends, max_rows)
        self._adapters = Adapters(self._replica, self.sampler)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._in_session = False
        self._released: set[str] = set()  # parts of the memory
        self._started = time.time()

    def application(self) -> web.Application:
        """Return the aiohttp application with all routes; blocking ones run on threads."""
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[failures_as_json])
        application.router.add_post("/generate", self._generate)
        for path, informing in {
            "/health": lambda _: {},
            "/health_generate": lambda _: {},
            "/model_info": self._model_info,
            "/server_info": self._server_info,
        }.items():
            application.router.add_get(path, blocking(informing))
        for path, (handler, needed) in {
            "/pause_generation": (self._pause, ()),
            "/continue_generation": (self._continue, (WEIGHTS, CACHE)),
            "/abort_request": (self._abort, ()),
            "/flush_cache": (self._flush_cache, ()),
            "/release_memory_occupation": (self._release, ()),
            "/resume_memory_occupation": (self._reacquire, ()),
            "/update_weights_from_disk": (self._load_from_disk, (WEIGHTS,)),
            "/update_weight_version": (self._rename, (WEIGHTS,)),
            "/load_lora_adapter": (self._load_adapter, (WEIGHTS,)),
            "/unload_lora_adapter": (self._unload_adapter, (WEIGHTS,)),
            "/weights_checker": (self._checksums, (WEIGHTS,)),
            "/init_weights_update_group": (self._join_group, (WEIGHTS,)),
            "/destroy_weights_update_group": (self._leave_group, (WEIGHTS,)),
            "/begin_weight_update": (self._begin, (WEIGHTS,)),
            "/update_weights_from_distributed": (self._load_from_group, (WEIGHTS,)),
            "/end_weight_update": (self._end, (WEIGHTS,)),
        }.items():
            application.router.add_post(path, blocking(partial(self._controlled, handler, needed)))
        return application

    def _controlled(
        self, handler: Callable[[Control], dict[str, Any] | None], needed: Iterable[str], raw: bytes
    ) -> dict[str, Any]:
        body = decoded(raw or b"{}", Control)
        self._require_memory(needed)
        return {"success": True, "message": "", **(handler(body) or {})}

    async def _generate(self, request: web.Request) -> web.Response:
        body = decoded(await request.read(), Generate)
        self._require_memory((WEIGHTS, CACHE))
        wanted, started = self.request_of(body), time.monotonic()
        self._adapters.check(body.lora_path)
        job = await self._answer(wanted)
        # Another adapter may have been loaded while the request was paused.
        self._adapters.check(body.lora_path, job.versions)
        return web.json_response(self._reply(job, time.monotonic() - started))

    async def _answer(self, wanted: ModelRequest) -> Job:
        try:
            return await asyncio.wrap_future(self.sampler.submit(wanted))
        except asyncio.CancelledError:  # the client disconnected
            self.sampler.abort(wanted.rid)
            raise

    def request_of(self, body: Generate) -> ModelRequest:
        """Return the request of a body. Raises `BadRequest` for anything unsupported."""
        params = body.sampling_params or Params()
        if body.stream or body.logprob_start_len not in (None, -1):
            raise BadRequest("the embedded engine neither streams nor scores given tokens; SGLang does")
        if body.input_ids is None and body.text is None:
            raise BadRequest("field 'input_ids' is missing")
        ids = self._tokenizer(body.text)["input_ids"] if body.input_ids is None else body.input_ids
        if not ids or not all(0 <= token < self._vocab_size for token in ids):
            raise BadRequest(f"input_ids must be one list of token ids below {self._vocab_size}, not empty")
        if not all(0 <= token < self._vocab_size for token in params.stop_token_ids or ()):
            raise BadRequest(f"stop_token_ids must be token ids below {self._vocab_size}")
        images, processor = tuple(map(picture, body.image_data or ())), self._replica.processor
        if images and processor is None:
            raise BadRequest("image_data is given, and the model reads text only")
        if processor is not None:
            ids = expanded(processor, ids, images)
        wanted, temperature = params.max_new_tokens or 128, params.temperature
        if len(ids) + wanted > self._context_length:
            raise BadRequest(
                "Requested token count exceeds the model's maximum context length of "
                f"{self._context_length} tokens: {len(ids)} of the prompt and {wanted} of the completion"
            )
        sampling = Sampling(
            max_new_tokens=wanted,
            min_new_tokens=params.min_new_tokens or 0,
            max_tokens=self._context_length,
            greedy=temperature is not None and temperature < 1e-6,  # as SGLang
            seed=params.sampling_seed,
            temperature=max(temperature or 1.0, 1e-6),
            top_p=1.0 if params.top_p is None else params.top_p,
            top_k=params.top_k if (params.top_k or 0) >= 1 else TOP_K_OFF,  # type: ignore[arg-type]
            stop_token_ids=params.stop_token_ids or [],
            stop=[params.stop] if isinstance(params.stop, str) else params.stop,
            ignore_eos=bool(params.ignore_eos),
            skip_special_tokens=params.skip_special_tokens is not False,
            frequency_penalty=params.frequency_penalty or 0.0,
        )
        return ModelRequest(
            input_ids=ids,
            sampling=sampling,
            rid=body.rid or uuid.uuid4().hex,
            images=images,
            image_token_id=-1 if processor is None else processor.image_token_id,
        )

    def _reply(self, job: Job, seconds: float) -> dict[str, Any]:
        """The JSON of a completion, with the spans of tokens that each version sampled."""
        runs = [(name, len(list(run))) for name, run in itertools.groupby(job.versions)]
        runs = runs or [(self.sampler.version, 0)]
        starts = itertools.accumulate((count for _, count in runs), initial=0)
        detail: dict[str, Any] = {"length": len(job.tokens)}
        if job.finish == "stop":
            detail = {"matched": job.tokens[-1]}
        elif job.finish == "abort":
            detail = {"message": "Aborted" if job.tokens else "Abort in waiting queue"}
        skip = job.request.sampling.skip_special_tokens
        return {
            "text": self._tokenizer.decode(job.tokens, skip_special_tokens=skip),
            "output_ids": job.tokens,
            "meta_info": {
                "id": job.request.rid,
                "finish_reason": {"type": job.finish, **detail},
                "prompt_tokens": len(job.request.input_ids),
                "completion_tokens": len(job.tokens),
                "cached_tokens": job.cached_tokens or 0,
                "weight_version": runs[-1][0],
                "weight_versions": [
                    {"version": name, "start": start, "end": start + count}
                    for (name, count), start in zip(runs, starts, strict=False)
                ],
                "output_token_logprobs": [
                    [logprob, token, None] for logprob, token in zip(job.logprobs, job.tokens, strict=True)
                ],
                "output_top_logprobs": [[] for _ in job.tokens],  # not kept for other tokens
                "e2e_latency": seconds,
            },
        }

    def _model_info(self, raw: bytes) -> dict[str, Any]:
        return {
            "model_path": self._path,
            "tokenizer_path": self._path,
            "is_generation": True,
            "has_image_understanding": self._replica.processor is not None,
            "weight_version": self.sampler.version,
            "model_type": self._config.model_type,
            "architectures": list(self._config.architectures or []),
            "vocab_size": self._vocab_size,
        }

    def _server_info(self, raw: bytes) -> dict[str, Any]:
        return {
            "engine": "embedded",
            "version": SPEAKS,
            "model_path": self._path,
            "context_length": self._context_length,
            "dtype": str(self._replica.model.dtype).removeprefix("torch."),
            "quantization": None,
            "kv_cache_dtype": "auto",
            "enable_lora": True,
            "device": "cpu",
            "tp_size": 1,
            "pid": os.getpid(),
            "startup_time": self._started,
            "num_unfinished": self.sampler.num_unfinished(),
        }

    def _pause(self, body: Control) -> None:
        self.sampler.pause(body.mode)

    def _continue(self, body: Control) -> None:
        self.sampler.pause(None)

    def _abort(self, body: Control) -> None:
        if not body.abort_all and not body.rid:
            raise BadRequest("give rid, or abort_all")
        self.sampler.abort("" if body.abort_all else body.rid or "")

    def _flush_cache(self, body: Control) -> None:
        if self.sampler.num_unfinished():
            raise BadRequest("Failed to flush cache: requests are running or waiting")
        self._replica.prefixes.clear()

    def _release(self, body: Control) -> None:
        """Release parts of the memory; SGLang ends where this refuses."""
        parts = set(body.tags or (WEIGHTS, CACHE))
        if self.sampler.num_unfinished():
            raise BadRequest("memory is released only while no request is running or waiting")
        self._require_memory(parts)
        if WEIGHTS in parts:
            self._replica.release()
        self._released |= parts

    def _reacquire(self, body: Control) -> None:
        """Allocate released parts of the memory again; the weights are to be loaded."""
        parts = set(body.tags or (WEIGHTS, CACHE))
        if present := parts - self._released:
            raise BadRequest(f"the memory of {' and '.join(sorted(present))} is not released")
        if WEIGHTS in parts:
            self._replica.allocate()
        self._released -= parts

    def _require_memory(self, parts: Iterable[str]) -> None:
        if missing := self._released & set(parts):
            raise BadRequest(
                f"the server is asleep: its {' and '.join(sorted(missing))} are released; "
                "call resume_memory_occupation first"
            )

    def _load_from_disk(self, body: Control) -> None:
        self.sampler.load(tensors_of(Path(required(body, "model_path"))), body.weight_version)
        self._adapters.forget()

    def _rename(self, body: Control) -> None:
        self._adapters.merge(required(body, "new_version"))

    def _load_adapter(self, body: Control) -> dict[str, Any]:
        name, folder = required(body, "lora_name"), required(body, "lora_path")
        self._adapters.load(name, Path(folder))
        return {"loaded_adapters": {name: folder}}

    def _unload_adapter(self, body: Control) -> dict[str, Any]:
        self._adapters.unload(required(body, "lora_name"))
        return {"loaded_adapters": {}}

    def _checksums(self, body: Control) -> dict[str, Any]:
        held = dict(self._replica.model.named_parameters()) | self._adapters.beneath
        rank = {
            "checksums": {name: sha256_of(tensor) for name, tensor in held.items()},
            "parallelism_info": [{"role": "target", "tp_rank": 0, "tp_size": 1, "pp_size": 1}],
        }
        return {"ranks": [rank]}

    def _join_group(self, body: Control) -> None:
        name, size = required(body, "group_name"), body.world_size
        # Documented by torch, but not in its __all__.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            body.master_address, body.master_port, size, wait_for_workers=False, timeout=GROUP_TIMEOUT
        )
        self._groups[name] = form_group(store, body.rank_offset, size, body.backend, name, GROUP_TIMEOUT)

    def _leave_group(self, body: Control) -> None:
        dist.destroy_process_group(self._group(body))
        del self._groups[body.group_name]

    def _group(self, body: Control) -> dist.ProcessGroup:
        if body.group_name not in self._groups:
            raise BadRequest(f"no group {body.group_name!r}")
        return self._groups[body.group_name]

    def _begin(self, body: Control) -> None:
        if self._in_session:
            raise BadRequest("a weight-update session is already open; call end_weight_update() first")
        self._in_session = True

    def _load_from_group(self, body: Control) -> None:
        if not self._in_session:
            raise BadRequest("call begin_weight_update() first")
        try:
            tensors = list(received(self._group(body), body))
        except (RuntimeError, ValueError, AttributeError) as error:  # the other end is gone, or no such dtype
            raise BadRequest(f"Failed to receive weights: {error}") from error
        self.sampler.load(tensors, body.weight_version)

    def _end(self, body: Control) -> None:
        if not self._in_session:
            raise BadRequest("no weight-update session is open; call begin_weight_update() first")
        self._in_session = False


def decoded(raw: bytes, kind: type[Body]) -> Body:
    """Parse a request's JSON. Raises `BadRequest`."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        found: list[str] = []  # fields of the innermost object with a number that JSON lacks
        with suppress(ValueError, RecursionError):
            json.loads(raw, object_pairs_hook=lambda pairs: found.extend(map(str, not_finite(pairs))))
        where = f"; {', '.join(found)} is no finite number" if found else ""
        raise BadRequest(f"the body is not what this route takes: {error}{where}") from error


def not_finite(pairs: list[tuple[str, Any]]) -> list[str]:
    return [name for name, value in pairs if isinstance(value, float) and not math.isfinite(value)]


def required(body: Control, name: str) -> str:
    if not (value := getattr(body, name)):
        raise BadRequest(f"field '{name}' is missing")
    return str(value)


def picture(text: str) -> bytes:
    """Return the bytes of a data: URL or base64."""
    try:
        return bytes_of_url(text if ":" in text[:6] else f"data:image;base64,{text}")
    except ImageError as error:
        raise BadRequest(str(error)) from error


def tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint folder. Raises `BadRequest` if there is none."""
    if not any(folder.glob("*.safetensors")):
        raise BadRequest(f"no safetensors files in {folder}")
    return read_safetensors(folder)


def read_adapter(folder: Path) -> tuple[dict[str, tuple[Tensor, Tensor]], float]:
    """Return (A, B) by the name of the adapted weight, and the factor on B A."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        scaling = config["lora_alpha"] / config["r"]
    except (OSError, KeyError, ValueError) as error:
        raise BadRequest(f"{folder} has no adapter_config.json of a LoRA adapter: {error!r}") from error
    tensors = {name.removeprefix(FILE_PREFIX): tensor for name, tensor in tensors_of(folder)}
    layers = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    if set(tensors) != {f"{layer}.lora_{part}.weight" for layer in layers for part in "AB"}:
        raise BadRequest(f"{folder} contains other tensors than lora_A.weight and lora_B.weight of layers")
    return {
        f"{layer}.weight": (tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"])
        for layer in layers
    }, scaling


def received(group: dist.ProcessGroup, body: Control) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that rank 0 of the group broadcasts, in order."""
    for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(tensor, src=0, group=group)
        yield name, tensor


def blocking(handler: Callable[[bytes], dict[str, Any]]) -> Any:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(handler, await request.read()))

    return handle


@web.middleware
async def failures_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    """Reply 400 with a message to client errors; others stay 500, with a traceback in the log."""
    try:
        return await handler(request)
    except (BadRequest, ModelError, PromptTooLong, UnsupportedSampling) as error:
        body = {"success": False, "message": str(error), "error": {"message": str(error)}}
        return web.json_response(body, status=400)


def serve(model_path: str, host: str, port: int, **options: Any) -> None:
    """Serve until the process ends. Raises `ModelError` if the model cannot be loaded."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    application = EmbeddedServer(model_path, **options).application()
    refuse_web_pages(application, host)
    web.run_app(
        application,
        host=host,
        port=port,
        print=lambda text: print(f"embedded server of {model_path} on {host}:{port}", flush=True),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=1.0,
    )


def main() -> int:
    """Serve the model of the arguments; return 2 if it cannot be loaded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", help="float32 or bfloat16; the checkpoint's own when not given")
    parser.add_argument("--random-seed", dest="seed", type=int, default=0)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--max-running-requests", dest="max_rows", type=int, default=256)
    options = vars(parser.parse_args())
    options["dtype"] = options["dtype"] and getattr(torch, options["dtype"])
    try:
        serve(**options)
    except ModelError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
