"""Images in conversations: parts of a message that name a file or hold a data URI.

{"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is this?"}]}
"""

import base64
import binascii
import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.errors import ConfigError, reason_of

if TYPE_CHECKING:
    from PIL import Image

KEYS = ("image", "path", "url")
"""Keys of a part that name its image."""
IMAGE_TYPES = ("image", "image_url")
"""Types of parts that are images."""
DATA = "data:image/"
LARGEST_IMAGE = 2**26
"""Bytes of a file or a data URI."""


def image_part(place: str, part: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return a part that names an image as {"type": "image", "image": path or data URI}.

    Args:
        place: file and line of the row.
        folder: of the images; default: the folder of the file. Paths are relative to it and do not leave it.

    Raises:
        ConfigError: for an image without a file, outside the folder or on the network.
    """
    names = [part[key] for key in (*KEYS, "image_url") if part.get(key) is not None]
    name = names[0].get("url") if len(names) == 1 and isinstance(names[0], dict) else names[0] if names else None
    if len(names) != 1 or not isinstance(name, str):
        raise ConfigError(f"{place}: an image with keys {sorted(part)}; expected one of {', '.join(KEYS)}, with a text")
    if not name.startswith(DATA):
        name = str(_file(place, name, folder))
    return {"type": "image", "image": name}


def _file(place: str, name: str, folder: Path | None) -> Path:
    """Return the path of an image that a row names."""
    shown = name if len(name) <= 80 else name[:77] + "..."
    if "://" in name or name.startswith("data:"):
        raise ConfigError(f"{place}: image={shown!r}; expected a file, or a data URI that begins with {DATA}")
    prompts = Path(place.rpartition(":")[0])
    if folder is None and not prompts.is_file():
        raise ConfigError(f"{place}: image={shown!r} of a data set without a folder; expected data URIs, or --images")
    root = (prompts.parent if folder is None else folder).resolve()
    try:
        path = (root / name).resolve()
        inside, exists = path.is_relative_to(root), path.is_file()
    except (OSError, ValueError) as error:  # a name that is too long, or with a zero byte
        raise ConfigError(f"{place}: image={shown!r}; expected a file ({reason_of(error)})") from error
    if not inside:
        raise ConfigError(f"{place}: image={shown!r} lies outside {root}; expected a path inside it (--images FOLDER)")
    if not exists:
        raise ConfigError(f"{place}: image={shown!r} is no file in {root}; expected one")
    return path


def images_in(messages: list[dict[str, Any]]) -> list[str]:
    """Return the paths and data URIs of all images of these messages, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image"] for part in parts if isinstance(part, dict) and part.get("type") == "image"]


def opened(place: str, source: str) -> "Image.Image":
    """Return the image of a path or data URI in RGB; ConfigError where it cannot be read."""
    from PIL import Image

    shown = f"a data URI of {len(source)} characters" if source.startswith(DATA) else source
    try:
        data = _bytes(source)
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(data)).convert("RGB")
    except Exception as error:  # decoders raise errors without a common base class
        raise ConfigError(f"{place}: image={shown} cannot be read ({reason_of(error)}); expected an image") from error


def _bytes(source: str) -> bytes:
    if source.startswith(DATA):
        head, _, text = source.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("the data URI is not in base64")
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError(f"not base64: {error}") from error
    path = Path(source)
    if path.stat().st_size > LARGEST_IMAGE:
        raise ValueError(f"{path.stat().st_size:,} bytes; at most {LARGEST_IMAGE:,} are read")
    return path.read_bytes()


def as_parts(messages: list[dict[str, Any]], images: list[Any]) -> list[dict[str, Any]]:
    """Return a copy of messages for a processor: every content is a list of parts, and images are those in `images`."""
    left = iter(images)

    def part(value: Any) -> Any:
        return (
            {"type": "image", "image": next(left)}
            if isinstance(value, dict) and value.get("type") == "image"
            else value
        )

    def content(value: Any) -> list[Any]:
        return (
            [part(each) for each in value] if isinstance(value, list) else [{"type": "text", "text": str(value or "")}]
        )

    return [{**message, "content": content(message.get("content"))} for message in messages]
