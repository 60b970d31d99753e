"""Cost of recording verl and SkyRL, in their training process, per step.

    python benchmarks/adapters.py [--rows 512] [--prompt 256] [--response 1024] [--steps 4]
                                  [--step-seconds 60]

Batches are as the trainers hold them before the update, padded, half of each response kept, with
log-probs of engine, policy and reference, and advantages. `blocked` is what the training thread
waits for; `cpu` is all of the process, the writing thread included. The share is of a step of
`--step-seconds`. The first step, which opens the record, is measured apart.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from areal_debug import skyrl, verl
from recorder import verify


class Batch(dict):
    """A TrainingInputBatch of SkyRL."""

    metadata: dict[str, Any] = {}


def response_columns(rows: int, width: int, seed: int) -> dict[str, torch.Tensor]:
    """What both trainers have per token of a response, [rows, width], padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths).long()
    names = ("rollout", "old", "ref", "advantages", "returns")
    return {"mask": mask} | {name: -torch.rand(rows, width, generator=generator) * mask for name in names}


Recording = tuple[Callable[[int], None], Callable[[], None]]


def verl_steps(rows: int, prompt: int, response: int, folder: Path) -> Recording:
    """Return what records a step of verl, and what ends the record."""
    made = response_columns(rows, response, 0)
    prompts = torch.randint(0, 150_000, (rows, prompt))
    batch = {
        "prompts": prompts,
        "responses": torch.randint(0, 150_000, (rows, response)),
        "attention_mask": torch.cat([torch.ones_like(prompts), made["mask"]], 1),
        "response_mask": made["mask"],
        "rollout_log_probs": made["rollout"],
        "old_log_probs": made["old"],
        "ref_log_prob": made["ref"],
        "advantages": made["advantages"],
        "returns": made["returns"],
        "token_level_scores": made["mask"].float(),
    }
    uid = np.array([str(row // 8) for row in range(rows)], object)
    data = SimpleNamespace(batch=batch, non_tensor_batch={"uid": uid})
    end = verl.recorder_in(folder, None).end
    return lambda step: verl.record_step(data, step, folder), end


def skyrl_steps(rows: int, prompt: int, response: int, folder: Path) -> Recording:
    """Return what records a step of SkyRL, and what ends the record."""
    made = {name: column.flip(1) for name, column in response_columns(rows, response, 0).items()}
    width = prompt + response
    lengths = made["mask"].sum(1, keepdim=True) + prompt
    batch = Batch(
        sequences=torch.randint(0, 150_000, (rows, width)),
        attention_mask=(torch.arange(width) >= width - lengths).long(),
        response_mask=made["mask"],
        loss_mask=made["mask"].float(),
        rollout_logprobs=made["rollout"],
        action_log_probs=made["old"],
        base_action_log_probs=made["ref"],
        returns=made["returns"],
    )
    callback, trainer = skyrl.Record(folder), SimpleNamespace(cfg={}, tokenizer=None)
    callback.on_train_start(trainer, None, None)

    def record(step: int) -> None:
        callback.advantages = made["advantages"]
        callback.generated = {"uid": [row // 8 for row in range(rows)], "reward": [1.0] * rows}
        given = SimpleNamespace(batch=batch, global_step=step, metrics={})
        callback.on_step_end(trainer, given, None)

    return record, lambda: callback.on_train_end(trainer, None, None)


def measure(name: str, make: Callable[..., Recording], given: argparse.Namespace) -> None:
    """Record steps with pauses, and print what they cost."""
    folder = Path(tempfile.mkdtemp()) / "record"
    record, end = make(given.rows, given.prompt, given.response, folder)
    blocked, cpu = [], []
    for step in range(given.steps + 1):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        record(step)
        blocked.append(time.perf_counter() - begin)
        while not (folder / "steps" / f"{step:06d}" / "step.json").exists():
            time.sleep(0.05)
        cpu.append(time.process_time() - begin_cpu)
    end()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / len(cpu)
    problems = verify(folder).problems
    shutil.rmtree(folder.parent)
    seconds = float(np.mean(cpu[1:]))
    print(
        f"{name}: blocked {np.mean(blocked[1:]):.3f} s, cpu {seconds:.3f} s "
        f"= {seconds / given.step_seconds:.2%} of {given.step_seconds:g} s, first {cpu[0]:.3f} s, "
        f"{size / 1e6:.1f} MB, {len(problems)} problems"
    )


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--step-seconds", type=float, default=60)
    given = parser.parse_args()
    measure("verl", verl_steps, given)
    measure("SkyRL", skyrl_steps, given)


if __name__ == "__main__":
    main()
