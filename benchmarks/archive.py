"""Size and speed of the archive compared with the folder of the same record, in one run.

    python benchmarks/archive.py [--model FOLDER --text FILE.jsonl] [--rows 200] [--steps 4]

Lines of the text have `question` and `answer`: questions are prompts, answers completions, every
logprob is the model's. Without them the text is this repository's prose, one token per word, and
logprobs are random, which is the worst case for compression.

With SmolLM2-135M and GSM8K's test set, 220 rows of 47,802 tokens, 58 % of them in the loss mask:
8.4 bytes per token in the folder, 3.4 in the archive, of which ids take 1.0 and logprobs 2.2.
"""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from recorder import RecordWriter, open_record
from recorder.archive.pack import archive_record
from recorder.header import write_header
from recorder.testing import SCRIPTED_HEADER, send_step

ROOT = Path(__file__).parents[1]
Row = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, loss mask, logprobs; each [tokens]


def main() -> None:
    """Print one line per quantity."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    rows = list(scored(options.model, options.text, options.rows) if options.model else prose(options.rows))
    with tempfile.TemporaryDirectory() as folder:
        record, archive = Path(folder) / "record", Path(folder) / "record.zarr"
        write_record(record, rows, options.steps)
        seconds, archived = timed(lambda: archive_record(record, archive))
        tokens = archived.num_tokens
        trained = sum(int(mask.sum()) for _, mask, _ in rows) / tokens
        print(f"tokens                    {tokens:>10,}   {trained:.0%} in the loss mask")
        print(f"folder, bytes per token   {archived.source_bytes / tokens:>10.2f}")
        print(f"archive, bytes per token  {archived.archive_bytes / tokens:>10.2f}")
        for array in sorted((archive / "all").iterdir()):
            size = (
                sum(path.stat().st_size for path in array.rglob("*") if path.is_file())
                if array.is_dir()
                else 0
            )
            if size / tokens >= 0.01:
                print(f"  {array.name:<22}  {size / tokens:>10.2f}")
        print(f"archiving, tokens/s       {tokens / seconds:>10,.0f}")
        for name, place in (("folder", record), ("archive", archive)):
            opening = min(timed(lambda place=place: open_record(place))[0] for _ in range(5))
            reading = min(
                timed(lambda place=place: open_record(place).step(1).rows(0, 3))[0] for _ in range(5)
            )
            print(f"{name}: open {opening * 1000:.1f} ms, open and read one sample {reading * 1000:.1f} ms")


def timed(work: Callable[[], object]) -> tuple[float, object]:
    """Return the seconds of a call, and its result."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def prose(num_rows: int) -> Iterator[Row]:
    """Rows of 500 tokens of this repository's files, half of them in the loss mask."""
    text = " ".join(path.read_text() for path in sorted(ROOT.glob("*/*.py")))
    words = re.findall(r"\w+|[^\w\s]|\s+", text)
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    rng = np.random.default_rng(0)
    for row in range(min(num_rows, len(words) // 500)):
        ids = np.array([vocabulary[word] for word in words[500 * row : 500 * row + 500]], np.int32)
        trained = np.arange(500) >= 250
        yield ids, trained, np.where(trained, -rng.exponential(1.0, 500), 0).astype(np.float32)


def scored(model_path: Path, text: Path, num_rows: int) -> Iterator[Row]:
    """Yield rows of a file, scored with a model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).eval()
    for line in text.read_text().splitlines()[:num_rows]:
        document = json.loads(line)
        messages = [{"role": "user", "content": document["question"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        ids = torch.tensor(prompt + tokenizer(document["answer"])["input_ids"])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1].float()
        logprobs = torch.zeros(len(ids))
        logprobs[1:] = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        trained = torch.arange(len(ids)) >= len(prompt)
        yield ids.int().numpy(), trained.numpy(), torch.where(trained, logprobs, 0.0).numpy()


def write_record(folder: Path, rows: list[Row], num_steps: int) -> None:
    """Write the rows as a record of several steps."""
    writer = RecordWriter(folder)
    folder.mkdir()
    write_header(folder, SCRIPTED_HEADER)
    for step in range(num_steps):
        send_step(writer, step, padded(rows[step::num_steps], step))


def padded(rows: list[Row], version: int) -> dict[str, np.ndarray]:
    """Return the rows as a padded batch."""
    lengths = np.array([len(ids) for ids, _, _ in rows])
    shape = (len(rows), int(lengths.max()))
    batch = {
        "input_ids": np.zeros(shape, np.int32),
        "attention_mask": np.arange(shape[1]) < lengths[:, None],
        "loss_mask": np.zeros(shape, np.int32),
        "logprobs": np.zeros(shape, np.float32),
        "versions": np.zeros(shape, np.int32),
        "rewards": (lengths % 2).astype(np.float32),
        "prompt_id": np.arange(len(rows)) // 4,
        "sample_id": (np.arange(len(rows)) % 4).astype(np.int32),
        "finish_reason": np.zeros(len(rows), np.int32),
    }
    for number, (ids, trained, logprobs) in enumerate(rows):
        size = len(ids)
        batch["input_ids"][number, :size] = ids
        batch["loss_mask"][number, :size] = trained
        batch["logprobs"][number, :size] = logprobs
        batch["versions"][number, :size] = np.where(trained, version, -1)
    return batch


if __name__ == "__main__":
    main()
