"""Write a small data set of posts and summaries, with a tokenizer of its words and a random model.

    python examples/tldr_data.py runs/tldr

Each post has a title and three sentences, in the form of the TL;DR data set of Reddit posts. The
first sentence is what the title is about, and the best summary. The summaries for supervised
fine-tuning are those of hasty authors: half of them go on with the second sentence, and a quarter
of the others say nothing, as the third one. A pair has the best summary and a worse one: too long,
without its last word, or one that says nothing.

A row has `messages` and `answer` (SFT), `chosen` and `rejected` (reward model), and `best`.
"""

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_core.testing import make_tiny_model

SUBJECTS = ("dog", "cat", "boss", "neighbor", "sister", "roommate", "teacher", "cousin", "landlord", "friend")
VERBS = ("lost", "sold", "broke", "hid", "painted", "returned", "borrowed", "washed", "dropped", "wanted")
OBJECTS = ("car", "keys", "phone", "bike", "guitar", "laptop", "sofa", "ring", "camera", "garden")
FILLERS = ("it was raining", "i was tired", "what a week", "it was late")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|> ' + message['content'] + ' <|end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unknown|>"]


def make_row(numbers: random.Random) -> dict[str, object]:
    """Return one post with its summaries."""
    subjects, verbs = numbers.sample(SUBJECTS, 2), numbers.choices(VERBS, k=2)
    best, detail = (f"{subjects[i]} {verbs[i]} {numbers.choice(OBJECTS)}" for i in range(2))
    filler, long = numbers.choice(FILLERS), f"{best} {detail}"
    return {
        "messages": [
            {
                "role": "user",
                "content": f"title my {subjects[0]} post {best} . {detail} . {filler} . tl;dr",
            }
        ],
        "answer": numbers.choice([long, filler if numbers.random() < 0.25 else best]),
        "chosen": best,
        "rejected": numbers.choice([long, f"{subjects[0]} {verbs[0]}", filler]),
        "best": best,
    }


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each word of the posts."""
    words = sorted({*SUBJECTS, *VERBS, *OBJECTS, *" ".join(FILLERS).split()})
    words += [".", "title", "my", "post", "tl;dr"]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *words])}, unk_token=SPECIAL[-1])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        unk_token=SPECIAL[-1],
        additional_special_tokens=SPECIAL[2:4],
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def write(folder: Path, num_rows: int = 4096, num_held_out: int = 128, seed: int = 0) -> None:
    """Write `train.jsonl`, `test.jsonl` and `model/`."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(seed)
    for split, count in {"train": num_rows, "test": num_held_out}.items():
        rows = [json.dumps(make_row(numbers)) + "\n" for _ in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(rows))
    make_tiny_model(
        folder / "model", tokenizer=make_tokenizer(), num_kv_heads=4, seed=seed,
        intermediate_size=128, max_position_embeddings=128,
    )  # fmt: skip


if __name__ == "__main__":
    write(Path(sys.argv[1]))
