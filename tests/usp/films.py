"""Reading back what a run has written."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

GAP, HEAD, COLUMNS = 4, 20, 6  # of a contact sheet, in pixels and frames


def frames_of(path: Path) -> tuple[np.ndarray, Fraction]:
    """The frames (T, H, W, 3) of a video, as integers that can be subtracted, and its frames per second."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        rate = container.streams.video[0].average_rate
    assert rate is not None
    return np.stack(frames).astype(int), rate


def sheet_frames(path: Path, *, height: int, width: int) -> np.ndarray:
    """The frames (T, H, W, 3) on a contact sheet, which must be a PNG; empty white places are left out."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("RGB")).astype(int)
    rows = (pixels.shape[0] - HEAD - GAP) // (height + GAP)
    columns = (pixels.shape[1] - GAP) // (width + GAP)
    assert pixels.shape == (HEAD + GAP + rows * (height + GAP), GAP + columns * (width + GAP), 3)
    assert columns <= COLUMNS
    found = []
    for row in range(rows):
        for column in range(columns):
            y, x = HEAD + GAP + row * (height + GAP), GAP + column * (width + GAP)
            found.append(pixels[y : y + height, x : x + width])
    return np.stack([frame for frame in found if not (frame == 255).all()])
