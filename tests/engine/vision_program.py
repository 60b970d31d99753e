"""One step of a tiny vision model on rows of text and of pictures, by the engine.

For a test that compares with Transformers. Arguments: folder of the model, number of
sequence-parallel ranks, output file of rank 0 for the gradients, and whether the tower is frozen.
Prints the loss, and the log-probs of this rank's rows.
"""

from io import BytesIO
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file

from areal_core.config.train_engine import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal_core.data.batch import Batch, pad_and_concat, select_rows
from areal_core.data.processor import VisionProcessor
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.ranks import Ranks, join_ranks
from areal_core.testing import step_with_gradients
from areal_core.trainer.build import build_engine

MAX_TOKENS = 90  # of a micro-batch, which the rows need two of
# Sizes of the pictures of each row: on two ranks, the second one has rows of text only.
ANSWER = [*range(20, 31), 40, 1]
PICTURES = [[(20, 20)], [], [(33, 17), (12, 30)], []]


def picture(width: int, height: int) -> bytes:
    """Return a PNG file whose pixels depend on its size."""
    generator = torch.Generator().manual_seed(width * 100 + height)
    pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
    file = BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return file.getvalue()


def row(processor: VisionProcessor, sizes: list[tuple[int, int]], answer: list[int] = ANSWER) -> Batch:
    """Return a row with pictures of the given sizes, whose answer is trained."""
    images = [picture(*size) for size in sizes]
    parts = [{"type": "image"}] * len(images)
    content = [*parts, {"type": "text", "text": f"How many{len(sizes)}?"}]
    prompt = processor.prompt([{"role": "user", "content": content}], images)
    ids = [*prompt.input_ids, *answer]
    types = [*prompt.mm_token_type_ids, *[0] * len(answer)]
    trained = [0] * (len(prompt.input_ids) - 1) + [1] * len(answer) + [0]
    return {
        "input_ids": torch.tensor([ids], dtype=torch.int32),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
        "loss_mask": torch.tensor([trained], dtype=torch.int32),
        "mm_token_type_ids": torch.tensor([types], dtype=torch.int32),
        "image_count": torch.tensor([len(images)], dtype=torch.int32),
        "image_bytes": torch.tensor([len(image) for image in images], dtype=torch.int32),
        "image_data": torch.tensor(list(b"".join(images)), dtype=torch.uint8),
    }


def rows(processor: VisionProcessor, rank: int = 0, num_ranks: int = 1) -> Batch:
    """Return this data-parallel rank's rows."""
    every = pad_and_concat([row(processor, sizes) for sizes in PICTURES])
    return select_rows(every, range(rank, len(PICTURES), num_ranks))


def make_engine(ranks: Ranks, folder: str, **options: Any) -> FSDPEngine:
    spec = MicroBatchSpec(max_tokens_per_mb=MAX_TOKENS)
    config = TrainEngineConfig(
        path=folder, mb_spec=spec, optimizer=OptimizerConfig(), **({"dtype": "float32"} | options)
    )
    return build_engine(config, ranks, 2)


def likelihood(logprobs: torch.Tensor, entropy: torch.Tensor, flat: Batch) -> torch.Tensor:
    return -(logprobs * flat["loss_mask"]).sum()


def weight(part: Batch) -> torch.Tensor:
    return part["loss_mask"].sum()


def main(folder: str, sequence_parallel: str, output: str, freezes: str) -> object:
    ranks = join_ranks("cpu", sequence_parallel=int(sequence_parallel))
    engine = make_engine(ranks, folder, freeze_vision_tower=freezes == "True")
    assert engine.processor is not None
    batch = rows(engine.processor, ranks.data_parallel_rank, ranks.data_parallel_size)
    logprobs = engine.compute_logprobs(batch)
    result, gradients = step_with_gradients(engine, batch)
    if ranks.rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in gradients.items()}, output)
    found = {"loss": result.loss, "logprobs": logprobs.tolist()}
    return found | {"num_micro_batches": len(result.micro_batches)}
