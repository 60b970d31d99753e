"""Live engines: sample completions of prompts, then have the same engines score what they sampled."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from consistency.check import AskAgain, Checked, check
from consistency.engine.ask import connect, sample_all, worker_of
from consistency.engine.reply import Engine, Identity, Law, Reply, Top
from consistency.engine.wire import open_session
from consistency.errors import NothingToCompare
from consistency.prompts import Prompt
from consistency.request import Request
from consistency.rescoring import Rescoring, rescore
from consistency.score import Progress, Scorer
from consistency.source import Sampled, Sampling, concatenate
from consistency.tokens import Completion, Sequences, sequences_from_completions


@dataclass(frozen=True)
class Conversation:
    """What engines at some addresses answered. `replies[i]` is to `prompts[i]`."""

    addresses: tuple[str, ...]
    identities: tuple[Identity, ...]
    prompts: tuple[Prompt, ...]
    replies: tuple[Reply, ...]
    law: Law


@dataclass(frozen=True)
class Words:
    """What a tokenizer must tell: how ids become text, and how many there are."""

    decode: Callable[[list[int]], str]
    vocabulary_size: int


def words_of(tokenizer: Any) -> Words:
    """From a Transformers tokenizer."""
    return Words(lambda ids: tokenizer.decode(ids), len(tokenizer))


def ask_engines(
    addresses: Sequence[str],
    prompts: Sequence[Prompt],
    num_samples: int,
    law: Law,
    words: Words,
    done: Callable[[int], None] = lambda num_replies: None,
) -> Conversation:
    """`num_samples` completions of every prompt, the engines in turn.

    Raises:
        EngineError: an address does not answer, or not with logprobs.
    """
    asked = tuple(prompt for prompt in prompts for _ in range(num_samples))

    async def ask() -> Conversation:
        async with open_session() as session:
            engines = await connect(session, addresses, words.decode, words.vocabulary_size)
            replies = await sample_all(engines, [prompt.ids for prompt in asked], law, done)
            identities = tuple(engine.identity for engine in engines)
            return Conversation(tuple(addresses), identities, asked, tuple(replies), law)

    return asyncio.run(ask())


def check_engines(
    conversation: Conversation,
    sampled: Sampled,
    request: Request,
    words: Words,
    progress: Progress = lambda num_tokens: None,
) -> Checked:
    """Judge what engines answered by a model. Raises as `check` does."""
    return check(sampled, request, progress, asking_again(conversation.addresses, words))


def sampled_of(conversation: Conversation, trainer_dtype: str) -> Sampled:
    """The columns of what was answered; the model is scored in `trainer_dtype`. Raises NothingToCompare when no reply holds a token."""
    law, identities = conversation.law, conversation.identities
    if not any(reply.output_ids for reply in conversation.replies):
        raise NothingToCompare(
            f"the engines answered {len(conversation.replies)} prompts without a token: are the prompts too long?"
        )
    rows = [
        one_sequence(prompt, reply, number, worker_of(number, len(identities)))
        for number, (prompt, reply) in enumerate(zip(conversation.prompts, conversation.replies, strict=True))
        if reply.output_ids
    ]
    dtypes = {identity.quantization or identity.dtype or trainer_dtype for identity in identities}
    sampling = Sampling(
        temperature=law.temperature,
        top_p=law.top_p,
        top_k=law.top_k,
        greedy=law.temperature == 0.0,
        trainer_dtype=trainer_dtype,
        engine_dtype=min(dtypes),
        kv_cache_dtype=next((i.kv_cache_dtype for i in identities if i.kv_cache_dtype), None),
    )
    versions = {reply.version for reply in conversation.replies}
    version = versions.pop() if len(versions) == 1 else None
    return Sampled({"live": concatenate(rows)}, sampling, version, tops_of(conversation.replies))


def tops_of(replies: Sequence[Reply]) -> tuple[Top, ...] | None:
    """The likeliest tokens of all replies that are compared; None where one engine did not tell."""
    compared = [reply for reply in replies if len(reply.logprobs) == len(reply.output_ids)]
    if any(reply.tops is None for reply in compared):
        return None
    return tuple(top for reply in compared for top in reply.tops or ())


def one_sequence(prompt: Prompt, reply: Reply, number: int, worker: int) -> Sequences:
    """One reply as a row, with the columns that the engine told."""
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


def asking_again(addresses: Sequence[str], words: Words) -> AskAgain:
    """Has the engines at the addresses score rows that they sampled."""

    def ask(scorer: Scorer, rows: Sequences, temperature: float) -> Rescoring:
        async def exchange() -> Rescoring:
            async with open_session() as session:
                engines: list[Engine] = await connect(session, addresses, words.decode, words.vocabulary_size)
                return await rescore(engines, scorer, rows, temperature)

        return asyncio.run(exchange())

    return ask
