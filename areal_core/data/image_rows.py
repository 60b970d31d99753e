"""Rows with pictures: messages with image parts, and the pictures' bytes, read when they are used.

Stored rows have `images` or `image` (one, or a list), a question (`problem`, `question` or
`prompt`, with `<image>` where each picture belongs) or `messages`, and usually `answer`.

clevr_count_70k   the number of things in a picture, in brackets
geometry3k        a problem of plane geometry, reasoned and boxed
virl39k           the same of many subjects; pictures are files beside the Parquet file
shapes            generated: a few shapes in a small picture, and how many
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, overload

from areal_core.config.vision_checks import IMAGE_DATASETS
from areal_core.data.images import as_image_bytes, decode, shrunk
from areal_core.data.rows import Row
from areal_core.errors import DatasetError, ImageError

if TYPE_CHECKING:
    from areal_core.config import DatasetConfig
    from areal_core.data.processor import Prompt, VisionProcessor

QUESTIONS = ("problem", "question", "prompt")
PICTURES = ("images", "image")
UNSUPPORTED = ("videos", "video", "audios", "audio")
MARKER = "<image>"
BRACKETS = (
    "Count what the question asks for in the image. Answer with the number in square brackets, such as "
    "[4], and with nothing else."
)
REASONED = (
    "\nFirst reason inside <think> </think> tags, step by step. Then give the final answer within \\boxed{}."
)
COLOURS = ("red", "lime", "blue", "yellow", "magenta", "cyan")


@dataclass(frozen=True)
class ImageTask:
    """How the rows of a dataset become messages."""

    system: str = ""
    suffix: str = ""  # of each question
    removed: str = ""  # a word that misleads
    max_pixels: int | None = None  # larger pictures are shrunk; `dataset_kwargs.max_pixels`


# By a substring of the path. Upstream removes the word, too: "How many different items" counts all.
CLEVR, GEOMETRY, VIRL = IMAGE_DATASETS
TASKS = {
    CLEVR: ImageTask(system=BRACKETS, removed="different ", max_pixels=336 * 336),
    GEOMETRY: ImageTask(suffix=REASONED, max_pixels=448 * 448),
    VIRL: ImageTask(suffix=REASONED, max_pixels=320 * 320),
}
OTHER = ImageTask()


class LazyRows(Sequence[Row]):
    """Rows converted on access, so that pictures need no memory before.

    Args:
        stored: the rows as they are stored.
        convert: called with a stored row and its number.
        chosen: numbers of the rows; by default all.
    """

    def __init__(
        self, stored: Any, convert: Callable[[Any, int], Row], chosen: Sequence[int] | None = None
    ) -> None:
        self._stored, self._convert = stored, convert
        self._chosen = range(len(stored)) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> "LazyRows": ...
    def __getitem__(self, index: int | slice) -> "Row | LazyRows":
        if isinstance(index, slice):
            return LazyRows(self._stored, self._convert, self._chosen[index])
        number = self._chosen[index]
        return self._convert(self._stored[number], number)

    def where(self, holds: Callable[[Row], bool]) -> "LazyRows":
        """Return the rows for which `holds`; each is converted once for it."""
        kept = [number for i, number in enumerate(self._chosen) if holds(self[i])]
        return LazyRows(self._stored, self._convert, kept)


def image_dataset(
    stored: Sequence[Row],
    config: "DatasetConfig",
    folder: str,
    max_pixels: int | None,
    processor: "VisionProcessor | None",
) -> Sequence[Row]:
    """Return rows with pictures, for a `PromptLoader` or supervised training.

    Args:
        stored: rows as they are stored.
        folder: of the pictures' relative paths.
        max_pixels: instead of the task's; None for the task's.

    Raises:
        DatasetError: the kind needs a processor, or is one of text only.
    """
    if config.type not in ("rl", "sft"):
        raise DatasetError(f"{config.path} has images, and type {config.type!r}; expected 'rl' or 'sft'")
    task = next((task for name, task in TASKS.items() if name in config.path.lower()), OTHER)
    limit = task.max_pixels if max_pixels is None else max_pixels

    def message_row(row: Row, number: int) -> Row:
        return image_row(row, task, limit, folder, f"{config.path}, row {number}")

    rows = LazyRows(stored, message_row)
    if processor is None:
        if config.type == "rl" and config.max_length is None:
            return rows
        raise DatasetError(
            f"{config.path} has images: type {config.type!r} with max_length {config.max_length} needs a "
            "processor; pass the one of load_processor(actor.path)"
        )
    ready, max_length = processor, config.max_length
    if config.type == "sft":
        rows = LazyRows(stored, lambda row, number: image_sft_row(message_row(row, number), ready))
        return rows if max_length is None else rows.where(lambda row: len(row["input_ids"]) <= max_length)
    if max_length is None:
        return rows
    return rows.where(lambda row: len(prompt_of(row, ready).input_ids) <= max_length)


def image_row(row: Row, task: ImageTask, max_pixels: int | None, folder: str, where: str) -> Row:
    """Return a row with `messages`, `images` as bytes, and the other fields as they are.

    Args:
        where: names the row in errors.

    Raises:
        DatasetError: it has no question, or not one picture for each `<image>`.
    """
    if name := next((name for name in UNSUPPORTED if row.get(name)), None):
        raise DatasetError(f"{where} has {name}, and only text and images are supported: leave such rows out")
    given: Any = next((row[name] for name in PICTURES if row.get(name) is not None), [])
    pictures = given if isinstance(given, list | tuple) else [given]
    try:
        images = [as_image_bytes(picture, folder) for picture in pictures]
        images = images if max_pixels is None else [shrunk(image, max_pixels) for image in images]
        for image in images:
            decode(image)  # damaged pixels are found here, where the row has a name
    except ImageError as error:
        raise DatasetError(f"{where}: {error}") from error
    messages = row.get("messages")
    if messages is None:
        name = next((name for name in QUESTIONS if name in row), None)
        if name is None:
            raise DatasetError(
                f"{where} has {', '.join(row) or 'no fields'}; expected messages, {', '.join(QUESTIONS)}"
            )
        text = str(row[name]).replace(task.removed, "") if task.removed else str(row[name])
        messages = [{"role": "user", "content": text + task.suffix}]
    if task.system:
        messages = [{"role": "system", "content": task.system}, *messages]
    used = {*QUESTIONS, *PICTURES, "messages"}
    rest = {name: value for name, value in row.items() if name not in used}
    return {"messages": with_image_parts(messages, len(images), where), "images": images, **rest}


def with_image_parts(messages: Sequence[Row], num_images: int, where: str) -> list[Row]:
    """Return messages with a part for each picture, at its `<image>` or before the first user text.

    Raises:
        DatasetError: the numbers of markers and pictures differ.
    """
    found = [message | {"content": image_parts(message["content"])} for message in messages]
    parts = [part for message in found if isinstance(message["content"], list) for part in message["content"]]
    num_parts = sum(part["type"] == "image" for part in parts)
    if num_parts == 0 and num_images:
        first = next((m for m in found if m["role"] == "user"), found[0])
        text = first["content"]
        rest = text if isinstance(text, list) else [{"type": "text", "text": text}]
        first["content"] = [{"type": "image"}] * num_images + rest
    elif num_parts != num_images:
        raise DatasetError(f"{where} has {num_parts} {MARKER} and {num_images} images; expected as many")
    return found


def image_parts(content: Any) -> Any:
    if not isinstance(content, str) or MARKER not in content:
        return content
    texts = content.split(MARKER)
    parts: list[Row] = []
    for number, text in enumerate(texts):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def image_sft_row(row: Row, processor: "VisionProcessor") -> Row:
    """Return `input_ids`, `loss_mask` (1 on the answer and EOS), `mm_token_type_ids` and `images`.

    Raises:
        DatasetError: there is no answer.
    """
    if "answer" not in row:
        raise DatasetError(f"a supervised row with images has {', '.join(row)}; expected an answer")
    prompt, tokenizer = prompt_of(row, processor), processor.tokenizer
    completion = [*tokenizer.encode(row["answer"], add_special_tokens=False), tokenizer.eos_token_id]
    return {
        "input_ids": [*prompt.input_ids, *completion],
        "loss_mask": [0] * len(prompt.input_ids) + [1] * len(completion),
        "mm_token_type_ids": [*prompt.mm_token_type_ids, *[0] * len(completion)],
        "images": row["images"],
    }


def prompt_of(row: Row, processor: "VisionProcessor") -> "Prompt":
    return processor.prompt(row["messages"], row["images"])


def shape_rows(num_rows: int = 1000, seed: int = 0, max_count: int = 4, size: int = 32) -> list[Row]:
    """Generate pictures of 1 to `max_count` shapes, and their number as the answer.

    Shapes lie in different cells of a grid of 4 x 4. The same arguments give the same pixels.

    Args:
        size: of the pictures, in pixels.

    Raises:
        DatasetError: an argument is out of range.
    """
    from PIL import Image, ImageDraw

    if num_rows < 1 or not 1 <= max_count <= 16 or size < 16:
        raise DatasetError(
            f"dataset_kwargs has num_rows {num_rows}, max_count {max_count} and size {size}; expected >= 1, "
            "1 to 16 and >= 16"
        )
    random_numbers = random.Random(seed)
    rows, cell = [], size // 4
    for _ in range(num_rows):
        count = random_numbers.randint(1, max_count)
        image = Image.new("RGB", (size, size))
        draw = ImageDraw.Draw(image)
        for place in random_numbers.sample(range(16), count):
            x, y = place % 4 * cell, place // 4 * cell
            box = (x + 1, y + 1, x + cell - 2, y + cell - 2)
            draw_shape = random_numbers.choice((draw.ellipse, draw.rectangle))
            draw_shape(box, fill=random_numbers.choice(COLOURS))
        file = BytesIO()
        image.save(file, format="PNG")
        rows.append({"problem": "<image>How many?", "images": [file.getvalue()], "answer": str(count)})
    return rows
