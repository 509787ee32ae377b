"""Small images and clips to feed a pipeline with."""

import torch
from PIL import Image


def picture(seed: int = 0, size: tuple[int, int] = (96, 64)) -> Image.Image:
    """An image of coarse coloured noise, `size` as (width, height) in pixels."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (4, 6, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy()).resize(size)


def one_picture() -> dict[str, Image.Image]:
    """One input image, as a pipeline's argument."""
    return {"image": picture()}


def two_pictures() -> dict[str, list[Image.Image]]:
    """Two input images of different shapes, as a pipeline's argument."""
    return {"image": [picture(), picture(1, (64, 80))]}
