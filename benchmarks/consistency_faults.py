"""Plant one fault at a time behind a live server, and see which cause `consistency` names first.

    python -m benchmarks.consistency_faults [--only WORD ...] [--family llama] [--dtype bfloat16]

    consistency ── HTTP ──> proxy: changes requests or replies ── HTTP ──> embedded server

About a thousand tokens are sampled for each row of the table. An answer is right if the verdict is
a mismatch and its first cause is one of those of the fault; honest if it is inconclusive, or if its
first cause has a confidence below `SURE`; else wrong.
"""

import asyncio
import copy
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import ClientSession, web
from PIL import Image
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from areal_core.data.images import as_image_bytes
from areal_core.data.processor import VisionProcessor, load_processor
from areal_core.engine.model import load_model
from areal_core.rollout.http_thread import HttpThread
from areal_core.rollout.types import Sampling
from areal_core.testing import make_tiny_family, make_tiny_model, make_tiny_tokenizer
from areal_core.testing.embedded_server import EmbeddedServer
from areal_core.testing.tiny_vision import make_tiny_vision_model
from benchmarks.harness import read_options
from consistency.alternatives.variants import SCHEMES
from consistency.case import Request
from consistency.check import Checked, check
from consistency.live import Prompt, make_rescorer, query_engines, sampled_of, vocabulary_of

SURE = 0.8
NUM_PROMPTS, NUM_SAMPLES, NUM_TOKENS = 24, 2, 32
BOS = 2
Json = dict[str, Any]
Exchange = Callable[[Json], Awaitable[Json]]  # a request of /generate -> its reply
Proxy = Callable[[Exchange, Json], Awaitable[Json]]
Change = Callable[[Any, torch.Generator], None]  # of a model, in place


@dataclass(frozen=True)
class Engine:
    """One server: its weights, and what is done to requests and replies.

    `weights` changes a copy of the model, or returns another model; `config` are changed options,
    and `processor` those of the image processor. `text_only` engines
    read placeholders of images as text.
    """

    weights: Change | None = None
    config: Json = field(default_factory=dict)
    processor: Json = field(default_factory=dict)
    text_only: bool = False
    dtype: str | None = None
    max_rows: int = 256
    proxy: Proxy | None = None
    info: Callable[[Json], Json] = lambda info: info
    stale_prefix: bool = False
    reports_cache: bool = True


@dataclass(frozen=True)
class Fault:
    """A row of the table; without causes, the engines are sound."""

    name: str
    causes: tuple[str, ...] = ()
    engines: tuple[Engine, ...] = (Engine(),)
    params: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=NUM_TOKENS))
    num_samples: int = NUM_SAMPLES
    previous: Change | None = None
    dtype: str | None = None
    equal_lengths: bool = False
    images: bool = False
    num_prompts: int = NUM_PROMPTS


# Weights


def tensor(model: Any, name: str) -> torch.Tensor:
    """Return the one parameter whose name ends so."""
    (found,) = [value for key, value in model.named_parameters() if key.endswith(name)]
    return found.data


def moved(size: float, *names: str) -> Change:
    """Move tensors, all by default, by a share of their standard deviation.

    A tied output layer has a name of its own.
    """

    def change(model: Any, random: torch.Generator) -> None:
        for name, value in model.named_parameters(remove_duplicate=not names):
            noise = torch.randn(value.shape, generator=random)
            if not names or name.endswith(names):
                scale = value.std() if value.numel() > 1 and value.std() > 0 else 1.0
                value.data += size * scale * noise

    return change


def filled(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(model: Any, random: torch.Generator) -> None:
        tensor(model, name).copy_(function(tensor(model, name).clone()))

    return change


def replaced(*names: str) -> Change:
    """Draw tensors again, with the same mean and standard deviation."""

    def change(model: Any, random: torch.Generator) -> None:
        for name, value in model.named_parameters():
            drawn = torch.randn(value.shape, generator=random)
            if not names or name.endswith(names):
                value.data.copy_(value.mean() + drawn * (value.std() if value.std() > 0 else 0.02))

    return change


def head_rows(num_rows: int) -> Change:
    """Draw some rows of the output layer again."""

    def change(model: Any, random: torch.Generator) -> None:
        head = model.get_output_embeddings().weight.data
        rows = torch.randperm(len(head), generator=random)[:num_rows]
        head[rows] = head.std() * torch.randn((num_rows, head.shape[1]), generator=random)

    return change


def head_replaced(model: Any, random: torch.Generator) -> None:
    head = model.get_output_embeddings().weight.data
    head.copy_(head.std() * torch.randn(head.shape, generator=random))


def swapped_layers(model: Any, random: torch.Generator) -> None:
    """Exchange the MLPs of the first two layers."""
    layers = model.model.layers
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp


def tower_of(change: Change) -> Change:
    def only(model: Any, random: torch.Generator) -> None:
        text = [value for name, value in model.named_parameters() if ".visual." not in name]
        kept = [value.data.clone() for value in text]
        change(model, random)
        for value, own in zip(text, kept, strict=True):
            value.data.copy_(own)

    return only


def rounded(scheme: str) -> Change:
    def change(model: Any, random: torch.Generator) -> None:
        for module in model.base_model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = SCHEMES[scheme](module.weight.data.float())

    return change


# Requests and replies


def rows_of(reply: Json) -> list[list[Any]]:
    """Return the rows [logprob, id, text] of a reply."""
    rows: list[list[Any]] = reply["meta_info"]["output_token_logprobs"]
    return rows


def sending(change: Callable[[Json], Json]) -> Proxy:
    async def proxy(exchange: Exchange, request: Json) -> Json:
        return await exchange(change(copy.deepcopy(request)))

    return proxy


def options(**changes: Any) -> Proxy:
    return sending(lambda request: request | {"sampling_params": request["sampling_params"] | changes})


def prompt(change: Callable[[list[int]], list[int]], reports: bool = False) -> Proxy:
    """Change the prompt; `reports` leaves the number of tokens that the engine counted."""

    async def proxy(exchange: Exchange, request: Json) -> Json:
        reply = await exchange(request | {"input_ids": change(list(request["input_ids"]))})
        if not reports:
            reply["meta_info"]["prompt_tokens"] = len(request["input_ids"])
        return reply

    return proxy


def image_data(change: Callable[[list[str]], list[str]]) -> Proxy:
    return sending(lambda request: request | {"image_data": change(request["image_data"])})


def first_images() -> Proxy:
    """Give every request the images of the first one with the same ids."""
    first: dict[tuple[int, ...], list[str]] = {}

    def change(request: Json) -> Json:
        images = first.setdefault(tuple(request["input_ids"]), request["image_data"])
        return request | {"image_data": images}

    return sending(change)


def without_images(request: Json) -> Json:
    return {name: value for name, value in request.items() if name != "image_data"}


def replying(change: Callable[[Json], None]) -> Proxy:
    async def proxy(exchange: Exchange, request: Json) -> Json:
        reply = await exchange(request)
        change(reply)
        return reply

    return proxy


def values(change: Callable[[np.ndarray], np.ndarray]) -> Proxy:
    def in_place(reply: Json) -> None:
        rows = rows_of(reply)
        logprobs = change(np.array([row[0] for row in rows], np.float64)) if rows else []
        for row, value in zip(rows, logprobs, strict=True):
            row[0] = float(value) if np.isfinite(value) else None

    return replying(in_place)


def shifted(by: int) -> Proxy:
    """Give every token the logprob `by` places later."""
    return values(lambda logprobs: np.roll(logprobs, -by))


def exchanging(change: Callable[[Json, Json], None]) -> Proxy:
    """Exchange something between the replies of two concurrent requests."""
    waiting: list[tuple[Json, Json, asyncio.Future[None]]] = []

    async def proxy(exchange: Exchange, request: Json) -> Json:
        reply = await exchange(request)
        partner = next((w for w in waiting if w[0]["input_ids"] != request["input_ids"]), None)
        if partner is None:
            mine = (request, reply, asyncio.get_running_loop().create_future())
            waiting.append(mine)
            try:
                await asyncio.wait_for(mine[2], 5.0)
            except TimeoutError:
                waiting.remove(mine)
            return reply
        waiting.remove(partner)
        change(partner[1], reply)
        partner[2].set_result(None)
        return reply

    return proxy


def swap_replies(one: Json, other: Json) -> None:
    kept = dict(one)
    one.update(other)
    other.update(kept)


def swap_content(one: Json, other: Json) -> None:
    """Exchange the completions, and keep what identifies the requests."""
    for reply, source in ((one, copy.deepcopy(other)), (other, copy.deepcopy(one))):
        own = {key: reply["meta_info"][key] for key in ("id", "prompt_tokens", "cached_tokens")}
        reply.update(source)
        reply["meta_info"] = source["meta_info"] | own


def swap_logprobs(one: Json, other: Json) -> None:
    for first, second in zip(rows_of(one), rows_of(other), strict=False):
        first[0], second[0] = second[0], first[0]


def swap_texts(one: Json, other: Json) -> None:
    one["text"], other["text"] = other["text"], one["text"]


def short(of: str) -> Callable[[Json], None]:
    """Leave the last entry out of a list, or of all of them."""

    def change(reply: Json) -> None:
        meta = reply["meta_info"]
        if of in ("logprobs", "lists"):
            meta["output_token_logprobs"] = meta["output_token_logprobs"][:-1]
            meta["output_top_logprobs"] = meta["output_top_logprobs"][:-1]
        if of in ("ids", "lists"):
            reply["output_ids"] = reply["output_ids"][:-1]

    return change


def first_is_zero(reply: Json) -> None:
    for row in rows_of(reply)[:1]:
        row[0] = 0.0


def other_ids(reply: Json) -> None:
    """Re-tokenise: one id of the list of ids is another one."""
    ids = reply["output_ids"]
    if len(ids) > 4:
        ids[len(ids) // 2] = 5 + (ids[len(ids) // 2] + 1) % 90


def one_seed() -> Proxy:
    """Answer a prompt that was seen before with the same completion."""
    known: dict[tuple[int, ...], asyncio.Task[Json]] = {}

    async def proxy(exchange: Exchange, request: Json) -> Json:
        key = tuple(request["input_ids"])
        if key not in known:
            known[key] = asyncio.ensure_future(exchange(request))
        reply = copy.deepcopy(await known[key])
        reply["meta_info"]["id"] = request.get("rid", reply["meta_info"]["id"])
        return reply

    return proxy


def noisy(size: float, wrong: Callable[[np.ndarray], np.ndarray]) -> Proxy:
    """Add noise to the logprobs at some places of each reply."""
    random = np.random.default_rng(0)

    def change(logprobs: np.ndarray) -> np.ndarray:
        noise = size * random.standard_normal(len(logprobs)) * wrong(np.arange(len(logprobs)))
        return -np.abs(logprobs + noise)

    return values(change)


def every_second(proxy: Proxy) -> Proxy:
    """Apply a fault to every second request."""
    count = itertools.count()

    async def chosen(exchange: Exchange, request: Json) -> Json:
        return await (proxy(exchange, request) if next(count) % 2 else exchange(request))

    return chosen


def without(*names: str) -> Callable[[Json], Json]:
    """Leave fields of `/server_info` out, as other versions do."""
    return lambda info: {name: value for name, value in info.items() if name not in names}


def claims_float32(info: Json) -> Json:
    """Claim another dtype than the one that is served."""
    return info | {"dtype": "float32"}


def bf16(logprobs: np.ndarray) -> np.ndarray:
    return torch.as_tensor(logprobs).bfloat16().double().numpy()


def reports(**changes: Any) -> Proxy:
    """Change fields of `meta_info`; functions get the old value."""

    def change(reply: Json) -> None:
        meta = reply["meta_info"]
        for name, value in changes.items():
            meta[name] = value(meta[name]) if callable(value) else value

    return replying(change)


UPDATE = moved(0.1)
Q, DOWN, NORM = "layers.1.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight", "model.norm.weight"
GATE = "layers.0.mlp.gate_proj.weight"  # norms after Gemma 2's layers undo the halving of others


def at(temperature: float = 1.0, top_p: float = 1.0) -> Sampling:
    return Sampling(temperature=temperature, top_p=top_p, max_new_tokens=NUM_TOKENS)


def proxied(*proxies: Proxy) -> tuple[Engine, ...]:
    return tuple(Engine(proxy=proxy) for proxy in proxies)


def holding(*weights: Change) -> tuple[Engine, ...]:
    """One engine for each change of the weights."""
    return tuple(Engine(weights=change) for change in weights)


LIMITED = {"size": {"shortest_edge": 128, "longest_edge": 512}}
WEIGHTS = ("R24", "R25", "R26", "R33")
SOUND = (
    Fault("sound, float32"),
    Fault("sound, one request a batch", engines=(Engine(max_rows=1),)),
    Fault("sound, eight requests a batch", engines=(Engine(max_rows=8),)),
    Fault("sound, bfloat16 on both sides", engines=(Engine(dtype="bfloat16"),), dtype="bfloat16"),
    Fault("sound, bfloat16 engine and float32 trainer", engines=(Engine(dtype="bfloat16"),), dtype="float32"),
    Fault("sound, bfloat16, one request a batch", engines=(Engine(dtype="bfloat16", max_rows=1),), dtype="bfloat16"),
    Fault("sound, temperature 0.7", params=at(0.7)),
    Fault("sound, temperature 1.3", params=at(1.3)),
    Fault("sound, greedy", params=at(0.0)),
    Fault("sound, two servers", engines=(Engine(), Engine())),
    Fault("sound, float32 and bfloat16 servers", engines=(Engine(), Engine(dtype="bfloat16")), dtype="float32"),
    Fault("sound, prefix cache", engines=proxied(every_second(reports(cached_tokens=6)))),
    Fault("sound, 150 tokens", num_prompts=6, num_samples=1),
    Fault("sound, four samples a prompt", num_prompts=12, num_samples=4),
    Fault("sound, server_info without optional fields", engines=(Engine(info=without("enable_lora", "quantization", "dtype")),)),
    Fault("sound, previous weights given", previous=UPDATE),
    Fault("sound, images", images=True),
)  # fmt: skip
FAULTS = (
    Fault("stale weights", ("R24", "R25"), holding(UPDATE), previous=UPDATE),
    Fault("stale weights, previous not given", WEIGHTS, holding(UPDATE)),
    Fault("stale weights, small update, not given", WEIGHTS, holding(moved(0.01))),
    Fault("one stale tensor", ("R25",), holding(moved(0.1, Q)), previous=UPDATE),
    Fault("one stale tensor, down_proj", ("R25",), holding(moved(0.1, DOWN)), previous=UPDATE),
    Fault("one stale tensor, not given", WEIGHTS, holding(moved(0.1, Q))),
    Fault("one stale tensor, small, not given", WEIGHTS, holding(moved(0.02, DOWN))),
    Fault("embedding moved", WEIGHTS, holding(moved(0.05, "embed_tokens.weight"))),
    Fault("norm weight doubled", (*WEIGHTS, "R01", "R54"), holding(filled(NORM, lambda w: 2 * w))),
    Fault("tensor zeroed", WEIGHTS, holding(filled(Q, torch.zeros_like))),
    Fault("tensor redrawn", WEIGHTS, holding(replaced(DOWN))),
    Fault("tensor halved", WEIGHTS, holding(filled(GATE, lambda w: w / 2))),
    Fault("layers exchanged", WEIGHTS, holding(swapped_layers)),
    Fault("output layer replaced", ("R26", "R27", "R33"), holding(head_replaced)),
    Fault("output layer moved", ("R26", "R27"), holding(moved(0.05, "lm_head.weight"))),
    Fault("five rows of the output layer", ("R26",), holding(head_rows(5))),
    Fault("another checkpoint", ("R33", "R24"), holding(replaced())),
    Fault("int8 weights", ("R44",), holding(rounded("int8"))),
    Fault("int4 weights", ("R44",), holding(rounded("int4, groups of 16"))),
    Fault("rope base 1e6", ("R49",), (Engine(config={"rope_theta": 1e6}),)),
    Fault("rope base 5e5", ("R49",), (Engine(config={"rope_theta": 5e5}),)),
    Fault("rope base 8,000", ("R49",), (Engine(config={"rope_theta": 8e3}),)),
    Fault("positions scaled by 4", ("R49",), (Engine(config={"rope_type": "linear", "factor": 4.0}),)),
    Fault("norm epsilon 1e-2", ("R54",), (Engine(config={"rms_norm_eps": 1e-2}),)),
    Fault("undeclared bfloat16", ("R38", "R37", "R35"), (Engine(dtype="bfloat16", info=claims_float32),), dtype="float32"),
    Fault("temperature 0.8 applied", ("R01",), proxied(options(temperature=0.8))),
    Fault("temperature 1.05 applied", ("R01",), proxied(options(temperature=1.05))),
    Fault("greedy instead of sampled", ("R01", "R03", "R04"), proxied(options(temperature=0.0))),
    Fault("temperature ignored", ("R01",), proxied(options(temperature=1.0)), params=at(0.7)),
    Fault("temperature twice", ("R02",), proxied(options(temperature=0.49)), params=at(0.7)),
    Fault("top_p 0.9", ("R03", "R04"), proxied(options(top_p=0.9))),
    Fault("top_k 10", ("R03", "R04"), proxied(options(top_k=10))),
    Fault("EOS forbidden", ("R06",), proxied(options(min_new_tokens=NUM_TOKENS, ignore_eos=False))),
    Fault("second BOS, counted", ("R15",), proxied(prompt(lambda ids: [BOS, *ids], reports=True))),
    Fault("second BOS, hidden", ("R15", "R16"), proxied(prompt(lambda ids: [BOS, *ids]))),
    Fault("prompt cut, counted", ("R16",), proxied(prompt(lambda ids: ids[3:], reports=True))),
    Fault("prompt cut, hidden", ("R16", "R15"), proxied(prompt(lambda ids: ids[3:]))),
    Fault("system prompt added", ("R16",), proxied(prompt(lambda ids: [9, 30, 41, 17, 50, *ids], reports=True))),
    Fault("logprobs shifted by one", ("R11",), proxied(shifted(1))),
    Fault("logprobs shifted back", ("R11",), proxied(shifted(-1))),
    Fault("constant offset", ("R07",), proxied(values(lambda v: v - 0.1))),
    Fault("base 2", ("R08",), proxied(values(lambda v: v / np.log(2)))),
    Fault("probabilities", ("R08",), proxied(values(np.exp))),
    Fault("negative logprobs", ("R08",), proxied(values(np.negative))),
    Fault("rounded to bfloat16", ("R36",), proxied(values(bf16))),
    Fault("rounded to two digits", ("R36",), proxied(values(lambda v: np.round(v, 2)))),
    Fault("cut off at -3", ("R60",), proxied(values(lambda v: np.maximum(v, -3.0)))),
    Fault("some logprobs missing", ("R60",), proxied(values(lambda v: np.where(np.arange(len(v)) % 9 == 4, np.nan, v)))),
    Fault("first logprob 0", ("R60",), proxied(replying(first_is_zero))),
    Fault("every third logprob wrong", ("R45",), proxied(noisy(1.0, lambda at: at % 3 == 2))),
    Fault("replies exchanged", ("R12",), proxied(exchanging(swap_replies))),
    Fault("completions exchanged", ("R12",), proxied(exchanging(swap_content)), equal_lengths=True),
    Fault("some completions exchanged", ("R12",), proxied(every_second(exchanging(swap_content))), equal_lengths=True),
    Fault("logprobs exchanged", ("R12",), proxied(exchanging(swap_logprobs))),
    Fault("texts exchanged", ("R12", "R13"), proxied(exchanging(swap_texts))),
    Fault("logprobs one short", ("R17",), proxied(replying(short("logprobs")))),
    Fault("all lists one short", ("R17",), proxied(replying(short("lists")))),
    Fault("ids one short", ("R17",), proxied(replying(short("ids")))),
    Fault("other ids than logprobs", ("R13",), proxied(replying(other_ids))),
    Fault("more tokens than requested", ("R17", "R61"), proxied(options(max_new_tokens=NUM_TOKENS + 8))),
    Fault("repeated seeds", ("R10",), proxied(one_seed())),
    Fault("repeated seeds, four samples", ("R10",), proxied(one_seed()), num_prompts=12, num_samples=4),
    Fault("stale prefix cache", ("R29",), (Engine(stale_prefix=True),), previous=moved(0.3), num_samples=2),
    Fault("stale prefix cache, not given", ("R29",), (Engine(stale_prefix=True),)),
    Fault("one of two servers stale", ("R34",), (Engine(), Engine(weights=UPDATE))),
    Fault("one of three servers, one tensor", ("R34",), (Engine(), Engine(weights=moved(0.05, Q)), Engine())),
    Fault("one of two servers at temperature 0.8", ("R34", "R01"), (Engine(), Engine(proxy=options(temperature=0.8)))),
    Fault("one of two servers shifts logprobs", ("R34", "R11"), (Engine(), Engine(proxy=shifted(1)))),
    Fault("one of two servers, small change", ("R34",), (Engine(), Engine(weights=moved(0.002)))),
    Fault("images normalised by 0.5", ("R62",), (Engine(processor={"image_mean": [0.5] * 3, "image_std": [0.5] * 3}),), images=True),
    Fault("images resized bilinearly", ("R62",), (Engine(processor={"resample": 2}),), images=True),
    Fault("images of at most 512 pixels", ("R62",), (Engine(processor=LIMITED),), images=True),
    Fault("pixels not divided by 255", ("R62",), (Engine(processor={"do_rescale": False}),), images=True),
    Fault("vision tower stale", ("R65",), holding(tower_of(UPDATE)), previous=UPDATE, images=True),
    Fault("vision tower stale, not given", ("R65",), holding(tower_of(UPDATE)), images=True),
    Fault("images of the first request", ("R66",), proxied(first_images()), images=True),
    Fault("images lost", ("R67",), (Engine(text_only=True, proxy=sending(without_images)),), images=True),
    Fault("images in the reverse order", ("R67",), proxied(image_data(lambda data: data[::-1])), images=True),
    Fault("noise at late positions", ("R40", "R43", "R49", "R52"), proxied(noisy(0.5, lambda at: at >= 16))),
)  # fmt: skip


# Servers


def make_model(family: str, folder: Path, seed: int) -> Path:
    """Write a tiny model and its tokenizer."""
    tokenizer = make_tiny_tokenizer()
    if family == "qwen2_5_vl":
        return make_tiny_vision_model(folder, family, seed=seed, initializer_range=0.3)
    if family == "tiny":
        return make_tiny_model(folder, seed=seed)
    if family == "llama":
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            initializer_range=0.3,
            bos_token_id=BOS,
            eos_token_id=1,
            pad_token_id=0,
            dtype="float32",
        )
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    else:
        ids = {"bos_token_id": BOS, "eos_token_id": 1, "pad_token_id": 0}
        make_tiny_family(folder, family, seed=seed, vocab_size=len(tokenizer), **ids)
    tokenizer.save_pretrained(folder)
    return folder


def changed_model(model: Path, folder: Path, engine: Engine, seed: int) -> Path:
    """Write a copy of the model with the engine's weights and config; the model itself if equal."""
    if engine.weights is None and not engine.config and not engine.processor:
        return model
    loaded: Any = load_model(str(model), attn_implementation="sdpa")
    if engine.weights is not None:
        engine.weights(loaded, torch.Generator().manual_seed(100 + seed))
    rope = {key: engine.config[key] for key in engine.config if key in ("rope_theta", "rope_type", "factor")}
    if rope:
        loaded.config.rope_parameters = loaded.config.rope_parameters | rope
    for key in engine.config.keys() - rope.keys():
        setattr(loaded.config, key, engine.config[key])
    shutil.copytree(model, folder, dirs_exist_ok=True)  # its tokenizer and processor
    loaded.save_pretrained(folder)
    if engine.processor:
        file = folder / "processor_config.json"
        known = json.loads(file.read_text())
        file.write_text(json.dumps(known | {"image_processor": known["image_processor"] | engine.processor}))
    return folder


def with_stale_prefix(now: Path, before: Path, reports_cache: bool) -> Exchange:
    """Answer with keys and values of older weights for all but the prompt's last token.

    The first request of each prompt is fresh.
    """
    model, old = (AutoModelForCausalLM.from_pretrained(folder).float().eval() for folder in (now, before))
    seen: set[tuple[int, ...]] = set()
    random = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def sample(request: Json) -> Json:
        ids = list(request["input_ids"])
        is_cached = tuple(ids) in seen
        seen.add(tuple(ids))
        cache = (old if is_cached else model)(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
        rows: list[list[Any]] = []
        token = ids[-1]
        while len(rows) < request["sampling_params"]["max_new_tokens"] and token != 1:
            logits = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1]
            logprobs = torch.log_softmax(logits.float(), 0)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=random))
            rows.append([float(logprobs[token]), token, None])
        meta = {
            "id": request.get("rid", ""),
            "finish_reason": {"type": "stop" if token == 1 else "length"},
            "prompt_tokens": len(ids),
            "completion_tokens": len(rows),
            "cached_tokens": len(ids) - 1 if is_cached and reports_cache else 0,
            "weight_version": "0",
            "output_token_logprobs": rows,
            "output_top_logprobs": [[] for _ in rows],
        }
        return {"output_ids": [row[1] for row in rows], "meta_info": meta}

    async def exchange(request: Json) -> Json:
        return sample(request)

    return exchange


@contextmanager
def serving(engine: Engine, model: Path, before: Path, folder: Path, seed: int) -> Iterator[str]:
    """Yield the address of the proxy in front of an engine."""
    dtype = None if engine.dtype is None else getattr(torch, engine.dtype)
    server = EmbeddedServer(
        str(changed_model(model, folder, engine, seed)),
        dtype=dtype,
        seed=seed,
        max_rows=engine.max_rows,
        context_length=512,
    )
    if engine.text_only:
        server._replica.processor = None  # it refuses placeholders without images
    with closing(HttpThread(server.application(), "embedded")) as upstream:
        address = f"http://127.0.0.1:{upstream.port}"
        stale_prefix = with_stale_prefix(model, before, engine.reports_cache) if engine.stale_prefix else None
        with closing(HttpThread(proxy_of(engine, address, stale_prefix), "proxy")) as proxy:
            yield f"http://127.0.0.1:{proxy.port}"
    server.sampler.close()


def proxy_of(engine: Engine, address: str, instead: Exchange | None) -> web.Application:
    """The routes that the check uses; `instead` answers `/generate` in place of the server."""

    async def exchange(request: Json) -> Json:
        if instead is not None:
            return await instead(request)
        async with ClientSession() as session, session.post(f"{address}/generate", json=request) as reply:
            if reply.status != 200:
                raise web.HTTPBadRequest(text=await reply.text())
            found: Json = await reply.json()
            return found

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        answer = exchange(body) if engine.proxy is None else engine.proxy(exchange, body)
        return web.json_response(await answer)

    async def information(request: web.Request) -> web.Response:
        async with ClientSession() as session, session.get(address + request.path) as reply:
            return web.json_response(engine.info(await reply.json()))

    built = web.Application()
    built.router.add_post("/generate", generate)
    for path in ("/server_info", "/model_info"):
        built.router.add_get(path, information)
    return built


def make_prompts(fault: Fault, seed: int, processor: VisionProcessor | None) -> list[Prompt]:
    """Draw prompts of 8 to 20 tokens, or questions about one image, every third about two."""
    random = np.random.default_rng(seed)
    if processor is not None:
        count = [2 if number % 3 == 0 else 1 for number in range(fault.num_prompts)]
        drawn = [random.integers(0, 255, (int(n), 28, 40, 3), dtype=np.uint8) for n in count]
        return [image_prompt(processor, [Image.fromarray(pixels) for pixels in one]) for one in drawn]
    lengths = np.full(fault.num_prompts, 12) if fault.equal_lengths else 8 + np.arange(fault.num_prompts) % 13
    return [Prompt((BOS, *random.integers(5, 100, length - 1).tolist()), {}) for length in lengths]


def image_prompt(processor: VisionProcessor, pictures: list[Image.Image]) -> Prompt:
    images = tuple(map(as_image_bytes, pictures))
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": "how many?"}]
    return Prompt(
        tuple(processor.prompt([{"role": "user", "content": content}], images).input_ids), {}, images
    )


def in_dtype(fault: Fault, dtype: str) -> Fault:
    """Compute in a dtype on each side that names none."""
    engines = tuple(replace(engine, dtype=engine.dtype or dtype) for engine in fault.engines)
    return replace(fault, engines=engines, dtype=fault.dtype or dtype)


def examine(fault: Fault, model: Path, folder: Path, seed: int) -> Checked:
    folder.mkdir(parents=True)
    change = fault.previous or moved(0.3)
    before = changed_model(model, folder / "before", Engine(weights=change), seed)
    processor = load_processor(str(model)) if fault.images else None
    tokenizer: PreTrainedTokenizerBase = make_tiny_tokenizer() if processor is None else processor.tokenizer
    vocabulary = vocabulary_of(tokenizer, processor)
    with ExitStack() as running:
        addresses = [
            running.enter_context(serving(engine, model, before, folder / f"engine{number}", seed + number))
            for number, engine in enumerate(fault.engines)
        ]
        samples = query_engines(
            addresses, make_prompts(fault, seed, processor), fault.num_samples, fault.params, vocabulary
        )
        dtype = fault.dtype or "float32"
        request = Request(str(model), dtype, previous=str(before) if fault.previous is not None else None)
        rescorer = make_rescorer(samples.addresses, vocabulary)
        return check(sampled_of(samples, dtype, vocabulary), request, rescorer=rescorer)


def grade(fault: Fault, checked: Checked) -> str:
    """Return right, honest, wrong, or wrong with high confidence."""
    found = checked.diagnosis
    first = next(iter(found.causes), None)
    if found.verdict == "unknown":
        return "honest"
    if not fault.causes:
        return "right" if found.verdict == "healthy" else "WRONG, SURE"
    if first is not None and first.id in fault.causes:
        return "right"
    is_sure = first is None or first.confidence >= SURE
    return "WRONG, SURE" if is_sure else "wrong"


def main() -> int:
    """Print one row per fault, and the counts; return 1 if an answer is wrong."""
    families = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "tiny")
    given = read_options(__doc__, only=[""], family=families, dtype=("float32", "bfloat16"), seed=0)
    torch.set_num_threads(1)
    grades: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as place:
        models = {
            False: make_model(given.family, Path(place) / "model", given.seed),
            True: make_model("qwen2_5_vl", Path(place) / "images", given.seed),
        }
        chosen = [fault for fault in (*SOUND, *FAULTS) if any(word in fault.name for word in given.only)]
        for path in models.values():  # weights of that dtype, as in the checkpoints that are trained
            load_model(str(path), dtype=getattr(torch, given.dtype)).save_pretrained(path)
        chosen = [in_dtype(fault, given.dtype) for fault in chosen]
        for number, fault in enumerate(chosen):
            begin = time.perf_counter()
            try:
                checked = examine(fault, models[fault.images], Path(place) / str(number), given.seed)
            except ValueError as error:
                result, said = "refused", str(error)[:90]
            else:
                result, found = grade(fault, checked), checked.diagnosis
                first = next(iter(found.causes), None)
                named = "-" if first is None else f"{first.id} {first.confidence:.2f} {first.name}"
                size = found.measurement.metrics["mean_abs"]
                said = f"{found.verdict:9} {named[:70]:70} {found.measurement.num_tokens:5} {size:.2g}"
            grades[result] = grades.get(result, 0) + 1
            expected = "/".join(fault.causes) or "healthy"
            seconds = time.perf_counter() - begin
            print(f"{result:12} {fault.name:44} {expected:20} {said} {seconds:.1f}s", flush=True)
    print(grades)
    return int(any(name not in ("right", "honest") for name in grades))


if __name__ == "__main__":
    raise SystemExit(main())
