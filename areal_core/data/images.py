"""A picture as its original encoded bytes: from datasets and requests to what the record keeps.

as_image_bytes   any form in which a row of data gives a picture -> bytes
bytes_of_url     the URL of a request -> bytes; never a file of this machine
decode           bytes -> RGB pixels, upright, as Transformers and SGLang decode them
shrunk           bytes -> bytes of a smaller picture

Bytes may come from anyone: only common formats are decoded, and sizes are checked in the header
first, so that no small file becomes gigabytes.
"""

import base64
import binascii
import hashlib
import math
import os
from io import BytesIO
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from areal_core.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_BYTES = 64 * 2**20
MAX_PIXELS = 8192 * 8192
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
ORIENTATION = 0x0112  # EXIF tag
REMOTE_TIMEOUT_S = 20.0
EXPECTED = "expected bytes, a PIL image, a path, a data: URL or base64"


def as_image_bytes(value: Any, folder: str | os.PathLike[str] = ".") -> bytes:
    """Return the encoded picture of a field of a dataset.

    Args:
        value: encoded bytes, a PIL image (encoded as PNG, without loss), the path of a file, a
            data: URL, base64, or a dict of `datasets` with `bytes` or `path`.
        folder: of relative paths.

    Raises:
        ImageError: another value, no such file, or no picture that `decode` takes.
    """
    from PIL.Image import Image

    match value:
        case bytes() | bytearray() | memoryview():
            return _checked(bytes(value))
        case Image():
            return _checked(_png(value))
        case {"bytes": bytes() as data}:
            return _checked(data)
        case {"path": str() as path}:
            return _checked(_read(os.path.join(folder, path)))
        case str() if value.startswith(("http://", "https://")):
            raise ImageError(
                f"image URL {value[:80]!r} is remote, and images of rows are not fetched: save the file and "
                "give its path"
            )
        case str() if value.startswith("data:"):
            return bytes_of_url(value)
        case str() | os.PathLike():
            path = os.path.join(folder, value)
            if isinstance(value, str) and not os.path.isfile(path):
                return _checked(_unbase64(value, f"no file {value[:80]!r}, and not base64"))
            return _checked(_read(path))
        case _:
            raise ImageError(f"an image is a {type(value).__name__}; {EXPECTED}")


def bytes_of_url(url: str, remote: bool = False) -> bytes:
    """Return the picture of a data: URL, or of an http(s) one where `remote` allows it.

    Raises:
        ImageError: another URL, or no picture that `decode` takes.
    """
    if url.startswith("data:"):
        head, comma, data = url.partition(",")
        if not comma:
            raise ImageError(f"image URL {url[:40]!r} has no comma; expected data:image/png;base64,...")
        if head.endswith(";base64"):
            return _checked(_unbase64(data, f"the data of image URL {head!r} is not base64"))
        return _checked(unquote_to_bytes(data))
    if not url.startswith(("http://", "https://")):
        raise ImageError(
            f"image URL {url[:80]!r} is neither a data: URL nor http(s); send data:image/png;base64,..."
        )
    if not remote:
        raise ImageError(
            f"image URL {url[:80]!r} is remote and would be fetched by this process; send the picture as a "
            "data: URL, or set rollout.agent.remote_images to true"
        )
    return _checked(_fetch(url))


def decode(data: bytes) -> "Image":
    """Return the picture as RGB, rotated as its EXIF data say; the first frame of an animation.

    Raises:
        ImageError: not one of `FORMATS`, damaged, or of more than `MAX_BYTES` or `MAX_PIXELS`.
    """
    from PIL import ImageOps

    image = _opened(data)
    try:
        return ImageOps.exif_transpose(_in_8_bits(image)).convert("RGB")
    # Decoders raise errors of every kind on damaged data, such as SyntaxError and struct.error.
    except Exception as error:
        raise ImageError(f"an image of {len(data)} bytes cannot be decoded: {error}") from error


def shrunk(data: bytes, max_pixels: int) -> bytes:
    """Return a picture of at most `max_pixels`, in its proportions; unchanged if it is one.

    A JPEG stays one, other formats become PNG. Raises as `decode` does.
    """
    from PIL.Image import Resampling

    image = _opened(data)
    if image.width * image.height <= max_pixels:
        return data
    upright = decode(data)
    factor = math.sqrt(max_pixels / (image.width * image.height))
    size = (max(1, int(upright.width * factor)), max(1, int(upright.height * factor)))
    file = BytesIO()
    is_jpeg = image.format in ("JPEG", "MPO")
    upright.resize(size, Resampling.BICUBIC).save(file, "JPEG" if is_jpeg else "PNG", quality=95)
    return file.getvalue()


def image_hash(data: bytes) -> str:
    """Return the sha256 of the encoded bytes, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def upright_png(data: bytes) -> bytes:
    """Return a PNG of the pixels that `decode` gives; the same bytes if they are one already.

    For servers that ignore the orientation of a photo, or decode JPEG on a GPU with other rounding.
    Raises as `decode` does.
    """
    image = _opened(data)
    if image.format == "PNG" and image.mode in PNG_MODES and image.getexif().get(ORIENTATION, 1) == 1:
        return data
    return _png(decode(data))


def data_url(data: bytes) -> str:
    """Return the data: URL of `upright_png`, as servers take pictures."""
    return f"data:image/png;base64,{base64.b64encode(upright_png(data)).decode()}"


def _opened(data: bytes) -> Any:
    """Return a `PIL.ImageFile`: header read and size checked, pixels not yet decoded."""
    from PIL import Image

    if len(data) > MAX_BYTES:
        raise ImageError(f"an image has {len(data)} bytes; at most {MAX_BYTES} are accepted")
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"an image is too large: {error}") from error
    except Exception as error:  # as in `decode`
        raise ImageError(
            f"an image of {len(data)} bytes, beginning {data[:8]!r}, cannot be read; expected a complete file "
            f"of {', '.join(FORMATS)}"
        ) from error
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(
            f"an image has {image.width} x {image.height} pixels; at most {MAX_PIXELS} in total are accepted"
        )
    return image


def _checked(data: bytes) -> bytes:
    _opened(data)
    return data


def _in_8_bits(image: "Image") -> "Image":
    """Return grey of 16 bits as grey of 8: Pillow's `convert` would make all above 255 white."""
    if not image.mode.startswith("I;16"):
        return image
    return image.convert("I").point(lambda value: value / 256).convert("L")


def _png(image: "Image") -> bytes:
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(_in_8_bits(image))
    file = BytesIO()
    (upright if upright.mode in PNG_MODES else upright.convert("RGB")).save(file, format="PNG")
    return file.getvalue()


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ImageError(f"image {path} cannot be read: {error.strerror}") from None


def _unbase64(text: str, otherwise: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ImageError(f"{otherwise}; {EXPECTED}") from None


def _fetch(url: str) -> bytes:
    import httpx

    data = bytearray()
    try:
        with httpx.stream("GET", url, timeout=REMOTE_TIMEOUT_S, follow_redirects=True) as reply:
            reply.raise_for_status()
            for piece in reply.iter_bytes():
                data += piece
                if len(data) > MAX_BYTES:
                    break
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ImageError(f"image URL {url[:80]!r} cannot be fetched: {error}") from None
    return bytes(data)
