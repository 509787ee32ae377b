"""Frames to files: what is read back is what was written, whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.runtime.processes import fork_ranks
from tests.usp.films import frames_of, sheet_frames
from usp.video import check_output, to_bytes, write_contact_sheet, write_video


def moving_ramp(count: int, height: int, width: int) -> np.ndarray:
    """A smooth clip whose every frame has its own brightness, none of them white."""
    y, x = np.mgrid[:height, :width]
    frames = [np.stack([x * 120 / width, y * 120 / height, 0 * x], -1) + 10 * i for i in range(count)]
    return np.stack(frames).clip(0, 250).astype(np.uint8)


@given(st.lists(st.floats(-2, 3, width=32), min_size=1, max_size=50))
def test_bytes_are_the_nearest_grey_level(values):
    """Each byte is within half a level of 255 times its value; beyond 0 and 1 it is black and white."""
    levels = to_bytes(np.array(values, dtype=np.float32))
    assert levels.dtype == np.uint8
    for value, level in zip(values, levels.tolist(), strict=True):
        assert abs(level - 255 * min(1.0, max(0.0, value))) <= 0.5 + 1e-4


def test_bytes_survive_a_round_trip():
    """All 256 levels come back as they were."""
    levels = np.arange(256, dtype=np.uint8)
    assert np.array_equal(to_bytes(levels / np.float32(255)), levels)


@pytest.mark.parametrize(
    ("count", "height", "width", "fps"), [(17, 112, 112, 8), (1, 48, 64, 16), (5, 32, 16, 30)]
)
def test_a_video_is_read_back_as_it_was(tmp_path, count, height, width, fps):
    """Point 6: all frames, size, fps; near-lossless: off by 2 levels on average (4:2:0 halves colours)."""
    frames = moving_ramp(count, height, width)
    write_video(frames, tmp_path / "new" / "a.mp4", fps=fps)
    found, rate = frames_of(tmp_path / "new" / "a.mp4")
    assert found.shape == frames.shape
    assert rate == fps
    error = np.abs(found - frames)
    assert error.mean() < 2
    assert error.max() < 24
    assert os.listdir(tmp_path / "new") == ["a.mp4"]


def test_the_same_frames_give_the_same_file(tmp_path):
    """Issue 2, "Shown by": runs whose frames are equal make equal videos."""
    frames = moving_ramp(17, 112, 112)
    for turn in range(20):
        write_video(frames, tmp_path / f"{turn}.mp4", fps=8)
    assert len({(tmp_path / f"{turn}.mp4").read_bytes() for turn in range(20)}) == 1


def test_videos_that_differ_by_a_grey_level_stay_alike(tmp_path):
    """A level in 1 of 2000 bytes, as from rounding, may become several in the mp4, and is seen nowhere."""
    frames = moving_ramp(9, 112, 112)
    apart = np.random.default_rng(0).random(frames.shape) < 1 / 2000
    for name, clip in (("a", frames), ("b", frames + apart.astype(np.uint8))):
        write_video(clip, tmp_path / f"{name}.mp4", fps=8)
    a, b = (frames_of(tmp_path / f"{name}.mp4")[0].astype(int) for name in "ab")
    assert np.abs(a - b).mean() <= 1
    assert np.abs(a - b).max() <= 32


@pytest.mark.parametrize(("count", "columns", "rows", "picks"), [
    (1, 1, 1, [0]),
    (5, 5, 1, [0, 1, 2, 3, 4]),
    (7, 6, 2, [0, 1, 2, 3, 4, 5, 6]),
    (17, 6, 2, [0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16]),
])  # fmt: skip
def test_a_contact_sheet_shows_the_frames_in_order(tmp_path, count, columns, rows, picks):
    """Up to 12 frames, evenly spaced from first to last, six to a row, bit for bit, under a caption."""
    frames = moving_ramp(count, 32, 48)
    write_contact_sheet(frames, tmp_path / "a.png", caption="a red circle")
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (4 + columns * (48 + 4), 20 + 4 + rows * (32 + 4))
        caption = np.asarray(image)[:20]
    assert np.array_equal(sheet_frames(tmp_path / "a.png", height=32, width=48), frames[picks])
    assert (caption < 128).any(), "the caption is written"
    assert os.listdir(tmp_path) == ["a.png"]


def test_a_caption_in_any_script_is_no_error(tmp_path):
    """A prompt in Chinese, or longer than the sheet, must not cost the run its sheet."""
    write_contact_sheet(moving_ramp(1, 16, 16), tmp_path / "a.png", caption="一个红色的圆 " * 40)
    assert sheet_frames(tmp_path / "a.png", height=16, width=16).shape == (1, 16, 16, 3)


@pytest.mark.parametrize("name", ["a.mp4", "b.mp4"])
def test_b38_a_writer_that_fails_leaves_what_was_there(tmp_path, name):
    """An odd size, which H.264 in 4:2:0 cannot hold: an error, the old file whole, no other one."""
    (tmp_path / "a.mp4").write_text("old")
    with pytest.raises(Exception, match="libx264"):
        write_video(moving_ramp(3, 15, 17), tmp_path / name, fps=8)
    assert os.listdir(tmp_path) == ["a.mp4"]
    assert (tmp_path / "a.mp4").read_text() == "old"


def test_b38_a_writer_that_fails_midway_leaves_nothing(tmp_path):
    """The fourth frame has another shape: the three that were encoded are removed again."""
    frames = [*moving_ramp(3, 16, 16), np.zeros((16, 16, 4), np.uint8)]
    with pytest.raises(ValueError, match="shape"):
        write_video(_Ragged(frames), tmp_path / "a.mp4", fps=8)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


class _Ragged(list):
    """Frames that do not all have one shape, as an array cannot hold them."""

    shape = (4, 16, 16, 3)


@pytest.mark.parametrize(("name", "message"), [
    ("a.avi", "output 'a.avi' was asked for; this task writes mp4; use a name that ends in .mp4"),
    ("a", "output 'a' was asked for; this task writes mp4; use a name that ends in .mp4"),
    ("folder.mp4", "output 'folder.mp4' is a folder; give the name of a file in it"),
    (
        "file/sub/a.mp4",
        "output 'file/sub/a.mp4': {here}/file is not a folder that can be written to; choose another",
    ),
])  # fmt: skip
def test_an_output_that_cannot_be_is_refused(tmp_path, monkeypatch, name, message):
    """Point 9: told before the run, with the name; nothing is made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="output") as caught:
        check_output(Path(name))
    assert str(caught.value) == message.format(here=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.mp4"]


@pytest.mark.parametrize("name", ["a.mp4", "A.MP4", "new/folder/a.mp4", "old.mp4"])
def test_a_good_output_is_taken_and_not_made(tmp_path, monkeypatch, name):
    """Folders that are yet to be made, capitals, and a file that will be replaced."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.mp4").touch()
    check_output(Path(name))
    assert os.listdir(tmp_path) == ["old.mp4"]


def test_an_output_whose_sheet_cannot_be_written_is_refused(tmp_path):
    """Promise 3: a folder where the contact sheet must go is seen before the run, not after it."""
    (tmp_path / "a.png").mkdir()
    with pytest.raises(ValueError, match=r"a\.png'? is a folder"):
        check_output(tmp_path / "a.mp4")


def _check_as_nobody(paths: list[Path]) -> None:
    if os.geteuid() == 0:  # root may write anywhere
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    for path in paths:
        try:
            check_output(path)
            print("taken")
        except Exception as error:
            print(f"{type(error).__name__}: {error}")


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that every user can reach, unlike tmp_path."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_a_folder_that_is_closed_to_the_user_is_refused(outside, tmp_path):
    """Point 9: it may be read but not written to, or not even looked into: one sentence that names it."""
    readable, closed = outside / "readable", outside / "closed"
    readable.mkdir(mode=0o555)
    closed.mkdir(mode=0o700)
    (closed / "there").mkdir()
    closed.chmod(0o000)
    paths = [readable / "a.mp4", closed / "a.mp4", closed / "there" / "a.mp4"]
    said = fork_ranks(1, _check_as_nobody, tmp_path, paths)[0].text.splitlines()
    closed.chmod(0o700)
    assert said == [
        f"ValueError: output '{path}': {folder} is not a folder that can be written to; choose another"
        for path, folder in zip(paths, (readable, closed, closed), strict=True)
    ]
