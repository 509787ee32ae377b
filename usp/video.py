"""Frames to files: an mp4 and a contact sheet, written whole or not at all."""

from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from usp.files import check_writable, write_whole

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
    check_writable(path, (path, path.with_suffix(".png")))


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

    write_whole(path, write)


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
    write_whole(path, lambda temporary: sheet.save(temporary, format="PNG"))
