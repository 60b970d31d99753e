"""The embedded engine behind SGLang's HTTP routes: a replacement server that starts in seconds.

    python -m areal_core.embedded.http_server --model-path M --port P

event loop (aiohttp)                         sampling thread (`engine.py`)
/generate ---- submit, await the future ---> waves of requests
/pause_generation, /abort_request, weights: block, so each runs on a thread of its own

It serves the routes of SGLang 0.5.23, so clients, launchers and tests work with either;
`/server_info` reports "engine": "embedded". It refuses what it does not support (text stops,
penalties, streaming) with 400.
"""

import argparse
import asyncio
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from aiohttp import web
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from areal_core.data.processor import load_processor
from areal_core.embedded.engine import InterruptibleSampler, Sampled
from areal_core.embedded.replica import Replica
from areal_core.embedded.weights import ServedWeights
from areal_core.embedded.wire import (
    BadRequest,
    generate_reply,
    parse_body,
    parse_request,
    succeeded,
    take,
)
from areal_core.engine.model import is_vision
from areal_core.errors import ModelError
from areal_core.rollout.errors import PromptTooLong, UnsupportedSampling
from areal_core.rollout.http_thread import refuse_web_pages
from areal_core.rollout.types import ModelRequest
from areal_core.servers.sglang import CACHE, WEIGHTS

SPEAKS = "0.5.23"  # the SGLang whose routes these are
MAX_BODY_BYTES = 64 << 20


@dataclass(frozen=True)
class ServedModel:
    """Model facts that the server reports."""

    model_path: str
    architectures: list[str]
    model_type: str
    vocab_size: int
    context_length: int
    dtype: str


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
        self._replica = Replica(model_path, dtype or "auto", torch.device("cpu"))
        config = self._replica.model.config
        if is_vision(config):
            self._replica.processor = load_processor(model_path)
        text = config.get_text_config()
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_path)
        self.identity = ServedModel(
            model_path,
            list(config.architectures or []),
            config.model_type,
            text.vocab_size,
            context_length or text.max_position_embeddings,
            str(self._replica.model.dtype).removeprefix("torch."),
        )
        self.sampler = InterruptibleSampler(
            self._replica,
            text.vocab_size,
            seed=seed,
            end_token_ids=() if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,),
            max_rows=max_rows,
        )
        self._weights = ServedWeights(self._replica, self.sampler)
        self._released: set[str] = set()  # parts of the memory
        self._started = time.time()

    def application(self) -> web.Application:
        """Return the aiohttp application with all routes; blocking ones run on threads."""
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[failures_as_json])
        application.router.add_post("/generate", self._generate)
        weights = self._weights
        for path in (
            "/health",
            "/health_generate",
            "/model_info",
            "/get_model_info",
            "/server_info",
            "/get_server_info",
        ):
            application.router.add_get(path, blocking(self._information, path))
        for path, handler in {
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/flush_cache": self._flush_cache,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._reacquire,
        }.items():
            application.router.add_post(path, blocking(handler))
        for path, handler in {
            "/update_weights_from_disk": weights.load_from_disk,
            "/update_weight_version": weights.rename_weights,
            "/load_lora_adapter": weights.load_adapter,
            "/unload_lora_adapter": weights.unload_adapter,
            "/weights_checker": weights.check_weights,
            "/init_weights_update_group": weights.join_group,
            "/destroy_weights_update_group": weights.leave_group,
            "/begin_weight_update": weights.begin_update,
            "/update_weights_from_distributed": weights.load_from_group,
            "/end_weight_update": weights.end_update,
        }.items():
            application.router.add_post(path, blocking(self._with_memory, {WEIGHTS}, handler))
        return application

    async def _generate(self, request: web.Request) -> web.Response:
        body = parse_body(await request.read())
        self._require_memory({WEIGHTS, CACHE})
        identity = self.identity
        wanted = parse_request(
            body, self.tokenizer, identity.context_length, identity.vocab_size, self._replica.processor
        )
        adapter = take(body, "lora_path", str, None)
        self._weights.check_adapter(adapter)
        started = time.monotonic()
        sampled = await self._answer(wanted)
        # Another adapter may have been loaded while the request was paused.
        self._weights.check_adapter(adapter, sampled.versions)
        reply = generate_reply(wanted, sampled, self.sampler.version, self.tokenizer)
        reply["meta_info"]["e2e_latency"] = time.monotonic() - started
        return web.json_response(reply)

    async def _answer(self, wanted: ModelRequest) -> Sampled:
        try:
            return await asyncio.wrap_future(self.sampler.submit(wanted))
        except asyncio.CancelledError:  # the client disconnected
            self.sampler.abort(wanted.rid)
            raise

    def _information(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.startswith("/health"):
            return {}
        if path.endswith("model_info"):
            return {
                "model_path": self.identity.model_path,
                "tokenizer_path": self.identity.model_path,
                "is_generation": True,
                "weight_version": self.sampler.version,
                "model_type": self.identity.model_type,
                "architectures": self.identity.architectures,
                "vocab_size": self.identity.vocab_size,
            }
        return {
            "engine": "embedded",
            "version": SPEAKS,
            "model_path": self.identity.model_path,
            "context_length": self.identity.context_length,
            "dtype": self.identity.dtype,
            "quantization": None,
            "kv_cache_dtype": "auto",
            "enable_lora": True,
            "device": "cpu",
            "tp_size": 1,
            "pid": os.getpid(),
            "startup_time": self._started,
            "num_unfinished": self.sampler.num_unfinished(),
        }

    def _pause(self, body: dict[str, Any]) -> dict[str, Any]:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise BadRequest(f"mode is {mode!r}; expected abort, retract or in_place")
        self.sampler.pause(mode)
        return succeeded("Generation paused successfully.")

    def _continue(self, body: dict[str, Any]) -> dict[str, Any]:
        self._require_memory({WEIGHTS, CACHE})
        self.sampler.resume()
        return succeeded("Generation continued successfully.")

    def _abort(self, body: dict[str, Any]) -> dict[str, Any]:
        aborts_all, rid = take(body, "abort_all", bool, False), take(body, "rid", str, None)
        if not aborts_all and not rid:
            raise BadRequest("give rid, or abort_all")
        self.sampler.abort(None if aborts_all else rid)
        return succeeded("")

    def _flush_cache(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.sampler.num_unfinished():
            raise BadRequest("Failed to flush cache: requests are running or waiting")
        self._replica.prefixes.clear()
        return succeeded("Cache flushed.")

    def _release(self, body: dict[str, Any]) -> dict[str, Any]:
        """Release parts of the memory; SGLang ends where this refuses."""
        parts = parts_of_memory(body)
        if self.sampler.num_unfinished():
            raise BadRequest("memory is released only while no request is running or waiting")
        self._require_memory(parts)
        if WEIGHTS in parts:
            self._replica.release()
        self._released |= parts
        return succeeded("")

    def _reacquire(self, body: dict[str, Any]) -> dict[str, Any]:
        """Allocate released parts of the memory again; the weights are to be loaded."""
        parts = parts_of_memory(body)
        if present := parts - self._released:
            raise BadRequest(f"the memory of {' and '.join(sorted(present))} is not released")
        if WEIGHTS in parts:
            self._replica.allocate()
        self._released -= parts
        return succeeded("")

    def _require_memory(self, parts: set[str]) -> None:
        if missing := parts & self._released:
            raise BadRequest(
                f"the server is asleep: its {' and '.join(sorted(missing))} are released; call resume_memory_occupation first"
            )

    def _with_memory(self, parts: set[str], handler: Any, body: dict[str, Any]) -> Any:
        self._require_memory(parts)
        return handler(body)


def parts_of_memory(body: dict[str, Any]) -> set[str]:
    """Return the tags of a body; all if it has none. Raises `BadRequest` for an unknown one."""
    parts = set(map(str, take(body, "tags", list, None) or (WEIGHTS, CACHE)))
    if unknown := parts - {WEIGHTS, CACHE}:
        raise BadRequest(f"tags has {', '.join(sorted(unknown))}; expected {WEIGHTS} and {CACHE}")
    return parts


def blocking(handler: Any, *arguments: Any) -> Any:
    async def handle(request: web.Request) -> web.Response:
        raw = await request.read()
        body = parse_body(raw) if raw else {}
        return web.json_response(await asyncio.to_thread(partial(handler, *arguments), body))

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
    server = EmbeddedServer(model_path, **options)
    application = server.application()
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


def main(argv: list[str] | None = None) -> int:
    """Serve the model of the arguments; return 2 if it cannot be loaded."""
    parser = argparse.ArgumentParser(
        prog="python -m areal_core.embedded.http_server", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--dtype", default=None, help="float32 or bfloat16; the checkpoint's own when not given"
    )
    parser.add_argument("--random-seed", type=int, default=0)
    parser.add_argument("--context-length", type=int, default=None)
    parser.add_argument("--max-running-requests", type=int, default=256)
    options = parser.parse_args(argv)
    try:
        serve(
            options.model_path,
            options.host,
            options.port,
            dtype=options.dtype and getattr(torch, options.dtype),
            seed=options.random_seed,
            context_length=options.context_length,
            max_rows=options.max_running_requests,
        )
    except ModelError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
