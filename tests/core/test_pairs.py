"""Preference rows in every format of datasets, as tokens."""

import json

import pytest

from areal_core.config import DatasetConfig
from areal_core.data import get_dataset
from areal_core.errors import DatasetError
from areal_core.testing import make_tiny_tokenizer

USER = {"role": "user", "content": "1+1="}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture
def rows_of(tmp_path, tokenizer):
    """Read the rows of a file as the trainer does: `rows_of([{...}], max_length=8)`."""

    def read(rows: list[dict], **options) -> list[dict]:
        file = tmp_path / "pairs.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        return list(get_dataset(DatasetConfig(path=str(file), type="dpo", **options), tokenizer=tokenizer))

    return read


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


TEXTS = {"chosen": "2", "rejected": "31"}
ANSWERS = {side: [assistant(text)] for side, text in TEXTS.items()}
CONVERSATIONS = {side: [USER, *messages] for side, messages in ANSWERS.items()}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "1+1=", **TEXTS}, "1+1="),
        ({"chosen": "1+1=2", "rejected": "1+1=31"}, "1+1="),
        ({"messages": [USER], **TEXTS}, None),
        ({"prompt": "1+1=", **ANSWERS}, None),
        ({"prompt": "1+1=", **CONVERSATIONS}, None),
        ({"prompt": [USER], **ANSWERS}, None),
        (CONVERSATIONS, None),
    ],
)
def test_loss_mask_of_every_format_covers_all_after_the_common_prefix(rows_of, tokenizer, row, prompt):
    [pair] = rows_of([row])
    prompt = prompt or "<|user|>1+1=<|end|><|assistant|>"
    for side, text in TEXTS.items():
        ids, mask = pair[f"{side}_ids"], pair[f"{side}_loss_mask"]
        assert tokenizer.decode(ids) == f"{prompt}{text}<|end|>"
        learned = [token for token, is_learned in zip(ids, mask, strict=True) if is_learned]
        assert tokenizer.decode(learned) == f"{text}<|end|>"


def test_ties_and_pairs_with_one_long_side_are_left_out(rows_of):
    short = {"prompt": "a", "chosen": "b", "rejected": "c"}
    rows = rows_of([short, short | {"rejected": "b"}, short | {"rejected": "cdef"}], max_length=5)
    assert len(rows) == 1
    with pytest.raises(DatasetError, match="no rows"):
        rows_of([short | {"rejected": "b"}])


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "a", "chosen": "b"}, "row 0 has prompt, chosen; expected chosen and rejected"),
        ({"chosen": "b", "rejected": [assistant("b")]}, "both texts or both lists"),
        ({"prompt": "a", "chosen": [], "rejected": []}, "row 0 has no text and no messages"),
    ],
)
def test_row_that_is_no_pair_is_refused_with_its_number(rows_of, row, sentence):
    with pytest.raises(DatasetError) as error:
        rows_of([row])
    assert sentence in str(error.value)
