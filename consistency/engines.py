"""Live engines over HTTP that sample and rescore completions: SGLang, vLLM, OpenAI's API.

prompts x samples ──> one thread a request, MAX_CONCURRENT per server ──> engine i, round robin ──> Reply
                      the first EngineError cancels the rest

Requests and rescoring of SGLang are those of the core's wire. Replies are read here, since a reply
that contradicts itself is a finding (`replies.py`) and not an error. vLLM is asked by
`/v1/completions`, which every version has; the route of the core's wire needs 0.32.
"""

import http.client
import json
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from areal_core.rollout.errors import MalformedReply, RequestRefused
from areal_core.rollout.types import TOP_K_OFF, ModelRequest, Sampling
from areal_core.servers.server import call_on
from areal_core.servers.sglang import SGLANG
from consistency.errors import EngineError

Top = tuple[tuple[int, float], ...]  # (id, logprob), most likely first
NUM_TOPS = 5
MAX_CONCURRENT = 64
TIMEOUT_S = 600.0
RESET_PAUSES_S = (0.2, 1.0, 3.0)
AMBIGUOUS = -1  # id of a text that several ids decode to
# What SGLang reports of itself besides its version; a server that only has its routes does not.
OWN_FIELDS = frozenset({"internal_states", "schedule_policy", "mem_fraction_static", "chunked_prefill_size"})
BROKEN = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
T = TypeVar("T")


@dataclass(frozen=True)
class Pictures:
    """Encoded images of a prompt; each run of `placeholder` among its ids is one of them."""

    images: tuple[bytes, ...]
    placeholder: int


@dataclass(frozen=True)
class Reply:
    """One completion.

    `logprobs` belong to `output_ids`, `tops` are the most likely tokens at each position. Fields
    that the engine did not report are None.

    The rest says again, in another way, what was sent or returned: `num_prompt` and `num_output`
    tokens as counted, `ids` as listed apart from the logprobs, `text`, `finish` (stop, length,
    abort), `matched` (the token that stopped), `sent_id` and `returned_id` of the request.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: tuple[Top, ...] | None = None
    version: int | None = None
    cached_tokens: int | None = None
    num_prompt: int | None = None
    num_output: int | None = None
    ids: tuple[int, ...] | None = None
    text: str | None = None
    finish: str | None = None
    matched: int | None = None
    sent_id: str | None = None
    returned_id: str | None = None


@dataclass(frozen=True)
class EngineIdentity:
    """Identity that an engine reports; unknown fields are None."""

    software: str
    model: str
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None

    def describe(self) -> str:
        """Return one line."""
        precision = ", ".join(name for name in (self.dtype, self.quantization) if name)
        return f"{self.software} with {self.model}" + (f" ({precision})" if precision else "")


@dataclass(frozen=True)
class Engine:
    """One server. Every call raises `EngineError` with its address without a usable reply.

    `sample` returns a completion with the logprob of every token at the temperature of its options,
    `rescore` prefill logprobs at temperature 1 of the tokens after the prompt. `model` is the served
    name; `ids` maps a token's text to its id, or to AMBIGUOUS.
    """

    address: str
    identity: EngineIdentity
    model: str = ""
    ids: Mapping[str, int] = field(default_factory=dict)

    def complete(self, ids: Sequence[int], pictures: Pictures | None, **options: Any) -> Any:
        """Return the reply of `/v1/completions`; only SGLang takes images together with ids."""
        if pictures is not None:
            raise EngineError(
                f"{self.address} takes no images with token ids: give text prompts, or serve the model with SGLang"
            )
        payload = {"model": self.model, "prompt": list(ids), **options}
        return parse_json(f"{self.address}/v1/completions", post(self.address, "/v1/completions", payload))


class SGLang(Engine):
    """SGLang's `/generate`; logprobs of sampled tokens are under softmax(logits / temperature)."""

    def sample(self, prompt_ids: Sequence[int], params: Sampling, pictures: Pictures | None = None) -> Reply:
        """Sample one completion."""
        sampling, rid = replace(params, skip_special_tokens=False), uuid.uuid4().hex
        payload = SGLANG.generate_payload(list(prompt_ids), sampling, params.max_new_tokens, 0, rid)
        body = self.generate(payload | {"top_logprobs_num": NUM_TOPS}, prompt_ids, pictures)
        reply = parse_sglang_reply(self.address, parse_json(f"{self.address}/generate", body))
        return replace(reply, sent_id=rid)

    def rescore(
        self, input_ids: Sequence[int], num_prompt: int, pictures: Pictures | None = None
    ) -> tuple[float, ...]:
        """Compute prefill logprobs, which SGLang never scales by a temperature."""
        payload = SGLANG.score_payload(list(input_ids), num_prompt, uuid.uuid4().hex)
        body = self.generate(payload, input_ids[:num_prompt], pictures)
        try:
            return tuple(SGLANG.parse_score(body.encode(), list(input_ids[num_prompt:])).logprobs)
        except MalformedReply as error:
            raise EngineError(f"{self.address}/generate did not score its prompt: {error}") from error

    def generate(self, payload: dict[str, Any], prompt: Sequence[int], pictures: Pictures | None) -> str:
        return post(self.address, "/generate", with_pictures(payload, prompt, pictures))


class VLLM(Engine):
    """vLLM's completions with ids (`return_token_ids`).

    Logprobs are those of raw logits unless vLLM runs with `--logprobs-mode processed_logprobs`.
    """

    def sample(self, prompt_ids: Sequence[int], params: Sampling, pictures: Pictures | None = None) -> Reply:
        """Sample one completion."""
        answer = self.complete(
            prompt_ids,
            pictures,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=-1 if params.top_k == TOP_K_OFF else params.top_k,
            max_tokens=params.max_new_tokens,
            skip_special_tokens=False,
            logprobs=NUM_TOPS,
            return_token_ids=True,
            return_tokens_as_token_ids=True,  # top tokens as "token_id:123" instead of text
        )
        with reading(
            f"{self.address}/v1/completions returned no ids with logprobs: use vLLM 0.10.2 or newer"
        ):
            entry = answer["choices"][0]["logprobs"]
            return Reply(
                tuple(map(int, answer["choices"][0]["token_ids"])),
                numbers(entry["token_logprobs"]),
                tuple(
                    tuple(
                        (int(token.removeprefix("token_id:")), float(value)) for token, value in top.items()
                    )
                    for top in entry["top_logprobs"]
                ),
                **counted(answer),
            )

    def rescore(
        self, input_ids: Sequence[int], num_prompt: int, pictures: Pictures | None = None
    ) -> tuple[float, ...]:
        """Compute prefill logprobs; the one token that vLLM must generate as well is discarded."""
        answer = self.complete(input_ids, pictures, temperature=1.0, max_tokens=1, prompt_logprobs=0)
        with reading(f"{self.address}/v1/completions returned no logprobs of its prompt"):
            rows = answer["choices"][0]["prompt_logprobs"][num_prompt:]  # dicts of id to `{logprob, ...}`
            pairs = zip(rows, input_ids[num_prompt:], strict=True)
            return tuple(float(row[str(token)]["logprob"]) for row, token in pairs)


class OpenAI(Engine):
    """OpenAI-compatible completions. Tokens arrive as text; the tokenizer maps them back to ids."""

    def sample(self, prompt_ids: Sequence[int], params: Sampling, pictures: Pictures | None = None) -> Reply:
        """Sample one completion. The API has no top_k."""
        if params.top_k != TOP_K_OFF:
            raise EngineError(
                f"{self.address} has OpenAI's API, which has no top_k ({params.top_k}): omit it"
            )
        answer = self.complete(
            prompt_ids,
            pictures,
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=params.max_new_tokens,
            logprobs=1,
        )
        with reading(f"{self.address}/v1/completions returned no logprobs: it must support logprobs=1"):
            entry, facts = answer["choices"][0]["logprobs"], counted(answer)
            texts, logprobs = list(map(str, entry["tokens"])), numbers(entry["token_logprobs"])
        return Reply(tuple(self.id_of(text) for text in texts), logprobs, **facts)

    def rescore(
        self, input_ids: Sequence[int], num_prompt: int, pictures: Pictures | None = None
    ) -> tuple[float, ...]:
        """Compute prefill logprobs by echoing the prompt, which few servers still support."""
        answer = self.complete(input_ids, pictures, temperature=1.0, max_tokens=0, echo=True, logprobs=1)
        with reading(f"{self.address}/v1/completions does not echo logprobs"):
            values = answer["choices"][0]["logprobs"]["token_logprobs"]
            return tuple(float(value) for value in values[num_prompt : len(input_ids)])

    def id_of(self, text: str) -> int:
        """Return the id of a token's text. Raises EngineError unless exactly one decodes to it."""
        number = text.removeprefix("token_id:")
        if number != text and number.isdecimal():
            return int(number)
        if text not in self.ids:
            raise EngineError(
                f"{self.address} sampled {text!r}, which is not a token of the model's tokenizer: the tokenizers differ"
            )
        if self.ids[text] == AMBIGUOUS:
            raise EngineError(
                f"{self.address} sampled {text!r}, which several tokens decode to: "
                "use the engine's own API, which returns ids (SGLang /generate, vLLM return_token_ids)"
            )
        return self.ids[text]


Server = SGLang | VLLM | OpenAI


def with_pictures(
    payload: dict[str, Any], prompt_ids: Sequence[int], pictures: Pictures | None
) -> dict[str, Any]:
    """Return SGLang's JSON with images: it expands one placeholder for each image of the prompt."""
    if pictures is None:
        return payload
    images, placeholder = pictures.images, pictures.placeholder
    request = ModelRequest(
        input_ids=list(prompt_ids), sampling=Sampling(), images=images, image_token_id=placeholder
    )
    return SGLANG.with_images(payload, request)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise EngineError with this sentence where a reply lacks a field, or has another type there."""
    try:
        yield
    except BROKEN as error:
        raise EngineError(f"{what} ({error!r})") from error


def numbers(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float("nan") if value is None else float(value) for value in values)


def counted(answer: Any) -> dict[str, Any]:
    """Return the fields of `Reply` that a completion of OpenAI's format repeats."""
    usage, choice = answer.get("usage") or {}, answer["choices"][0]
    return {
        "num_prompt": usage.get("prompt_tokens"),
        "num_output": usage.get("completion_tokens"),
        "text": choice.get("text"),
        "finish": choice.get("finish_reason"),
    }


def parse_sglang_reply(address: str, answer: Any) -> Reply:
    """Parse a reply of `/generate`: rows are [logprob, id, text]. Raises EngineError."""
    with reading(f"{address}/generate returned no logprobs: it must support return_logprob"):
        meta = answer["meta_info"]
        rows, tops = meta["output_token_logprobs"], meta.get("output_top_logprobs")
        version, finish = str(meta.get("weight_version")), meta.get("finish_reason") or {}
        matched = finish.get("matched")
        counts: dict[str, Any] = {
            name: None if meta.get(key) is None else int(meta[key])
            for name, key in (
                ("cached_tokens", "cached_tokens"),
                ("num_prompt", "prompt_tokens"),
                ("num_output", "completion_tokens"),
            )
        }
        return Reply(
            output_ids=tuple(int(row[1]) for row in rows),
            logprobs=numbers([row[0] for row in rows]),
            tops=None
            if tops is None
            else tuple(tuple((int(i), float(value)) for value, i, _ in top or ()) for top in tops),
            version=int(version) if version.isdecimal() else None,
            ids=None if answer.get("output_ids") is None else tuple(map(int, answer["output_ids"])),
            text=answer.get("text"),
            finish=finish.get("type"),
            matched=matched if isinstance(matched, int) else None,
            returned_id=meta.get("id"),
            **counts,
        )


# Who serves an address.


def connect(
    addresses: Sequence[str], decode: Callable[[list[int]], str], vocabulary_size: int
) -> list[Server]:
    """Identify the engines at all addresses. Raises EngineError if one is not an engine."""
    return [identify(base_url(address), decode, vocabulary_size) for address in addresses]


def identify(address: str, decode: Callable[[list[int]], str], vocabulary_size: int) -> Server:
    info = get(address, "/server_info")
    if info is not None and "vllm_config" not in info:  # vLLM's servers of a run have this route, too
        return SGLang(address, parse_sglang_identity(address, info, get(address, "/model_info")))
    version, models = get(address, "/version"), get(address, "/v1/models")
    if models is None:
        raise EngineError(
            f"{address} answers neither /server_info (SGLang) nor /v1/models (vLLM, OpenAI): is it an inference server?"
        )
    try:
        card = models["data"][0]
        name = str(card["id"])
        if version is not None:
            return VLLM(address, EngineIdentity(f"vLLM {version['version']}", str(card["root"])), name)
    except (IndexError, KeyError, TypeError) as error:
        raise EngineError(f"{address}/v1/models names no model: it lacks {error}") from error
    identity = EngineIdentity("an OpenAI-compatible server", name)
    return OpenAI(address, identity, name, ids_of_texts(decode, vocabulary_size))


def ids_of_texts(decode: Callable[[list[int]], str], vocabulary_size: int) -> dict[str, int]:
    """Map the text of every token to its id.

    Byte pieces share the replacement character, so they are ambiguous.
    """
    found: dict[str, int] = {}
    for token in range(vocabulary_size):
        text = decode([token])
        found[text] = AMBIGUOUS if text in found else token
    return found


def parse_sglang_identity(address: str, info: Any, model: Any) -> EngineIdentity:
    """Parse `/server_info` and `/model_info`; what a version lacks is unknown. Raises EngineError.

    A server is called SGLang for its scheduler's fields, not for the version that it claims.
    """
    if not isinstance(info, dict) or not ("version" in info or info.keys() & OWN_FIELDS):
        raise EngineError(
            f"{address}/server_info names neither a version nor an option of SGLang: is it an inference server?"
        )

    def known(name: str) -> str | None:
        value = info.get(name)
        return None if value in (None, "", "auto") else str(value)

    path = (model if isinstance(model, dict) else {}).get("model_path", info.get("model_path"))
    version = known("version") or "unknown"
    if info.get("engine") is not None:
        software = f"{info['engine']} engine with the API of SGLang {version}"
    elif len(info.keys() & OWN_FIELDS) > 1:
        software = f"SGLang {version}"
    else:
        software = f"a server with the API of SGLang (it claims version {version}, without the fields of its scheduler)"
    model_name = "an unknown model" if path is None else str(path)
    return EngineIdentity(
        software, model_name, known("dtype"), known("quantization"), known("kv_cache_dtype")
    )


# Many requests at a time.


def call_all(calls: Sequence[Callable[[], T]], limit: int, done: Callable[[int], None]) -> list[T]:
    """Run `limit` calls at a time and return all results in order.

    The first exception is raised at once: it waits for no other call, and none begins after it.
    """
    waiting, finished = deque(enumerate(calls)), SimpleQueue[tuple[int, T | None, Exception | None]]()

    def work() -> None:
        while waiting:
            with suppress(IndexError):  # another thread took the last one
                number, call = waiting.popleft()
                try:
                    finished.put((number, call(), None))
                except Exception as error:  # raised by the caller's thread
                    finished.put((number, None, error))

    for _ in range(min(limit, len(calls))):
        Thread(target=work, daemon=True).start()
    results: dict[int, T] = {}
    while len(results) < len(calls):
        number, result, error = finished.get()
        if error is not None:
            waiting.clear()
            raise error
        results[number] = cast("T", result)
        done(1)
    return [results[number] for number in range(len(calls))]


# HTTP.


def base_url(text: str) -> str:
    """Turn `host:port` or a URL, with or without `/v1`, into a URL without a path.

    Raises EngineError.
    """
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EngineError(f"engine {text!r} is not an address: write http://host:port")
    return f"{parts.scheme}://{parts.netloc}"


def post(address: str, path: str, payload: Any) -> str:
    """Return the body of a 200 reply to a JSON payload. Raises EngineError."""
    try:
        return exchange(address, "POST", path, payload)
    except RequestRefused as error:
        raise EngineError(str(error)) from error


def get(address: str, path: str) -> Any | None:
    """Return the JSON of a 200 reply, None for another status. Raises EngineError without one."""
    try:
        return parse_json(address + path, exchange(address, "GET", path, None))
    except RequestRefused:
        return None


def exchange(address: str, method: str, path: str, payload: Any) -> str:
    parts = urlsplit(address)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    pauses_s = list(RESET_PAUSES_S)
    while True:
        try:
            return call_on(kind(parts.netloc, timeout=TIMEOUT_S), method, path, payload)
        except (OSError, http.client.HTTPException) as error:
            # A server that gets many connections at once drops those beyond its backlog.
            is_dropped = isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
            if not pauses_s or not is_dropped:
                raise EngineError(
                    f"no answer from {address}{path} ({type(error).__name__}: {error}): is the server up?"
                ) from error
        time.sleep(pauses_s.pop(0))


def parse_json(source: str, body: str) -> Any:
    """Parse a JSON text. Raises EngineError."""
    try:
        return json.loads(body)
    except ValueError as error:
        raise EngineError(f"{source} did not answer with JSON: {body[:300]!r}") from error
