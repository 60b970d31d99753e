"""Record every step of verl: `AREAL_DEBUG_RECORD=runs/r python -m verl.trainer.main_ppo ...`.

verl imports this module in each of its processes (entry point `verl.plugins`). If the variable is
set, the update of the actor is wrapped in the classes of TRAINERS as soon as verl imports them: the
batch is complete then, and in one process. docs/trainers/verl.md says what is recorded.
"""

import functools
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from areal_debug.guarded import Guarded

FOLDER = os.environ.get("AREAL_DEBUG_RECORD")
# module -> class: the trainer of DataProto, and that of TransferQueue, which is 0.9's default
TRAINERS = {
    "verl.trainer.ppo.ray_trainer": "RayPPOTrainer",
    "verl.trainer.ppo.v1.trainer_base": "PPOTrainer",
}
# inputs to the loss -> their names in a record
LEARNING = {
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
    "old_log_probs": "prox_logp",
    "ref_log_prob": "ref_logp",
    "token_level_rewards": "token_level_rewards",
    "rollout_is_weights": "rollout_is_weights",
    "entropy": "entropy",
}
EXPERTS, IMAGES = "routed_experts", "multi_modal_inputs"
REWARDS = ("token_level_scores", "rm_scores")  # the first is the sum of all terms
PER_TOKEN = ("prompts", "responses", "response_mask", "rollout_log_probs", *REWARDS, *LEARNING, EXPERTS)
DERIVED = ("input_ids", "attention_mask", "position_ids", "loss_mask")  # nothing is lost without them
VERSIONS = ("min_global_steps", "max_global_steps")  # of the weights that sampled a row
recorders: dict[str, "Guarded"] = {}


@dataclass(frozen=True)
class Rows:
    """A batch of verl, without padding.

    Attributes:
        tokens: by name, one array per row: [completion, ...] or [prompt and completion, ...].
        others: by name, one value per row.
        dropped: names of tensors that are not recorded.
    """

    tokens: Mapping[str, Sequence["np.ndarray"]]
    others: Mapping[str, Sequence[Any]]
    dropped: Collection[str]


def record_step(
    data: Any,
    step: int,
    folder: str | os.PathLike[str],
    *,
    version: int | None = None,
    stats: Mapping[str, Any] | None = None,
    trainer: Any = None,
) -> None:
    """Record a step of a trainer that is built on verl.

    It raises nothing: the first failure is one sentence on stderr, and recording ends.

    Args:
        data: DataProto with prompts padded on the left and responses on the right, or KVBatchMeta.
        step: its number; numbers ascend.
        folder: of the record, which ends with the process; a record in it is continued.
        version: weight version after the step; unless given, one more than before.
        stats: numbers by name; other values are left out.
        trainer: has the `config` and the `tokenizer` of the run, read at the first step.
    """
    recorder = recorder_in(folder, trainer)
    recorder.attempt(f"step {step}", lambda: write(recorder, data, step, version, stats, trainer))


def recorder_in(folder: str | os.PathLike[str], trainer: Any) -> "Guarded":
    from areal_debug.guarded import Guarded

    key = os.fspath(folder)
    if key not in recorders:
        recorders[key] = Guarded("verl", key, tokenizer=getattr(trainer, "tokenizer", None))
    return recorders[key]


def write(
    recorder: "Guarded",
    data: Any,
    step: int,
    version: int | None,
    stats: Mapping[str, Any] | None,
    trainer: Any,
) -> None:
    """Record a step."""
    rows = rows_of_queue(data) if hasattr(data, "partition_id") else rows_of_proto(data)
    config = config_of(trainer) if recorder.recorder is None else None
    recorder.step(
        step,
        lambda: samples_of(rows),
        not_recorded=rows.dropped,
        config=config,
        version=version,
        stats=stats,
    )


def config_of(trainer: Any) -> Any:
    """Return the options of the run, resolved; None if they are not known."""
    from omegaconf import OmegaConf

    config = getattr(trainer, "config", None)
    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config


def rows_of_proto(data: Any) -> Rows:
    attention = to_numpy(data.batch["attention_mask"]).astype(bool)
    width = data.batch["prompts"].shape[1]
    tokens = {}
    for name in PER_TOKEN:
        if name in data.batch:
            values = to_numpy(data.batch[name])
            kept = attention[:, :width] if name == "prompts" else attention[:, -values.shape[1] :]
            tokens[name] = [values[row][kept[row]] for row in range(len(values))]
    others = {name: values.tolist() for name, values in data.non_tensor_batch.items()}
    others |= {name: values.tolist() for name, values in data.batch.items() if values.ndim == 1}
    dropped = set(data.batch.keys()) - {*tokens, *DERIVED, *others}
    dropped |= {IMAGES} if any(others.get(IMAGES, ())) else set()
    return Rows(tokens, others, dropped)


def rows_of_queue(batch: Any) -> Rows:
    """Return the rows that a KVBatchMeta names in TransferQueue, without those verl pads with."""
    import transfer_queue as queue

    rows = [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding")]
    keys = [batch.keys[row] for row in rows]
    per_row = ["uid", "num_turns", "extra_fields"]
    # a field that there is not is left out
    data = queue.kv_batch_get(keys, batch.partition_id, [*PER_TOKEN, *per_row])
    tokens = {
        name: [to_numpy(values) for values in data[name].unbind()] for name in PER_TOKEN if name in data
    }
    others = {name: as_list(data[name]) for name in per_row if name in data}
    extra = [row.get("reward_extra_info") or {} for row in others.pop("extra_fields", ())]
    others |= {name: [row.get(name) for row in extra] for name in {name for row in extra for name in row}}
    others |= {name: [batch.tags[row].get(name) for row in rows] for name in VERSIONS}
    images = queue.kv_batch_get(keys[:1], batch.partition_id, [IMAGES]).get(IMAGES, ())
    return Rows(tokens, others, [IMAGES] if any(as_list(images)) else [])


def as_list(column: Any) -> list[Any]:
    """Return the values of a column that is not a tensor: a stack of TensorDict, or a list."""
    return column.tolist() if hasattr(column, "tolist") else list(column)


def to_numpy(tensor: Any) -> "np.ndarray":
    from recorder.trainers.sample import as_numpy

    return as_numpy(tensor, "the batch")


def samples_of(rows: Rows) -> list[dict[str, Any]]:
    unknown = [None] * len(rows.tokens["prompts"])
    first, last = (rows.others.get(name, unknown) for name in VERSIONS)
    numbers = {
        name: column
        for name, column in rows.others.items()
        if all(value is None or isinstance(value, bool | int | float) for value in column)
    }

    def sample_of(row: int) -> dict[str, Any]:
        values = {name: column[row] for name, column in rows.tokens.items()}
        rewards = [float(values[name].sum()) for name in REWARDS if name in values]
        return {
            "prompt_tokens": values["prompts"],
            "completion_tokens": values["responses"],
            "loss_mask": values.get("response_mask"),
            "logprobs": values.get("rollout_log_probs"),
            "reward": rewards[0] if rewards else None,
            "group": str(rows.others["uid"][row]) if "uid" in rows.others else None,
            "versions": first[row] if first[row] == last[row] else None,
            "learning": {LEARNING[name]: values[name] for name in LEARNING if name in values},
            "extras": {name: values[name] for name in (EXPERTS,) if name in values},
            "scores": {name: column[row] for name, column in numbers.items()},
        }

    return [sample_of(row) for row in range(len(unknown))]


def recorded(update: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_update_actor` of a trainer, to record its batch and what the update measured.

    Where an update fails, the batch that it failed on is recorded as well.
    """

    @functools.wraps(update)
    def update_actor(trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = None
        try:
            result = update(trainer, batch, *args, **kwargs)
        finally:
            recorder = recorder_in(FOLDER or "", trainer)
            recorder.attempt(
                "an update", lambda: record_update(recorder, trainer, batch, result, *args, **kwargs)
            )
        return result

    return update_actor


def record_update(
    recorder: "Guarded", trainer: Any, batch: Any, result: Any, metrics: Mapping[str, Any] | None = None
) -> None:
    step, version = count(trainer)
    if metrics is None and result is not None:
        from verl.utils.metric import reduce_metrics

        metrics = reduce_metrics(dict(result.meta_info["metrics"]))
    write(recorder, batch, step, version, metrics, trainer)


def count(trainer: Any) -> tuple[int, int]:
    """Return the number of an update and the weight version after it, as rollouts name it.

    A step of an asynchronous trainer may have several updates, the last of which is synchronised.
    """
    step: int = trainer.global_steps
    if hasattr(trainer, "parameter_sync_step"):
        updates, done = trainer.parameter_sync_step, trainer.local_trigger_step + 1
        return (step - 1) * updates + done, step - (done < updates)
    if hasattr(trainer, "current_param_version"):
        last = trainer.local_trigger_step == trainer.trigger_parameter_sync_step
        return step, trainer.current_param_version + last
    return step, step


class Wrapping(MetaPathFinder):
    """Wraps the trainers of TRAINERS when they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a trainer's module, and None for every other name."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in TRAINERS else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                wrap(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def wrap(module: ModuleType) -> None:
    """Wrap the trainer of a module."""
    trainer: Any = getattr(module, TRAINERS[module.__name__], None)
    if hasattr(trainer, "_update_actor"):
        trainer._update_actor = recorded(trainer._update_actor)
    else:
        print(
            f"areal-debug: {module.__name__} has no {TRAINERS[module.__name__]}._update_actor: nothing is recorded",
            file=sys.stderr,
        )


def install() -> None:
    """Wrap the trainers that are imported, and those that will be."""
    for name in TRAINERS.keys() & sys.modules.keys():
        wrap(sys.modules[name])
    sys.meta_path.insert(0, Wrapping())


if FOLDER:
    install()
