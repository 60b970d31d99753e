"""The checks of a certificate: one engine, one trainer, many situations.

```
requests ── engine: batches of 1, 8, 64; reversed; again; next turn, with and without its cache ──> log-probs
                                                                                                      │ bit for bit
the same tokens ── trainer: packed rows, in other micro-batches ─────────────────────────────────> log-probs
```
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch

from areal_core.engine.ranks import Ranks, join_ranks, leave_ranks
from consistency.certify.certificate import Certificate, Check, compare, hash_model
from consistency.certify.targets import Completed, EmbeddedTarget, Request, ServerTarget, Target
from consistency.certify.trainer_scores import Trainer

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
