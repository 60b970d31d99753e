"""The trainers' own classes where they are installed, else classes of the same members.

slime, miles and prime-rl are not on the package index; NeMo-RL and AReaL need other versions of
torch than ours. To test against the real ones, put their sources on PYTHONPATH.
"""

import importlib
import json
import os
import subprocess
import sys
import types
from abc import ABC, abstractmethod
from collections import UserDict
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from tests.command_line import installed


def real(name: str) -> Any:
    """Return a module of a trainer, None if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def run_installed(trainer: str, *arguments: str, **environment: str) -> tuple[Any, str]:
    """Run TRAINER_runs.py in the trainer's environment; return what it has seen, and stderr."""
    here = Path(__file__).parent
    python = installed(here / "install_trainers.sh", trainer)
    command = [python, "-W", "ignore", str(here / f"{trainer}_runs.py"), *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""} | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = next(line for line in done.stdout.splitlines() if line.startswith("SEEN "))
    return json.loads(seen.removeprefix("SEEN ")), done.stderr


# slime and miles


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class SlimeSample:
    """`slime.utils.types.Sample`, with the members that describe what was generated."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: list[int] | torch.Tensor | None = None
    rollout_top_p_token_offsets: list[int] | torch.Tensor | None = None
    rollout_routed_experts: torch.Tensor | None = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)


def slime_sample(status: str, **members: Any) -> Any:
    module = real("slime.utils.types")
    if module is None:
        return SlimeSample(status=Status(status), **members)
    return module.Sample(status=module.Sample.Status(status), **members)


def log_rollout_data(args: Any, rollout_id: int, samples: Any, metrics: Any, rollout_time: float) -> bool:
    """Call the hook as slime and miles do; return whether their default log follows."""
    function = load_function(args.custom_rollout_log_function_path)
    return not function(rollout_id, args, samples, metrics, rollout_time)


def load_function(path: str) -> Any:
    """Import a function by its path, as slime, miles and prime-rl do."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


# prime-rl


@dataclass
class LossInputs:
    """`prime_rl.trainer.rl.loss.LossInputs` since 0.7."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


@dataclass
class LossOutputs:
    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


@dataclass
class DefaultLossConfig:
    dppo_mask_low: float = 0.2
    dppo_mask_high: float = 0.2
    adv_tau: float = 1.0
    kl_tau: float = 1e-3


def default_loss_fn(inputs: LossInputs, loss_config: DefaultLossConfig) -> LossOutputs:
    """A loss of the same signature that depends on every input."""
    log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
    weights = 1.0 if inputs.loss_weights is None else inputs.loss_weights
    per_token = loss_config.kl_tau * log_ratio**2 - loss_config.adv_tau * inputs.advantages * log_ratio.exp()
    return LossOutputs((per_token * weights)[inputs.loss_mask].sum(), {"k1": -log_ratio.detach().mean()})


def prime_rl_loss() -> Any:
    module = real("prime_rl.trainer.rl.loss")
    if module is None:
        names = ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl", "prime_rl.trainer.rl.loss")
        for name in names:
            sys.modules[name] = types.ModuleType(name)
        module = sys.modules[names[-1]]
        module.LossInputs, module.default_loss_fn = LossInputs, default_loss_fn
        sys.modules["prime_rl.trainer.rl"].loss = module
    return module


# NeMo-RL


class BatchedDataDict(UserDict):
    """`nemo_rl.distributed.batched_data_dict.BatchedDataDict`, as far as the logger uses it."""

    def make_microbatch_iterator(self, size: int) -> Any:
        """Yield slices of `size` rows."""
        for row in range(0, len(next(iter(self.data.values()))), size):
            yield {name: values[row : row + size] for name, values in self.data.items()}


class NemoLogger:
    """`nemo_rl.utils.logger.Logger` with its dump, and a list in the place of its backends."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.base_log_dir = cfg["log_dir"]
        self.logged: list[tuple[Any, ...]] = []
        self.finished = False

    def log_metrics(
        self,
        metrics: dict[str, Any],
        step: int,
        prefix: str | None = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        self.logged.append((metrics, step, prefix, step_metric, step_finished))

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        self.logged.append((params,))

    def log_batched_dict_as_jsonl(self, to_log: Any, filename: str) -> None:
        """Write a JSON object per sample."""
        if not isinstance(to_log, BatchedDataDict):
            to_log = BatchedDataDict(to_log)
        filepath = os.path.join(self.base_log_dir, filename)
        os.makedirs(os.path.dirname(filepath), exist_ok=True)
        with open(filepath, "w") as file:
            for number, sample in enumerate(to_log.make_microbatch_iterator(1)):
                for key, value in sample.items():
                    if isinstance(value, torch.Tensor):
                        sample[key] = value.tolist()
                file.write(json.dumps({**sample, "idx": number}, default=str) + "\n")

    def finish(self) -> None:
        self.finished = True


# AReaL


@dataclass(frozen=True)
class WorkflowContext:
    is_eval: bool = False
    task_id: int | None = None


class RolloutWorkflow(ABC):
    @abstractmethod
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any: ...


@dataclass
class ModelResponse:
    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: str = "stop"


@dataclass
class InteractionWithTokenLogpReward:
    """One call of an agent, without its tree."""

    model_response: ModelResponse | None = None
    reward: float | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    output_message_list: list[dict[str, Any]] | None = None

    @property
    def has_tensor_data(self) -> bool:
        return self.model_response is not None

    def to_tensor_dict(self) -> dict[str, torch.Tensor]:
        response = self.model_response
        prompt, size = len(response.input_tokens), len(response.output_tokens)
        return {
            "input_ids": torch.tensor([response.input_tokens + response.output_tokens]),
            "loss_mask": torch.tensor([[0] * prompt + [1] * size]),
            "logprobs": torch.tensor([[0.0] * prompt + response.output_logprobs]),
            "versions": torch.tensor([[-1] * prompt + response.output_versions]),
            "attention_mask": torch.ones(1, prompt + size, dtype=torch.bool),
            "rewards": torch.tensor([float(self.reward or 0.0)]),
        }


def areal_modules() -> dict[str, types.ModuleType]:
    """Return modules with the names that the adapter imports; none where AReaL is installed."""
    if real("areal.api") is not None:
        return {}
    current: ContextVar[WorkflowContext] = ContextVar("workflow_context")
    members: dict[str, dict[str, Any]] = {
        "areal": {},
        "areal.workflow_context": {
            "WorkflowContext": WorkflowContext,
            "get": lambda: current.get(WorkflowContext()),
            "set": current.set,
        },
        "areal.api": {"RolloutWorkflow": RolloutWorkflow, "ModelResponse": ModelResponse},
        "areal.experimental": {},
        "areal.experimental.openai": {},
        "areal.experimental.openai.types": {"InteractionWithTokenLogpReward": InteractionWithTokenLogpReward},
    }
    modules = {name: types.ModuleType(name) for name in members}
    for name, module in modules.items():
        vars(module).update(members[name])
    modules["areal"].workflow_context = modules["areal.workflow_context"]
    return modules
