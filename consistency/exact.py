"""Are sampled log-probs those of the trainer in every bit? One engine, one trainer, many situations.

The result is a certificate, a small JSON file: what was sampled, how much of it differs, and with
what. Differences are exact: hexadecimal floats.

```
requests ── engine: batches of 1, 8, 64; reversed; again; next turn, with and without its cache ──> log-probs
                                                                                                      │ bit for bit
the same tokens ── trainer: packed rows, in other micro-batches ─────────────────────────────────> log-probs
```
"""

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_core.config import MicroBatchSpec, TrainEngineConfig
from areal_core.data.batch import Batch
from areal_core.embedded.generate import generate
from areal_core.embedded.replica import Replica
from areal_core.engine.parity import batch_of, require_parity
from areal_core.engine.ranks import Ranks, join_ranks, leave_ranks
from areal_core.rollout.errors import RequestRefused
from areal_core.rollout.types import Sampling
from areal_core.trainer.build import shard_engine
from consistency.engines import SamplingParams, call_all, connect, exchange, post
from consistency.errors import BadCertificate
from consistency.live import Vocabulary

FORMAT = 1
PROVEN, REFUTED, UNDECIDED = "proven", "refuted", "undecided"


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
        seconds: of sampling.
    """

    name: str
    num_tokens: int = 0
    num_different: int = 0
    max_abs: float = 0.0
    cached_tokens: int | None = None
    first: FirstDifference | None = None
    not_run: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Certificate:
    """The result of all checks.

    Args:
        engine: facts that the engine reports.
        model: sha256 of the model's files, and dtype of the scoring.
        versions: of the software and the processor.
    """

    engine: dict[str, str | None]
    model: dict[str, str]
    versions: dict[str, str]
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> str:
        """Proven, refuted, or undecided where a check did not run."""
        if any(check.num_different for check in self.checks):
            return REFUTED
        return UNDECIDED if any(check.not_run is not None for check in self.checks) else PROVEN

    @property
    def num_tokens(self) -> int:
        """Number of compared tokens."""
        return sum(check.num_tokens for check in self.checks)

    @property
    def num_different(self) -> int:
        """Number of compared tokens whose bits differ."""
        return sum(check.num_different for check in self.checks)

    @property
    def max_abs(self) -> float:
        """Largest difference of all checks, in nats."""
        return max((check.max_abs for check in self.checks), default=0.0)

    def document(self) -> dict[str, Any]:
        """Return what the file holds."""
        return {
            "certificate": FORMAT,
            "verdict": self.verdict,
            "num_tokens": self.num_tokens,
            "num_different": self.num_different,
            "max_abs_difference": self.max_abs.hex(),
            "engine": self.engine,
            "model": self.model,
            "versions": self.versions,
            "checks": [
                asdict(check) | {"max_abs": check.max_abs.hex(), "first": _exact(check.first)}
                for check in self.checks
            ],
        }


def _exact(first: FirstDifference | None) -> dict[str, Any] | None:
    if first is None:
        return None
    return asdict(first) | {"engine": first.engine.hex(), "trainer": first.trainer.hex()}


@dataclass(frozen=True)
class Saved:
    """What is read back of a certificate's file."""

    verdict: str
    max_abs: float
    sha256: str
    dtype: str
    checks: frozenset[str]  # names of those that ran
    versions: dict[str, str]


def read_certificate(path: Path) -> Saved:
    """Read a certificate. Raises `BadCertificate`."""
    try:
        found = json.loads(path.read_text())
        if found["certificate"] != FORMAT:
            raise BadCertificate(
                f"{path} has certificate format {found['certificate']!r}; this version reads format {FORMAT}: "
                f"write it again"
            )
        saved = Saved(
            str(found["verdict"]),
            float.fromhex(found["max_abs_difference"]),
            str(found["model"]["sha256"]),
            str(found["model"]["dtype"]),
            frozenset(str(check["name"]) for check in found["checks"] if check["not_run"] is None),
            {str(name): str(version) for name, version in found["versions"].items()},
        )
    except OSError as error:
        raise BadCertificate(f"{path} cannot be read: {error.strerror}") from error
    except KeyError as error:
        raise BadCertificate(f"{path} is not a certificate: it has no {error}; -o writes one") from error
    except (UnicodeDecodeError, AttributeError, TypeError) as error:
        raise BadCertificate(f"{path} is not a certificate: {error}; -o writes one") from error
    except ValueError as error:
        if isinstance(error, BadCertificate):
            raise
        raise BadCertificate(f"{path} is not a certificate: {error}") from error
    if saved.verdict not in (PROVEN, REFUTED, UNDECIDED) or not saved.max_abs >= 0:
        raise BadCertificate(
            f"{path} has verdict {saved.verdict!r} and a largest difference of {saved.max_abs}: it is damaged"
        )
    return saved


def worse_than(found: Certificate, saved: Saved) -> list[str]:
    """Say in what a certificate is worse than a saved one; empty if in nothing.

    Raises:
        BadCertificate: they are of other models or dtypes, or a check of the saved one did not run.
    """
    if (saved.sha256, saved.dtype) != (found.model["sha256"], found.model["dtype"]):
        raise BadCertificate(
            f"the certificate is of model {saved.sha256[:12]} in {saved.dtype}, this is model "
            f"{found.model['sha256'][:12]} in {found.model['dtype']}: certify the same one"
        )
    ran = {check.name for check in found.checks if check.not_run is None}
    if missing := sorted(saved.checks - ran):
        raise BadCertificate(
            f"the certificate has checks that did not run now: {', '.join(missing)}; give the same options"
        )
    worse = []
    if saved.verdict == PROVEN and found.verdict == REFUTED:
        worse.append(f"it was proven, and {found.num_different} of {found.num_tokens} tokens differ")
    if found.max_abs > saved.max_abs:
        worse.append(f"the largest difference was {saved.max_abs:.3g} nats and is {found.max_abs:.3g}")
    return worse


def hash_model(folder: Path) -> str:
    """Return a sha256 of config and weights of a model's folder. Raises `BadCertificate`."""
    files = sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")])
    if len(files) < 2:
        raise BadCertificate(
            f"{folder} has no config.json with safetensors files beside it: give the folder of a model"
        )
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def compare(
    name: str, sampled: list[tuple[list[int], list[float]]], trained: list[list[float]], **facts: Any
) -> Check:
    """Compare log-probs in float32, bit for bit.

    Args:
        sampled: tokens of each completion, and the engine's log-probs.
        trained: the trainer's log-probs of the same tokens.
        facts: further fields of the check.
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


TOKENS_PER_MICRO_BATCH = 8192
UPDATE = 1e-3  # standard deviation of the noise that stands for a training step


class Trainer:
    """A train engine with `attn_impl=batch_invariant`.

    Args:
        path: folder of the model.
        dtype: of compute.

    Raises:
        ModelError: the model cannot be loaded, or its log-probs depend on the batch.
    """

    def __init__(self, path: str, dtype: str, ranks: Ranks) -> None:
        options = TrainEngineConfig(
            path=path,
            dtype=dtype,
            attn_impl="batch_invariant",
            mb_spec=MicroBatchSpec(max_tokens_per_mb=TOKENS_PER_MICRO_BATCH),
        )
        self._engine = shard_engine(options, ranks)
        require_parity(self._engine, path)

    def score(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Return the log-probs of the completions of rows, (prompt, completion) each."""
        batch = batch_with_mask(rows)
        scored = self._engine.compute_logprobs(batch).tolist()
        return [
            line[len(prompt) - 1 : len(prompt) - 1 + len(completion)]
            for line, (prompt, completion) in zip(scored, rows, strict=True)
        ]

    @torch.no_grad()
    def change_weights(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self._engine.model.parameters():
            mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            mine.add_(UPDATE * torch.randn(mine.shape, generator=generator))

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the weights as training sends them to an engine."""
        return self._engine.named_full_tensors()


def batch_with_mask(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Batch:
    batch = batch_of([torch.tensor([*prompt, *completion]) for prompt, completion in rows])
    starts = torch.tensor([len(prompt) - 1 for prompt, _ in rows])
    places = torch.arange(batch["loss_mask"].shape[1])
    batch["loss_mask"] *= places >= starts[:, None]
    return batch


@dataclass(frozen=True)
class Request:
    """A prompt, and a seed where the engine has seeds."""

    prompt: list[int]
    seed: int


@dataclass(frozen=True)
class Completed:
    """Sampled tokens with the log-probs that the engine reported, and its cached tokens."""

    tokens: list[int]
    logprobs: list[float]
    cached_tokens: int | None


class Target(Protocol):
    """An engine. Every call raises `EngineError` if it cannot be made."""

    facts: dict[str, str | None]
    vocabulary_size: int

    def sample(self, requests: Sequence[Request], batch_size: int, max_new_tokens: int) -> list[Completed]:
        """Sample at temperature 1, at most `batch_size` requests at a time."""
        ...

    def flush(self) -> bool:
        """Empty the prefix cache; return whether the engine did."""
        ...


class EmbeddedTarget:
    """The embedded engine with `attn_impl=batch_invariant`, or the fast one to compare with it."""

    def __init__(self, path: str, dtype: str, *, is_invariant: bool = True) -> None:
        """Load the model. Raises ModelError."""
        self._replica = Replica(path, getattr(torch, dtype), torch.device("cpu"), is_invariant=is_invariant)
        self.vocabulary_size = self._replica.model.config.get_text_config().vocab_size
        self.facts: dict[str, str | None] = {"software": "embedded engine", "dtype": dtype}

    def sample(self, requests: Sequence[Request], batch_size: int, max_new_tokens: int) -> list[Completed]:
        """Sample in batches of exactly `batch_size`, but for the last one."""
        found = []
        for start in range(0, len(requests), batch_size):
            batch = requests[start : start + batch_size]
            found += generate(
                self._replica,
                [request.prompt for request in batch],
                [Sampling(max_new_tokens=max_new_tokens)] * len(batch),
                [max_new_tokens] * len(batch),
                [request.seed for request in batch],
                vocab_size=self.vocabulary_size,
            )
        return [Completed(row.tokens, row.logprobs, row.cached_tokens) for row in found]

    def flush(self) -> bool:
        """Empty the prefix cache."""
        self._replica.prefixes.clear()
        return True

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights, as a weight update of training does."""
        self._replica.load(weights)


class ServerTarget:
    """A server with SGLang's native API, vLLM's, or OpenAI's with log-probs of tokens."""

    def __init__(self, address: str, vocabulary: Vocabulary) -> None:
        """Identify the server. Raises EngineError."""
        (self._engine,) = connect([address], vocabulary.decode, vocabulary.size)
        self.vocabulary_size = vocabulary.size
        identity = self._engine.identity
        self.facts: dict[str, str | None] = {
            "software": identity.software,
            "dtype": identity.dtype,
            "quantization": identity.quantization,
            "kv_cache_dtype": identity.kv_cache_dtype,
        }

    def sample(self, requests: Sequence[Request], batch_size: int, max_new_tokens: int) -> list[Completed]:
        """Send `batch_size` requests at a time; the server chooses the seeds."""
        params = SamplingParams(max_new_tokens=max_new_tokens)
        calls = [partial(self._engine.sample, request.prompt, params) for request in requests]
        return [
            # The trainer's log-probs are float32; a server may print fewer or more digits.
            Completed(
                list(reply.output_ids),
                np.array(reply.logprobs, dtype=np.float32).tolist(),
                reply.cached_tokens,
            )
            for reply in call_all(calls, batch_size, lambda _: None)
        ]

    def flush(self) -> bool:
        """Ask for an empty prefix cache by SGLang's route; a server without it keeps its cache."""
        try:
            exchange(self._engine.address, "POST", "/flush_cache", None)
        except RequestRefused:
            return False
        return True

    def load_from_disk(self, folder: str) -> None:
        """Load a checkpoint by SGLang's route. Raises EngineError."""
        post(self._engine.address, "/update_weights_from_disk", {"model_path": folder})


GROUP = 64  # requests of a batch
LONGEST_PROMPT = 96
AFTER_UPDATE = "after a weight update"
NUM_NEW = 5  # tokens of a user's next turn
Report = Callable[[Check], None]


class Run:
    """The checks in order; each is reported when it has run.

    Args:
        max_new_tokens: of a completion.
        seed: of prompts and, where the engine has seeds, of sampling.
    """

    def __init__(
        self, target: Target, trainer: Trainer, max_new_tokens: int, seed: int, report: Report
    ) -> None:
        self.target, self.trainer, self.max_new_tokens = target, trainer, max_new_tokens
        self.report = report
        self.checks: list[Check] = []
        self._random = random.Random(seed)

    def requests(self, count: int) -> list[Request]:
        """Draw requests: groups of four of one prompt, of 1 to 96 random tokens."""
        found: list[Request] = []
        while len(found) < count:
            length = self._random.randint(1, LONGEST_PROMPT)
            prompt = [self._random.randrange(self.target.vocabulary_size) for _ in range(length)]
            found += [Request(prompt, self._random.getrandbits(62)) for _ in range(4)]
        return found[:count]

    def check(self, name: str, requests: Sequence[Request], batch_size: int) -> list[Completed]:
        """Sample requests, and compare their log-probs with the trainer's."""
        started = time.perf_counter()
        completed = self.target.sample(requests, batch_size, self.max_new_tokens)
        seconds = time.perf_counter() - started
        self.compare(name, requests, completed, seconds)
        return completed

    def compare(
        self, name: str, requests: Sequence[Request], completed: Sequence[Completed], seconds: float = 0.0
    ) -> None:
        """Score completions with the trainer, and add the check."""
        rows = [(r.prompt, c.tokens) for r, c in zip(requests, completed, strict=True) if c.tokens]
        sampled = [(c.tokens, c.logprobs) for c in completed if c.tokens]
        cached = [c.cached_tokens for c in completed if c.cached_tokens is not None]
        cached_tokens = sum(cached) if len(cached) == len(completed) else None
        trained = self.trainer.score(rows) if rows else []
        self.add(compare(name, sampled, trained, cached_tokens=cached_tokens, seconds=seconds))

    def add(self, check: Check) -> None:
        """Add a check to the result, and report it."""
        self.checks.append(check)
        self.report(check)

    def all(self, num_tokens: int) -> None:
        """Run every check but that of a weight update, until `num_tokens` are compared."""
        self.check("batch of 1", self.requests(GROUP // 4), 1)
        self.check("batch of 8", self.requests(GROUP), 8)
        requests = self.requests(GROUP)
        completed = self.check("batch of 64", requests, GROUP)
        self.check("other order", requests[::-1], GROUP)
        self.check("repeated", requests, GROUP)
        turns = self.turns(requests, completed)
        self.check("next turn, cached", turns, GROUP)
        if self.target.flush():
            self.check("next turn, cache emptied", turns, GROUP)
        else:
            self.add(Check("next turn, cache emptied", not_run="the engine has no route /flush_cache"))
        self.trainer_alone(requests, completed)
        self.bulk(num_tokens)

    def turns(self, requests: Sequence[Request], completed: Sequence[Completed]) -> list[Request]:
        """Return requests that continue completions by a few tokens of a user."""
        new = [self._random.randrange(self.target.vocabulary_size) for _ in range(NUM_NEW)]
        return [
            Request([*request.prompt, *row.tokens, *new], request.seed + 1)
            for request, row in zip(requests, completed, strict=True)
        ]

    def trainer_alone(self, requests: Sequence[Request], completed: Sequence[Completed]) -> None:
        """Compare the trainer with itself: packed rows in another order, and each row alone."""
        pairs = zip(requests, completed, strict=True)
        rows = [(request.prompt, row.tokens) for request, row in pairs if row.tokens]
        packed = self.trainer.score(rows[::-1])[::-1]
        alone = [self.trainer.score([row])[0] for row in rows]
        sampled = [(tokens, logprobs) for (_, tokens), logprobs in zip(rows, packed, strict=True)]
        self.add(compare("trainer, rows alone", sampled, alone))

    def bulk(self, num_tokens: int) -> None:
        found: list[Check] = []
        name = "many batches of 64"
        missing = num_tokens - sum(check.num_tokens for check in self.checks)
        while missing > 0:
            part = Run(
                self.target, self.trainer, self.max_new_tokens, self._random.getrandbits(62), found.append
            )
            part.check(name, part.requests(GROUP), GROUP)
            if found[-1].num_tokens == 0:
                break
            missing -= found[-1].num_tokens
        if found:
            self.add(merged(name, found))


def certify_embedded(
    path: str, dtype: str, num_tokens: int, max_new_tokens: int, seed: int, report: Report
) -> Certificate:
    """Certify the embedded engine in this process.

    Raises:
        ModelError: the model cannot be sampled from or scored batch-invariantly.
        BadCertificate: `path` is not a folder of a model.
    """
    sha256 = hash_model(Path(path))
    target = EmbeddedTarget(path, dtype)
    with one_rank() as ranks:
        run = Run(target, Trainer(path, dtype, ranks), max_new_tokens, seed, report)
        run.all(num_tokens)
        run.trainer.change_weights(seed)
        target.load(run.trainer.weights())
        run.check(AFTER_UPDATE, run.requests(GROUP), GROUP)
    return certificate_of(run, sha256, dtype)


def certify_server(
    target: ServerTarget,
    path: str,
    dtype: str,
    num_tokens: int,
    max_new_tokens: int,
    seed: int,
    update: str | None,
    report: Report,
) -> Certificate:
    """Certify a server that serves the model at `path`.

    Args:
        update: folder of a checkpoint that the server loads for the last check, and the server's
            machine can read; it loads `path` again at the end. None leaves that check out.

    Raises:
        EngineError: the server does not answer, or without log-probs.
        ModelError, BadCertificate: as in `certify_embedded`.
    """
    sha256 = hash_model(Path(path))
    with one_rank() as ranks:
        run = Run(target, Trainer(path, dtype, ranks), max_new_tokens, seed, report)
        run.all(num_tokens)
        if update is None:
            run.add(Check(AFTER_UPDATE, not_run="give --update CHECKPOINT"))
        else:
            run.trainer = Trainer(update, dtype, ranks)
            try:
                target.load_from_disk(update)
                run.check(AFTER_UPDATE, run.requests(GROUP), GROUP)
            finally:
                target.load_from_disk(path)
    return certificate_of(run, sha256, dtype)


@contextmanager
def one_rank() -> Iterator[Ranks]:
    ranks = join_ranks("cpu")
    try:
        yield ranks
    finally:
        leave_ranks()


def certificate_of(run: Run, sha256: str, dtype: str) -> Certificate:
    versions = {
        "areal-debug": metadata.version("areal-debug"),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "processor": torch.backends.cpu.get_cpu_capability(),
    }
    return Certificate(run.target.facts, {"sha256": sha256, "dtype": dtype}, versions, tuple(run.checks))


def merged(name: str, checks: Sequence[Check]) -> Check:
    """Return many checks as one; the first difference is that of the first check that has one."""
    cached = [check.cached_tokens for check in checks if check.cached_tokens is not None]
    return Check(
        name,
        sum(check.num_tokens for check in checks),
        sum(check.num_different for check in checks),
        max(check.max_abs for check in checks),
        sum(cached) if len(cached) == len(checks) else None,
        next((check.first for check in checks if check.first is not None), None),
        seconds=sum(check.seconds for check in checks),
    )
