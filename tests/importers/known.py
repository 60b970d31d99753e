"""The batch of all importer tests, and stand-ins that give a pickle the real class names."""

import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Known:
    """One sample. `mask`, `logprobs` and `advantage` are those of the completion."""

    group: int
    prompt: list[int]
    completion: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float
    advantage: float
    finish_reason: int = 0
    text: tuple[str, str] = field(default=("q", "a"))

    @property
    def tokens(self):
        return self.prompt + self.completion

    @property
    def full_mask(self):
        return [0] * len(self.prompt) + self.mask

    @property
    def full_logprobs(self):
        return [0.0] * len(self.prompt) + self.logprobs


def f32(*values):
    """Return numbers that float32 represents exactly."""
    return [float(np.float32(value)) for value in values]


# Two prompts with two samples each; the second sample of the first prompt has a token of a tool.
KNOWN = [
    Known(0, [5, 6], [7, 8, 9], [1, 1, 1], f32(-0.1, -0.2, -0.3), 1.0, 0.5, text=("ab", "cde")),
    Known(0, [5, 6], [10, 11], [1, 0], f32(0, -2.5), 0.0, -0.5, 1, text=("ab", "fg")),
    Known(1, [12, 13, 14], [15], [1], f32(-0.7), 1.0, 0.0, text=("hij", "k")),
    Known(
        1, [12, 13, 14], [16, 17, 18, 19], [1, 1, 1, 1], f32(-3, -4, -5, -6), 1.0, 0.0, text=("hij", "lmno")
    ),
]


@contextmanager
def pretending(**classes):
    """Register stand-ins under the modules in their `__module__` while something is pickled."""
    added = []
    for stand_in in classes.values():
        parts = stand_in.__module__.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in sys.modules:
                sys.modules[name] = types.ModuleType(name)
                added.append(name)
        setattr(sys.modules[stand_in.__module__], stand_in.__name__, stand_in)
    yield
    for name in added:
        del sys.modules[name]


def stand_in(module, name, base=object):
    """Create a class that pickles as `module.name`."""
    return type(name, (base,), {"__module__": module, "__qualname__": name})


def named_function(module, name):
    """Create a function that pickles as `module.name`."""

    def function(*arguments):
        raise AssertionError("nothing that a pickle names is ever called")

    function.__module__, function.__name__, function.__qualname__ = module, name, name
    return function


def padded(rows, width, left=False, dtype=np.int64):
    out = np.zeros((len(rows), width), dtype)
    for number, row in enumerate(rows):
        if left:
            out[number, width - len(row) :] = row
        else:
            out[number, : len(row)] = row
    return out
