"""Write dumps of prime-rl, NeMo-RL, open-instruct and AReNo, and dumps of text."""

import json
from pathlib import Path

import pyarrow
from pyarrow import parquet

from .eras import PADDING, micro_batch, write_ranks
from .known import KNOWN

# prime-rl


def write_prime_rl(folder: Path) -> Path:
    masked = micro_batch(KNOWN[:2], PADDING, loss_mask=[False] * 12)
    return write_ranks(folder, [micro_batch(KNOWN[:2], PADDING)], [micro_batch(KNOWN[2:]), masked])


def write_prime_rl_export(folder: Path) -> Path:
    step = folder / "token_exports" / "step_4"
    step.mkdir(parents=True)
    with (step / "rank_0.jsonl").open("w") as file:
        for number, one in enumerate(KNOWN):
            row = {
                "schema_version": 1,
                "step": 4,
                "rank": 0,
                "micro_step": number,
                "export_sequence_idx": number,
                "env_name": "math",
                "token_ids": one.tokens,
                "position_ids": list(range(len(one.tokens))),
                "loss_mask": [bool(m) for m in one.full_mask],
                "advantages": [one.advantage] * len(one.tokens),
                "inference_logprobs": one.full_logprobs,
                "trainer_logprobs": one.full_logprobs,
            }
            file.write(json.dumps(row) + "\n")
    (step / "STABLE").touch()
    return folder


# JSON lines


def write_nemo_rl(folder: Path) -> Path:
    width = 9
    path = folder / "exp_001" / "train_data_step5.jsonl"
    path.parent.mkdir(parents=True)

    def fill(values):
        return list(values) + [0] * (width - len(values))

    rows = [
        {
            "content": [list(one.text)],
            "rewards": [one.reward],
            "input_lengths": [len(one.tokens)],
            "token_ids": [fill(one.tokens)],
            "token_loss_mask": [fill(one.full_mask)],
            "sample_loss_mask": [1.0],
            "advantages": [fill([one.advantage] * len(one.tokens))],
            "generation_logprobs": [fill(one.full_logprobs)],
            "prev_logprobs": [fill(one.full_logprobs)],
            "idx": number,
        }
        for number, one in enumerate(KNOWN)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.parent


def write_open_instruct(folder: Path) -> Path:
    (folder / "run_metadata.jsonl").write_text('{"run_name": "run", "git_commit": "0"}\n')
    rows = [
        {
            "step": step,
            "sample_idx": number,
            "prompt_idx": one.group,
            "prompt_tokens": one.prompt,
            "response_tokens": one.completion,
            "reward": one.reward,
            "advantage": one.advantage,
            "finish_reason": ["stop", "length"][one.finish_reason],
            "dataset": "gsm8k",
            "ground_truth": "42",
            "request_info": {"num_calls": int(0 in one.mask), "tool_calleds": 0 in one.mask},
            "logprobs": one.logprobs,
        }
        for step in (1, 2)
        for number, one in enumerate(KNOWN)
    ]
    (folder / "run_rollouts_000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    (folder / "run_rollouts_000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[5:]))
    return folder


def write_areno(folder: Path) -> Path:
    rows = [
        {
            "format_version": 1,
            "step": 7,
            "prompt_index": number,
            "sample_index": 0,
            "tokens": one.tokens,
            "prompt_mask": [not m for m in one.full_mask],
            "loss_mask": [bool(m) for m in one.full_mask] if 0 in one.mask else [],
            "logprobs": one.full_logprobs,
            "advantages": [one.advantage] * len(one.tokens),
            "reward": one.reward,
            "metadata": {},
        }
        for number, one in enumerate(KNOWN)
    ]
    (folder / "step_000007.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


# text


def write_areal_text(folder: Path) -> Path:
    for number, one in enumerate(KNOWN):
        path = folder / "rollout" / "3" / f"{one.group}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {
            "task_id": one.group,
            "sample_idx": number % 2,
            "seqlen": len(one.tokens),
            "prompt_len": len(one.prompt),
            "head_version": 3,
            "tail_version": 3,
            "version_rle": [[3, len(one.completion)]],
            "reward": one.reward,
            "prompt": one.text[0],
            "completion": one.text[1],
        }
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return folder


def write_verl_text(folder: Path) -> Path:
    rows = [
        {"input": one.text[0], "output": one.text[1], "gts": "42", "score": one.reward, "step": 1}
        for one in KNOWN
    ]
    (folder / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_roll_text(folder: Path) -> Path:
    columns = {
        "global_step": [1] * len(KNOWN),
        "prompt": [one.text[0] for one in KNOWN],
        "responses": [one.text[1] for one in KNOWN],
        "scores": [one.reward for one in KNOWN],
    }
    (folder / "rollout_dump_data.step_1.jsonl").write_text(json.dumps(columns) + "\n")
    return folder


def write_trl(folder: Path, **columns) -> Path:
    table = {
        "step": [1] * len(KNOWN),
        "prompt": [one.text[0] for one in KNOWN],
        "completion": [one.text[1] for one in KNOWN],
        "accuracy": [one.reward for one in KNOWN],
        **columns,
        "advantage": [one.advantage for one in KNOWN],
    }
    (folder / "completions").mkdir()
    parquet.write_table(pyarrow.table(table), folder / "completions" / "completions_00001.parquet")
    return folder
