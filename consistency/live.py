"""Live engines: sample completions of prompts, then rescore them with the same engines."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from consistency.check import Checked, Rescorer, check
from consistency.engine.ask import connect, sample_all, worker_of
from consistency.engine.reply import Engine, Identity, Reply, SamplingParams, Top
from consistency.engine.wire import open_session
from consistency.errors import NothingToCompare
from consistency.prompts import Prompt
from consistency.request import Request
from consistency.rescoring import Rescoring, rescore
from consistency.score import Progress, Scorer
from consistency.source import Sampled, Sampling, concatenate
from consistency.tokens import Completion, Sequences, sequences_from_completions


@dataclass(frozen=True)
class EngineSamples:
    """Completions sampled by engines; `replies[i]` answers `prompts[i]`."""

    addresses: tuple[str, ...]
    identities: tuple[Identity, ...]
    prompts: tuple[Prompt, ...]
    replies: tuple[Reply, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Vocabulary:
    """Decoding function and size of a tokenizer's vocabulary."""

    decode: Callable[[list[int]], str]
    size: int


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Return the vocabulary of a Transformers tokenizer."""
    return Vocabulary(lambda ids: tokenizer.decode(ids), len(tokenizer))


def query_engines(
    addresses: Sequence[str],
    prompts: Sequence[Prompt],
    num_samples: int,
    params: SamplingParams,
    vocabulary: Vocabulary,
    done: Callable[[int], None] = lambda num_replies: None,
) -> EngineSamples:
    """Sample `num_samples` completions of every prompt, round robin over the engines.

    Raises:
        EngineError: an address does not answer, or without logprobs.
    """
    repeated = tuple(prompt for prompt in prompts for _ in range(num_samples))

    async def query() -> EngineSamples:
        async with open_session() as session:
            engines = await connect(session, addresses, vocabulary.decode, vocabulary.size)
            replies = await sample_all(engines, [prompt.ids for prompt in repeated], params, done)
            identities = tuple(engine.identity for engine in engines)
            return EngineSamples(tuple(addresses), identities, repeated, tuple(replies), params)

    return asyncio.run(query())


def check_engines(
    samples: EngineSamples,
    sampled: Sampled,
    request: Request,
    vocabulary: Vocabulary,
    progress: Progress = lambda num_tokens: None,
) -> Checked:
    """Compare the replies of engines with a model. Raises as `check` does."""
    return check(sampled, request, progress, make_rescorer(samples.addresses, vocabulary))


def sampled_of(samples: EngineSamples, trainer_dtype: str) -> Sampled:
    """Turn replies into columns; the model scores them in `trainer_dtype`.

    Raises:
        NothingToCompare: no reply holds a token.
    """
    params, identities = samples.params, samples.identities
    if not any(reply.output_ids for reply in samples.replies):
        raise NothingToCompare(
            f"{len(samples.replies)} replies of the engines hold no token: are the prompts too long?"
        )
    rows = [
        one_sequence(prompt, reply, number, worker_of(number, len(identities)))
        for number, (prompt, reply) in enumerate(zip(samples.prompts, samples.replies, strict=True))
        if reply.output_ids
    ]
    dtypes = {identity.quantization or identity.dtype or trainer_dtype for identity in identities}
    sampling = Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        greedy=params.temperature == 0.0,
        trainer_dtype=trainer_dtype,
        engine_dtype=min(dtypes),
        kv_cache_dtype=next((i.kv_cache_dtype for i in identities if i.kv_cache_dtype), None),
    )
    versions = {reply.version for reply in samples.replies}
    version = versions.pop() if len(versions) == 1 else None
    return Sampled({"live": concatenate(rows)}, sampling, version, tops_of(samples.replies))


def tops_of(replies: Sequence[Reply]) -> tuple[Top, ...] | None:
    """Return the top tokens of all compared replies; None if an engine did not report them."""
    compared = [reply for reply in replies if len(reply.logprobs) == len(reply.output_ids)]
    if any(reply.tops is None for reply in compared):
        return None
    return tuple(top for reply in compared for top in reply.tops or ())


def one_sequence(prompt: Prompt, reply: Reply, number: int, worker: int) -> Sequences:
    """Turn one reply into a row, with the columns that the engine reported."""
    row = sequences_from_completions([Completion(prompt.ids, reply.output_ids, reply.logprobs)])
    num_tokens = len(row.input_ids)
    return Sequences(
        row.input_ids,
        row.cu_seqlens,
        row.sampled,
        row.engine_logprobs,
        versions=None if reply.version is None else np.full(num_tokens, reply.version),
        prompt_id=np.full(row.num_rows, number),
        worker=np.full(row.num_rows, worker),
        cached_tokens=None if reply.cached_tokens is None else np.full(row.num_rows, reply.cached_tokens),
        length_differences=row.length_differences,
    )


def make_rescorer(addresses: Sequence[str], vocabulary: Vocabulary) -> Rescorer:
    """Return a function that makes the engines at the addresses score rows that they sampled."""

    def rescore_rows(scorer: Scorer, rows: Sequences, temperature: float) -> Rescoring:
        async def exchange() -> Rescoring:
            async with open_session() as session:
                engines: list[Engine] = await connect(session, addresses, vocabulary.decode, vocabulary.size)
                return await rescore(engines, scorer, rows, temperature)

        return asyncio.run(exchange())

    return rescore_rows
