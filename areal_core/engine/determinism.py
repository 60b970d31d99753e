"""Deterministic mode that fails closed: it is an error if a requirement was not set in time.

`use_deterministic_algorithms(True, warn_only=True)` is not sufficient: attention backward then
keeps its non-deterministic kernel and prints a warning. Environment variables that are set after
torch, cuBLAS or NCCL have started have no effect. So both are errors here.
"""

import base64
import hashlib
import json
import os
import random
import shlex
import sys
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from areal_core.environment import DETERMINISTIC, DETERMINISTIC_ON_CPU
from areal_core.errors import DeterminismError


def enforce_determinism(device: str = "auto") -> None:
    """Turn deterministic algorithms on.

    Args:
        device: "cpu", "cuda" or "auto" of the run: variables of GPU libraries are not needed on a
            CPU.

    Raises:
        DeterminismError: environment variables were not set before Python started, or
            `torch.use_deterministic_algorithms` was called with `warn_only`.
    """
    is_on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    started_with = environment_at_start()
    wrong = {
        name: wanted
        for name, wanted in (DETERMINISTIC if is_on_gpu else DETERMINISTIC_ON_CPU).items()
        if started_with.get(name) != wanted
    }
    if wrong:
        raise DeterminismError(describe_missing(wrong, started_with))
    if torch.is_deterministic_algorithms_warn_only_enabled():
        raise DeterminismError(
            "deterministic=true, but torch.use_deterministic_algorithms was called with warn_only=True, which leaves "
            "non-deterministic kernels in place: remove that call"
        )
    torch.use_deterministic_algorithms(True)
    # A property of the module object, which annotations cannot express.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def describe_missing(wrong: dict[str, str], started_with: dict[str, str]) -> str:
    """Describe variables that were set too late or not at all, with a command line to copy."""
    seen = [
        f"{name}={wanted} ({'was not set' if name not in started_with else f'is {started_with[name]!r}'})"
        for name, wanted in wrong.items()
    ]
    settings = " ".join(f"{name}={shlex.quote(wanted)}" for name, wanted in wrong.items())
    again = f"{settings} {shlex.join(sys.orig_argv)}"
    if "TORCHELASTIC_RUN_ID" in started_with:  # torchrun started this process
        again = f"export {settings}"
    return (
        f"deterministic=true needs {', '.join(seen)} before Python starts: start the run with `areal-debug train`, "
        f"which sets them, or yourself with\n    {again}"
    )


def environment_at_start() -> dict[str, str]:
    """Return the environment at the start of this process, without later changes of os.environ."""
    if not sys.platform.startswith("linux"):
        return dict(os.environ)
    with open("/proc/self/environ", "rb") as file:
        entries = file.read().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch, each rank with a different stream."""
    stream = seed * 1_000_003 + rank
    random.seed(stream)
    np.random.seed(stream % 2**32)
    torch.manual_seed(stream)


def branch_rng(index: int) -> None:
    """Switch to random stream `index`, derived from the RNG states; stream 0 is these states.

    Ranks that share the tokens of a row restore the same recorded RNG states, but must not apply
    the same dropout to their different slices.
    """
    if index:
        digest = hashlib.sha256(json.dumps(rng_state(), sort_keys=True).encode()).digest()
        seed_everything(int.from_bytes(digest[:5], "big"), index)


def rng_state() -> dict[str, str]:
    """Return the states of all random number generators that training may use, as text."""
    _, words, position, has_gauss, gauss = cast(
        "tuple[str, NDArray[np.uint32], int, int, float]", np.random.get_state(legacy=True)
    )
    version, python_words, python_gauss = random.getstate()
    gauss_of_python = "none" if python_gauss is None else python_gauss.hex()
    states = {
        "torch": _text(torch.get_rng_state().numpy()),
        "numpy": f"{position} {has_gauss} {float(gauss).hex()} {_text(words)}",
        "python": f"{version} {gauss_of_python} {_text(np.array(python_words, dtype=np.uint32))}",
    }
    if torch.cuda.is_available():
        states["cuda"] = _text(torch.cuda.get_rng_state().numpy())
    return states


def set_rng_state(states: dict[str, str]) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(torch.from_numpy(_array(states["torch"], np.uint8)))
    position, has_gauss, gauss, words = states["numpy"].split(" ")
    np.random.set_state(
        ("MT19937", _array(words, np.uint32), int(position), int(has_gauss), float.fromhex(gauss))
    )
    version, python_gauss, python_words = states["python"].split(" ")
    gauss_next = None if python_gauss == "none" else float.fromhex(python_gauss)
    random.setstate((int(version), tuple(_array(python_words, np.uint32).tolist()), gauss_next))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(_array(states["cuda"], np.uint8)))


def _text(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: type) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()
