"""Episodes as readable text: one JSON line per row, in a folder per version of the weights."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from areal_core.batch import FINISH_REASONS
from areal_core.rollout.engine import EpisodeSampler
from areal_core.rollout.workflow import RolloutWorkflow


class WrittenWorkflow:
    """A workflow that also writes its episodes to `folder/{version}/{prompt_id}.jsonl`.

    Rejected prompts are included. All samples of a prompt run on one rank, in one thread, so its
    file has only one writer.
    """

    def __init__(self, workflow: RolloutWorkflow, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._workflow, self._folder, self._tokenizer = workflow, folder, tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workflow, name)

    async def arun_episode(self, engine: EpisodeSampler, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Run the workflow's episode and write its rows."""
        version = engine.version
        rows = await self._workflow.arun_episode(engine, data)
        if rows is not None:
            file = self._folder / str(version) / f"{engine.prompt_id}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as lines:
                for line in text_lines(rows, self._tokenizer):
                    named = {"prompt_id": engine.prompt_id, "sample_id": engine.sample_id, **line}
                    lines.write(json.dumps(named, ensure_ascii=False) + "\n")
        return rows


def text_lines(rows: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the prompt, completion, reward and finish reason of each row.

    The prompt is the text before the first token in the loss mask.
    """
    lines = []
    for row in range(rows["input_ids"].shape[0]):
        real = rows["attention_mask"][row]
        ids, sampled = rows["input_ids"][row][real], rows["loss_mask"][row][real].bool()
        begin = int(sampled.int().argmax()) if sampled.any() else len(ids)
        lines.append(
            {
                "reward": float(rows["rewards"][row]),
                "finish_reason": FINISH_REASONS[int(rows["finish_reason"][row])],
                "num_sampled": int(sampled.sum()),
                "prompt": tokenizer.decode(ids[:begin]),
                "completion": tokenizer.decode(ids[begin:]),
            }
        )
    return lines
