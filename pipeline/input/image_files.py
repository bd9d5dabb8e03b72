"""Image files: recognised by their first bytes, and decoded to uint8 [C, H, W] by Pillow.

An EXIF orientation is applied first. Then images are converted to --channels and resized to --resize, if given. Images
with transparency, several frames or more than 8 bits per channel are refused, because nothing says how to flatten them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageFile, ImageOps

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import MAX_IMAGE_BYTES, Layout
from pipeline.core.shardset.schema import words_of
from pipeline.input.channels import CHANNELS, to_channels
from pipeline.input.resize import Size, resize

# The first bytes of image files, as (offset, bytes): PNG, JPEG, GIF, BMP, WebP, TIFF of either byte order, AVIF, HEIF,
# JPEG 2000, and PBM, PGM and PPM as text or binary (P1 to P6 and white space).
SIGNATURES = (
    ((0, b"\x89PNG"),),
    ((0, b"\xff\xd8\xff"),),
    ((0, b"GIF8"),),
    ((0, b"BM"), (6, bytes(4))),
    ((0, b"RIFF"), (8, b"WEBP")),
    ((0, b"II*\0"),),
    ((0, b"MM\0*"),),
    ((4, b"ftyp"),),
    ((0, b"\0\0\0\x0cjP  "),),
    *(((0, b"P%d%c" % (kind, space)),) for kind in range(1, 7) for space in b"\n\r\t "),
)

# Of a channel, in the raw modes of Pillow's decoders. BGR;16 of BMP has 16 bits per pixel.
SIXTEEN_BITS = re.compile(r";16[BLNS]")
ONE_FRAME = ("PNG", "JPEG", "MPO")  # formats of which only the first image is read
LOOKED_AT = 100  # the most images of a file that are tried to find its shape
ImageShape = tuple[tuple[int, int, int], bool]  # [C, H, W], and whether the image is decoded by itself


def begins_as_image(data: bytes) -> bool:
    """True if bytes begin as a file of a known image format."""
    return any(all(data.startswith(part, at) for at, part in signature) for signature in SIGNATURES)


def is_encoded(data: bytes, pixels: int) -> bool:
    """True if bytes are an image file. Raw pixels may begin like one, but have the raw length."""
    return begins_as_image(data) and len(data) != pixels


class Undecodable(DataError):
    """An image file that Pillow cannot read."""


def decode(data: bytes) -> npt.NDArray[np.uint8]:
    """Return an image file as uint8 [C, H, W], with its EXIF orientation applied.

    Grey images keep one channel, all others become RGB. Raises DataError if this would lose bits, transparency or
    further frames, and Undecodable for a broken file."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            return _pixels_of(image)
    except DataError:
        raise
    except Exception as error:  # Pillow raises many kinds for a broken image
        raise Undecodable(f"the image cannot be decoded ({words_of(error)})") from None


def _pixels_of(image: ImageFile.ImageFile) -> npt.NDArray[np.uint8]:
    """Return the pixels of an open image file, uint8 [C, H, W] (see ``decode``).

    Raises DataError if the conversion to 8-bit grey or RGB would lose frames, bits or transparency, or if the image is
    too large."""
    frames = 1 if image.format in ONE_FRAME else getattr(image, "n_frames", 1)
    if frames > 1:
        raise DataError(f"the image has {frames} frames; save each as an image of its own")
    if image.mode.startswith(("I", "F")) or _loses_bits(image):
        raise DataError(f"the image has more than 8 bits a channel (mode {image.mode}); convert it to 8 bits")
    if 3 * image.width * image.height > MAX_IMAGE_BYTES:
        raise DataError(f"the image of {image.width}x{image.height} pixels has more than {MAX_IMAGE_BYTES:,} bytes")
    # Only real transparency is refused: an alpha channel that is opaque everywhere loses nothing.
    image.load()
    upright = ImageOps.exif_transpose(image) if _is_turned(image) else image
    if upright.has_transparency_data and upright.convert("RGBA").getchannel("A").getextrema() != (255, 255):
        raise DataError(
            "the image is transparent in places; flatten it onto a background, in Pillow by"
            ' background.paste(image, mask=image.convert("RGBA").getchannel("A"))'
        )
    pixels = np.asarray(upright if upright.mode == "L" else upright.convert("RGB"))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _loses_bits(image: ImageFile.ImageFile) -> bool:
    """Return whether Pillow, which has no colours of 16 bits, keeps only 8 bits of each channel of an open image file.

    Its decoder says so: a raw mode such as RGB;16B, or a largest value above 255 in a PPM file."""
    for codec, _, _, settings in image.tile:
        values = settings if isinstance(settings, tuple) else (settings,)
        is_deep = any(isinstance(value, str) and SIXTEEN_BITS.search(value) for value in values)
        if is_deep or (codec.startswith("ppm") and any(isinstance(value, int) and value > 255 for value in values)):
            return True
    return False


def _is_turned(image: Image.Image) -> bool:
    """True if the image's EXIF data declare an orientation other than upright."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation) in range(2, 9)
    except Exception:  # Pillow raises many kinds for broken EXIF data, although the pixels are intact
        return False


def shape_of_image(data: bytes | None, layout: Layout, place: str) -> ImageShape:
    """Return the shape [C, H, W] of an image, and whether it is encoded (an image file).

    Raises DataError if it is null, cannot be decoded, or does not have the size of a raw image."""
    if data is None:
        raise DataError(f"{place}: the image is null")
    # Only uint8 rows may be image files: Pillow decodes to bytes, and float32 values may begin like an image file.
    if layout.dtype == "uint8" and is_encoded(data, layout.record_bytes):
        try:
            channels, height, width = decode(data).shape
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        return (channels, height, width), True
    if len(data) != layout.record_bytes:
        size = "x".join(map(str, layout.shape)) + (" float32" if layout.dtype == "float32" else "")
        raise DataError(
            f"{place}: {len(data)} bytes that begin as no known image file, and raw images of {size} have"
            f" {layout.record_bytes}; declare --image-shape"
        )
    return layout.shape, False


def first_shape(shapes: Iterable[Callable[[], ImageShape]], expected: ImageShape | None = None) -> ImageShape:
    """Return the shape of the first valid image.

    A broken image does not condemn its file: only if none of the first LOOKED_AT images is valid, the DataError of the
    first is raised, or ``expected`` returned.

    Args:
        shapes: at least one function, each of which returns the shape of an image or raises DataError.
        expected: the shape of the images in other files, if a file of broken images may be surveyed.
    """
    problem: DataError | None = None
    for shape in islice(shapes, LOOKED_AT):
        try:
            return shape()
        except DataError as error:
            problem = problem or error
    assert problem, "there is at least one image"
    if expected is None:
        raise problem
    return expected


def decode_image(
    data: bytes, layout: Layout, place: str, channels: int | None, size: Size | None
) -> npt.NDArray[np.uint8]:
    """Return one image, encoded or raw, as uint8 [C*H*W]. Raises DataError.

    Each image is classified by itself, independent of block boundaries. Raw pixels may begin like an image file: bytes
    of the raw size that cannot be decoded are raw. Bytes of the raw size that can be decoded are an image file.

    Args:
        data: the bytes of the image.
        layout: the layout of the rows.
        place: the file and row, for error lines.
        channels: the channels to which image files are converted, or None.
        size: the size to which image files are resized, or None.
    """
    is_raw = len(data) == layout.record_bytes
    if not begins_as_image(data):
        if not is_raw:
            raise DataError(f"{place}: the image has {len(data)} bytes, not {layout.record_bytes}")
        return np.frombuffer(data, np.uint8)
    # Bytes of the raw size that do not decode are pixels that happen to begin like an image file.
    try:
        image = decode(data)
    except DataError as error:
        if is_raw and isinstance(error, Undecodable):
            return np.frombuffer(data, np.uint8)
        raise DataError(f"{place}: {error}") from None
    return convert_image(image, layout, place, channels, size)


def convert_image(
    image: npt.NDArray[np.uint8], layout: Layout, place: str, channels: int | None, size: Size | None
) -> npt.NDArray[np.uint8]:
    """Return a decoded image uint8 [C, H, W] after its conversion, as uint8 [C*H*W]; for the arguments see
    ``decode_image``.

    Raises DataError if it does not have the shape of the layout."""
    # Channels are converted before the size, because a grey image takes a third of the time to resize.
    if channels and len(image) in CHANNELS:
        image = to_channels(image, channels)
    if size:
        image = resize(image, size)
    if image.shape != layout.shape:
        shape, expected = ("x".join(map(str, each)) for each in (image.shape, layout.shape))
        raise DataError(
            f"{place}: the image is {shape}, the first one {expected}{conversion_advice(image.shape, layout)}"
        )
    return image.reshape(-1)


def conversion_advice(shape: tuple[int, ...], layout: Layout) -> str:
    """Return the end of an error line about an image of another shape: the flags that would make shapes equal."""
    flags = ["--channels 1 or 3 converts grey and RGB"] * (shape[0] != layout.shape[0])
    flags += [f"--resize {layout.shape[1]}x{layout.shape[2]} makes sizes equal"] * (shape[1:] != layout.shape[1:])
    return f"; {', and '.join(flags)}" if flags else ""
