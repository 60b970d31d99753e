"""A readable summary of each step, in one line."""

from areal_core.telemetry.loggers import Stats

# Column, names under which the trainers record it (the first that exists is shown), format. The
# loss is the number whose gradient the optimizer gets: the mean over minibatches.
COLUMNS = (
    ("reward", ("ppo_actor/task_reward/avg", "rollout/reward"), "{:.3f}"),
    (
        "loss",
        ("ppo_actor/update/loss", "sft/loss/avg", "sft/loss", "dpo/loss/avg", "rw/loss/avg"),
        "{:.4g}",
    ),
    ("accuracy", ("dpo/reward_accuracy/avg", "rw/correct_ratio/avg"), "{:.3f}"),
    (
        "held-out",
        ("eval-sft/loss/avg", "eval-dpo/reward_accuracy/avg", "eval-rw/correct_ratio/avg"),
        "{:.3f}",
    ),
    ("grad_norm", ("ppo_actor/update/grad_norm", "sft/grad_norm", "dpo/grad_norm", "rw/grad_norm"), "{:.4g}"),
    ("lr", ("ppo_actor/update/lr", "sft/lr", "dpo/lr", "rw/lr"), "{:.2e}"),
    ("seq_len", ("ppo_actor/seq_len/avg", "sft/seq_len/avg"), "{:.0f}"),
)
NUM_TOKENS = ("ppo_actor/n_tokens", "sft/n_tokens", "dpo/n_tokens", "rw/n_tokens")


def step_summary(
    step: int, stats: Stats, total_steps: int | None = None, seconds: float | None = None
) -> str:
    """Return `step 2 (3 of 10)  reward 0.250  loss -0.01235 ...`.

    Steps have the numbers of their record, from 0. Columns without a value are left out. `seconds`
    is the duration of the step, for the tokens per second.
    """
    parts = [f"step {step}" + (f" ({step + 1} of {total_steps})" if total_steps else "")]
    parts += [f"{column} {number}" for column, number in summary_columns(stats).items()]
    num_tokens = first_of(stats, NUM_TOKENS)
    if num_tokens is not None and seconds:
        parts.append(f"{num_tokens / seconds:.0f} tokens/s")
    return "  ".join(parts)


def summary_columns(stats: Stats) -> dict[str, str]:
    """Return the numbers of a step by their names, as training and replay print them."""
    values = [(column, first_of(stats, names), shape) for column, names, shape in COLUMNS]
    return {column: shape.format(value) for column, value, shape in values if value is not None}


def first_of(stats: Stats, names: tuple[str, ...]) -> float | None:
    """Return the value of the first name that was recorded."""
    return next((stats[name] for name in names if name in stats), None)
