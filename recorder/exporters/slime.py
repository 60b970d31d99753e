"""slime's `rollout_data/{rollout_id}.pt`, one per step, for `--load-debug-rollout-data`.

Also loadable with `weights_only=True`: it holds dicts, lists, strings and numbers.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_core.safety.durable import commit_file
from recorder.exporters.rows import ExportedRow, check_file, file_of_step, read_rows
from recorder.reader import Record

STATUS = ("completed", "truncated", "aborted")  # by finish reason


def write(record: Record, file: Path, steps: Sequence[int], overwrite: bool) -> list[Path]:
    """Write one file per step, each atomically."""
    import torch

    files = {step: file_of_step(file, step, len(steps)) for step in steps}
    for step, path in files.items():
        check_file(path, overwrite)
        rows = read_rows(record, [step])
        samples = [sample_of(row, index) for index, row in enumerate(rows)]
        packed = io.BytesIO()  # torch turns an error of a file into one without its reason
        torch.save({"rollout_id": step, "samples": samples}, packed)
        commit_file(path, packed.getvalue())
    return list(files.values())


def sample_of(row: ExportedRow, index: int) -> dict[str, Any]:
    """Return a row as `Sample.to_dict()` of slime.

    The response begins at the first token in the loss mask.
    """
    response = slice(row.prompt_len, None)
    prompt, completion = row.text or ("", "")
    trained = row.versions[row.loss_mask != 0].tolist()
    return {
        "group_index": row.prompt_id,
        "index": index,
        "rollout_id": row.step,
        "prompt": prompt,
        "tokens": row.token_ids.tolist(),
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "response": completion,
        "response_length": len(row.token_ids) - row.prompt_len,
        "label": None,
        "reward": row.reward,
        "loss_mask": row.loss_mask[response].tolist(),
        "weight_versions": [str(version) for version in dict.fromkeys(trained)],
        "rollout_log_probs": row.logprobs[response].tolist(),
        "rollout_routed_experts": None,
        "teacher_log_probs": None,
        "remove_sample": False,
        "status": STATUS[row.finish_reason],
        "metadata": {"sample_id": row.sample_id},
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
