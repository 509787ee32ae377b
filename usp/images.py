"""Images in and out: read whole into memory before anything else, written as PNG, whole or not at all."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from usp.files import check_writable, write_whole

SIDE_STEP = 32  # pixels; what Qwen's pipelines round to


def at_area(size: tuple[int, int], area: int) -> tuple[int, int]:
    """Width and height of an image of this size brought to about `area` pixels.

    Source: `calculate_dimensions` of diffusers' Qwen-Image-Edit.
    """
    width, height = size
    wide = math.sqrt(area * width / height)
    sides = (wide, wide * height / width)
    fitted = (max(1, round(side / SIDE_STEP)) * SIDE_STEP for side in sides)
    return next(fitted), next(fitted)


def read_images(paths: Sequence[Path]) -> tuple[Image.Image, ...]:
    """The images in these files, in order: fully loaded, upright as their EXIF says, in RGB.

    What is transparent becomes white. Raises ValueError that names the file if one cannot be read.
    """
    return tuple(_read(path) for path in paths)


def _read(path: Path) -> Image.Image:
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"image {str(path)!r} {kind}; give the name of an image file")
    try:
        with Image.open(path) as image:
            return _rgb(ImageOps.exif_transpose(image))
    except UnidentifiedImageError as error:
        raise ValueError(
            f"image {str(path)!r} is no image that can be read; use PNG, JPEG or WebP"
        ) from error
    except (
        OSError,
        SyntaxError,
        Image.DecompressionBombError,
    ) as error:  # PIL: broken PNGs are a SyntaxError
        raise ValueError(
            f"image {str(path)!r} cannot be read ({error}); save it again, or use another"
        ) from error


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise OSError("its pixels are floating point numbers, of no known scale")
    if image.mode.startswith("I"):  # 16 bits of grey, which convert() would cut off at 255
        image = Image.fromarray((np.asarray(image).clip(0, 65535) / 257).round().astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def image_paths(path: Path, count: int) -> tuple[Path, ...]:
    """The files of `count` images that were asked for as `path`: itself, or name-0.png, name-1.png ..."""
    if count == 1:
        return (path,)
    return tuple(path.with_name(f"{path.stem}-{i}{path.suffix}") for i in range(count))


def check_image_output(path: Path, count: int = 1) -> None:
    """Raise ValueError unless `count` PNGs can be written at `path`; nothing is created."""
    if path.suffix.lower() != ".png":
        raise ValueError(
            f"output {str(path)!r} was asked for; this task writes PNG; use a name that ends in .png"
        )
    check_writable(path, image_paths(path, count))


def write_images(images_NHWC: np.ndarray, path: Path) -> tuple[Path, ...]:
    """Write byte images (N, H, W, 3) as PNG and return their files, `image_paths(path, N)`."""
    files = image_paths(path, len(images_NHWC))
    for pixels, file in zip(images_NHWC, files, strict=True):
        image = Image.fromarray(np.ascontiguousarray(pixels))
        write_whole(file, lambda temporary, image=image: image.save(temporary, format="PNG"))
    return files
