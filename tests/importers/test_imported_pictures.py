"""Pictures in the dumps of other frameworks: their files, else pixels, else a note."""

import io

import numpy as np
import PIL.Image
import pytest
import torch

from recorder import open_record, verify
from recorder.trainers.file_pictures import image_inputs, png_of
from recorder.trainers.importing import import_record
from replayer.source import recorded_batch
from tests.recorder.pictured import png

from . import dataproto, eras, pickled
from .known import KNOWN


def imported(source, folder):
    result = import_record(source, folder)
    assert verify(folder).problems == ()
    return result, open_record(folder).step(0)


def write_verl(folder, inputs):
    column = np.empty(len(KNOWN), object)
    column[:] = inputs
    return dataproto.write_verl(folder, others=dataproto.verl_others() | {"multi_modal_inputs": column})


def test_verls_pixels_are_recorded_by_image_and_row(tmp_path):
    pixels = torch.arange(8 * 3, dtype=torch.float32).reshape(8, 3)
    first = {"pixel_values": pixels[:6], "image_grid_thw": torch.tensor([[1, 1, 2], [1, 2, 2]])}
    second = {"pixel_values": pixels[6:], "image_grid_thw": torch.tensor([[1, 2, 1]])}
    result, step = imported(write_verl(tmp_path / "verl", [first, second, {}, first]), tmp_path / "record")
    assert "the file has the pixels of images, not their files" in result.notes
    assert not [note for note in result.notes if "not imported" in note]
    batch = recorded_batch(step, 0)
    assert batch["image_count"].tolist() == [2, 1, 0, 2]
    assert batch["image_units"].tolist() == [2, 4, 2, 2, 4]
    assert torch.equal(batch["pixel_values"], torch.cat([pixels, pixels[:6]]))


def test_pickled_pictures_are_png_files_of_the_same_pixels(tmp_path):
    pictures = [PIL.Image.new(mode, (3, 2), colour) for mode, colour in (("RGB", "red"), ("L", 7))]
    given = {"images": pictures, "videos": None}
    slime = pickled.write_slime(tmp_path / "a", multimodal_inputs=given)
    (slime / "rollout_data" / "10.pt").unlink()
    column = np.empty(len(KNOWN), object)
    column[:] = [{"image": pictures}, {}, None, {"image": [PIL.Image.open(io.BytesIO(png(1)))]}]
    verl = dataproto.write_verl(tmp_path / "b", others=dataproto.verl_others() | {"multi_modal_data": column})
    for name, source, rows in (("slime", slime, [2, 2, 2, 2]), ("verl", verl, [2, 0, 0, 1])):
        result, step = imported(source, tmp_path / name)
        assert not [note for note in result.notes if "not imported" in note]
        assert [len(row) for row in step.images(0)] == rows
        found = [PIL.Image.open(io.BytesIO(file)) for file in step.images(0)[0]]
        assert [(one.mode, one.tobytes()) for one in found] == [(one.mode, one.tobytes()) for one in pictures]
    assert PIL.Image.open(io.BytesIO(step.images(0)[3][0])).tobytes() == column[3]["image"][0].tobytes()


@pytest.mark.parametrize(
    ("mode", "size", "data"),
    [
        ("RGB", [2, 2], b"x"),
        ("RGB", [-1, -1], b"xxx"),
        ("RGB", ["1", 1], b"xxx"),
        ("RGB", [1], b"xxx"),
        (["RGB"], [1, 1], b"xxx"),
        ("RGB", [1, 1], "xxx"),
        ("RGB", [0, 0], b""),
    ],
)
def test_a_pickled_picture_that_contradicts_itself_is_none(mode, size, data):
    assert png_of(mode, size, data) is None


def test_pixels_of_skyrl_and_areal_are_recorded_by_row(tmp_path):
    pixels, grid = torch.arange(12, dtype=torch.float32).reshape(4, 3), torch.tensor([[1, 2, 2]])
    packed = [pickled_tensor(pixels), None, pickled_tensor(pixels)]
    grids = [pickled_tensor(grid), None, pickled_tensor(grid)]
    lists = {"pixel_values": packed, "image_grid_thw": grids}
    source = pickled.write_skyrl(tmp_path / "skyrl", lists=lists)
    result, step = imported(source, tmp_path / "of_skyrl")
    assert recorded_batch(step, 0)["image_count"].tolist() == [1, 0, 1, 0]
    assert "the file has the pixels of images, not their files" in result.notes
    inputs = [{"pixel_values": pixels, "image_grid_thw": grid}, {}, {}, {}]
    source = pickled.write_areal_padded(tmp_path, multi_modal_input=inputs)
    result, step = imported(source, tmp_path / "of_areal")
    assert recorded_batch(step, 0)["image_count"].tolist() == [1, 0, 0, 0]
    assert torch.equal(recorded_batch(step, 0)["pixel_values"], pixels)


def pickled_tensor(tensor):
    array = tensor.numpy()
    return {"format": "numpy", "data": array.tobytes(), "shape": array.shape, "dtype": str(array.dtype)}


def encoded_tensor(tensor):
    """As prime-rl encodes one."""
    array = tensor.numpy()
    return [str(array.dtype), list(array.shape), array.tobytes()]


def prime_rl_batch(counts, grid, pixels, types=None):
    """Return a micro-batch of the first two samples, whose tokens are placeholders by `counts`."""
    inputs = {"pixel_values": encoded_tensor(pixels), "image_grid_thw": encoded_tensor(grid)}
    sizes = [len(one.tokens) for one in KNOWN[:2]]
    marks = [int(i < n) for n, size in zip(counts, sizes, strict=True) for i in range(size)]
    types = [*marks, 0, 0, 0] if types is None else types
    return eras.micro_batch(KNOWN[:2], eras.PADDING, mm=inputs, types=types)


def write_prime_rl(folder, batch):
    return eras.write_ranks(folder, [batch], [eras.micro_batch(KNOWN[2:])])


def test_pixels_of_prime_rls_packed_rows_are_those_of_their_placeholders(tmp_path):
    pixels = torch.arange(8 * 3, dtype=torch.float32).reshape(8, 3)
    grid = torch.tensor([[1, 2, 1], [1, 2, 1], [1, 2, 2]])
    source = write_prime_rl(tmp_path / "run", prime_rl_batch((2, 2), grid, pixels))
    result, step = imported(source, tmp_path / "record")
    batch = recorded_batch(step, 0)
    assert batch["image_count"].tolist() == [2, 1, 0, 0]
    assert batch["image_units"].tolist() == [2, 2, 4]
    assert torch.equal(batch["pixel_values"], pixels)
    assert torch.equal(batch["image_grid_thw"].long(), grid)
    assert "the file has the pixels of images, not their files" in result.notes
    assert not [note for note in result.notes if "not imported" in note]


@pytest.mark.parametrize("is_new", [True, False])
def test_pixels_of_prime_rls_orchestrator_are_read_in_both_layouts(is_new):
    pixels, grid = torch.arange(12, dtype=torch.float32).reshape(4, 3), torch.tensor([[1, 2, 2]])
    old = {
        "pixel_values": pixels.numpy().tobytes(),
        "pixel_values_shape": [4, 3],
        "image_grid_thw": [[1, 2, 2]],
    }
    new = {"mm_kwargs": {"pixel_values": encoded_tensor(pixels), "image_grid_thw": encoded_tensor(grid)}}
    inputs = image_inputs(new if is_new else old)
    assert torch.equal(torch.from_numpy(inputs["pixel_values"].copy()), pixels)
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 2]]
    for lie in (["float32", [5, 3]], ["bfloat16", [4, 3]], ["float32", ["4", 3]], ["O", [4, 3]]):
        found = image_inputs({"mm_kwargs": {"pixel_values": [*lie, b"0" * 48]}})
        assert found["pixel_values"] == [*lie, b"0" * 48]  # no array: left out
