"""A recorded step as what it was written from, to be written again."""

from dataclasses import replace

from recorder.format import IMAGE_DATA, BatchEntry
from recorder.reader import RecordedStep
from recorder.step_files import RankStep
from recorder.tensors import BITS_ONLY, FlatBatch, FlatTensor, narrow


def rank_step(step: RecordedStep, rank: int) -> RankStep:
    """Return a rank's data of a step, as it was recorded. Raises DamagedRecord."""
    name, entry = step.batch_entry(rank)
    learning = step.rank_name("learning", rank, "safetensors")
    text, calls = (step.rank_name(kind, rank, "jsonl") for kind in ("text", "calls"))
    plan, outcome = (step.rank_name(kind, rank, "json") for kind in ("plan", "outcome"))
    files, batches = step.manifest.files, step.manifest.batches
    return RankStep(
        step.manifest.step,
        step.manifest.version,
        with_image_data(step, rank, flat_batch(step, name, entry)),
        step.plan(rank) if plan in files else None,
        step.outcome(rank) if outcome in files else None,
        flat_batch(step, learning, batches[learning]) if learning in batches else None,
        step.file(text) if text in files else None,
        calls=step.file(calls) if calls in files else None,
    )


def flat_batch(step: RecordedStep, name: str, entry: BatchEntry) -> FlatBatch:
    arrays = step.tensors(name, entry)
    tensors = {}
    for key, tensor in entry.tensors.items():
        is_narrow = tensor.axis == "token" and tensor.dtype not in BITS_ONLY.values()
        array = narrow(arrays[key]) if is_narrow else arrays[key]
        tensors[key] = FlatTensor(tensor.dtype, tensor.axis, array)
    return FlatBatch(entry.num_rows, entry.num_tokens, entry.padded_length, tensors)


def with_image_data(step: RecordedStep, rank: int, batch: FlatBatch) -> FlatBatch:
    """Replace the names of pictures, which are of another record's files, by their bytes."""
    if "image_sha256" not in batch.tensors:
        return batch
    tensors = {key: tensor for key, tensor in batch.tensors.items() if key != "image_sha256"}
    tensors[IMAGE_DATA] = FlatTensor("U8", "byte", step.image_data(rank))
    return replace(batch, tensors=tensors)
