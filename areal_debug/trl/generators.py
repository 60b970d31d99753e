"""States of the random generators that TRL's training uses: PyTorch's, of the CPU and the device.

A state is kept where it is not what the previous pass left, so that a replay, which neither samples
nor calls reward functions, can set it: dropout and TRL's shuffling then draw the same numbers.
"""

import base64
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


class Generators:
    """The generators of a process whose model is on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.left: dict[str, Tensor] = {}

    def read(self) -> dict[str, Tensor]:
        """Return the states by name."""
        states = {"torch": torch.get_rng_state()}
        if self.device.type != "cpu":
            states[self.device.type] = torch.get_device_module(self.device).get_rng_state(self.device)
        return states

    def leave(self) -> None:
        """Remember the states after a pass."""
        self.left = self.read()

    def changes(self) -> dict[str, str]:
        """Return the states that are not those that `leave` remembered, as texts of FORMAT.md."""
        states = self.read()
        return {
            name: base64.b64encode(state.numpy().tobytes()).decode()
            for name, state in states.items()
            if name not in self.left or not torch.equal(state, self.left[name])
        }

    def restore(self, texts: Mapping[str, str]) -> None:
        """Set states from their texts."""
        for name, text in texts.items():
            state = torch.from_numpy(np.frombuffer(base64.b64decode(text), np.uint8).copy())
            if name == "torch":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(self.device).set_rng_state(state, self.device)
