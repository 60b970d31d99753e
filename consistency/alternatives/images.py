"""Placeholders of images: how many tokens stand for each image, in a row and by the processor."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import transformers
from PIL import Image, ImageOps
from PIL.ExifTags import Base
from transformers.image_utils import PILImageResampling
from transformers.utils.constants import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)

from areal_core.data.images import decode
from areal_core.data.processor import VisionProcessor
from consistency.causes import Finding, finding
from consistency.errors import NothingToCompare
from consistency.score import Scorer, score_logprobs
from consistency.source import Sampled
from consistency.tokens import Bools, Floats, Images, Ints, Sequences
from consistency.transforms import Prediction, best_by_row, bounded, residual_size, select_rows, usable_or
from recorder.pictures.kinds import encoded


def placeholder_counts(processor: VisionProcessor, images: Images) -> tuple[tuple[int, ...], ...]:
    known: dict[bytes, int] = {}
    for image in {image for row in images for image in row}:
        ids = processor.tokenize(processor.processor.image_token, [image]).input_ids
        known[image] = ids.count(processor.image_token_id)
    return tuple(tuple(known[image] for image in row) for row in images)


def runs_of(input_ids: Ints, token_id: int) -> list[tuple[int, int]]:
    """Return begin and end of each run of a token."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], input_ids == token_id, [False]]).astype(int)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def expanded(rows: Sequences, token_id: int, counts: Sequence[Sequence[int]]) -> Sequences:
    """Give the n-th run of placeholders of each row as many as `counts[row][n]`."""
    repeats = np.ones(len(rows.input_ids), np.int64)
    for row, wanted in enumerate(counts):
        begin = int(rows.cu_seqlens[row])
        runs = runs_of(rows.input_ids[rows.row(row)], token_id)
        for (first, last), count in zip(runs, wanted, strict=False):
            repeats[begin + first : begin + last] = 0
            repeats[begin + first] = count
    return with_repeats(rows, repeats)


def with_repeats(rows: Sequences, repeats: Ints) -> Sequences:
    """Repeat each token so many times; 0 leaves it out."""
    ends = np.concatenate([[0], np.cumsum(repeats)])
    return rows.of_tokens(np.repeat(np.arange(len(repeats)), repeats), ends[rows.cu_seqlens])


def prepare_images(scorer: Scorer, sampled: Sampled) -> Sampled:
    """Give every row the placeholders that its images have in the scoring model.

    Tokens from a sampled placeholder on are not compared: Transformers would look for its image.

    Raises:
        NothingToCompare: rows have images and the model has no processor, or a row has other
            numbers of images and of runs of placeholders.
    """
    if all(chunk.images is None for chunk in sampled.chunks.values()):
        return sampled
    if scorer.processor is None:
        raise NothingToCompare("rows have images, and the model is a text model: give the one that sampled")
    token_id = scorer.processor.image_token_id
    usable = {
        name: with_repeats(chunk, (~from_placeholder(chunk, token_id)).astype(np.int64))
        for name, chunk in sampled.chunks.items()
    }
    kept = np.concatenate(
        [~from_placeholder(chunk, token_id)[chunk.scored] for chunk in sampled.chunks.values()]
    )
    fitted = {name: fit_placeholders(scorer.processor, chunk) for name, chunk in usable.items()}
    notes = [*sampled.notes, *other_options(sampled.image_processor, scorer.processor)]
    if not kept.all():
        notes.append(f"{(~kept).sum()} tokens from a sampled placeholder of an image on are not compared")
    return replace(
        sampled,
        chunks={name: rows for name, (rows, _) in fitted.items()},
        trainer=None if sampled.trainer is None else sampled.trainer[kept],
        tops=None if sampled.tops is None else tuple(itertools.compress(sampled.tops, kept)),
        notes=tuple(notes),
        contradictions=(
            *sampled.contradictions,
            *(found for _, found in fitted.values() if found is not None),
        ),
    )


def other_options(recorded: dict[str, Any] | None, own: VisionProcessor) -> list[str]:
    """Describe the options of the run's image processor that the scoring model's has otherwise."""
    if recorded is None:
        return []
    then, now = recorded["options"], own.identity()["options"]
    return [
        f"the run's image processor had {name} {then.get(name)}, the model's has {now.get(name)}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]


def from_placeholder(rows: Sequences, token_id: int) -> Bools:
    """Mask the tokens from the first sampled placeholder of each row on, bool [tokens]."""
    found = rows.sampled & (rows.input_ids == token_id)
    seen = np.concatenate([[0], np.cumsum(found)])
    return seen[1:] > np.repeat(seen[rows.cu_seqlens[:-1]], np.diff(rows.cu_seqlens))


def fit_placeholders(processor: VisionProcessor, rows: Sequences) -> tuple[Sequences, Finding | None]:
    """Expand images as the model's processor does, and report rows of other counts (R63)."""
    if rows.images is None:
        return rows, None
    token_id = processor.image_token_id
    given = tuple(
        tuple(last - first for first, last in runs_of(rows.input_ids[rows.row(row)], token_id))
        for row in range(rows.num_rows)
    )
    for row, (runs, images) in enumerate(zip(given, rows.images, strict=True)):
        if len(runs) != len(images):
            raise NothingToCompare(
                f"row {row} has {len(images)} images and {len(runs)} runs of their placeholder (token {token_id}): "
                "give the ids that the model's own processor makes"
            )
    counts = placeholder_counts(processor, rows.images)
    differing = [row for row in range(rows.num_rows) if given[row] != counts[row]]
    if not differing:
        return rows, None
    row = differing[0]
    found = finding(
        "R63",
        differing=len(differing),
        rows=rows.num_rows,
        row=row,
        given=list(given[row]),
        wanted=list(counts[row]),
    )
    return expanded(rows, token_id, counts), found


NORMALISATIONS: dict[str, tuple[Sequence[float], Sequence[float]]] = {
    "CLIP": (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD),
    "ImageNet": (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
    "0.5": (IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD),
    "0 and 1": ([0.0] * 3, [1.0] * 3),
}
KERNELS = (PILImageResampling.BICUBIC, PILImageResampling.BILINEAR, PILImageResampling.NEAREST)
# Pixels of an image, as checkpoints and serving guides of the Qwen-VL families set them.
LEAST_PIXELS = (4 * 28**2, 16 * 28**2, 256 * 28**2)
MOST_PIXELS = (256 * 28**2, 768 * 28**2, 1280 * 28**2, 16384 * 28**2)
PARTS_OF_LIMIT = (0.25, 0.5, 2.0, 4.0)
ORIENTATION = Base.Orientation
ROWS_TO_SCREEN = 16
PARTNERS_TO_TRY = 4


Treatment = tuple[str, str, Sequences, Scorer]  # cause, name, rows as they would be, who scores them


def image_alternatives(scorer: Scorer, rows: Sequences, temperature: float, base: Floats) -> list[Prediction]:
    """Score with images treated otherwise (R62, R64, R66, R67); nothing for rows without images.

    `base` are the logprobs of the rows as they are, float64 [scored]. A treatment that explains the
    worst rows no better than the model is left out.
    """
    if rows.images is None or scorer.processor is None:
        return []
    engine = usable_or(rows.engine_logprobs[rows.scored], base)
    row_of_place = rows.row_of_token[rows.scored]
    apart = np.bincount(row_of_place, bounded(engine - base), rows.num_rows)
    worst = np.sort(np.argsort(-apart, kind="stable")[:ROWS_TO_SCREEN])
    at = np.flatnonzero(np.isin(row_of_place, worst))
    own, found = residual_size(engine[at], base[at]), []
    for cause, name, treated, by in treatments(scorer, rows):
        screened = score_logprobs(by, select_rows(treated, worst), temperature=temperature)
        if residual_size(engine[at], screened) < own:
            logprobs = score_logprobs(by, treated, temperature=temperature)
            found.append(Prediction(cause, name, 0.0, logprobs))
    return found + exchanged_images(scorer, rows, base, temperature)


def treatments(scorer: Scorer, rows: Sequences) -> Iterator[Treatment]:
    """Yield other processors, positions of text, no images, and images in another order."""
    assert rows.images is not None
    assert scorer.processor is not None
    for name, processor, changed in other_processors(scorer.processor, rows):
        yield "R62", name, changed, replace(scorer, processor=processor)
    of_text = replace(scorer, marks_images=False)
    yield "R64", "images placed and attended as text", rows, of_text
    unseen = replace(rows, images=None)
    yield "R67", "no images: placeholders embedded as text", unseen, scorer
    one_each = expanded(rows, scorer.processor.image_token_id, [[1] * len(images) for images in rows.images])
    unseen = replace(one_each, images=None)
    yield "R67", "no images: one placeholder each, embedded as text", unseen, scorer
    if any(len(set(images)) > 1 for images in rows.images):
        turned = tuple(images[::-1] for images in rows.images)
        if placeholder_counts(scorer.processor, turned) == placeholder_counts(scorer.processor, rows.images):
            yield "R67", "images in the reverse order", replace(rows, images=turned), scorer


# Processors


def other_processors(own: VisionProcessor, rows: Sequences) -> list[tuple[str, VisionProcessor, Sequences]]:
    """Return names, processors, and rows with as many placeholders as each expects."""
    assert rows.images is not None
    found = [(name, with_options(own, **options), rows) for name, options in pixel_options(own)]
    pil = pil_twin(own)
    if pil is not None:
        found.append(("resized by Pillow instead of torchvision", pil, rows))
    found += [
        (name, own, replace(rows, images=tuple(tuple(map(decoding, row)) for row in rows.images)))
        for name, decoding in DECODINGS.items()
        if any(decoding(image) != image for row in rows.images for image in row)
    ]
    alike: dict[tuple[tuple[int, ...], ...], list[tuple[str, VisionProcessor]]] = {}
    for name, options in size_options(own):
        other = with_options(own, **options)
        alike.setdefault(placeholder_counts(other, rows.images), []).append((name, other))
    alike.pop(placeholder_counts(own, rows.images), None)
    for counts, same in alike.items():  # limits of the same effect on these images
        names = " or ".join(name for name, _ in same)
        found.append((names, same[0][1], expanded(rows, own.image_token_id, counts)))
    return found


def with_options(own: VisionProcessor, **options: Any) -> VisionProcessor:
    changed = copy.deepcopy(own.processor.image_processor)
    for name, value in options.items():
        setattr(changed, name, value)
    return around(own, changed)


def around(own: VisionProcessor, image_processor: Any) -> VisionProcessor:
    """Return a processor that differs in its image processor alone."""
    changed = copy.copy(own.processor)
    changed.image_processor = image_processor
    return VisionProcessor(changed)


def pil_twin(own: VisionProcessor) -> VisionProcessor | None:
    """Return the processor of the same options that resizes with Pillow; None if there is none."""
    image_processor = own.processor.image_processor
    twin = getattr(transformers, f"{type(image_processor).__name__}Pil", None)
    return None if twin is None else around(own, twin(**options_of(image_processor)))


def options_of(image_processor: Any) -> dict[str, Any]:
    options: dict[str, Any] = image_processor.to_dict()
    return {key: value for key, value in options.items() if key != "image_processor_type"}


def pixel_options(own: VisionProcessor) -> list[tuple[str, dict[str, Any]]]:
    image_processor = own.processor.image_processor
    normalisations = NORMALISATIONS | {
        "its own deviation and mean 0": ([0.0] * 3, list(image_processor.image_std)),
        "its own mean and deviation 1": (list(image_processor.image_mean), [1.0] * 3),
    }
    found: list[tuple[str, dict[str, Any]]] = [
        (
            f"pixels normalised by {name}",
            {"image_mean": list(mean), "image_std": list(std), "do_normalize": True},
        )
        for name, (mean, std) in normalisations.items()
        if not np.allclose([*mean, *std], [*image_processor.image_mean, *image_processor.image_std])
    ]
    found.append(("pixels from 0 to 255, not divided by 255", {"do_rescale": False}))
    found += [
        (f"images resized by the {kernel.name.lower()} kernel", {"resample": kernel})
        for kernel in KERNELS
        if kernel != image_processor.resample
    ]
    return found


def size_options(own: VisionProcessor) -> list[tuple[str, dict[str, Any]]]:
    size = own.processor.image_processor.size
    least, most = size.get("shortest_edge"), size.get("longest_edge")
    if least is None or most is None:
        return []
    lower = sorted({*LEAST_PIXELS, *(int(least * part) for part in PARTS_OF_LIMIT)} - {least})
    upper = sorted({*MOST_PIXELS, *(int(most * part) for part in PARTS_OF_LIMIT)} - {most})
    own_limits = {"shortest_edge": least, "longest_edge": most}
    limits = [("most", "longest_edge", pixels) for pixels in upper if pixels >= least]
    limits += [("least", "shortest_edge", pixels) for pixels in lower if pixels <= most]
    return [
        (f"images of at {side} {pixels} pixels", {"size": type(size)(**own_limits | {edge: pixels})})
        for side, edge, pixels in limits
    ]


# Decoding


def stored_orientation(image: bytes) -> bytes:
    """Return a picture that its EXIF data rotate as PNG of its stored pixels; others as is."""
    with Image.open(BytesIO(image)) as opened:
        turned = opened.getexif().get(ORIENTATION, 1) != 1
        return encoded(opened.convert("RGB"), "an image") if turned else image


def on_white(image: bytes) -> bytes:
    """Return a picture with transparent pixels as PNG on white; others as they are."""
    with Image.open(BytesIO(image)) as opened:
        if not opened.has_transparency_data:
            return image
        upright = ImageOps.exif_transpose(opened).convert("RGBA")
    white = Image.new("RGBA", upright.size, "white")
    return encoded(Image.alpha_composite(white, upright).convert("RGB"), "an image")


def blue_first(image: bytes) -> bytes:
    red, green, blue = decode(image).split()
    return encoded(Image.merge("RGB", (blue, green, red)), "an image")


DECODINGS: dict[str, Callable[[bytes], bytes]] = {
    "images in their stored orientation, EXIF ignored": stored_orientation,
    "transparent pixels on white": on_white,
    "channels in the order blue, green, red": blue_first,
}


# Owners


def exchanged_images(scorer: Scorer, rows: Sequences, base: Floats, temperature: float) -> list[Prediction]:
    """Score rows with the images of another row whose ids are equal to the end of the images (R66)."""
    assert scorer.processor is not None
    token_id, every = scorer.processor.image_token_id, rows.images or ()
    prefixes = [image_prefix(rows, row, token_id) for row in range(rows.num_rows)]

    def tried(row: int, places: Ints) -> Iterator[Floats]:
        alike = (one for one, prefix in zip(every, prefixes, strict=True) if prefix == prefixes[row])
        others = dict.fromkeys(one for one in alike if one != every[row])
        for images in list(others)[:PARTNERS_TO_TRY]:
            one = replace(select_rows(rows, np.array([row])), images=(images,))
            yield score_logprobs(scorer, one, temperature=temperature)

    return best_by_row(rows, base, tried, "R66", "the images of other requests")


def image_prefix(rows: Sequences, row: int, token_id: int) -> bytes:
    ids = rows.input_ids[rows.row(row)]
    runs = runs_of(ids, token_id)
    return ids[: runs[-1][1]].tobytes() if runs else b""
