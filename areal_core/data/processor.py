"""A model's processor of pictures: prompts with placeholders, and pixels, the same on every rank.

messages + pictures -> prompt   token ids, one placeholder for each vision token, as Transformers'
pictures            -> pixels   what the model's forward takes; computed once per picture and process

The engine computes pixels from a picture's bytes in each process, so they pass through no queue and
need not be in a record: the processor's `identity` and the bytes determine them.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from areal_core.data.images import decode, image_hash
from areal_core.errors import ImageError, ModelError, first_line, load_failure

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_CACHED_BYTES = 1 << 30  # of pixels in one process


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt; the types are 1 at placeholders of pictures, 0 elsewhere."""

    input_ids: list[int]
    mm_token_type_ids: list[int]


@dataclass
class VisionProcessor:
    """Transformers' processor of one checkpoint, for pictures as their encoded bytes."""

    processor: Any  # a ProcessorMixin, whose attributes differ by family
    _pixels: OrderedDict[str, dict[str, Tensor]] = field(default_factory=OrderedDict, repr=False)
    _cached_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that `prompt` uses."""
        tokenizer: PreTrainedTokenizerBase = self.processor.tokenizer
        return tokenizer

    @property
    def image_token_id(self) -> int:
        """The placeholder of one vision token."""
        (found,) = self.processor.image_token_ids
        return int(found)

    def prompt(
        self, messages: Sequence[dict[str, Any]], images: Sequence[bytes], **template_options: Any
    ) -> Prompt:
        """Render messages by the chat template, and expand the placeholder of each picture.

        Args:
            messages: their content is text, or a list of `{"type": "text", "text": ...}` and, for
                each picture in order, `{"type": "image"}`.
            template_options: of the chat template. `add_generation_prompt` is true by default.

        Raises:
            ImageError: the numbers of pictures and placeholders differ, one is damaged, or a
                message has another part, such as a video.
        """
        for message in messages:
            refuse_other_parts(message.get("content"))
        options = {"add_generation_prompt": True} | template_options
        text = self.tokenizer.apply_chat_template(
            list(messages), chat_template=self.processor.chat_template, tokenize=False, **options
        )
        assert isinstance(text, str)
        return self.tokenize(text, images)

    def tokenize(self, text: str, images: Sequence[bytes]) -> Prompt:
        """Tokenize a rendered prompt, without adding special tokens; raises as `prompt` does."""
        expected = text.count(self.processor.image_token)
        if expected != len(images):
            raise ImageError(
                f"a prompt has {expected} placeholders of images and {len(images)} images: "
                f'give each message one {{"type": "image"}} for each of its images, in order, and no text '
                f"with {self.processor.image_token!r}"
            )
        pictures = [decode(image) for image in images]
        try:
            found = self.processor(images=pictures or None, text=[text], add_special_tokens=False)
        except ValueError as error:
            raise _refused(pictures, error) from error
        (input_ids,) = found["input_ids"]
        (types,) = self.processor.create_mm_token_type_ids([input_ids])
        return Prompt(input_ids, types)

    def pixels(self, images: Sequence[bytes]) -> dict[str, Tensor]:
        """Return the pixels of pictures, on the CPU, by the names of the model's forward.

        They are `pixel_values` [units, ...] and, where the family has them, tensors such as
        `image_grid_thw`, int64 [images, 3]. Without pictures there are none.

        Raises:
            ImageError: a picture is damaged, or too large.
        """
        each = [self._pixels_of(image) for image in images]
        return {key: torch.cat([found[key] for found in each]) for key in (each[0] if each else ())}

    def units(self, images: Sequence[bytes]) -> list[int]:
        """Return how many entries of `pixel_values` each picture has; raises as `pixels` does."""
        return [len(self._pixels_of(image)["pixel_values"]) for image in images]

    def _pixels_of(self, image: bytes) -> dict[str, Tensor]:
        name = image_hash(image)
        with self._lock:
            if (known := self._pixels.get(name)) is not None:
                self._pixels.move_to_end(name)
                return known
        # Alone: a batch of pictures of one size may take another kernel, with other last bits.
        picture = decode(image)
        try:
            inputs = self.processor(images=[picture], return_tensors="pt")
        except ValueError as error:
            raise _refused([picture], error) from error
        names = self.processor.image_processor.model_input_names
        found = {key: inputs[key] for key in names if key in inputs}
        with self._lock:
            if name not in self._pixels:
                self._pixels[name] = found
                self._cached_bytes += _num_bytes(found)
            while len(self._pixels) > 1 and self._cached_bytes > MAX_CACHED_BYTES:
                self._cached_bytes -= _num_bytes(self._pixels.popitem(last=False)[1])
        return found

    def identity(self) -> dict[str, Any]:
        """Return what determines pixels and placeholders besides the bytes, for JSON."""
        options: dict[str, Any] = json.loads(self.processor.image_processor.to_json_string())
        return {
            "processor": type(self.processor).__name__,
            "image_processor": type(self.processor.image_processor).__name__,
            "options": options,
            "image_token_id": self.image_token_id,
            "versions": _versions("transformers", "torchvision", "pillow", "torch"),
        }

    def save_pretrained(self, folder: str | Path) -> None:
        """Write processor, tokenizer and chat template beside a model."""
        self.processor.save_pretrained(folder)


def _refused(pictures: Sequence["Image"], error: ValueError) -> ImageError:
    sizes = ", ".join(f"{picture.width} x {picture.height}" for picture in pictures)
    return ImageError(f"the model's processor refuses images of {sizes} pixels: {error}")


def refuse_other_parts(content: Any) -> None:
    """Raise ImageError for a part of a message that is neither text nor a picture."""
    for part in content if isinstance(content, (list, tuple)) else ():
        if part["type"] not in ("text", "image"):
            raise ImageError(
                f"a message has a part of type {part['type']!r}, and only text and images are supported: "
                "leave such rows out"
            )


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):  # without torchvision, Pillow resizes
            found[name] = version(name)
    return found


def _num_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@lru_cache(maxsize=4)  # shared by the models of a run, and with it the cached pixels
def load_processor(path: str) -> VisionProcessor:
    """Load the processor of a checkpoint.

    Args:
        path: a folder in Hugging Face format, or a hub name.

    Raises:
        ModelError: there is none, or it has no processor of images.
    """
    from transformers import AutoProcessor  # imports torchvision

    try:
        processor = AutoProcessor.from_pretrained(path)
    except (ImportError, RuntimeError) as error:  # a torchvision of another build is a RuntimeError
        raise ModelError(
            f"cannot load the processor of {path!r} ({first_line(error)}): pip install torchvision, of the build of torch"
        ) from error
    except (OSError, ValueError) as error:
        if not Path(path).is_dir():
            raise load_failure(path, error) from error
        raise ModelError(
            f"cannot load the processor of {path!r} ({str(error).splitlines()[0]}): copy "
            f"preprocessor_config.json and processor_config.json of the original model beside its weights"
        ) from error
    if getattr(processor, "image_processor", None) is None:
        raise ModelError(
            f"{path!r} has a {type(processor).__name__} and no processor of images: use a vision model; if it "
            f"is one, copy preprocessor_config.json and processor_config.json of the original beside its weights"
        )
    return VisionProcessor(processor)
