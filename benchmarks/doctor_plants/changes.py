"""Faults that no option makes: each changes the process of one run, which then ends."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from areal_core.embedded import generate
from areal_core.embedded.replica import Replica
from areal_core.trainer.rl import PPOTrainer

LATER = 20  # the step at which faults begin that do not begin at once


def stale_engine(trainer: PPOTrainer) -> None:
    """Let the engine keep the weights of step `LATER`, and say that it has the new ones."""
    load, times = Replica.load, [0]

    def keep(self: Replica, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        times[0] += 1
        if times[0] <= LATER:
            load(self, named_tensors)
        else:
            list(named_tensors)

    Replica.load = keep  # type: ignore[method-assign]


def engine_rounds(trainer: PPOTrainer) -> None:
    """Let the engine keep weights with 3 bits of mantissa, as a coarse quantisation does."""
    load = Replica.load

    def rounded(self: Replica, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        load(self, ((name, coarse(tensor)) for name, tensor in named_tensors))

    Replica.load = rounded  # type: ignore[method-assign]


def engine_temperature(trainer: PPOTrainer) -> None:
    """Let the engine sample at 0.6 and give the log-probs of that, whatever is asked for."""
    options = generate.build_rows

    def colder(*arguments: Any) -> Any:
        rows = options(*arguments)
        rows.temperature.fill_(0.6)
        return rows

    generate.build_rows = colder  # type: ignore[assignment]


def coarse(tensor: Tensor) -> Tensor:
    """Round float32 values to 3 bits of mantissa."""
    bits = tensor.float().contiguous().view(torch.int32)
    return ((bits + (1 << 19)) >> 20 << 20).view(torch.float32)


def at_steps(trainer: PPOTrainer, event: str, steps: Iterable[int], act: Any) -> None:
    """Call `act(facts)` at an event of some steps."""
    wanted = set(steps)

    def observe(name: str, **facts: Any) -> None:
        if name == event and facts["step"] in wanted:
            act(facts)

    trainer.observers.insert(0, observe)


def bad_batches(trainer: PPOTrainer) -> None:
    """Multiply the rewards of every ninth batch by 200."""
    at_steps(trainer, "batch", range(8, 999, 9), lambda facts: facts["batch"]["rewards"].mul_(200))


def random_tokens(trainer: PPOTrainer) -> None:
    """Replace the tokens of every eighth batch: a wrong buffer was trained on."""

    def act(facts: Any) -> None:
        ids, mask = facts["batch"]["input_ids"], facts["batch"]["loss_mask"].bool()
        ids[mask] = torch.randint(5, 100, (int(mask.sum()),), dtype=ids.dtype)

    at_steps(trainer, "batch", range(10, 999, 8), act)


def wrong_resume(trainer: PPOTrainer) -> None:
    """Go back to the initial weights at a step: a resume that loaded the wrong checkpoint."""
    parameters = list(trainer.actor.model.parameters())
    initial = [parameter.detach().clone() for parameter in parameters]

    def act(facts: Any) -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters, initial, strict=True):
                parameter.copy_(value)

    at_steps(trainer, "advantages", [LATER + 8], act)


def broken_weight(trainer: PPOTrainer) -> None:
    """Add noise to all weights at one step, as a bad communication does."""

    def act(facts: Any) -> None:
        with torch.no_grad():
            for parameter in trainer.actor.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)

    at_steps(trainer, "advantages", [LATER + 5], act)


def learning_rate_jumps(trainer: PPOTrainer) -> None:
    """Multiply the learning rate by 20 from a step on."""

    def act(facts: Any) -> None:
        for group in trainer.actor.optimizer.param_groups:
            group["lr"] *= 20

    at_steps(trainer, "loss", range(LATER, 999), act)


def shifted_advantages(trainer: PPOTrainer) -> None:
    """Exchange the advantages between rows: credit goes to other samples."""

    def act(facts: Any) -> None:
        facts["inputs"]["advantages"].copy_(facts["inputs"]["advantages"].roll(3, 0))

    at_steps(trainer, "advantages", range(999), act)
