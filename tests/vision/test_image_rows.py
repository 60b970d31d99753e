"""Data sets with pictures become messages with image parts, rewards follow their answers."""

import json
from io import BytesIO

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from areal_core.config import DatasetConfig
from areal_core.data import get_dataset
from areal_core.data.processor import VisionProcessor
from areal_core.errors import DatasetError
from areal_core.testing.tiny_vision import make_tiny_processor


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
