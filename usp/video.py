"""Frames to files: an mp4 and a contact sheet, written whole or not at all."""

import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SHEET_COLUMNS = 6
SHEET_FRAMES = 12


def to_bytes(frames_THWC: np.ndarray) -> np.ndarray:
    """Frames in 0..1 as bytes, rounded to the nearest grey level."""
    return (frames_THWC.clip(0, 1) * 255).round().astype(np.uint8)


def check_output(path: Path) -> None:
    """Raise ValueError unless an mp4 can be written at `path`; nothing is created."""
    if path.suffix.lower() != ".mp4":
        raise ValueError(
            f"output {str(path)!r} was asked for; this task writes mp4; use a name that ends in .mp4"
        )
    for file in (path, path.with_suffix(".png")):
        if os.path.isdir(file):
            raise ValueError(f"output {str(file)!r} is a folder; give the name of a file in it")
    # os.path answers False where Path raises, as in a folder that is closed to the user
    parent = next(p for p in path.absolute().parents if os.path.exists(p))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"output {str(path)!r}: {parent} is not a folder that can be written to; choose another"
        )


def write_video(frames_THWC: np.ndarray, path: Path, *, fps: int) -> None:
    """Write byte frames (T, H, W, 3) as H.264 mp4, of high quality.

    A constant quantiser and one thread: x264's rate control gives other bytes for the same frames now and
    then (seen at crf 12, 5 results in 60 runs).

    The encoder is lossy: where two runs round one level apart, their files may differ by several.
    """
    import av

    def write(temporary: Path) -> None:
        with av.open(str(temporary), "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=Fraction(fps), options={"qp": "12"})
            stream.height, stream.width = frames_THWC.shape[1:3]
            stream.pix_fmt = "yuv420p"
            stream.codec_context.thread_count = 1
            for frame in frames_THWC:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), "rgb24")))
            container.mux(stream.encode())

    _whole_or_not(path, write)


def write_contact_sheet(frames_THWC: np.ndarray, path: Path, *, caption: str) -> None:
    """Write up to 12 frames, evenly spaced over the video, side by side under a caption, as PNG."""
    count = min(SHEET_FRAMES, len(frames_THWC))
    picks = np.linspace(0, len(frames_THWC) - 1, count).round().astype(int)
    height, width = frames_THWC.shape[1:3]
    rows = -(-count // SHEET_COLUMNS)
    columns, gap, head = min(SHEET_COLUMNS, count), 4, 20
    sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * (height + gap) + gap + head), "white")
    ImageDraw.Draw(sheet).text((gap, 4), caption, fill="black")
    for place, pick in enumerate(picks):
        row, column = divmod(place, SHEET_COLUMNS)
        at = (gap + column * (width + gap), head + gap + row * (height + gap))
        sheet.paste(Image.fromarray(frames_THWC[pick]), at)
    _whole_or_not(path, lambda temporary: sheet.save(temporary, format="PNG"))


def _whole_or_not(path: Path, write: Callable[[Path], None]) -> None:
    """Write to a temporary name in the same folder, which is made, then rename; on failure leave nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
