"""Pictures in the dumps of other frameworks: their files, else pixels, else a note."""

import numpy as np
import torch

from recorder import open_record, verify
from recorder.importers.importing import import_record
from replayer.source import recorded_batch
from tests.recorder.pictured import png

from . import dataproto, lines
from .known import KNOWN

NOT_IMPORTED = "images and other inputs that are not text are not imported"


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
    assert NOT_IMPORTED not in result.notes
    batch = recorded_batch(step, 0)
    assert batch["image_count"].tolist() == [2, 1, 0, 2]
    assert batch["image_units"].tolist() == [2, 4, 2, 2, 4]
    assert torch.equal(batch["pixel_values"], torch.cat([pixels, pixels[:6]]))


def test_pixels_without_a_grid_that_fits_are_left_out_with_a_note(tmp_path):
    grids = [
        {},
        {"image_grid_thw": torch.tensor([[1, 1, 3]])},
        {"image_grid_thw": torch.tensor([[-1, -1, 2]])},
    ]
    for number, grid in enumerate(grids):
        row = {"pixel_values": torch.zeros(2, 3)} | grid
        source = write_verl(tmp_path / f"verl{number}", [row] * len(KNOWN))
        result, step = imported(source, tmp_path / f"record{number}")
        assert NOT_IMPORTED in result.notes
        assert "pixel_values" not in step.batch(0)


def test_trls_log_has_the_files_of_its_data_sets_column(tmp_path):
    column = [[{"bytes": png(row), "path": None}] for row in range(len(KNOWN))]
    result, step = imported(lines.write_trl(tmp_path, images=column), tmp_path / "record")
    assert sorted(step.images(0)) == sorted((png(row),) for row in range(len(KNOWN)))
    assert not [note for note in result.notes if "image" in note]


def test_images_that_trls_log_only_names_are_a_note(tmp_path):
    parts = [{"type": "image", "text": ""}, {"type": "text", "text": "How many?"}]
    prompts = [[{"role": "user", "content": parts}] for _ in KNOWN]
    completions = [[{"role": "assistant", "content": [{"type": "text", "text": "2"}]}] for _ in KNOWN]
    result, step = imported(
        lines.write_trl(tmp_path, prompt=prompts, completion=completions), tmp_path / "record"
    )
    assert "the log names images whose files it does not have: they are not imported" in result.notes
    assert step.images(0) is None
