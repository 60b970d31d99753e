"""slime's `rollout_data/{rollout_id}.pt`, one per step, for `--load-debug-rollout-data`.

Also loadable with `weights_only=True`: it holds dicts, lists, strings and numbers.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_core.safety.durable import commit_file
from recorder.exporters.rows import check_file, file_of_step, layout_of_steps, read_rows
from recorder.reader import Record

# by finish reason; slime has no word for one that is not known, and "pending" is its default
STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted", None: "pending"}
COLUMNS = (
    "step", "prompt_id", "sample_id", "prompt_len", "reward", "finish_reason",
    "token_ids", "loss_mask", "logprobs", "versions", "prompt", "completion", "messages", "tools",
)  # fmt: skip


def write(record: Record, file: Path, steps: Sequence[int], overwrite: bool) -> list[Path]:
    """Write one file per step, each atomically."""
    import torch

    files = {step: file_of_step(file, step, len(steps)) for step in steps}
    for step, path in files.items():
        check_file(path, overwrite)
        rows = read_rows(record, [step], layout_of_steps(record, [step]), COLUMNS)
        samples = [sample_of(row, index) for index, row in enumerate(rows)]
        packed = io.BytesIO()  # torch turns an error of a file into one without its reason
        torch.save({"rollout_id": step, "samples": samples}, packed)
        commit_file(path, packed.getvalue())
    return list(files.values())


def sample_of(row: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a row as `Sample.to_dict()` of slime; what is not known is None.

    The response begins behind the prompt. Without one that is known it is the whole row.
    """
    tokens, mask, versions = row["token_ids"] or [], row["loss_mask"], row["versions"] or []
    begin = row["prompt_len"] or 0
    trained = [version for version, kept in zip(versions, mask or [1] * len(tokens), strict=False) if kept]
    return {
        "group_index": row["prompt_id"],
        "index": index,
        "rollout_id": row["step"],
        "prompt": row.get("prompt") or "",
        "tokens": tokens,
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "response": row.get("completion") or "",
        "response_length": len(tokens) - begin,
        "label": None,
        "reward": row["reward"],
        "loss_mask": None if mask is None else mask[begin:],
        "weight_versions": [str(version) for version in dict.fromkeys(trained)],
        "rollout_log_probs": None if row["logprobs"] is None else row["logprobs"][begin:],
        "rollout_routed_experts": None,
        "teacher_log_probs": None,
        "remove_sample": False,
        "status": STATUS[row["finish_reason"]],
        "metadata": {"sample_id": row["sample_id"]}
        | {name: row[name] for name in ("messages", "tools") if row.get(name) is not None},
        "train_metadata": None,
        "session_id": None,
        "non_generation_time": 0.0,
        "spec_info": {
            "spec_accept_token_num": 0,
            "spec_draft_token_num": 0,
            "spec_verify_ct": 0,
            "completion_token_num": 0,
        },
        "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0},
    }
