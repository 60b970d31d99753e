"""Are sampled log-probs those of the trainer in every bit? One engine and trainer, many situations.

The result is a certificate, a small JSON file: what was sampled, how much of it differs, and with
what. Differences are exact: hexadecimal floats.

```
requests ── engine: batches of 1, 8, 64; reversed; again; next turn, with and without its cache ──> log-probs
                                                                                                      │ bit for bit
the same tokens ── trainer: packed rows, in other micro-batches ─────────────────────────────────> log-probs
```
"""

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from areal_core.config import MicroBatchSpec, TrainEngineConfig
from areal_core.data.batch import Batch
from areal_core.embedded.generate import generate
from areal_core.embedded.replica import Replica
from areal_core.engine.parity import batch_of, require_parity
from areal_core.engine.ranks import Ranks, join_ranks, leave_ranks
from areal_core.errors import ModelError
from areal_core.rollout.errors import RequestRefused
from areal_core.rollout.types import Sampling
from areal_core.trainer.build import shard_engine
from consistency.engines import call_all, connect, exchange
from consistency.live import Vocabulary

FORMAT = 1
PROVEN, REFUTED, UNDECIDED = "proven", "refuted", "undecided"
TOKENS_PER_MICRO_BATCH = 8192
UPDATE = 1e-3  # standard deviation of the noise that stands for a training step
GROUP = 64  # requests of a batch
LONGEST_PROMPT = 96  # tokens
NUM_NEW = 5  # tokens of a user's next turn


# Certificates.


@dataclass(frozen=True)
class FirstDifference:
    """The first token that differs in a check: its place in a completion, and both log-probs."""

    row: int
    position: int
    token: int
    engine: float
    trainer: float


@dataclass(frozen=True)
class Check:
    """Sampled log-probs against the trainer's in one situation.

    Args:
        num_tokens: compared tokens; 0 if the check did not run.
        num_different: those whose bits differ.
        max_abs: of the differences, in nats; infinity if a log-prob is not finite.
        cached_tokens: of the prompts, as the engine reports them; None where it does not.
        not_run: why it did not run; None if it did.
    """

    name: str
    num_tokens: int = 0
    num_different: int = 0
    max_abs: float = 0.0
    cached_tokens: int | None = None
    first: FirstDifference | None = None
    not_run: str | None = None


@dataclass
class Certificate:
    """The result of all checks: facts of the engine, sha256 and dtype of the model, versions."""

    engine: dict[str, str | None]
    model: dict[str, str]
    versions: dict[str, str]
    checks: Sequence[Check]

    def __post_init__(self) -> None:
        self.num_tokens = sum(check.num_tokens for check in self.checks)
        self.num_different = sum(check.num_different for check in self.checks)
        self.max_abs = max((check.max_abs for check in self.checks), default=0.0)  # in nats
        is_complete = all(check.not_run is None for check in self.checks)
        self.verdict = REFUTED if self.num_different else PROVEN if is_complete else UNDECIDED

    def document(self) -> dict[str, Any]:
        """Return what the file holds."""
        checks = [asdict(check) | {"max_abs": check.max_abs.hex()} for check in self.checks]
        for check in checks:
            if first := check["first"]:
                first |= {"engine": first["engine"].hex(), "trainer": first["trainer"].hex()}
        names = ("verdict", "num_tokens", "num_different", "engine", "model", "versions")
        facts = {name: getattr(self, name) for name in names}
        return {"certificate": FORMAT, **facts, "max_abs_difference": self.max_abs.hex(), "checks": checks}


def hash_model(folder: Path) -> str:
    """Return a sha256 of config and weights of a model's folder. Raises `ModelError`."""
    files = sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")])
    if len(files) < 2:
        raise ModelError(
            f"{folder} has no config.json with safetensors files beside it: give the folder of a model"
        )
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def compare(
    name: str, sampled: list[tuple[list[int], list[float]]], trained: list[list[float]], **facts: Any
) -> Check:
    """Compare log-probs in float32, bit for bit.

    `sampled` has tokens and the engine's log-probs, `trained` the trainer's of the same tokens;
    `facts` are further fields of the check.
    """
    num_tokens, num_different, max_abs, first = 0, 0, 0.0, None
    for row, ((tokens, mine), theirs) in enumerate(zip(sampled, trained, strict=True)):
        num_tokens += len(tokens)
        for position, (token, engine, trainer) in enumerate(zip(tokens, mine, theirs, strict=True)):
            if engine == trainer and math.isfinite(engine):
                continue
            num_different += 1
            difference = abs(engine - trainer)
            max_abs = max(max_abs, difference if math.isfinite(difference) else math.inf)
            first = first or FirstDifference(row, position, token, engine, trainer)
    return Check(name, num_tokens, num_different, max_abs, first=first, **facts)


# The trainer, and engines.


class Trainer:
    """A train engine with `attn_impl=batch_invariant`, of a model's folder.

    Raises:
        ModelError: the model cannot be loaded, or its log-probs depend on the batch.
    """

    def __init__(self, path: str, dtype: str, ranks: Ranks) -> None:
        spec = MicroBatchSpec(max_tokens_per_mb=TOKENS_PER_MICRO_BATCH)
        options = TrainEngineConfig(path=path, dtype=dtype, attn_impl="batch_invariant", mb_spec=spec)
        self.dtype, self.ranks, self.engine = dtype, ranks, shard_engine(options, ranks)
        require_parity(self.engine, path)

    def score(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Return the log-probs of the completions of rows, (prompt, completion) each."""
        scored = self.engine.compute_logprobs(batch_with_mask(rows)).tolist() if rows else []
        return [
            line[len(prompt) - 1 : len(prompt) - 1 + len(completion)]
            for line, (prompt, completion) in zip(scored, rows, strict=True)
        ]

    @torch.no_grad()
    def change_weights(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.engine.model.parameters():
            mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            mine.add_(UPDATE * torch.randn(mine.shape, generator=generator))


def batch_with_mask(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Batch:
    batch = batch_of([torch.tensor([*prompt, *completion]) for prompt, completion in rows])
    starts = torch.tensor([len(prompt) - 1 for prompt, _ in rows])
    batch["loss_mask"] *= torch.arange(batch["loss_mask"].shape[1]) >= starts[:, None]
    return batch


class Request(NamedTuple):
    """A prompt, and a seed where the engine has seeds."""

    prompt: list[int]
    seed: int


class Completed(NamedTuple):
    """Sampled tokens with the log-probs that the engine reported, and its cached tokens."""

    tokens: list[int]
    logprobs: list[float]
    cached_tokens: int | None


class EmbeddedTarget:
    """The embedded engine with `attn_impl=batch_invariant`.

    Raises:
        ModelError: the model cannot be loaded.
    """

    def __init__(self, path: str, dtype: str) -> None:
        self._replica = Replica(path, getattr(torch, dtype), torch.device("cpu"), is_invariant=True)
        self.vocabulary_size: int = self._replica.model.config.get_text_config().vocab_size
        self.facts: dict[str, str | None] = {"software": "embedded engine", "dtype": dtype}

    def sample(self, requests: Sequence[Request], batch_size: int, max_new_tokens: int) -> list[Completed]:
        """Sample at temperature 1, in batches of exactly `batch_size`, but for the last one."""
        found = []
        for start in range(0, len(requests), batch_size):
            prompts, seeds = zip(*requests[start : start + batch_size], strict=True)
            options = [Sampling(max_new_tokens=max_new_tokens)] * len(prompts)
            limits, size = [max_new_tokens] * len(prompts), self.vocabulary_size
            found += generate(self._replica, prompts, options, limits, seeds, vocab_size=size)
        return [Completed(row.tokens, row.logprobs, row.cached_tokens) for row in found]

    def flush(self) -> bool:
        """Empty the prefix cache."""
        self._replica.prefixes.clear()
        return True

    def update(self, trainer: Trainer, seed: int) -> None:
        """Change the trainer's weights, and load them as a weight update of training does."""
        trainer.change_weights(seed)
        self._replica.load(trainer.engine.named_full_tensors())


class ServerTarget:
    """A server with SGLang's native API, vLLM's, or OpenAI's with log-probs of tokens.

    Every call raises `EngineError` if the server does not answer, or without log-probs. Its weight
    updates are those of `entry.conform`.
    """

    def __init__(self, address: str, vocabulary: Vocabulary) -> None:
        (self._engine,) = connect([address], vocabulary.decode, vocabulary.size)
        self.vocabulary_size = vocabulary.size
        names = ("software", "dtype", "quantization", "kv_cache_dtype")
        self.facts: dict[str, str | None] = {n: getattr(self._engine.identity, n) for n in names}

    def sample(self, requests: Sequence[Request], batch_size: int, max_new_tokens: int) -> list[Completed]:
        """Send `batch_size` requests at a time; the server chooses the seeds."""
        params = Sampling(max_new_tokens=max_new_tokens)
        calls = [partial(self._engine.sample, request.prompt, params) for request in requests]
        replies = call_all(calls, batch_size, lambda _: None)
        # The trainer's log-probs are float32; a server may print fewer or more digits.
        numbers = [np.array(reply.logprobs, dtype=np.float32).tolist() for reply in replies]
        pairs = zip(replies, numbers, strict=True)
        return [Completed(list(r.output_ids), logprobs, r.cached_tokens) for r, logprobs in pairs]

    def flush(self) -> bool:
        """Ask for an empty prefix cache by SGLang's route; a server without it keeps its cache."""
        try:
            exchange(self._engine.address, "POST", "/flush_cache", None)
        except RequestRefused:
            return False
        return True


# All checks.


@dataclass
class Run:
    """The checks in order; each is reported when it has run."""

    target: EmbeddedTarget | ServerTarget
    trainer: Trainer
    max_new_tokens: int
    seed: int
    report: Callable[[Check], None]

    def __post_init__(self) -> None:
        self.checks: list[Check] = []
        self._random = random.Random(self.seed)

    def requests(self, count: int = GROUP) -> list[Request]:
        """Draw requests: groups of four of one prompt, of 1 to 96 random tokens."""
        found: list[Request] = []
        while len(found) < count:
            prompt = self.tokens(self._random.randint(1, LONGEST_PROMPT))
            found += [Request(prompt, self._random.getrandbits(62)) for _ in range(4)]
        return found

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self.target.vocabulary_size) for _ in range(count)]

    def check(self, name: str, requests: Sequence[Request], batch_size: int = GROUP) -> list[Completed]:
        """Sample requests, compare their log-probs with the trainer's, and add the check."""
        completed = self.target.sample(requests, batch_size, self.max_new_tokens)
        rows = rows_of(requests, completed)
        sampled = [(c.tokens, c.logprobs) for c in completed if c.tokens]
        cached = [c.cached_tokens for c in completed if c.cached_tokens is not None]
        facts = {"cached_tokens": sum(cached) if len(cached) == len(completed) else None}
        self.add(compare(name, sampled, self.trainer.score(rows), **facts))
        return completed

    def add(self, check: Check) -> None:
        self.checks.append(check)
        self.report(check)

    def all(self, num_tokens: int) -> None:
        """Run every check but that of a weight update, until `num_tokens` are compared."""
        self.check("batch of 1", self.requests(GROUP // 4), 1)
        self.check("batch of 8", self.requests(), 8)
        requests = self.requests()
        completed = self.check("batch of 64", requests)
        self.check("other order", requests[::-1])
        self.check("repeated", requests)
        new = self.tokens(NUM_NEW)
        pairs = zip(requests, completed, strict=True)
        turns = [Request([*asked.prompt, *row.tokens, *new], asked.seed + 1) for asked, row in pairs]
        self.check("next turn, cached", turns)
        if self.target.flush():
            self.check("next turn, cache emptied", turns)
        else:
            self.add(Check("next turn, cache emptied", not_run="the engine has no route /flush_cache"))
        self.trainer_alone(rows_of(requests, completed))
        missing = num_tokens - sum(check.num_tokens for check in self.checks)
        if missing > 0:
            count = math.ceil(missing / max(1, sum(len(row.tokens) for row in completed))) * GROUP
            self.check("many batches of 64", self.requests(count))

    def trainer_alone(self, rows: Sequence[tuple[list[int], list[int]]]) -> None:
        """Compare the trainer with itself: packed rows in another order, and each row alone."""
        packed = self.trainer.score(rows[::-1])[::-1]
        alone = [self.trainer.score([row])[0] for row in rows]
        sampled = [(tokens, logprobs) for (_, tokens), logprobs in zip(rows, packed, strict=True)]
        self.add(compare("trainer, rows alone", sampled, alone))


def rows_of(requests: Sequence[Request], completed: Sequence[Completed]) -> list[tuple[list[int], list[int]]]:
    """Return prompt and completion of each request that got tokens."""
    pairs = zip(requests, completed, strict=True)
    return [(request.prompt, row.tokens) for request, row in pairs if row.tokens]


def certify(
    target: EmbeddedTarget | ServerTarget,
    path: str,
    sha256: str,
    dtype: str,
    num_tokens: int,
    max_new_tokens: int,
    seed: int,
    report: Callable[[Check], None],
) -> Certificate:
    """Certify an engine that holds the model at `path`, whose hash is `sha256`.

    Raises:
        ModelError: the model cannot be sampled from or scored batch-invariantly.
        EngineError: a server does not answer, or without log-probs.
    """
    ranks = join_ranks("cpu")
    try:
        run = Run(target, Trainer(path, dtype, ranks), max_new_tokens, seed, report)
        run.all(num_tokens)
        if isinstance(target, EmbeddedTarget):
            target.update(run.trainer, seed)
            run.check("after a weight update", run.requests())
    finally:
        leave_ranks()
    versions = {name: metadata.version(name) for name in ("areal-debug", "transformers")}
    versions |= {"torch": torch.__version__, "processor": torch.backends.cpu.get_cpu_capability()}
    return Certificate(target.facts, {"sha256": sha256, "dtype": dtype}, versions, run.checks)
