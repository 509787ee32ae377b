"""Synthetic clips and their captions: what the demo model learns from and is measured on.

A clip is one shape of one colour that moves in one direction over a plain background. `render` draws it,
`captions` words it, `HELD_OUT` names the combinations that training never sees.
"""

import random
from dataclasses import dataclass

import numpy as np

NUM_FRAMES = 17
SIDE = 112

COLOURS = {
    "red": (222, 48, 44),
    "green": (44, 168, 70),
    "blue": (44, 86, 222),
    "yellow": (246, 212, 46),
    "purple": (158, 62, 200),
    "white": (240, 240, 236),
}
BACKGROUNDS = {
    "black": (16, 16, 20),
    "white": COLOURS["white"],
    "blue": COLOURS["blue"],
    "green": COLOURS["green"],
    "grey": (128, 130, 134),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}

# Radii in pixels; `None` is a caption that does not speak of size.
RADII = {"small": (9.0, 11.5), None: (13.0, 18.0), "big": (20.0, 24.0)}
TRAVEL = (34.0, 60.0)  # pixels from first to last frame
MARGIN = 3.0  # pixels that always stay free between shape and border

# Every word that a caption can hold: all that the demo model knows.
WORDS = tuple(
    sorted(
        {"a", "the", "small", "little", "big", "large", "moving", "moves", "to", "on", "over", "background"}
        | {*COLOURS, *BACKGROUNDS, *SHAPES, *DIRECTIONS}
    )
)

# (colour, shape, direction, background)
HELD_OUT = (
    ("red", "circle", "right", "blue"),
    ("red", "square", "up", "black"),
    ("red", "triangle", "left", "white"),
    ("red", "circle", "down", "grey"),
    ("red", "square", "left", "green"),
    ("green", "circle", "left", "black"),
    ("green", "square", "right", "white"),
    ("green", "triangle", "up", "blue"),
    ("green", "square", "down", "grey"),
    ("blue", "circle", "up", "white"),
    ("blue", "square", "left", "grey"),
    ("blue", "triangle", "right", "black"),
    ("blue", "circle", "down", "green"),
    ("yellow", "circle", "up", "green"),
    ("yellow", "square", "down", "blue"),
    ("yellow", "triangle", "left", "black"),
    ("yellow", "triangle", "right", "grey"),
    ("yellow", "circle", "right", "white"),
    ("purple", "circle", "left", "grey"),
    ("purple", "square", "right", "black"),
    ("purple", "triangle", "down", "white"),
    ("purple", "square", "up", "green"),
    ("white", "circle", "down", "black"),
    ("white", "square", "left", "blue"),
    ("white", "triangle", "up", "grey"),
    ("white", "circle", "right", "green"),
)


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Everything that one clip shows; positions and radius in pixels of a `SIDE` x `SIDE` frame."""

    colour: str
    shape: str
    direction: str
    background: str
    size: str | None
    radius: float
    start: tuple[float, float]
    travel: float

    @property
    def combination(self) -> tuple[str, str, str, str]:
        """The four words that `HELD_OUT` is about."""
        return self.colour, self.shape, self.direction, self.background


def combinations() -> list[tuple[str, str, str, str]]:
    """Every (colour, shape, direction, background) whose shape and background differ in colour."""
    return [
        (colour, shape, direction, background)
        for colour in COLOURS
        for shape in SHAPES
        for direction in DIRECTIONS
        for background in BACKGROUNDS
        if colour != background
    ]


def seen_combinations() -> list[tuple[str, str, str, str]]:
    """The combinations that training uses: all but `HELD_OUT`."""
    return [combination for combination in combinations() if combination not in HELD_OUT]


def draw_clip(rng: random.Random, combination: tuple[str, str, str, str] | None = None) -> Clip:
    """A random clip, of `combination` or of one that training may see; the shape never leaves the frame."""
    colour, shape, direction, background = combination or rng.choice(seen_combinations())
    size = rng.choice(("small", None, None, None, "big"))
    radius = rng.uniform(*RADII[size])
    low, high = radius + MARGIN, SIDE - radius - MARGIN
    travel = rng.uniform(TRAVEL[0], min(TRAVEL[1], high - low))
    near, across = rng.uniform(low, high - travel), rng.uniform(low, high)
    dx, dy = DIRECTIONS[direction]
    along = near if dx + dy > 0 else near + travel
    start = (along, across) if dx else (across, along)
    return Clip(
        colour=colour,
        shape=shape,
        direction=direction,
        background=background,
        size=size,
        radius=radius,
        start=start,
        travel=travel,
    )


def render(clip: Clip) -> np.ndarray:
    """The clip's frames, float32 in 0..1, (NUM_FRAMES, SIDE, SIDE, 3): antialiased and softly lit."""
    grid = np.arange(SIDE, dtype=np.float32) + 0.5
    time = np.linspace(0.0, clip.travel, NUM_FRAMES, dtype=np.float32)
    dx, dy = DIRECTIONS[clip.direction]
    x = grid[None, None, :] - (clip.start[0] + dx * time)[:, None, None]  # frames, 1, width
    y = grid[None, :, None] - (clip.start[1] + dy * time)[:, None, None]  # frames, height, 1
    cover = np.clip(0.5 - _distance(clip.shape, x, y, clip.radius), 0.0, 1.0)[..., None]
    light = 1.0 - 0.10 * np.clip((x + y) / (2.0 * clip.radius), -1.0, 1.0)[..., None]
    shape_rgb = np.clip(np.array(COLOURS[clip.colour], dtype=np.float32) / 255.0 * light, 0.0, 1.0)
    return cover * shape_rgb + (1.0 - cover) * _background(clip.background)


def plain_caption(colour: str, shape: str, direction: str, background: str) -> str:
    """The plainest wording of a combination."""
    return f"a {colour} {shape} moving {direction} on a {background} background"


def captions(clip: Clip) -> list[str]:
    """Every wording of `clip` that training draws from."""
    sizes = {"small": ("small", "little"), None: ("",), "big": ("big", "large")}[clip.size]
    backgrounds = [f" {word} {clip.background} background" for word in ("on a", "over a")]
    backgrounds.append(f" on {clip.background}")
    if clip.background == "black":
        backgrounds.append("")
    moves = ("moving", "moving to the", "moves") if DIRECTIONS[clip.direction][0] else ("moving", "moves")
    return [
        " ".join(f"{article} {size} {clip.colour} {clip.shape} {move} {clip.direction}{background}".split())
        for article in ("a", "the")
        for size in sizes
        for move in moves
        for background in backgrounds
    ]


def _distance(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Signed pixels from the outline, negative inside; every shape spans about 2 x `radius` in both axes."""
    if shape == "circle":
        return np.sqrt(x * x + y * y) - radius
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.9 * radius
    # Apex up: the sides of a triangle of width and height 2 x radius have normal (2, -1) / sqrt(5).
    sides = (2.0 * np.abs(x) - (y + radius)) / np.float32(np.sqrt(5.0))
    return np.maximum(sides, y - radius)


def _background(name: str) -> np.ndarray:
    grid = np.linspace(-1.0, 1.0, SIDE, dtype=np.float32)
    vignette = 1.0 - 0.12 * (grid[None, :] ** 2 + grid[:, None] ** 2) / 2.0
    return np.array(BACKGROUNDS[name], dtype=np.float32) / 255.0 * vignette[..., None]
