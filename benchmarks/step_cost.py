"""Cost of recording and replaying a training step: bare, recorded and replayed, in one process.

    python -m benchmarks.step_cost [--hidden 384] [--rows 32] [--tokens 192]
                                   [--rounds 3] [--steps 4]

The same batches are trained in each way, in turn. Prints ratios of complete steps to the bare ones,
in wall time and CPU time; the latter also holds on a busy machine. Checksums of
all parameters are part of both costs.
"""

import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from areal_core.config import PPOConfig, config_from_dict
from areal_core.data.batch import Batch
from areal_core.telemetry.loggers import read_stats
from areal_core.testing import make_tiny_model
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import make_recorder
from benchmarks.harness import read_options, report, say
from recorder import open_record
from replayer.check import ReplayCheck
from replayer.source import RecordedRollouts


class FixedRollouts:
    """The same batch at every step, from memory."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def next_batch(self, step: int, version: int) -> Batch:
        return self.batch

    def update_weights(self, engine: object, version: int) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def random_batch(num_rows: int, num_tokens: int) -> Batch:
    """Return rows of `num_tokens` tokens, three quarters in the loss mask, in groups of four."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_rows, num_tokens)
    trained = (torch.arange(num_tokens) >= num_tokens // 4).expand(shape)
    return {
        "input_ids": torch.randint(5, 100, shape, generator=generator, dtype=torch.int32),
        "attention_mask": torch.ones(shape, dtype=torch.bool),
        "loss_mask": trained.int(),
        "logprobs": -torch.rand(shape, generator=generator) * trained,
        "versions": torch.where(trained, 0, -1).int(),
        "rewards": torch.rand(num_rows, generator=generator),
        "prompt_id": torch.arange(num_rows) // 4,
        "sample_id": (torch.arange(num_rows) % 4).int(),
        "finish_reason": torch.zeros(num_rows, dtype=torch.int32),
    }


def make_config(folder: Path, model: Path, steps: int, num_rows: int, trial: str) -> PPOConfig:
    norm = {"mean_level": "group", "std_level": "group", "group_size": 4}
    actor = {
        "path": str(model),
        "dtype": "float32",
        "optimizer": {"lr": 1e-4},
        "kl_ctl": 0.0,
        "ppo_n_minibatches": 1,
        "reward_norm": norm,
        "mb_spec": {"max_tokens_per_mb": 4096},
    }
    tree = {
        "experiment_name": "cost",
        "trial_name": trial,
        "device": "cpu",
        "allocation_mode": "embedded|fsdp:d1",
        "total_train_steps": steps,
        "cluster": {"fileroot": str(folder)},
        "debug": {"path": str(folder / "record"), "overwrite": True},
        "train_dataset": {"path": "none", "type": "rl", "batch_size": num_rows // 4},
        "actor": actor,
    }
    return config_from_dict(tree, PPOConfig)


def step_seconds(
    config: PPOConfig, steps: int, source: Any, observers: Sequence[Any] = ()
) -> list[tuple[float, float]]:
    """Return (wall, CPU) seconds of each step except the first and the last."""
    notes: list[float] = []

    def note(event: str, **facts: Any) -> None:
        if event == "batch":
            notes.append(time.process_time())

    watching = [*observers, lambda trainer: note]
    with PPOTrainer(
        config, total_steps=steps, print_steps=False, source=source, observers=watching
    ) as trainer:
        trainer.train()
    file = next(Path(config.cluster.fileroot).glob(f"logs/*/cost/{config.trial_name}/stats.jsonl"))
    seconds = [line["timeperf/step"] for line in read_stats(file)][-steps:]
    busy = [after - before for before, after in itertools.pairwise(notes)]
    return list(zip(seconds[1:-1], busy[1:], strict=True))


def main() -> None:
    options = read_options(__doc__, hidden=384, rows=32, tokens=192, rounds=3, steps=4)
    seconds: dict[str, list[tuple[float, float]]] = {"bare": [], "recorded": [], "replayed": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_model(folder / "model", hidden_size=options.hidden, num_layers=6)
        batch = random_batch(options.rows, options.tokens)

        def fixed(trainer: PPOTrainer) -> FixedRollouts:
            return FixedRollouts(batch)

        def recorded(trainer: PPOTrainer) -> RecordedRollouts:
            return RecordedRollouts(open_record(folder / "record"), 0, 1)

        def check(trainer: PPOTrainer) -> ReplayCheck:
            return ReplayCheck(open_record(folder / "record"), 0, trainer.ranks.gather_objects)

        hooks = {
            "bare": {"source": fixed},
            "recorded": {"source": fixed, "observers": [make_recorder]},
            "replayed": {"source": recorded, "observers": [check]},
        }
        for _ in range(options.rounds):
            for kind, arguments in hooks.items():
                config = make_config(folder, model, options.steps, options.rows, kind)
                seconds[kind] += step_seconds(config, options.steps, **arguments)
    print(f"{options.rows} rows x {options.tokens} tokens, hidden {options.hidden}, 6 layers, float32")
    for kind in ("recorded", "replayed"):
        say(f"{kind} to bare", list(zip(seconds[kind], seconds["bare"], strict=True)))
    busy_s = {kind: [cpu_s for _, cpu_s in values] for kind, values in seconds.items()}
    for kind in ("recorded", "replayed"):
        report(f"a {kind} training step", "the same step, bare", "CPU s", busy_s[kind], busy_s["bare"])


if __name__ == "__main__":
    main()
