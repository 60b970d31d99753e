"""The embedded engine behind SGLang's HTTP routes: a server that starts in seconds, in the place of the real one.

    python -m areal_core.launch.embedded_server --model-path M --port P

event loop (aiohttp)                         sampling thread (`interruptible.py`)
/generate ---- submit, await the future ---> waves of requests
/pause_generation, /abort_request, weights: block, so each runs on a thread of its own

It speaks what SGLang 0.5.23 speaks, so clients, launchers and tests need not know which one they have; `/server_info` says
"engine": "embedded". What it cannot do (text stops, penalties, streaming) it refuses with 400.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from areal_core.engine.errors import ModelError
from areal_core.engine.replica import Replica
from areal_core.rollout.errors import PromptTooLong, UnsupportedSampling
from areal_core.rollout.interruptible import InterruptibleSampler, Sampled
from areal_core.rollout.types import TOP_K_OFF, ModelRequest, Sampling
from areal_core.rollout.update_group import form_group
from areal_core.rollout.weight_checksums import sha256_of

SPEAKS = "0.5.23"  # the SGLang whose routes these are
MAX_BODY_BYTES = 64 << 20
GENERATE_FIELDS = {"input_ids", "text", "sampling_params", "return_logprob", "stream", "rid"}
RENAMED = {"temperature", "top_k", "min_new_tokens", "max_new_tokens"}
PLAIN = {"top_p", "stop_token_ids", "stop", "ignore_eos", "skip_special_tokens", "frequency_penalty"}


class BadRequest(ValueError):
    """A request that this server does not take."""


@dataclass(frozen=True)
class Identity:
    """What the server says of itself."""

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
        context_length: most tokens of prompt and completion; None for the model's own.
        max_rows: most requests of one batch.
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
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_path)
        self.identity = Identity(
            model_path,
            list(config.architectures or []),
            config.model_type,
            config.vocab_size,
            context_length or config.max_position_embeddings,
            str(self._replica.model.dtype).removeprefix("torch."),
        )
        self.sampler = InterruptibleSampler(
            self._replica,
            config.vocab_size,
            seed=seed,
            end_token_ids=() if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,),
            max_rows=max_rows,
        )
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._in_session = False
        self._started = time.time()

    def application(self) -> web.Application:
        """All routes; the blocking ones on threads."""
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[failures_as_json])
        application.router.add_post("/generate", self._generate)
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
            "/update_weights_from_disk": self._load_from_disk,
            "/update_weight_version": self._rename_weights,
            "/weights_checker": self._check_weights,
            "/init_weights_update_group": self._join_group,
            "/destroy_weights_update_group": self._leave_group,
            "/begin_weight_update": self._begin_update,
            "/update_weights_from_distributed": self._load_from_group,
            "/end_weight_update": self._end_update,
        }.items():
            application.router.add_route("*", path, blocking(handler))
        return application

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        wanted = parse_request(body, self.tokenizer, self.identity.context_length)
        started = time.monotonic()
        sampled = await self._answer(wanted)
        reply = generate_reply(wanted, sampled, self.sampler.version, self.tokenizer)
        reply["meta_info"]["e2e_latency"] = time.monotonic() - started
        return web.json_response(reply)

    async def _answer(self, wanted: ModelRequest) -> Sampled:
        try:
            return await asyncio.wrap_future(self.sampler.submit(wanted))
        except asyncio.CancelledError:  # the client has gone
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
        self.sampler.resume()
        return succeeded("Generation continued successfully.")

    def _abort(self, body: dict[str, Any]) -> dict[str, Any]:
        if not body.get("abort_all") and not body.get("rid"):
            raise BadRequest("give rid, or abort_all")
        self.sampler.abort(None if body.get("abort_all") else body["rid"])
        return succeeded("")

    def _flush_cache(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.sampler.num_unfinished():
            raise BadRequest("Failed to flush cache: requests are running or waiting")
        return succeeded("Cache flushed.")

    def _load_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        self.sampler.load(read_safetensors(Path(body["model_path"])), body.get("weight_version"))
        return succeeded("Succeeded to update model weights.")

    def _rename_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        self.sampler.load(iter(()), body["new_version"])
        return succeeded(f"Weight version updated to {body['new_version']}")

    def _check_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("action", "checksum") != "checksum":
            raise BadRequest(f"action is {body['action']!r}; the embedded engine knows 'checksum'")
        rank = {
            "checksums": {name: sha256_of(p) for name, p in self._replica.model.named_parameters()},
            "parallelism_info": [{"role": "target", "tp_rank": 0, "tp_size": 1, "pp_size": 1}],
        }
        return {**succeeded("Success."), "ranks": [rank]}

    def _join_group(self, body: dict[str, Any]) -> dict[str, Any]:
        name, world_size = body["group_name"], body["world_size"]
        timeout = timedelta(seconds=300)
        store = dist.TCPStore(
            body["master_address"],
            int(body["master_port"]),
            world_size,
            wait_for_workers=False,
            timeout=timeout,
        )
        self._groups[name] = form_group(
            store, body["rank_offset"], world_size, body["backend"], name, timeout
        )
        return succeeded("Succeeded to initialize custom process group.")

    def _leave_group(self, body: dict[str, Any]) -> dict[str, Any]:
        if (group := self._groups.pop(body["group_name"], None)) is None:
            raise BadRequest(f"no group {body['group_name']!r}")
        dist.destroy_process_group(group)
        return succeeded("Succeeded to destroy custom process group.")

    def _begin_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._in_session:
            raise BadRequest("a weight-update session is already open; call end_weight_update() first")
        self._in_session = True
        return succeeded("Success")

    def _load_from_group(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._in_session:
            raise BadRequest(
                "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        try:
            tensors = list(received(self._groups[body["group_name"]], body))
        except RuntimeError as error:  # the other end has gone
            raise BadRequest(f"Failed to receive weights: {error}") from error
        self.sampler.load(iter(tensors), body.get("weight_version"))
        return succeeded("Succeeded to update parameter online.")

    def _end_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._in_session:
            raise BadRequest("no weight-update session is open; call begin_weight_update() first")
        self._in_session = False
        return succeeded("Success")


def succeeded(message: str) -> dict[str, Any]:
    return {"success": True, "message": message}


def blocking(handler: Any, *arguments: Any) -> Any:
    """An aiohttp handler that gives the request's JSON to `handler(*arguments, body)` on a thread."""

    async def handle(request: web.Request) -> web.Response:
        text = await request.text()
        return web.json_response(
            await asyncio.to_thread(handler, *arguments, json.loads(text) if text else {})
        )

    return handle


@web.middleware
async def failures_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    """What a client can mend becomes 400 with a message; anything else stays 500, with its traceback in the log."""
    try:
        return await handler(request)
    except (BadRequest, ModelError, PromptTooLong, UnsupportedSampling, json.JSONDecodeError) as error:
        body = {"success": False, "message": str(error), "error": {"message": str(error)}}
        return web.json_response(body, status=400)
    except KeyError as error:
        message = f"field {error} is missing"
        return web.json_response(
            {"success": False, "message": message, "error": {"message": message}}, status=400
        )


def parse_request(
    body: dict[str, Any], tokenizer: PreTrainedTokenizerBase, context_length: int
) -> ModelRequest:
    """A `/generate` body. Raises `BadRequest` for what cannot be honoured."""
    if unknown := set(body) - GENERATE_FIELDS:
        raise BadRequest(f"the embedded engine does not know {', '.join(sorted(unknown))}")
    if body.get("stream"):
        raise BadRequest("stream is true; the embedded engine answers in one piece")
    input_ids = tokenizer(body["text"])["input_ids"] if "text" in body else body["input_ids"]
    if not input_ids or not all(isinstance(token, int) for token in input_ids):
        raise BadRequest("input_ids must be one list of token ids, not empty")
    params = body.get("sampling_params", {})
    if unknown := set(params) - RENAMED - PLAIN:
        raise BadRequest(f"the embedded engine does not know sampling_params.{', '.join(sorted(unknown))}")
    wanted = params.get("max_new_tokens", 128)
    if len(input_ids) + wanted > context_length:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens: "
            f"{len(input_ids)} of the prompt and {wanted} of the completion"
        )
    temperature = params.get("temperature", 1.0)
    sampling = Sampling(
        max_new_tokens=wanted,
        min_new_tokens=params.get("min_new_tokens", 0),
        max_tokens=context_length,
        greedy=temperature == 0,
        temperature=temperature or 1.0,
        top_k=TOP_K_OFF if params.get("top_k", -1) < 1 else params["top_k"],
        **{name: value for name, value in params.items() if name in PLAIN and value is not None},
    )
    return ModelRequest(input_ids=input_ids, sampling=sampling, rid=body.get("rid") or uuid.uuid4().hex)


def generate_reply(
    request: ModelRequest, sampled: Sampled, version: str, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The JSON of a completion, with the spans of tokens that each version sampled."""
    ends = [(name, len(list(run))) for name, run in itertools.groupby(sampled.versions)] or [(version, 0)]
    starts = itertools.accumulate((count for _, count in ends), initial=0)
    spans = [
        {"version": name, "start": start, "end": start + count}
        for (name, count), start in zip(ends, starts, strict=False)
    ]
    skip = request.sampling.skip_special_tokens
    return {
        "text": tokenizer.decode(sampled.tokens, skip_special_tokens=skip),
        "output_ids": sampled.tokens,
        "meta_info": {
            "id": request.rid,
            "finish_reason": finish_reason(sampled),
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(sampled.tokens),
            "cached_tokens": 0,
            "weight_version": spans[-1]["version"],
            "weight_versions": spans,
            "output_token_logprobs": [
                [logprob, token, None]
                for logprob, token in zip(sampled.logprobs, sampled.tokens, strict=True)
            ],
        },
    }


def finish_reason(sampled: Sampled) -> dict[str, Any]:
    if sampled.finish == "stop":
        return {"type": "stop", "matched": sampled.tokens[-1]}
    if sampled.finish == "length":
        return {"type": "length", "length": len(sampled.tokens)}
    return {"type": "abort", "message": "Aborted" if sampled.tokens else "Abort in waiting queue"}


def read_safetensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint folder. Raises `BadRequest` when it holds none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadRequest(f"no safetensors files in {folder}")
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                yield name, tensors.get_tensor(name)


def received(group: dist.ProcessGroup, body: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that rank 0 of the group broadcasts, in order."""
    for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(tensor, src=0, group=group)
        yield name, tensor


def serve(model_path: str, host: str, port: int, **options: Any) -> None:
    """Serves until the process ends. Raises `ModelError` when there is no such model."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    server = EmbeddedServer(model_path, **options)
    web.run_app(
        server.application(),
        host=host,
        port=port,
        print=lambda text: print(f"embedded server of {model_path} on {host}:{port}", flush=True),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=1.0,
    )


def main(argv: list[str] | None = None) -> int:
    """Exit 2 for a model that cannot be loaded."""
    parser = argparse.ArgumentParser(
        prog="python -m areal_core.launch.embedded_server", description=__doc__.splitlines()[0]
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
