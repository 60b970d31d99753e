"""Padded batches to checksummed safetensors files and back, bit for bit."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recorder import RecordError
from recorder.storage import FolderStorage
from recorder.tensors import flatten, narrow, read_tensor, write_batch
from recorder.testing import scripted_batch


@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 2**32 - 1))
def test_any_ragged_batch_comes_back_with_its_dtypes_and_bits(tmp_path_factory, lengths, seed):
    batch = scripted_batch(lengths, seed % 1000)
    path = tmp_path_factory.mktemp("batch") / "b.safetensors"
    entry = write_batch(path, flatten(batch))
    read = partial(read_tensor, FolderStorage(path.parent), path.name)
    arrays = {name: read(name, tensor) for name, tensor in entry.tensors.items()}
    assert (entry.num_rows, entry.num_tokens) == (len(lengths), sum(lengths))
    assert entry.padded_length == max(lengths, default=0)
    assert arrays.pop("cu_seqlens").tolist() == np.cumsum([0, *lengths]).tolist()
    for key, array in arrays.items():
        expected = batch[key][batch["attention_mask"]] if batch[key].ndim == 2 else batch[key]
        assert array.dtype == batch[key].dtype
        assert array.tobytes() == expected.tobytes()


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


@pytest.mark.parametrize("filled", [slice(2, None), slice(2, 3), slice(3, None)])
def test_padding_that_could_not_be_restored_is_refused(filled):
    batch = scripted_batch([2, 4])
    batch["versions"][0, filled] = -1
    with pytest.raises(RecordError, match=r"batch\['versions'\] has padding that is not 0"):
        flatten(batch)
