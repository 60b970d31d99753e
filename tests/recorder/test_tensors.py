"""Padded batches to checksummed safetensors files and back, bit for bit."""

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recorder import RecordError
from recorder.documents import checksum
from recorder.storage import FolderStorage
from recorder.tensors import flatten, narrow, read_tensor, write_batch
from recorder.testing import scripted_batch


def read_all(path, entry):
    storage = FolderStorage(path.parent)
    return {name: read_tensor(storage, path.name, name, tensor) for name, tensor in entry.tensors.items()}


@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 2**32 - 1))
def test_any_ragged_batch_comes_back_with_its_dtypes_and_bits(tmp_path_factory, lengths, seed):
    batch = scripted_batch(lengths, seed % 1000)
    path = tmp_path_factory.mktemp("batch") / "b.safetensors"
    entry = write_batch(path, flatten(batch))
    arrays = read_all(path, entry)
    assert (entry.num_rows, entry.num_tokens) == (len(lengths), sum(lengths))
    assert entry.padded_length == max(lengths, default=0)
    assert arrays.pop("cu_seqlens").tolist() == np.cumsum([0, *lengths]).tolist()
    for key, array in arrays.items():
        expected = batch[key][batch["attention_mask"]] if batch[key].ndim == 2 else batch[key]
        assert array.dtype == batch[key].dtype
        assert array.tobytes() == expected.tobytes()


def test_the_safetensors_library_reads_the_same_file(tmp_path):
    entry = write_batch(tmp_path / "b.safetensors", flatten(scripted_batch([3, 5])))
    loaded = safetensors.numpy.load_file(tmp_path / "b.safetensors")
    for name, array in read_all(tmp_path / "b.safetensors", entry).items():
        assert (loaded[name] == array).all()


def test_header_and_tensors_cover_every_byte_of_the_file(tmp_path):
    path = tmp_path / "b.safetensors"
    entry = write_batch(path, flatten(scripted_batch([3, 5])))
    data = path.read_bytes()
    assert checksum(data[: entry.header_bytes]) == entry.header_crc32c
    position = entry.header_bytes
    for tensor in sorted(entry.tensors.values(), key=lambda tensor: tensor.offset):
        assert tensor.offset == position
        position += tensor.size_bytes
    assert position == len(data) == entry.size_bytes


def test_torch_tensors_of_every_kind_keep_their_bits(tmp_path):
    mask = torch.tensor([[True, True], [True, False]])
    batch = {
        "attention_mask": mask,
        "bf16": torch.tensor([[1.5, -2.0], [3.0, 0.0]], dtype=torch.bfloat16),
        "fp8": torch.tensor([[1.5, -2.0], [3.0, 0.0]]).to(torch.float8_e4m3fn),
        "experts": torch.arange(12, dtype=torch.uint8).reshape(2, 2, 3) * mask[..., None],
    }
    path = tmp_path / "b.safetensors"
    entry = write_batch(path, flatten(batch))
    arrays = read_all(path, entry)
    assert (entry.tensors["bf16"].dtype, entry.tensors["bf16"].stored) == ("BF16", "BF16")
    assert arrays["bf16"].tolist() == [0x3FC0, 0xC000, 0x4040]
    assert (entry.tensors["fp8"].dtype, entry.tensors["fp8"].stored) == ("F8_E4M3", "F8_E4M3")
    assert arrays["fp8"].tolist() == [0x3C, 0xC0, 0x44]
    assert arrays["experts"].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0, 1], "uint8"),
        ([-1, 127], "int8"),
        ([-1, 128], "int16"),
        ([-128, 0], "int8"),
        ([0, 65535], "uint16"),
        ([0, 65536], "int32"),
        ([], "int32"),
    ],
)
def test_integers_are_stored_in_the_narrowest_type(values, dtype):
    narrowed = narrow(np.array(values, np.int32))
    assert narrowed.dtype == dtype
    assert narrowed.tolist() == values


def test_a_recorded_token_takes_eight_bytes_with_a_vocabulary_of_16_bits():
    flat = flatten(scripted_batch([1000] * 4, seed=3))
    per_token = [tensor.array.itemsize for tensor in flat.tensors.values() if tensor.axis == "token"]
    assert sum(per_token) == 2 + 1 + 4 + 1


@pytest.mark.parametrize("filled", [slice(2, None), slice(2, 3), slice(3, None)])
def test_padding_that_could_not_be_restored_is_refused(filled):
    batch = scripted_batch([2, 4])
    batch["versions"][0, filled] = -1
    with pytest.raises(RecordError, match=r"batch\['versions'\] has padding that is not 0"):
        flatten(batch)


@pytest.mark.parametrize("mask", [[[False, True]], [[1, 0]], [True, False]])
def test_a_mask_that_is_not_right_padded_bool_is_refused(mask):
    with pytest.raises(RecordError, match="must be bool"):
        flatten({"attention_mask": np.array(mask)})


def test_a_tensor_that_is_neither_per_token_nor_per_row_is_refused():
    with pytest.raises(RecordError, match=r"batch\['odd'\] has shape \(5,\)"):
        flatten(scripted_batch([2, 4]) | {"odd": np.zeros(5)})
