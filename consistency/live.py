"""Live engines: sample completions of prompts, compare them with a model, rescore with the engines.

Prompts are rows of ids, text or chats, tokenised by the model's tokenizer and chat template.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.data.images import as_image_bytes
from areal_core.data.processor import VisionProcessor
from areal_core.data.read import read_rows, rl_row
from areal_core.rollout.types import Sampling as RequestSampling
from consistency.check import Rescorer
from consistency.engines import MAX_CONCURRENT, EngineIdentity, Pictures, Reply, Top, call_all, connect
from consistency.errors import BadPrompts, NothingToCompare
from consistency.replies import find_contradictions
from consistency.rescoring import rescore
from consistency.source import Sampled, Sampling, concatenate, limit_of
from consistency.tokens import Completion, Sequences, sequences_from_completions

PROMPT_KINDS = "input_ids (numbers), messages (a chat), text (tokenised as it is), question or prompt"


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, with all placeholders of its images, and the row it comes from."""

    ids: tuple[int, ...]
    row: dict[str, Any]
    images: tuple[bytes, ...] = ()


def read_prompts(
    source: str,
    split: str | None,
    tokenizer: Any,
    count: int | None = None,
    processor: VisionProcessor | None = None,
) -> tuple[Prompt, ...]:
    """Read the first `count` prompts of a JSONL file, a text file (one per line) or a dataset.

    Raises:
        DatasetError: the source cannot be read.
        BadPrompts: it has no rows, or a row holds no prompt.
    """
    if source.endswith(".txt"):
        lines = Path(source).read_text(encoding="utf-8").splitlines()
        rows: list[dict[str, Any]] = [{"text": line} for line in lines if line.strip()]
    else:
        rows = read_rows(source, split, {})
    prompts = tuple(
        parse_prompt(row, tokenizer, f"{source}, row {number}", processor)
        for number, row in enumerate(itertools.islice(rows, count))
    )
    if not prompts:
        raise BadPrompts(f"{source} holds no prompt: write one JSON object per line with {PROMPT_KINDS}")
    return prompts


def parse_prompt(
    row: dict[str, Any], tokenizer: Any, where: str, processor: VisionProcessor | None = None
) -> Prompt:
    """Tokenise one row: a chat by the chat template, `text` as it is.

    Images are files, data: URLs, base64 or bytes.

    Raises:
        BadPrompts: the row holds no prompt, or the tokenizer has no chat template.
        ImageError: an image is damaged, or its placeholder is missing.
    """
    images = tuple(as_image_bytes(image) for image in row.get("images") or ())
    if images and processor is None:
        raise BadPrompts(f"{where} has images, and the model is a text model: give an image-text model")
    if "input_ids" in row:
        return Prompt(tuple(int(token) for token in row["input_ids"]), row, images)
    if "text" in row:
        ids = processor.tokenize(row["text"], images).input_ids if processor and images else None
        return Prompt(tuple(ids or tokenizer.encode(row["text"])), row, images)
    chat = rl_row(row, where)
    if processor and images:
        return Prompt(tuple(processor.prompt(chat["messages"], images).input_ids), chat, images)
    try:
        ids = tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=True, return_dict=False)
    except ValueError as error:
        raise BadPrompts(
            f"{where} is a chat, and the model's tokenizer has no chat template: give text instead"
        ) from error
    return Prompt(tuple(ids), chat)


@dataclass(frozen=True)
class EngineSamples:
    """Completions sampled by engines; `replies[i]` answers `prompts[i]`."""

    addresses: tuple[str, ...]
    identities: tuple[EngineIdentity, ...]
    prompts: tuple[Prompt, ...]
    replies: tuple[Reply, ...]
    params: RequestSampling


@dataclass(frozen=True)
class Vocabulary:
    """Decoding function and size of a tokenizer's vocabulary, and the placeholder of images."""

    decode: Callable[[list[int]], str]
    size: int
    image_token_id: int | None = None


def vocabulary_of(tokenizer: Any, processor: VisionProcessor | None = None) -> Vocabulary:
    """Return the vocabulary of a Transformers tokenizer, or of the processor around it."""
    placeholder = None if processor is None else processor.image_token_id
    return Vocabulary(lambda ids: tokenizer.decode(ids), len(tokenizer), placeholder)


def query_engines(
    addresses: Sequence[str],
    prompts: Sequence[Prompt],
    num_samples: int,
    params: RequestSampling,
    vocabulary: Vocabulary,
    done: Callable[[int], None] = lambda _: None,
) -> EngineSamples:
    """Sample `num_samples` completions of every prompt, round robin over the engines.

    Raises:
        EngineError: an address does not answer, or without logprobs.
    """
    repeated = tuple(prompt for prompt in prompts for _ in range(num_samples))
    engines = connect(addresses, vocabulary.decode, vocabulary.size)
    calls = [
        partial(engines[i % len(engines)].sample, prompt.ids, params, pictures_of(prompt, vocabulary))
        for i, prompt in enumerate(repeated)
    ]
    replies = call_all(calls, MAX_CONCURRENT * len(engines), done)
    identities = tuple(engine.identity for engine in engines)
    return EngineSamples(tuple(addresses), identities, repeated, tuple(replies), params)


def pictures_of(prompt: Prompt, vocabulary: Vocabulary) -> Pictures | None:
    """Return the images that a request carries. Raises `BadPrompts` for a text model."""
    if not prompt.images:
        return None
    if vocabulary.image_token_id is None:
        raise BadPrompts("the prompts have images, and the model is a text model: give an image-text model")
    return Pictures(prompt.images, vocabulary.image_token_id)


def sampled_of(samples: EngineSamples, trainer_dtype: str, vocabulary: Vocabulary) -> Sampled:
    """Compare the facts of the replies, and turn them into columns.

    The model scores them in `trainer_dtype`.

    Raises:
        NothingToCompare: no reply holds a token.
    """
    params, identities = samples.params, samples.identities
    if not any(reply.output_ids for reply in samples.replies):
        raise NothingToCompare(
            f"{len(samples.replies)} replies of the engines hold no token: are the prompts too long?"
        )
    with_images = frozenset(i for i, prompt in enumerate(samples.prompts) if prompt.images)
    contradictions = find_contradictions(
        [prompt.ids for prompt in samples.prompts], samples.replies, params, vocabulary.decode, with_images
    )
    prompts = dict.fromkeys((prompt.ids, prompt.images) for prompt in samples.prompts)
    numbers = {prompt: number for number, prompt in enumerate(prompts)}
    rows = [
        one_sequence(prompt, reply, numbers[prompt.ids, prompt.images], number % len(identities))
        for number, (prompt, reply) in enumerate(zip(samples.prompts, samples.replies, strict=True))
        if reply.output_ids
    ]
    dtypes = {identity.quantization or identity.dtype or trainer_dtype for identity in identities}
    sampling = Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=limit_of(params.top_k),
        greedy=params.temperature == 0.0,
        trainer_dtype=trainer_dtype,
        engine_dtype=min(dtypes),
        kv_cache_dtype=next((i.kv_cache_dtype for i in identities if i.kv_cache_dtype), None),
    )
    versions = {reply.version for reply in samples.replies}
    version = versions.pop() if len(versions) == 1 else None
    tops = tops_of(samples.replies)
    return Sampled({"live": concatenate(rows)}, sampling, version, tops, contradictions=contradictions)


def tops_of(replies: Sequence[Reply]) -> tuple[Top, ...] | None:
    """Return the top tokens of all compared replies; None if an engine did not report them."""
    compared = [reply for reply in replies if len(reply.logprobs) == len(reply.output_ids)]
    if any(reply.tops is None or len(reply.tops) != len(reply.logprobs) for reply in compared):
        return None
    return tuple(top for reply in compared for top in reply.tops or ())


def one_sequence(prompt: Prompt, reply: Reply, prompt_id: int, worker: int) -> Sequences:
    row = sequences_from_completions(
        [Completion(prompt.ids, reply.output_ids, reply.logprobs, prompt.images)]
    )
    num_tokens = len(row.input_ids)
    return replace(
        row,
        versions=None if reply.version is None else np.full(num_tokens, reply.version),
        prompt_id=np.full(row.num_rows, prompt_id),
        worker=np.full(row.num_rows, worker),
        cached_tokens=None if reply.cached_tokens is None else np.full(row.num_rows, reply.cached_tokens),
    )


def make_rescorer(addresses: Sequence[str], vocabulary: Vocabulary) -> Rescorer:
    """Return a function that makes the engines at the addresses score rows that they sampled."""
    return lambda scorer, rows, temperature: rescore(
        connect(addresses, vocabulary.decode, vocabulary.size), scorer, rows, temperature
    )
