"""Image files in and out: what is read is whole, upright and RGB; what is written is whole or not there."""

import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests import tiny
from tests.usp.in_ranks import SEED
from usp.images import check_image_output, image_paths, read_images, write_images
from usp.pipeline import ParallelPipeline

ORIENTATION = 0x0112


def pixels(height: int = 6, width: int = 9) -> np.ndarray:
    """A picture whose corners all differ."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 25, y * 40, 0 * x + 7], -1).astype(np.uint8)


@pytest.mark.parametrize("turn", range(1, 9))
def test_an_image_is_upright_as_its_exif_says(tmp_path, turn):
    """All eight orientations of a camera come out as what the person saw."""
    upright = pixels()
    undo = {
        1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud,
        5: lambda a: a.transpose(1, 0, 2), 6: lambda a: np.rot90(a, 1),
        7: lambda a: np.rot90(a.transpose(1, 0, 2), 2), 8: lambda a: np.rot90(a, -1),
    }  # fmt: skip
    exif = Image.Exif()
    exif[ORIENTATION] = turn
    stored = Image.fromarray(np.ascontiguousarray(undo[turn](upright)))
    stored.save(tmp_path / "a.png", exif=exif)
    (image,) = read_images([tmp_path / "a.png"])
    assert np.array_equal(np.asarray(image), upright)


def test_images_are_loaded_whole_and_in_order(tmp_path):
    """The files may be gone by the time that they are used."""
    for name, level in (("b.png", 10), ("a.jpg", 200)):
        Image.new("RGB", (8, 4), (level,) * 3).save(tmp_path / name)
    images = read_images([tmp_path / "b.png", tmp_path / "a.jpg"])
    for name in ("b.png", "a.jpg"):
        (tmp_path / name).unlink()
    assert [image.getpixel((0, 0)) for image in images] == [(10,) * 3, (200,) * 3]
    assert all(type(image) is Image.Image for image in images)


def film_from(path: Path, read: bool) -> tuple[np.ndarray, list[str]]:
    """Latents from an image that the user opened, read at once or not yet; what is open of it afterwards."""
    image = Image.open(path)
    if read:
        image.load()
    with ParallelPipeline(tiny.build("ti2v_image"), "ulysses2") as pipe:
        latents = np.asarray(pipe(**tiny.call("ti2v_image", image=image), seed=SEED).frames)
    held = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return latents, [name for name in held if name == str(path.resolve())]


def test_hazard_39_an_image_opened_lazily_is_read_and_closed_on_each_rank(ranks, tmp_path):
    """The wrapper reads it when ranks compare their arguments: the film of an image that was read before."""
    tiny.picture().save(tmp_path / "a.png")
    lazy, read = (ranks(2).run(film_from, tmp_path / "a.png", read) for read in (False, True))
    for (latents, held), (expected, _) in zip(lazy, read, strict=True):
        assert np.array_equal(latents, expected)
        assert held == []


@pytest.mark.parametrize(("mode", "colour", "seen"), [
    ("RGB", (1, 2, 3), (1, 2, 3)),
    ("L", 77, (77, 77, 77)),
    ("1", 1, (255, 255, 255)),
    ("RGBA", (255, 0, 0, 255), (255, 0, 0)),
    ("RGBA", (255, 0, 0, 0), (255, 255, 255)),
    ("LA", (0, 0), (255, 255, 255)),
    ("I;16", 257 * 100, (100, 100, 100)),
    ("I;16", 65535, (255, 255, 255)),
])  # fmt: skip
def test_every_mode_becomes_rgb(tmp_path, mode, colour, seen):
    """Grey, 16 bits and transparency too: what is transparent is white, and no level is cut off."""
    Image.new(mode, (4, 4), colour).save(tmp_path / "a.png")
    (image,) = read_images([tmp_path / "a.png"])
    assert (image.mode, image.size, image.getpixel((3, 3))) == ("RGB", (4, 4), seen)


def test_a_palette_with_a_transparent_colour_is_read(tmp_path):
    """PNGs and GIFs with few colours keep them; the transparent one is white."""
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.putpixel((0, 0), 0)
    image.save(tmp_path / "a.png", transparency=b"\x00\xff")
    (found,) = read_images([tmp_path / "a.png"])
    assert [found.getpixel(at) for at in ((0, 0), (1, 1))] == [(255, 255, 255), (10, 20, 30)]


def broken(folder: Path) -> dict[str, str]:
    """Files that are no images, and what is said of each after its name."""
    whole = folder / "whole.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(whole)
    (folder / "cut.png").write_bytes(whole.read_bytes()[:2000])
    (folder / "text.png").write_text("no image")
    (folder / "empty.png").touch()
    (folder / "folder.png").mkdir()
    Image.new("F", (4, 4), 0.5).save(folder / "float.tiff")
    return {
        "cut.png": "cannot be read (",
        "text.png": "is no image that can be read; use PNG, JPEG or WebP",
        "empty.png": "is no image that can be read; use PNG, JPEG or WebP",
        "folder.png": "is a folder; give the name of an image file",
        "nowhere.png": "does not exist; give the name of an image file",
        "float.tiff": "cannot be read (its pixels are floating point numbers, of no known scale)",
    }


@pytest.mark.parametrize(
    "name", ["cut.png", "text.png", "empty.png", "folder.png", "nowhere.png", "float.tiff"]
)
def test_what_cannot_be_read_is_named(tmp_path, name):
    """One sentence with the file's name."""
    said = broken(tmp_path)[name]
    with pytest.raises(ValueError, match=f"^{re.escape(f'image {str(tmp_path / name)!r} {said}')}"):
        read_images([tmp_path / "whole.png", tmp_path / name])


def test_a_decompression_bomb_is_named(tmp_path, monkeypatch):
    """PIL refuses an image of absurd size; that is a sentence too."""
    Image.new("L", (100, 100)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with warnings.catch_warnings(), pytest.raises(ValueError, match=r"a\.png' cannot be read \(Image size"):
        read_images([tmp_path / "a.png"])


def test_several_images_are_numbered():
    """One keeps its name; of several each has its number."""
    assert image_paths(Path("out/a.png"), 1) == (Path("out/a.png"),)
    assert image_paths(Path("out/a.b.png"), 2) == (Path("out/a.b-0.png"), Path("out/a.b-1.png"))


@pytest.mark.parametrize("count", [1, 3])
def test_images_are_read_back_as_they_were(tmp_path, count):
    """PNG keeps every level; the folder is made; nothing else is left in it."""
    images = np.stack([pixels() + i for i in range(count)])
    files = write_images(images, tmp_path / "new" / "a.png")
    assert files == image_paths(tmp_path / "new" / "a.png", count)
    for image, file in zip(images, files, strict=True):
        assert np.array_equal(np.asarray(Image.open(file)), image)
    assert sorted(os.listdir(tmp_path / "new")) == sorted(file.name for file in files)


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    """An older image of that name stays, and no part of the new one."""
    write_images(pixels()[None], tmp_path / "a.png")

    def fail(self: Image.Image, path: Path, **options: object) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        write_images(pixels()[None] + 1, tmp_path / "a.png")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["a.png"]
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), pixels())


@pytest.mark.parametrize("name", ["a.mp4", "a.jpg", "a"])
def test_another_file_type_is_refused(name):
    """The ending is named."""
    message = f"output {name!r} was asked for; this task writes PNG; use a name that ends in .png"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_image_output(Path(name))


def test_a_folder_in_the_way_is_refused(tmp_path):
    """Of each of several images; nothing is created."""
    (tmp_path / "a-1.png").mkdir()
    check_image_output(tmp_path / "a.png", 1)
    check_image_output(tmp_path / "new" / "a.png", 2)
    with pytest.raises(ValueError, match=r"a-1\.png' is a folder"):
        check_image_output(tmp_path / "a.png", 2)
    assert os.listdir(tmp_path) == ["a-1.png"]
