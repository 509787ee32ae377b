"""What a clip shows, from its pixels alone: colours, direction and shape. Plain numpy, no model.

Every function takes frames (frames, height, width, 3) of floats in 0..1.
"""

from collections.abc import Sequence

import numpy as np

from usp.demo.clips import BACKGROUNDS, COLOURS

OFF_BACKGROUND = 0.22  # a pixel belongs to the shape if a channel differs by more from the background
LEAST_PIXELS = 60  # of a frame of 112 x 112; fewer are not a shape
LEAST_TRAVEL = 12.0  # pixels from the first to the last frames; less is not a motion


def background_name(frames: np.ndarray) -> str:
    """The name in `BACKGROUNDS` nearest to the median colour of the border."""
    return _nearest(_border_colour(frames), BACKGROUNDS)


def shape_mask(frames: np.ndarray) -> np.ndarray:
    """True where a pixel is not background, (frames, height, width)."""
    return np.abs(frames - _border_colour(frames)).max(axis=-1) > OFF_BACKGROUND


def colour_name(frames: np.ndarray) -> str | None:
    """The name in `COLOURS` nearest to the shape's median colour, or None if there is no shape."""
    mask = shape_mask(frames)
    if mask.sum() < LEAST_PIXELS * len(frames):
        return None
    return _nearest(np.median(frames[mask], axis=0), COLOURS)


def direction_name(frames: np.ndarray) -> str | None:
    """Where the shape's centre goes: left, right, up or down; None if it is missing, still or moves askew."""
    mask = shape_mask(frames)
    ends = [_centroid(mask[:3]), _centroid(mask[-3:])]
    if ends[0] is None or ends[1] is None:
        return None
    dx, dy = ends[1] - ends[0]
    long, short = max(abs(dx), abs(dy)), min(abs(dx), abs(dy))
    if long < LEAST_TRAVEL or short > 0.5 * long:
        return None
    if abs(dx) > abs(dy):
        return "right" if dx > 0 else "left"
    return "down" if dy > 0 else "up"


def shape_name(frames: np.ndarray) -> str | None:
    """Circle, square or triangle, by how much of its bounding box the shape fills, or None without a shape.

    The median over frames is compared with pi / 4, 1 and 0.58 (small triangles fill more than half).
    """
    mask = shape_mask(frames)
    if mask.sum() < LEAST_PIXELS * len(frames):
        return None
    ground = _border_colour(frames)
    towards = np.median(frames[mask], axis=0) - ground
    inner = (frames - ground) @ towards / (towards @ towards) > 0.5  # more than half covered by the shape
    fills = [_fill(frame) for frame in inner if frame.sum() >= LEAST_PIXELS]
    if len(fills) < len(frames) // 2:
        return None
    ideal = {"circle": np.pi / 4, "square": 1.0, "triangle": 0.58}
    fill = np.median(fills)
    return min(ideal, key=lambda name: abs(ideal[name] - fill))


def describe(frames: np.ndarray) -> dict[str, str | None]:
    """The four words of a combination, as seen in `frames`."""
    return {
        "colour": colour_name(frames),
        "shape": shape_name(frames),
        "direction": direction_name(frames),
        "background": background_name(frames),
    }


def following_rates(
    videos: Sequence[np.ndarray], combinations: Sequence[tuple[str, str, str, str]]
) -> dict[str, float]:
    """The share of videos that show what was asked, per word and for all words together (`all`)."""
    names = ("colour", "shape", "direction", "background")
    hits = np.array(
        [
            [describe(frames)[name] == wanted for name, wanted in zip(names, combination, strict=True)]
            for frames, combination in zip(videos, combinations, strict=True)
        ]
    )
    return {
        **dict(zip(names, hits.mean(axis=0).tolist(), strict=True)),
        "all": float(hits.all(axis=1).mean()),
    }


def _border_colour(frames: np.ndarray) -> np.ndarray:
    border = (frames[:, :2], frames[:, -2:], frames[:, :, :2], frames[:, :, -2:])
    return np.median(np.concatenate([part.reshape(-1, 3) for part in border]), axis=0)


def _nearest(colour: np.ndarray, table: dict[str, tuple[int, int, int]]) -> str:
    return min(table, key=lambda name: float(np.linalg.norm(np.array(table[name]) / 255.0 - colour)))


def _centroid(mask: np.ndarray) -> np.ndarray | None:
    """Mean (x, y) of the True pixels of (frames, height, width), or None where they are too few."""
    if mask.sum() < LEAST_PIXELS * len(mask):
        return None
    _, y, x = np.nonzero(mask)
    return np.array([x.mean(), y.mean()])


def _fill(mask: np.ndarray) -> float:
    """The filled share of the bounding box of a (height, width) mask, whose sides hold 3 pixels or more."""
    rows, columns = np.flatnonzero(mask.sum(axis=1) > 2), np.flatnonzero(mask.sum(axis=0) > 2)
    if not len(rows) or not len(columns):
        return 0.0
    box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return float(box.mean())
