"""Preconditions of a replay, checked without torch, so that mistakes fail before launch.

Our trainer trains on the batches of another trainer's record if it gets a config of ours, and if
the record has the values that this config needs: a placeholder must never reach a loss. Such a
record has no plans, so that nothing can be checked against bits.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from areal_core.config import PPOActorConfig, PPOConfig
from areal_core.engine.checkpoint.files import read_checkpoint
from recorder import Problem, Record, RecordedStep, verify
from recorder.environment import folder_identity
from recorder.header import check_folder
from replayer.anchors import CHECKPOINT
from replayer.carried import model_folder
from replayer.errors import CannotReplay, ReplayError, WrongEdit, WrongModel
from replayer.expression import ROW_NAMES, parse_expression
from replayer.own_code import check_own_code
from replayer.request import Request, Summation

PAIRED = ("dpo", "rw")  # methods whose rows are pairs
# values that training can do without -> what stands for those that are not known
STAND_INS = {
    "versions": "a token of unknown version counts as sampled by the weights of its step",
    "finish_reason": "a row of unknown finish reason counts as stopped",
    "prompt_id": "a row of unknown group is a group of its own",
}


def step_range(record: Record, first_step: int | None, last_step: int | None) -> tuple[int, int]:
    """Return the steps to report, both included; None is the first or last recorded step.

    Raises:
        ReplayError: the record has no such steps.
    """
    if not record.steps:
        raise ReplayError(f"{record.path} has no finished step: there is nothing to replay")
    first = record.steps[0] if first_step is None else first_step
    last = record.steps[-1] if last_step is None else last_step
    if not record.steps[0] <= first <= last <= record.steps[-1]:
        raise ReplayError(
            f"steps {first} to {last} were requested, the record has {record.steps[0]} to {record.steps[-1]}"
        )
    return first, last


def nearest_anchor(record: Record, step: int) -> int | None:
    """Return the last anchor at or before a step; None to start from the run's first weights."""
    return max((anchor for anchor in record.anchors() if anchor <= step), default=None)


def check_steps_present(record: Record, first: int, last: int) -> None:
    """Raise ReplayError unless all steps from the anchor before `first` to `last` are recorded."""
    start = nearest_anchor(record, first) or 0
    recorded = set(record.steps)
    missing = [step for step in range(start, last + 1) if step not in recorded]
    if missing:
        anchors = ", ".join(map(str, record.anchors())) or "none"
        raise ReplayError(
            f"step {missing[0]} is not in {record.path}, and a replay to step {last} needs it: start after it, from an "
            f"anchor (available: {anchors}), or end before it"
        )


def summation_on(record: Record, num_ranks: int, settings: Sequence[str] = ()) -> Summation:
    """Return how so many processes can sum over the recorded ranks to their bits.

    "" if they cannot. With an allocation among `settings` the processes are the ranks.

    Raises:
        ReplayError: the recorded ranks share rows, and fewer processes cannot stand for them.
    """
    header = record.header
    size, options = header.world_size, header.config
    is_redistributed = any(setting.startswith("allocation_mode=") for setting in settings)
    if num_ranks >= size or not header.config_is_ours or is_redistributed:
        return ""
    if header.num_ranks < size:
        raise ReplayError(
            f"{record.path} was computed by {size} ranks that share rows by sequence or tensor parallelism "
            f"({header.allocation}), and --nproc {num_ranks} can stand for data-parallel ranks only: leave it out, or "
            f"give allocation_mode=fsdp:d{num_ranks}, which is compared within noise"
        )
    if size % num_ranks:
        return ""
    if options.get("debug", {}).get("reduction") == "fixed":
        return "fixed"
    models = [options[name] for name in ("actor", "critic") if options.get(name)]
    is_plain = all(m["fsdp"]["shard_size"] is None and m["grad_reduce_dtype"] == "float32" for m in models)
    is_on_gloo = options["device"] == "cpu" or not header.environment.get("gpus")
    return (
        "gloo"
        if is_plain and is_on_gloo and not options.get("rollout", {}).get("return_routed_experts")
        else ""
    )


def exact_summation(record: Record, num_ranks: int, asked: str) -> Summation:
    """Return how so many processes repeat the bits of a record; "" if they are its ranks.

    Raises:
        ReplayError: they cannot, and `asked` is about those bits.
    """
    size = record.header.world_size
    found = summation_on(record, num_ranks)
    if not found and num_ranks != size:
        raise ReplayError(
            f"{asked} needs the bits of the record, and --nproc {num_ranks} cannot repeat those of {size} recorded ranks: "
            "leave it out, or record with debug.reduction=fixed and give a divisor of that number"
        )
    return found


def check_anchor(record: Record, step: int) -> None:
    """Raise CheckpointError if the anchor from which a replay of `step` starts is damaged.

    Otherwise every rank would report it with a traceback.
    """
    if (anchor := nearest_anchor(record, step)) is not None:
        read_checkpoint(record.anchor(anchor) / CHECKPOINT)


def check_model(record: Record, model: str | None, first_step: int = 0) -> None:
    """Raise WrongModel unless a folder, by default the recorded one, has the run's first model.

    With an anchor at `first_step` or before, the weights come from there, and only the model's
    config must be the same.
    """
    path, recorded = model_folder(record, model), record.header.model["files"]
    if any(step <= first_step for step in record.anchors()):
        recorded = {name: identity for name, identity in recorded.items() if name == "config.json"}
    if not Path(path).is_dir():
        if recorded:
            raise WrongModel(
                f"the run started from the model at {path}, which is not a folder on this machine: "
                f"give its path with --model (or actor.path)"
            )
        return
    current = folder_identity(path)["files"]
    names = [name for name, identity in recorded.items() if current.get(name) != identity]
    if names:
        raise WrongModel(
            f"{path} is not the model that the run started from: {', '.join(names[:3])} differ; "
            f"give the right one with --model (or actor.path)"
        )


def verify_bytes(folder: str | os.PathLike[str], on_step: Callable[[int], None]) -> list[Problem]:
    """List the damage in a record, without steps that were unfinished when the run ended."""
    return [problem for problem in verify(folder, on_step).problems if problem.kind != "unfinished"]


def check_is_policy(record: Record, asked: str) -> None:
    """Raise ReplayError for a record of a supervised method, which has no rewards or advantages."""
    if record.header.method is not None:
        raise ReplayError(
            f"{asked} is for policy optimisation, and {record.path} is a record of {record.header.method}, without rewards "
            "and advantages: `replay`, with changed options or --find-faulty, `goto` and `why` work on it"
        )


def check_edits(record: Record, request: Request) -> None:
    """Raise WrongFilter, WrongEdit or RecordExists for errors that are visible before a run.

    Also ReplayError for rewards of a supervised run, and for rows of pairs, which stay together.
    """
    if request.reward is not None:
        check_is_policy(record, "--reward")
    if request.row_filter is not None:
        condition = parse_expression(request.row_filter, ROW_NAMES)
        if any(map(condition.uses, ("reward", "logprobs", "versions", "finish_reason"))):
            check_is_policy(record, f"--filter {request.row_filter!r}")
    if record.header.method in PAIRED and (request.row_filter or request.edit):
        raise ReplayError(
            f"{record.path} is a record of {record.header.method}, whose rows are pairs: they can be replayed, not filtered or edited"
        )
    if request.edit is not None and not Path(request.edit).is_file():
        raise WrongEdit(
            f"there is no edit script {request.edit}: give a file with a function edit(batch, step)"
        )
    if request.record_to is not None:
        check_folder(Path(request.record_to), overwrite=False)
        if Path(request.record_to).resolve().is_relative_to(Path(record.path).resolve()):
            raise WrongEdit(f"{request.record_to} is inside the record, which is never written into")


def check_options(record: Record, config: str | None) -> None:
    """Raise ReplayError unless there are tokens, and options of ours: recorded, or `config`."""
    header = record.header
    if record.steps and header.trainer is not None and not record.step(record.steps[0]).has_tokens:
        raise ReplayError(f"{record.path} has text and no tokens: it can be read, but not replayed")
    if config is None and not header.config_is_ours:
        raise ReplayError(
            f"{record.path} is a record of {header.trainer}: {their_replay(record)}"
            "our own trainer trains on its batches with --config FILE and --model PATH"
        )


def their_replay(record: Record) -> str:
    call = f"`areal_debug.trl.replay(trainer, {record.path!r})` replays it in TRL, and "
    return call if record.header.trainer == "trl" else ""


def has_layouts_by_trl(record: Record, config: str | None) -> bool:
    """Return whether TRL itself computes the layouts of a record: it does without options of ours."""
    return record.header.trainer == "trl" and config is None


def check_by_trl(record: Record, trainer: str | None = None) -> None:
    """Raise CannotReplay unless TRL was recorded while it trained, by `trainer` if it is given."""
    path, header = record.path, record.header
    if header.trainer != "trl" or "imported" in header.environment:
        raise CannotReplay(
            f"{path} was not recorded by areal_debug.trl.record: it is of {header.trainer or 'our trainer'}"
        )
    if not record.steps:
        raise CannotReplay(f"{path} holds no steps: there is nothing to replay")
    first = record.step(record.steps[0])
    if first.rank_name("plan", 0, "json") not in first.manifest.files:
        raise CannotReplay(f"{path} has no plan of TRL's training: record with areal_debug.trl.record")
    if trainer not in (None, found := first.plan(0).details["trainer"]):
        raise CannotReplay(f"{path} is of a {found}, and this is for a {trainer}")


def check_recorded_results(record: Record, verb: str) -> None:
    """Raise ReplayError for a record without plans and outcomes, which `verb` compares with.

    Also for own code of the user that is not allowed.
    """
    check_own_code(record)
    if record.header.recording.has_plans:
        return
    trainer = record.header.trainer
    what = "a record of rollouts alone" if trainer is None else f"a record of {trainer}"
    raise ReplayError(
        f"{verb} needs the plans and outcomes that our trainer records, and {record.path} is {what}: "
        f"{their_replay(record)}`areal-debug replay` trains our own trainer on its batches"
    )


def check_checksums(record: Record, step: int) -> None:
    """Raise ReplayError for a record of another trainer without checksums of the weights."""
    recorded = record.step(step)
    has_outcome = recorded.rank_name("outcome", 0, "json") in recorded.manifest.files
    if record.header.trainer is not None and not (has_outcome and recorded.outcome(0).checksums):
        raise ReplayError(
            f"{record.path} is a record of {record.header.trainer} without checksums of its weights "
            "(`checksums` of Recorder.step): `areal-debug why A B --all` compares what it has"
        )


def check_values(record: Record, config: PPOConfig, first: int, last: int, has_rewards: bool = False) -> None:
    """Raise ReplayError unless the steps have every value that training with these options needs.

    Args:
        has_rewards: rewards are computed again.
    """
    if record.header.lacks_images:
        raise ReplayError(f"{record.path} is a copy without the pictures of its rows: replay the original")
    instead = {"input_ids": "they are masked in this copy: replay the original"}
    if record.header.trainer is not None:
        instead = values_needed(config.actor, has_rewards)
    for step in [step for step in record.steps if first <= step <= last]:
        recorded = record.step(step)
        ranks = range(recorded.manifest.num_ranks)
        total = sum(map(recorded.num_rows, ranks))
        for key, advice in instead.items():
            if count := sum(int((~known_rows(recorded, rank, key)).sum()) for rank in ranks):
                raise ReplayError(
                    f"{record.path} cannot be replayed with these options: {key} is not known in {count} of "
                    f"{total} rows of step {step}; {advice}"
                )


def values_needed(actor: PPOActorConfig, has_rewards: bool) -> dict[str, str]:
    """Return the values that training with these options needs, and what to do without each."""
    norms = [norm for norm in (actor.reward_norm, actor.adv_norm) if norm is not None]
    uses_groups = any("group" in (norm.mean_level, norm.std_level) for norm in norms)
    needs = {
        "input_ids": (True, "text can be read, but not trained on"),
        "loss_mask": (True, "nothing says which tokens to train on"),
        "rewards": (not has_rewards, "give --reward MODULE:FN, which computes them"),
        "logprobs": (
            actor.use_decoupled_loss or not actor.recompute_logprob,
            "give actor.recompute_logprob=true actor.use_decoupled_loss=false",
        ),
        "prompt_id": (uses_groups, "normalise by batch, not by group (actor.reward_norm, actor.adv_norm)"),
        "finish_reason": (actor.mask_no_eos_with_zero, "give actor.mask_no_eos_with_zero=false"),
    }
    return {key: instead for key, (is_needed, instead) in needs.items() if is_needed}


def stand_ins(record: Record, last: int) -> list[str]:
    """Return a sentence for each kind of value that is replaced in the steps up to `last`.

    None for a supervised run, which trains without them.
    """
    if record.header.method is not None:
        return []
    steps = [record.step(step) for step in record.steps if step <= last]
    unknown = {key for step in steps for key in step.num_unknown()}
    return [sentence for key, sentence in STAND_INS.items() if key in unknown]


def known_rows(step: RecordedStep, rank: int, key: str) -> np.ndarray:
    """Return which rows are known, bool [rows]: one log-prob that is NaN makes a row unknown."""
    known = step.known(rank, key)
    if key != "logprobs":
        return known
    arrays = step.batch(rank, ["cu_seqlens", "logprobs", "loss_mask"])
    missing = np.isnan(arrays["logprobs"]) & arrays["loss_mask"].astype(bool)
    row_of_token = np.repeat(np.arange(len(known)), np.diff(arrays["cu_seqlens"]))
    return known & (np.bincount(row_of_token, missing, len(known)) == 0)
