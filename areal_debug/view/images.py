"""The pictures of a step for a page: each once, as the bytes of its file, by row.

A page shows formats of pixels whose size is known and not too large; nothing is decoded here. Of
others, such as SVG, and of those that are redacted, it has no bytes.
"""

import base64
from typing import Any

import numpy as np

from areal_debug.view.text import TokenText
from recorder.pictures.kinds import kind_of
from recorder.reader import RecordedStep


def image_counts(step: RecordedStep) -> list[int] | None:
    """Return the number of pictures of each row over all ranks; None if no row has one."""
    ranks = range(step.manifest.num_ranks)
    counts = [len(row) for rank in ranks for row in step.pictures_of_rows(rank)]
    return counts if any(counts) else None


def image_document(step: RecordedStep, hidden: bool) -> dict[str, Any]:
    """Return the pictures of a step, and their positions by row over all ranks.

    `hidden` ones have neither bytes nor names, which would identify them. Raises DamagedRecord.
    """
    ranks = range(step.manifest.num_ranks)
    rows = [row for rank in ranks for row in step.pictures_of_rows(rank)]
    if hidden:
        return {"rows": [[0] * len(row) for row in rows], "images": [{"about": "redacted"}]}
    places: dict[str, int] = {}
    images: list[dict[str, str]] = []
    for name, size_bytes in (named for row in rows for named in row):
        if name in places:
            continue
        places[name] = len(images)
        data = step.picture(name, size_bytes)
        kind = kind_of(data)
        image = {"about": f"{kind}, {size_bytes:,} bytes", "name": name}
        if kind.is_shown:
            image |= {"format": kind.format.lower(), "data": base64.b64encode(data).decode()}
        images.append(image)
    return {"rows": [[places[name] for name, _ in row] for row in rows], "images": images}


def with_images_named(found: TokenText, bounds: np.ndarray, types: np.ndarray) -> TokenText:
    """Replace the text of each run of placeholders of a picture by one phrase.

    `types` [tokens] are 0 for text; rows go from `bounds[i]` to `bounds[i + 1]`.
    """
    of_image = types != 0
    begins = of_image & ~np.concatenate([[False], of_image[:-1]])
    begins[bounds[:-1][bounds[:-1] < len(types)]] = of_image[bounds[:-1][bounds[:-1] < len(types)]]
    places = np.flatnonzero(begins)
    run = np.cumsum(begins) - 1  # of each placeholder
    sizes = np.bincount(run[of_image], minlength=len(places))
    entries = {size: len(found.texts) + 1 + number for number, size in enumerate(np.unique(sizes).tolist())}
    index = np.where(of_image, len(found.texts), found.index)
    index[places] = [entries[size] for size in sizes.tolist()]
    names = [f"[image: {size} tokens]" for size in entries]
    return TokenText(
        index.astype(np.uint32), [*found.texts, "", *names], [*found.ids, -1, *[-1] * len(names)]
    )
