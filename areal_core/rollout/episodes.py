"""The episodes of one prompt: run, checked and accepted as a group, and made rows of a batch.

Plan: workflow, n_samples, filter
Group: a prompt in flight   run_episodes       an `EpisodeEngine` per sample names its requests
                            refuse_unusable, refuse_malformed
                            is_accepted        the filter, on all rows of the prompt
groups of a batch           assemble           rows in canonical order
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from areal_core.data.batch import (
    FINISH_REASONS,
    PER_ENTRY,
    PER_IMAGE,
    PER_ROW,
    RAGGED,
    Batch,
    pad_and_concat,
    sort_canonical,
)
from areal_core.data.rows import Row
from areal_core.errors import RewardFailed
from areal_core.rollout.errors import MalformedEpisode
from areal_core.rollout.types import ModelRequest, ModelResponse, TokenSampler
from areal_core.rollout.workflow import RolloutWorkflow
from areal_core.telemetry.in_episode import Scalars, collecting

# Dtypes of the tensors that a workflow returns: per token [n, T], or per row [n] (`batch.PER_ROW`).
ROW_DTYPES = {
    "input_ids": torch.int32,
    "attention_mask": torch.bool,
    "loss_mask": torch.int32,
    "logprobs": torch.float32,
    "versions": torch.int32,
    "rewards": torch.float32,
    "finish_reason": torch.int32,
}
IMAGE_DTYPES = {
    "image_count": torch.int32,
    "mm_token_type_ids": torch.int32,
    "image_bytes": torch.int32,
    "image_data": torch.uint8,
    "image_units": torch.int32,
    "image_grid_thw": torch.int32,
}
IN_EPISODE = "in the episode"  # the beginning of the note that names it
AcceptFn = Callable[[Batch], bool]  # all rows of one prompt -> whether to train on them


@dataclass(frozen=True)
class Plan:
    """The episodes of a prompt: `n_samples` of a workflow, all dropped unless `should_accept`."""

    workflow: RolloutWorkflow
    n_samples: int = 1
    should_accept: AcceptFn | None = None


class EpisodeEngine:
    """The `EpisodeSampler` of one episode: adds the episode's name and turn number to its requests.

    It also records the progress of the episode, from which `watch.Watch` explains a long wait.
    """

    def __init__(self, engine: TokenSampler, prompt_id: int, sample_id: int) -> None:
        self.prompt_id = prompt_id
        self.sample_id = sample_id
        self.num_generating = 0  # requests that wait for the engine
        self.since = time.monotonic()  # time at which the last request was sent or answered
        self.is_finished = False  # its group may still wait for other samples
        self.scalars: Scalars = {}  # that its workflow recorded
        self.stop_reason: str | None = None  # of the last completion
        self._engine = engine
        self._turn = 0

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        return self._engine.version

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one completion, as the next turn of this episode."""
        name = {"prompt_id": self.prompt_id, "sample_id": self.sample_id, "turn": self._turn}
        self._turn += 1
        self.num_generating += 1
        self.since = time.monotonic()
        try:
            response = await self._engine.agenerate(replace(req, metadata={**name, **req.metadata}))
            self.stop_reason = response.stop_reason
            return response
        finally:
            self.num_generating -= 1
            self.since = time.monotonic()


@dataclass(eq=False)
class Group:
    """One prompt in flight, or finished."""

    task_id: int
    prompt_id: int
    data: Row
    plan: Plan
    from_feed: bool = False
    version: int = -1  # at the start; once finished, that of the oldest token
    task: asyncio.Task[None] | None = None
    episodes: list[EpisodeEngine] = field(default_factory=list)
    rows: list[Batch | None] | None = None  # per episode; None unless accepted

    def batch(self) -> Batch | None:
        """Return the accepted rows in canonical order; None if the prompt was not accepted."""
        return None if self.rows is None else assemble([(self.prompt_id, self.rows)])


async def run_episodes(
    episodes: Sequence[EpisodeEngine], workflow: RolloutWorkflow, data: dict[str, Any], check_format: bool
) -> list[Batch | None]:
    """Return the result of each episode, in order; None where the workflow left a sample out.

    The first exception of an episode cancels the others and is raised, with a note that names the
    episode.
    """
    tasks = [asyncio.create_task(_run_episode(e, workflow, data, check_format)) for e in episodes]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_episode(
    episode: EpisodeEngine, workflow: RolloutWorkflow, data: dict[str, Any], check_format: bool
) -> Batch | None:
    try:
        with collecting() as episode.scalars:
            rows = await workflow.arun_episode(episode, data)
        if rows is not None:
            if isinstance(rows, dict) and GIVEN in rows:  # images in the form of AReaL
                rows = with_our_keys(rows, episode.stop_reason)
            refuse_unusable(rows)
            if check_format:
                refuse_malformed(rows)
    except Exception as error:
        # one error of the embedded engine ends all episodes of its batch
        if not any(note.startswith(IN_EPISODE) for note in getattr(error, "__notes__", ())):
            error.add_note(f"{IN_EPISODE} of prompt {episode.prompt_id}, sample {episode.sample_id}")
        raise
    finally:
        episode.is_finished = True
    return rows


def is_accepted(prompt_id: int, rows: Sequence[Batch | None], plan: Plan) -> bool:
    """Return `should_accept` of a prompt's rows.

    Its exception gets a note that names the prompt.
    """
    if plan.should_accept is None:
        return True
    try:
        return bool(plan.should_accept(assemble([(prompt_id, rows)])))
    except Exception as error:
        error.add_note(f"in should_accept_fn for prompt {prompt_id}")
        raise


def joined_scalars(groups: Sequence[Group]) -> Scalars:
    """Return what workflows recorded in the episodes of accepted prompts, by name."""
    found: Scalars = {}
    for group in groups:
        for episode in group.episodes if group.rows is not None else ():
            for name, values in episode.scalars.items():
                found.setdefault(name, []).extend(values)
    return found


def refuse_unusable(rows: Batch) -> None:
    """Check for rows that would hang or corrupt a training step.

    Raises:
        MalformedEpisode: not a dict of tensors with the keys of a batch.
        RewardFailed: a reward is not finite.
    """
    if not isinstance(rows, dict) or not rows.keys() >= ROW_DTYPES.keys():
        shown = f"keys {sorted(rows)}" if isinstance(rows, dict) else f"a {type(rows).__name__}"
        raise MalformedEpisode(
            f"the workflow returned {shown}; expected None or a dict of tensors with {', '.join(ROW_DTYPES)}"
        )
    if not rows["rewards"].isfinite().all():
        raise RewardFailed(
            f"the workflow returned rewards {rows['rewards'].tolist()}; expected finite numbers"
        )
    if rows.keys() & {*PER_IMAGE, *PER_ENTRY, "image_count"}:
        refuse_miscounted(rows)


def refuse_miscounted(rows: Batch) -> None:
    """Check that pictures belong to rows: a wrong count would give each later row another's.

    Raises:
        MalformedEpisode: a key is missing, or counts and lengths disagree.
    """
    data = next((key for key in PER_ENTRY if key in rows), "image_data")
    needed = ["image_count", "mm_token_type_ids", PER_ENTRY[data], data]
    if missing := [key for key in needed if key not in rows]:
        raise MalformedEpisode(
            f"the workflow returned images without {', '.join(missing)}; expected {', '.join(needed)}"
        )
    num_images, num_entries = int(rows["image_count"].sum()), int(rows[PER_ENTRY[data]].sum())
    expected = {"image_count": len(rows["input_ids"]), PER_ENTRY[data]: num_images, data: num_entries}
    if "image_grid_thw" in rows:
        expected["image_grid_thw"] = num_images
    for key, length in expected.items():
        if len(rows[key]) != length:
            raise MalformedEpisode(
                f"the workflow returned {key} with {len(rows[key])} entries; expected {length}, as "
                f"image_count and {PER_ENTRY[data]} say"
            )


def refuse_malformed(rows: Batch) -> None:
    """Check shapes, dtypes and masks (`rollout.check_trajectory_format`).

    Raises:
        MalformedEpisode: one does not fit; the message holds the expected and the actual value.
    """
    shape = rows["input_ids"].shape
    images = {name: dtype for name, dtype in IMAGE_DTYPES.items() if name in rows}
    for name, dtype in (ROW_DTYPES | images).items():
        tensor = rows[name]
        if name in RAGGED:  # its length is checked by `refuse_miscounted`
            if tensor.dtype != dtype:
                raise MalformedEpisode(f"the workflow returned {name} as {tensor.dtype}; expected {dtype}")
            continue
        expected = shape[:1] if name in PER_ROW else shape
        if tensor.dtype != dtype or tensor.shape != expected or len(shape) != 2:
            raise MalformedEpisode(
                f"the workflow returned {name} as {tensor.dtype} {list(tensor.shape)}; expected {dtype} "
                f"{list(expected)}, rows first and then tokens (input_ids has {list(shape)})"
            )
    trained = rows["loss_mask"] != 0
    if (trained & ~rows["attention_mask"]).any():
        raise MalformedEpisode("the workflow returned a loss_mask of 1 where attention_mask is false")
    if "mm_token_type_ids" in rows and (trained & (rows["mm_token_type_ids"] != 0)).any():
        raise MalformedEpisode("the workflow returned a loss_mask of 1 on tokens of images")
    if (rows["versions"][trained] < 0).any() or (rows["logprobs"][trained] > 0).any():
        raise MalformedEpisode(
            "the workflow returned tokens in the loss mask with a version below 0 or a logprob above 0"
        )


def oldest_version(rows: Sequence[Batch | None], otherwise: int) -> int:
    """Return the version of the oldest token in the loss mask; `otherwise` where there is none."""
    trained = [r["versions"][r["loss_mask"] != 0] for r in rows if r is not None]
    return min((int(versions.min()) for versions in trained if len(versions)), default=otherwise)


def assemble(groups: Sequence[tuple[int, Sequence[Batch | None]]]) -> Batch:
    """Return one batch in canonical order from pairs `(prompt_id, episodes)`."""
    # An episode of several rows (such as one per turn) gets as many sample ids as the longest one
    # has rows.
    stride = max(len(rows["input_ids"]) for _, episodes in groups for rows in episodes if rows is not None)
    return sort_canonical(
        pad_and_concat(
            [
                stamp(rows, prompt_id, episode, stride)
                for prompt_id, episodes in groups
                for episode, rows in enumerate(episodes)
                if rows is not None
            ]
        )
    )


def stamp(rows: Batch, prompt_id: int, episode: int, stride: int) -> dict[str, Tensor]:
    """Add the names of the n rows of an episode: `prompt_id` int64 [n], `sample_id` int32 [n].

    Rows of a tree of calls also get `episode` int32 [n], because an episode may have several.
    """
    num_rows = len(rows["input_ids"])
    first = episode * stride
    names = {
        "prompt_id": torch.full((num_rows,), prompt_id, dtype=torch.int64),
        "sample_id": torch.arange(first, first + num_rows, dtype=torch.int32),
    }
    if "branch" in rows:
        names["episode"] = torch.full((num_rows,), episode, dtype=torch.int32)
    return {**rows, **names}


GIVEN = "multi_modal_input"
NARROWED = ("input_ids", "mm_token_type_ids")  # int64 in AReaL, int32 here


def with_our_keys(rows: dict[str, Any], stop_reason: str | None) -> Batch:
    """Return rows with `image_count`, `image_units` and `pixel_values` for `multi_modal_input`.

    Args:
        rows: of one episode; a row without images has an empty dict.
        stop_reason: of the episode's last completion, for an episode of one row; None if there was
            no completion.

    Raises:
        MalformedEpisode: not one dict a row, or other tensors than pixels and their grids.
    """
    images, count = rows[GIVEN], len(rows["input_ids"])
    if not isinstance(images, (list, tuple)) or len(images) != count:
        shown = (
            f"{len(images)} entries" if isinstance(images, (list, tuple)) else f"a {type(images).__name__}"
        )
        raise MalformedEpisode(
            f"the workflow returned {GIVEN} with {shown}; expected a list of {count} dicts"
        )
    for row in images:
        if unknown := sorted(row.keys() - {"pixel_values", "image_grid_thw"}):
            raise MalformedEpisode(
                f"the workflow returned {GIVEN} with {', '.join(unknown)}; only images are supported, "
                "with pixel_values and image_grid_thw"
            )
    found = {name: value for name, value in rows.items() if name not in (GIVEN, "turn_ids")}
    found |= {name: found[name].int() for name in NARROWED if name in found}
    if "finish_reason" not in found and stop_reason is not None and count == 1:
        found["finish_reason"] = torch.tensor([FINISH_REASONS.index(stop_reason)], dtype=torch.int32)
    return found | image_keys_of([row for row in images if row], [len_of(row) for row in images])


def len_of(row: dict[str, Tensor]) -> int:
    return len(row["image_grid_thw"]) if "image_grid_thw" in row else len(row.get("pixel_values", ()))


def image_keys_of(pictured: list[dict[str, Tensor]], counts: list[int]) -> Batch:
    if not pictured:
        return {}
    pixels = torch.cat([row["pixel_values"] for row in pictured])
    found = {"image_count": torch.tensor(counts, dtype=torch.int32), "pixel_values": pixels}
    if "image_grid_thw" not in pictured[0]:  # images of one size, each one entry
        return found | {"image_units": torch.ones(len(pixels), dtype=torch.int32)}
    grids = torch.cat([row["image_grid_thw"] for row in pictured]).int()
    return found | {"image_grid_thw": grids, "image_units": grids.prod(dim=1).int()}
