"""Data sets with pictures become messages with image parts, rewards follow their answers."""

import json
from io import BytesIO

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from areal_core.config import DatasetConfig
from areal_core.data import get_dataset
from areal_core.data.images import decode
from areal_core.data.processor import VisionProcessor
from areal_core.errors import DatasetError
from areal_core.reward.functions import (
    clevr_count_70k_reward_fn,
    geometry3k_reward_fn,
    reasoned_reward_fn,
)
from areal_core.testing.tiny_vision import make_tiny_processor

IMAGE = {"type": "image"}


def png(width: int, height: int, colour: str = "red") -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), colour).save(file, format="PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def processor():
    return VisionProcessor(make_tiny_processor("qwen2_5_vl"))


@pytest.fixture
def clevr(tmp_path, monkeypatch):
    """A folder with the columns of BUAADreamer/clevr_count_70k."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "clevr_count_70k"
    folder.mkdir()
    rows = [
        {
            "images": [{"bytes": png(480, 320) if n else png(40, 30), "path": None}],
            "problem": "<image>How many different items are there in the image?",
            "answer": str(n),
        }
        for n in range(4)
    ]
    for split in ("train", "test"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
    return str(folder)


def test_clevr_asks_for_a_number_in_brackets_and_shrinks_large_pictures(clevr):
    rows = get_dataset(DatasetConfig(path=clevr, type="rl"), split="test")
    assert len(rows) == 4
    system, user = rows[1]["messages"]
    assert system["role"] == "system"
    assert "square brackets" in system["content"]
    assert user == {
        "role": "user",
        "content": [IMAGE, {"type": "text", "text": "How many items are there in the image?"}],
    }
    assert rows[1]["answer"] == "1"
    assert rows[0]["images"] == [png(40, 30)]
    width, height = decode(rows[1]["images"][0]).size
    assert (width, height) == (411, 274)
    assert width * height <= 336 * 336
    small = DatasetConfig(path=clevr, type="rl", dataset_kwargs={"max_pixels": 600})
    assert decode(get_dataset(small)[1]["images"][0]).size == (30, 20)


def test_supervised_rows_have_types_and_pictures_beside_the_tokens(clevr, processor):
    config = DatasetConfig(path=clevr, type="sft", dataset_kwargs={"max_pixels": 600})
    row = get_dataset(config, processor=processor)[2]
    tokenizer = processor.tokenizer
    answer = [*tokenizer.encode("2", add_special_tokens=False), tokenizer.eos_token_id]
    assert row["input_ids"][-2:] == answer
    assert [i for i, m in enumerate(row["loss_mask"]) if m] == [
        len(row["input_ids"]) - 2,
        len(row["input_ids"]) - 1,
    ]
    placeholders = [int(token == processor.image_token_id) for token in row["input_ids"]]
    assert row["mm_token_type_ids"] == placeholders
    units = processor.units(row["images"])
    assert sum(placeholders) == units[0] // 4  # 2 x 2 patches are one token


def test_max_length_counts_the_tokens_of_pictures(tmp_path, processor):
    file = tmp_path / "rows.jsonl"
    (tmp_path / "small.png").write_bytes(png(16, 8))
    (tmp_path / "large.png").write_bytes(png(32, 32))
    rows = [{"question": "?", "image": name, "answer": "1"} for name in ("small.png", "large.png")]
    file.write_text("\n".join(map(json.dumps, rows)))
    for kind in ("rl", "sft"):
        found = get_dataset(DatasetConfig(path=str(file), type=kind, max_length=12), processor=processor)
        assert [row["images"] for row in found] == [[png(16, 8)]]
    with pytest.raises(DatasetError, match="needs a processor"):
        get_dataset(DatasetConfig(path="shapes", type="sft"))


def test_virl39k_reads_pictures_beside_its_parquet_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "virl39k"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "a.png").write_bytes(png(20, 10))
    row = {
        "question": "What is x?",
        "image": ["images/a.png"],
        "answer": "\\boxed{3}",
        "qid": "q1",
        "PassRate_7BBase": 0.5,
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "39k.parquet")
    (found,) = get_dataset(DatasetConfig(path=str(folder / "39k.parquet"), type="rl"))
    (message,) = found["messages"]
    assert message["content"][0] == IMAGE
    assert message["content"][1]["text"].startswith("What is x?\nFirst reason inside <think>")
    assert found["images"] == [png(20, 10)]
    assert {"question", "image"} & found.keys() == set()


def test_pictures_and_markers_must_agree(tmp_path):
    file = tmp_path / "geometry3k.jsonl"
    (tmp_path / "a.png").write_bytes(png(8, 8))
    file.write_text(json.dumps({"problem": "<image> and <image>?", "images": ["a.png"], "answer": "1"}))
    with pytest.raises(DatasetError, match=r"row 0 has 2 <image> and 1 images"):
        get_dataset(DatasetConfig(path=str(file), type="rl"))[0]
    file.write_text(json.dumps({"problem": "?", "images": ["b.png"], "answer": "1"}))
    with pytest.raises(DatasetError, match=r"row 0: no file 'b.png'"):
        get_dataset(DatasetConfig(path=str(file), type="rl"))[0]
    (tmp_path / "b.png").write_bytes(png(80, 80)[:-60])
    with pytest.raises(DatasetError, match=r"row 0: an image of \d+ bytes cannot be decoded: .*truncated"):
        get_dataset(DatasetConfig(path=str(file), type="rl"))[0]
    with pytest.raises(DatasetError, match="type 'dpo'; expected 'rl' or 'sft'"):
        get_dataset(DatasetConfig(path=str(file), type="dpo"))


def test_shapes_are_the_same_every_time_and_as_many_as_the_answer():
    config = DatasetConfig(path="shapes", type="rl", dataset_kwargs={"num_rows": 20, "seed": 3})
    rows = get_dataset(config)
    assert [rows[i]["images"] for i in range(20)] == [get_dataset(config)[i]["images"] for i in range(20)]
    for row in rows[:5]:
        image = decode(row["images"][0])
        cells = [image.getpixel((x * 8 + 4, y * 8 + 4)) for x in range(4) for y in range(4)]
        assert sum(cell != (0, 0, 0) for cell in cells) == int(row["answer"])
    with pytest.raises(DatasetError, match="'shapes' takes num_rows, seed, max_count, size"):
        get_dataset(DatasetConfig(path="shapes", type="rl", dataset_kwargs={"rows": 1}))


@pytest.mark.parametrize(
    ("reward_fn", "completion", "answer", "reward"),
    [
        (clevr_count_70k_reward_fn, "There are [3] and [4].", "4", 1.0),
        (clevr_count_70k_reward_fn, "[4] no, 5", "5", 0.0),
        (clevr_count_70k_reward_fn, "4", "4", 0.0),
        (geometry3k_reward_fn, "so [2\\sqrt{3}]", "2 \\sqrt 3", 1.0),
        (geometry3k_reward_fn, "the area is 1,200.0 square units", "1200", 1.0),
        (geometry3k_reward_fn, "\\boxed{7} [8]", "7", 1.0),
        (geometry3k_reward_fn, "no answer", "7", 0.0),
        (reasoned_reward_fn, "<think>a</think> \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        (reasoned_reward_fn, "\\boxed{\\frac{1}{2}}", "\\boxed{\\frac{1}{2}}", 0.9),
        (reasoned_reward_fn, "<think>a</think> \\boxed{3}", "4", 0.1),
        (reasoned_reward_fn, "<think>a</think> 4", "4", 0.0),
    ],
)
def test_rewards(reward_fn, completion, answer, reward):
    assert reward_fn("", completion, [], [], answer=answer) == pytest.approx(reward)


def test_rows_with_videos_are_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"problem": "What?", "videos": ["a.mp4"], "images": [], "answer": "x"}) + "\n")
    rows = get_dataset(DatasetConfig(path=str(file), type="rl"), processor=VisionProcessor(None))
    with pytest.raises(DatasetError, match="row 0 has videos, and only text and images are supported"):
        rows[0]
