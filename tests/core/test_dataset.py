"""Rows from files and generators, supervised rows as tokens, the order of prompts over ranks."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_core.config import DatasetConfig
from areal_core.data import PromptLoader, get_dataset
from areal_core.data.read import full_batches
from areal_core.errors import DatasetError
from areal_core.testing import make_tiny_tokenizer

QUESTIONS = [
    {"question": "Tom has 2 pens and buys 3. How many?", "answer": "2 + 3 = 5\n#### 5"},
    {"question": "A box holds 4 rows of 6 eggs. How many?", "answer": "4 * 6 = 24\n#### 24"},
    {"question": "9 less 1?", "answer": "#### 8"},
]


@pytest.fixture
def questions(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n\n")
    return file


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def test_folder_gives_the_requested_split(questions):
    folder = questions.parent
    (folder / "test.jsonl").write_text(json.dumps(QUESTIONS[0]) + "\n")
    config = DatasetConfig(path=str(folder), type="rl", split="train")
    assert len(get_dataset(config)) == 3
    assert len(get_dataset(config, split="test")) == 1
    with pytest.raises(DatasetError, match=r"no dev.jsonl; it has test.jsonl, train.jsonl"):
        get_dataset(config, split="dev")


def test_long_prompts_are_left_out(questions, tokenizer):
    config = DatasetConfig(path=str(questions), type="rl", max_length=70)
    rows = get_dataset(config, tokenizer=tokenizer)
    assert [row["answer"] for row in rows] == ["#### 8"]
    with pytest.raises(DatasetError, match="needs a tokenizer"):
        get_dataset(config)
    config.max_length = 3
    with pytest.raises(DatasetError, match="no rows of at most 3 tokens"):
        get_dataset(config, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("bad.jsonl", b'{"question": "a", "answer": "b"}\n{"question": \n', "line 2 is not JSON"),
        ("bad.jsonl", b"[1]\n", "line 1 is list"),
        (
            "bad.jsonl",
            b'{"text": "a", "label": 1}\n',
            "row 0 has text, label; expected messages, question or prompt",
        ),
        ("bad.csv", b"prompt,answer\n1,2\n1,2,3\n", "line 3 has 3 values; expected prompt, answer"),
        ("short.csv", b"prompt,answer\n1\n", "line 2 has 1 values; expected prompt, answer"),
        ("bad.parquet", b"prompt,answer", "is not Parquet"),
    ],
)
def test_damaged_file_is_reported_with_its_line(tmp_path, name, content, sentence):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(DatasetError) as error:
        get_dataset(DatasetConfig(path=str(file), type="rl"))
    assert str(file) in str(error.value)
    assert sentence in str(error.value)


@pytest.mark.parametrize("path", ["absent.jsonl", "absent.parquet", "./absent", "/absent/folder"])
def test_a_file_that_is_absent_is_not_asked_of_the_hub(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it would fail
    with pytest.raises(DatasetError, match=f"^{path} does not exist: "):
        get_dataset(DatasetConfig(path=path, type="rl"))


def test_loss_mask_of_supervised_rows_covers_the_completion_and_its_eos(tmp_path, tokenizer):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    row = get_dataset(DatasetConfig(path=str(file), type="sft"), tokenizer=tokenizer)[0]
    assert tokenizer.decode(row["input_ids"]) == "1+1=2<|end|>"
    assert row["loss_mask"] == [0, 0, 0, 0, 1, 1]


def rows_of(num_rows: int) -> list[dict]:
    return [{"number": number} for number in range(num_rows)]


def global_batches(num_batches: int, world_size: int, **options) -> list[list[tuple[int, int]]]:
    """Return the rows of all ranks together, in order of prompt_id."""
    loaders = [PromptLoader(rows_of(13), 4, rank, world_size, **options) for rank in range(world_size)]
    batches = []
    for _ in range(num_batches):
        pairs = [(prompt_id, row["number"]) for loader in loaders for prompt_id, row in loader.next_batch()]
        batches.append(sorted(pairs))
    return batches


@given(st.sampled_from([2, 4]), st.booleans(), st.booleans(), st.integers(0, 5))
def test_order_does_not_depend_on_the_number_of_ranks(world_size, shuffle, drop_last, seed):
    options = {"shuffle": shuffle, "drop_last": drop_last, "seed": seed}
    assert global_batches(9, world_size, **options) == global_batches(9, 1, **options)


@given(st.booleans(), st.booleans())
def test_a_prompts_row_is_found_again_by_its_id(shuffle, drop_last):
    loader = PromptLoader(rows_of(13), 4, shuffle=shuffle, drop_last=drop_last)
    given_out = [pair for _ in range(9) for pair in loader.next_batch()]
    assert [(prompt_id, loader.row(prompt_id)) for prompt_id, _ in given_out] == given_out


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [4, 4, 4]), (False, [4, 4, 4, 1])])
def test_every_epoch_shows_each_row_once_in_a_new_order(drop_last, sizes):
    loader = PromptLoader(rows_of(13), 4, drop_last=drop_last)
    assert loader.steps_per_epoch == len(sizes)
    epochs = []
    for epoch in range(2):
        assert loader.epoch == epoch
        batches = [loader.next_batch() for _ in sizes]
        assert [len(batch) for batch in batches] == sizes
        epochs.append([row["number"] for batch in batches for _, row in batch])
        assert len(set(epochs[-1])) == sum(sizes)
    assert epochs[0] != epochs[1]
    if not drop_last:
        assert sorted(epochs[0]) == list(range(13))


@pytest.mark.parametrize("num_before", [0, 2, 3, 5])
def test_state_continues_exactly_and_that_of_another_order_is_refused(num_before):
    loader = PromptLoader(rows_of(13), 4, 1, 2, seed=5)
    for _ in range(num_before):
        loader.next_batch()
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = PromptLoader(rows_of(13), 4, 1, 2, seed=5)
    resumed.load_state_dict(state)
    assert [resumed.next_batch() for _ in range(6)] == [loader.next_batch() for _ in range(6)]
    state = PromptLoader(rows_of(13), 4, seed=5).state_dict()
    with pytest.raises(DatasetError, match="saved loader has seed 5 and this one 6"):
        PromptLoader(rows_of(13), 4, seed=6).load_state_dict(state)
    with pytest.raises(DatasetError, match="saved loader has num_rows 13 and this one 12"):
        PromptLoader(rows_of(12), 4, seed=5).load_state_dict(state)


def test_csv_tsv_and_parquet_rows_are_those_of_jsonl(tmp_path):
    from pyarrow import Table, parquet

    rows = [{"prompt": 'say "a, b"', "answer": "a, b"}, {"prompt": "two\nlines", "answer": "7"}]
    (tmp_path / "rows.csv").write_text('prompt,answer\n"say ""a, b""","a, b"\n"two\nlines",7\n')
    (tmp_path / "rows.tsv").write_text('prompt\tanswer\n"say ""a, b"""\ta, b\n"two\nlines"\t7\n')
    parquet.write_table(Table.from_pylist(rows), tmp_path / "rows.parquet")
    for ending in ("csv", "tsv", "parquet"):
        read = get_dataset(DatasetConfig(path=str(tmp_path / f"rows.{ending}"), type="rl"))
        assert [(row["messages"][0]["content"], row["answer"]) for row in read] == [(r["prompt"], r["answer"]) for r in rows]  # fmt: skip
    (tmp_path / "split").mkdir()
    (tmp_path / "rows.csv").rename(tmp_path / "split" / "test.csv")
    assert len(get_dataset(DatasetConfig(path=str(tmp_path / "split"), type="rl", split="test"))) == 2


def test_drop_last_keeps_full_batches():
    config = DatasetConfig(path="x", type="rl", batch_size=4)
    assert full_batches([{}] * 10, config) == [{}] * 8
    assert (
        len(full_batches([{}] * 10, DatasetConfig(path="x", type="rl", batch_size=4, drop_last=False))) == 10
    )
    with pytest.raises(DatasetError, match="x has 3 rows, drop_last is True and batch_size is 4"):
        full_batches([{}] * 3, config)
