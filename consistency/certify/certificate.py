"""A certificate: what was sampled, how much of it differs from the trainer, and with what.

It is a small JSON file. Differences are exact: hexadecimal floats.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from consistency.errors import BadCertificate

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
    name: str,
    sampled: list[tuple[list[int], list[float]]],
    trained: list[list[float]],
    **facts: Any,
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
