"""Where rows come from: a JSONL file or folder, a Hugging Face dataset, or a generator. A row is a plain dict.

Rows of type "rl" have `messages` (the conversation so far) and whatever the reward function needs, `answer` above all.
"""

import inspect
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.dataset.pairs import is_tie, pair_length, pair_row
from areal_core.dataset.tokens import sft_row
from areal_core.errors import DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from areal_core.config import DatasetConfig

Row = dict[str, Any]
BOXED_INSTRUCTION = "\nPlease put your final answer within \\boxed{}."
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def get_dataset(
    config: "DatasetConfig", split: str | None = None, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> Sequence[Row]:
    """All rows of one split, ready for a `PromptLoader`. Raises DatasetError.

    "rl" rows hold `messages`; those whose prompt is longer than `config.max_length` tokens are left out. "sft" rows hold
    `input_ids` and `loss_mask` (lists of int), "rw" and "dpo" rows what `pair_row` says; longer ones are left out too, and pairs of
    equal sides. All but "rl" rows without `max_length` need `tokenizer`.
    """
    split = split or config.split
    rows = read_rows(config.path, split, dict(config.dataset_kwargs))
    if tokenizer is None and (config.type != "rl" or config.max_length is not None):
        raise DatasetError(
            f"type {config.type!r} with max_length {config.max_length} needs a tokenizer; pass one"
        )
    if config.type == "sft":
        rows = [sft_row(row, tokenizer) for row in rows]
        lengths = [len(row["input_ids"]) for row in rows] if config.max_length is not None else []
    elif config.type == "rl":
        rows = [rl_row(row, f"{config.path}, row {number}") for number, row in enumerate(rows)]
        lengths = [num_prompt_tokens(row, tokenizer) for row in rows] if config.max_length is not None else []
    elif config.type in ("rw", "dpo"):
        rows = [pair_row(row, tokenizer, f"{config.path}, row {number}") for number, row in enumerate(rows)]
        rows = [row for row in rows if not is_tie(row)]
        lengths = [pair_length(row) for row in rows]
    else:
        raise DatasetError(f"dataset type is {config.type!r}; expected 'rl', 'sft', 'rw' or 'dpo'")
    if config.max_length is not None:
        rows = [row for row, length in zip(rows, lengths, strict=True) if length <= config.max_length]
    if not rows:
        raise DatasetError(f"{config.path} (split {split}) has no rows of at most {config.max_length} tokens")
    return rows


def read_rows(path: str, split: str | None, arguments: dict[str, Any]) -> list[Row]:
    """Rows as they are stored. `arguments` go to the generator or to `datasets.load_dataset`. Raises DatasetError."""
    if path == "arithmetic":
        known = inspect.signature(arithmetic_rows).parameters
        if unknown := sorted(set(arguments) - set(known)):
            raise DatasetError(
                f"dataset_kwargs has {', '.join(unknown)}; 'arithmetic' takes {', '.join(known)}"
            )
        return arithmetic_rows(**arguments)
    local = Path(path)
    if local.is_file():
        return list(read_jsonl(local))
    if local.is_dir() and (file := jsonl_of_split(local, split)):
        return list(read_jsonl(file))
    return read_hugging_face(path, split, arguments)


def jsonl_of_split(folder: Path, split: str | None) -> Path | None:
    """`folder/split.jsonl`, or the only JSONL file if no split is asked for."""
    named = folder / f"{split}.jsonl"
    if named.is_file():
        return named
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        return None
    if split is None and len(files) == 1:
        return files[0]
    raise DatasetError(f"{folder} has no {split}.jsonl; it has {', '.join(file.name for file in files)}")


def read_jsonl(file: Path) -> Iterator[Row]:
    """One JSON object a line; empty lines are passed over."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DatasetError(f"{file}, line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DatasetError(
                    f"{file}, line {number} is {type(row).__name__}; expected an object with named fields"
                )
            yield row


def read_hugging_face(path: str, split: str | None, arguments: dict[str, Any]) -> list[Row]:
    """A dataset of the hub, of its local cache, or a local folder in a form that `datasets` knows."""
    import datasets

    if "name" not in arguments and path.rstrip("/").endswith("gsm8k"):
        arguments = arguments | {"name": "main"}
    try:
        loaded = datasets.load_dataset(path, split=split or "train", **arguments)
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DatasetError(
            f"{path} is no file, no folder with JSONL files, and no dataset that can be loaded (split {split}): {reason}"
        ) from None
    return [dict(row) for row in loaded]


def rl_row(row: Row, where: str) -> Row:
    """The row with `messages`, built from `question` (with the request for a boxed answer) or `prompt` if it has none."""
    if "messages" in row:
        return row
    if "question" in row:
        rest = {key: value for key, value in row.items() if key != "question"}
        return {"messages": [{"role": "user", "content": row["question"] + BOXED_INSTRUCTION}], **rest}
    if "prompt" in row:
        rest = {key: value for key, value in row.items() if key != "prompt"}
        return {"messages": [{"role": "user", "content": row["prompt"]}], **rest}
    raise DatasetError(f"{where} has {', '.join(row) or 'no fields'}; expected messages, question or prompt")


def num_prompt_tokens(row: Row, tokenizer: "PreTrainedTokenizerBase") -> int:
    return len(tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False))


def arithmetic_rows(
    num_rows: int = 1000, seed: int = 0, max_operand: int = 9, ops: str | Sequence[str] = "+"
) -> list[Row]:
    """Questions such as "3+4=" with the answer "7": the same rows for the same arguments, on every machine."""
    unknown = [op for op in ops if op not in OPERATIONS]
    if unknown or not ops:
        raise DatasetError(f"dataset_kwargs.ops is {ops!r}; expected some of {' '.join(OPERATIONS)}")
    if num_rows < 1 or max_operand < 0:
        raise DatasetError(
            f"dataset_kwargs.num_rows is {num_rows} and max_operand {max_operand}; expected >= 1 and >= 0"
        )
    random_numbers = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        a, b = random_numbers.randint(0, max_operand), random_numbers.randint(0, max_operand)
        op = random_numbers.choice(list(ops))
        question = {"role": "user", "content": f"{a}{op}{b}="}
        rows.append({"messages": [question], "answer": str(OPERATIONS[op](a, b))})
    return rows
