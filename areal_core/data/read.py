"""Rows of one split, from a file, a folder, a Hugging Face dataset or a generator, by their type.

read_rows   JSONL, CSV or Parquet file, folder, `datasets`, `GENERATED`    rows as they are stored
tokenized   "rl"          `messages` and the fields that the reward function needs, usually `answer`
            "sft"         tokens with a loss mask
            "rw", "dpo"   two answers to one prompt as tokens, a chosen and a rejected one
"""

import csv
import inspect
import json
import logging
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.config.vision_checks import is_of_images
from areal_core.data.image_rows import LazyRows, image_dataset, shape_rows
from areal_core.data.rows import Row, chat_ids, num_shared, sft_row
from areal_core.errors import DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from areal_core.config import DatasetConfig
    from areal_core.data.processor import VisionProcessor

logger = logging.getLogger(__name__)
PAIR_FIELDS = (
    "chosen and rejected, both texts or both lists of messages, and the prompt or messages before them, "
    "if they do not begin with it"
)
BOXED_INSTRUCTION = "\nPlease put your final answer within \\boxed{}."
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def get_dataset(
    config: "DatasetConfig",
    split: str | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    processor: "VisionProcessor | None" = None,
) -> Sequence[Row]:
    """Return all rows of one split, ready for a trainer.

    Rows of more than `config.max_length` tokens (of an "rl" row: of its prompt) are left out, and
    pairs of equal sides.

    Args:
        config: `train_dataset` or `valid_dataset` of a config: path, type, split and maximum
            length.
        split: by default `config.split`.
        tokenizer: of the model; all but "rl" rows without `max_length` need it.
        processor: of a vision model; a dataset that has pictures needs it.

    Returns:
        Rows as dicts. Type "rl" has `messages` and the fields that the reward function needs, "sft"
        `input_ids` and `loss_mask` (lists of int, 1 on completion and EOS), "rw" and "dpo" the
        tokens of a chosen and a rejected answer. With `processor` also `images`.

    Raises:
        DatasetError: the rows cannot be read or have other fields, none is left, or `tokenizer` or
            `processor` is missing.
    """
    split = split or config.split
    arguments = dict(config.dataset_kwargs)
    rows: Sequence[Row]
    if processor is not None or is_of_images(config.path):
        max_pixels = arguments.pop("max_pixels", None)
        stored = read_lazily(config.path, split, arguments)
        folder = config.path if Path(config.path).is_dir() else str(Path(config.path).parent)
        rows = image_dataset(stored, config, folder, max_pixels, processor)
    elif tokenizer is not None:
        rows = tokenized(read_rows(config.path, split, arguments), config, tokenizer)
    elif config.type == "rl" and config.max_length is None:
        rows = rl_rows(read_rows(config.path, split, arguments), config.path)
    else:
        raise DatasetError(
            f"type {config.type!r} with max_length {config.max_length} needs a tokenizer; pass one"
        )
    if not rows:
        limit = "" if config.max_length is None else f" of at most {config.max_length} tokens"
        raise DatasetError(f"{config.path} (split {split}) has no rows{limit}")
    return rows


def rows_of(path: str) -> list[Row]:
    """Return the rows of a dataset as training passes them to a workflow. Raises DatasetError."""
    from areal_core.config import DatasetConfig

    return list(get_dataset(DatasetConfig(path=path, type="rl")))


def full_batches(rows: Sequence[Row], config: "DatasetConfig") -> Sequence[Row]:
    """Return the rows; with `drop_last`, those of full batches.

    Raises:
        DatasetError: no batch is full.
    """
    if not config.drop_last:
        return rows
    if len(rows) < config.batch_size:
        raise DatasetError(
            f"{config.path} has {len(rows)} rows, drop_last is True and batch_size is {config.batch_size}; no batch is full"
        )
    return rows[: len(rows) // config.batch_size * config.batch_size]


def tokenized(
    rows: Sequence[Row], config: "DatasetConfig", tokenizer: "PreTrainedTokenizerBase"
) -> list[Row]:
    """Convert rows to those of `config.type`, without those longer than `config.max_length`."""
    if config.type == "sft":
        converted: list[Row] = [dict(sft_row(row, tokenizer)) for row in rows]
    elif config.type == "rl":
        converted = rl_rows(rows, config.path)
    elif config.type in ("rw", "dpo"):
        pairs = [pair_row(row, tokenizer, f"{config.path}, row {number}") for number, row in enumerate(rows)]
        # a pair of the same tokens has no gradient
        converted = [dict(pair) for pair in pairs if pair["chosen_ids"] != pair["rejected_ids"]]
    else:
        raise DatasetError(f"dataset type is {config.type!r}; expected 'rl', 'sft', 'rw' or 'dpo'")
    if config.max_length is None:
        return converted
    return [row for row in converted if length_of(row, config.type, tokenizer) <= config.max_length]


def length_of(row: Row, kind: str, tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the tokens of a converted row: of the prompt, the row, or a pair's longer side."""
    if kind == "rl":
        return len(chat_ids(row["messages"], tokenizer, add_generation_prompt=True))
    if kind == "sft":
        return len(row["input_ids"])
    return max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def rl_rows(rows: Sequence[Row], path: str) -> list[Row]:
    """Return rows with `messages`, and log the text that is appended to questions.

    Args:
        path: names the dataset in errors.
    """
    if rows and "messages" not in rows[0] and "question" in rows[0] and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%s: %r is appended to every question; rows with `prompt` or `messages` are used as they are",
            path,
            BOXED_INSTRUCTION,
        )
    return [rl_row(row, f"{path}, row {number}") for number, row in enumerate(rows)]


def read_rows(path: str, split: str | None, arguments: dict[str, Any]) -> list[Row]:
    """Read rows as they are stored.

    Args:
        arguments: of the generator or of `datasets.load_dataset`.

    Raises:
        DatasetError: there are none to read, or an argument is unknown.
    """
    if path in GENERATED:
        known = inspect.signature(GENERATED[path]).parameters
        if unknown := sorted(set(arguments) - set(known)):
            raise DatasetError(f"dataset_kwargs has {', '.join(unknown)}; {path!r} takes {', '.join(known)}")
        return GENERATED[path](**arguments)
    local = Path(path)
    if local.is_file():
        return read_file(local)
    if local.is_dir() and (file := file_of_split(local, split)):
        return read_file(file)
    return [dict(row) for row in load_hugging_face(path, split, arguments)]


def read_lazily(path: str, split: str | None, arguments: dict[str, Any]) -> Sequence[Row]:
    """Read rows as `read_rows`; those of Parquet files and of the hub when they are used.

    Their pictures are not decoded: `bytes` and `path`, as they are stored.
    """
    local = Path(path)
    if local.is_file() and local.suffix.lower() == ".parquet":
        loaded = load_hugging_face("parquet", "train", {"data_files": path} | arguments)
    elif path in GENERATED or local.is_file() or (local.is_dir() and file_of_split(local, split)):
        return read_rows(path, split, arguments)
    else:
        loaded = load_hugging_face(path, split, arguments)
    return LazyRows(loaded.with_format("arrow"), lambda table, number: table.to_pylist()[0])


def read_file(file: Path) -> list[Row]:
    """Read a CSV, TSV or Parquet file by its ending, any other as JSONL. Raises DatasetError."""
    reader = READERS.get(file.suffix.lower(), read_jsonl)
    return list(reader(file))


def file_of_split(folder: Path, split: str | None) -> Path | None:
    """Return the file `folder/SPLIT.*`, or without a split the only one; None without any.

    JSONL files precede CSV and TSV ones. A folder of Parquet files alone is one of `datasets`.
    """
    for ending in (".jsonl", ".csv", ".tsv"):
        named = folder / f"{split}{ending}"
        if named.is_file():
            return named
    files = sorted(file for ending in (".jsonl", ".csv", ".tsv") for file in folder.glob(f"*{ending}"))
    if not files:
        return None
    if split is None and len(files) == 1:
        return files[0]
    raise DatasetError(f"{folder} has no {split}.jsonl; it has {', '.join(file.name for file in files)}")


def read_jsonl(file: Path) -> Iterator[Row]:
    """Yield the JSON object of each line; empty lines are skipped. Raises DatasetError."""
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


def read_csv(file: Path) -> Iterator[Row]:
    """Yield the texts of each line, named by the first line. Raises DatasetError."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    found = (
                        len(row) - 1 + len(row[None])
                        if None in row
                        else sum(v is not None for v in row.values())
                    )
                    raise DatasetError(
                        f"{file}, line {reader.line_num} has {found} values; expected {', '.join(reader.fieldnames or ())}"
                    )
                yield row
        except csv.Error as error:
            raise DatasetError(f"{file}, line {reader.line_num} is not CSV: {error}") from None


def read_parquet(file: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file. Raises DatasetError."""
    import pyarrow
    from pyarrow import parquet

    try:
        yield from parquet.read_table(file).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DatasetError(f"{file} is not Parquet: {str(error).splitlines()[0]}") from None


READERS = {".csv": read_csv, ".tsv": read_csv, ".parquet": read_parquet}


def load_hugging_face(path: str, split: str | None, arguments: dict[str, Any]) -> Any:
    is_of_files = Path(path).suffix.lower() in {*READERS, ".jsonl", ".json"} or path.startswith(("/", "."))
    if is_of_files and not Path(path).exists():  # the hub would be asked, several times
        raise DatasetError(f"{path} does not exist: give a file, a folder or a dataset of the hub")
    import datasets

    if "name" not in arguments and path.rstrip("/").endswith("gsm8k"):
        arguments = arguments | {"name": "main"}
    try:
        return datasets.load_dataset(path, split=split or "train", **arguments)
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DatasetError(
            f"{path} is no file, no folder with JSONL or CSV files, and no dataset that can be loaded "
            f"(split {split}): {reason}"
        ) from None


def rl_row(row: Row, where: str) -> Row:
    """Return the row with `messages`, built from `question` or `prompt` if it has none.

    A question gets an instruction to put the final answer in a box.
    """
    if "messages" in row:
        return row
    if "question" in row:
        rest = {key: value for key, value in row.items() if key != "question"}
        return {"messages": [{"role": "user", "content": row["question"] + BOXED_INSTRUCTION}], **rest}
    if "prompt" in row:
        rest = {key: value for key, value in row.items() if key != "prompt"}
        return {"messages": [{"role": "user", "content": row["prompt"]}], **rest}
    raise DatasetError(f"{where} has {', '.join(row) or 'no fields'}; expected messages, question or prompt")


def arithmetic_rows(
    num_rows: int = 1000, seed: int = 0, max_operand: int = 9, ops: str | Sequence[str] = "+"
) -> list[Row]:
    """Generate questions such as "3+4=" with the answer "7".

    The same arguments give the same rows on every machine.
    """
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


GENERATED: dict[str, Callable[..., list[Row]]] = {"arithmetic": arithmetic_rows, "shapes": shape_rows}


def pair_row(row: Row, tokenizer: "PreTrainedTokenizerBase", where: str) -> dict[str, list[int]]:
    """Return `chosen_ids`, `rejected_ids`, `chosen_loss_mask` and `rejected_loss_mask`.

    A loss mask is 0 on the common prefix of the two. Rows have `chosen` and `rejected`, and
    optionally the `prompt` or `messages` before them. EOS is appended to texts; messages go through
    the chat template, which ends them. Without a prompt, and if the messages start with a system or
    user turn, they are complete conversations.

    Args:
        where: names the row in errors.

    Raises:
        DatasetError: the row has other fields.
    """
    if "chosen" not in row or "rejected" not in row or type(row["chosen"]) is not type(row["rejected"]):
        raise DatasetError(f"{where} has {', '.join(row) or 'no fields'}; expected {PAIR_FIELDS}")
    prompt = next((row[name] for name in ("messages", "prompt") if name in row), None)
    chosen, rejected = (answer_ids(prompt, row[side], tokenizer, where) for side in ("chosen", "rejected"))
    shared = num_shared(chosen, rejected)
    return {
        "chosen_ids": chosen,
        "rejected_ids": rejected,
        "chosen_loss_mask": [0] * shared + [1] * (len(chosen) - shared),
        "rejected_loss_mask": [0] * shared + [1] * (len(rejected) - shared),
    }


def answer_ids(prompt: Any, answer: Any, tokenizer: "PreTrainedTokenizerBase", where: str) -> list[int]:
    match prompt, answer:
        case _, [{"role": "user" | "system"}, *_]:
            return chat_ids(answer, tokenizer)
        case list(), [_, *_]:
            return chat_ids([*prompt, *answer], tokenizer)
        case str(), [_, *_]:
            turn = {"role": "user", "content": prompt}
            return chat_ids([turn, *answer], tokenizer)
        case list(), str():
            prompt_ids = chat_ids(prompt, tokenizer, add_generation_prompt=True)
        case str(), str():
            prompt_ids = tokenizer.encode(prompt)
        case None, str():
            return [*tokenizer.encode(answer), tokenizer.eos_token_id]
        case _:
            raise DatasetError(f"{where} has no text and no messages to compare; expected {PAIR_FIELDS}")
    return [*prompt_ids, *tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
