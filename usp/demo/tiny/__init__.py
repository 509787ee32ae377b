"""Tiny pipelines with random weights, one of each family: `build(name)`, or as a folder `save(name, folder)`.

Each is of the real classes, tokenizers and encoders included, so that what is tested is the real pipeline's
code. A picture of one is noise. `python -m usp.demo tiny NAME DIR` writes one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from usp.demo.tiny import (
    cogvideox,
    flux,
    flux2,
    hunyuan_video,
    ltx2,
    ltx_video,
    qwen_image,
    sd3,
    sd15,
    wan,
    z_image,
)
from usp.demo.tiny.pictures import one_picture, two_pictures
from usp.demo.tiny.weights import built


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a tiny pipeline is made, the sizes of a small call, and the images that the call takes."""

    make: Callable[[], Any]
    call: Mapping[str, Any]
    images: Callable[[], Mapping[str, Any]] = dict
    negative: bool = True  # whether it takes a negative prompt


FAMILIES = {
    "wan-t2v": Family(make=wan.t2v, call=wan.CALL),
    "wan22-t2v": Family(make=wan.t2v_2_2, call=wan.CALL),
    "wan-i2v": Family(make=wan.i2v, call=wan.IMAGE_CALL, images=one_picture),
    "wan22-i2v": Family(make=wan.i2v_2_2, call=wan.CALL, images=one_picture),
    "wan-ti2v": Family(make=wan.ti2v, call=wan.CALL),
    "wan-vace": Family(make=wan.vace, call=wan.CALL, images=wan.control_video),
    "qwen-image": Family(make=qwen_image.text_to_image, call=qwen_image.CALL),
    "qwen-image-edit": Family(make=qwen_image.edit, call=qwen_image.EDIT_CALL, images=one_picture),
    "qwen-image-edit-plus": Family(make=qwen_image.edit_plus, call=qwen_image.EDIT_CALL, images=two_pictures),
    "flux": Family(make=flux.text_to_image, call=flux.CALL),
    "flux2": Family(make=flux2.dev, call=flux2.CALL, negative=False),
    "flux2-klein": Family(make=flux2.klein, call=flux2.CALL, negative=False),
    "sd3": Family(make=sd3.text_to_image, call=sd3.CALL),
    "z-image": Family(make=z_image.text_to_image, call=z_image.CALL),
    "sd15": Family(make=sd15.text_to_image, call=sd15.CALL),
    "hunyuan-video": Family(make=hunyuan_video.text_to_video, call=hunyuan_video.CALL),
    "ltx-video": Family(make=ltx_video.text_to_video, call=ltx_video.CALL),
    "ltx-2": Family(make=ltx2.text_to_video, call=ltx2.CALL),
    "cogvideox": Family(make=cogvideox.text_to_video, call=cogvideox.CALL),
}


def family(name: str) -> Family:
    """The family of that name. Raises ValueError that lists the names."""
    if name not in FAMILIES:
        raise ValueError(f"there is no tiny pipeline {name!r}; use one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def build(name: str, seed: int = 0) -> Any:
    """A tiny pipeline of a family, in memory and fp32; a name and a seed give the same on every process."""
    return built(family(name).make, seed)


def save(name: str, folder: Path, seed: int = 0) -> int:
    """Write a tiny pipeline as an ordinary diffusers folder, whole or not at all, and return its bytes.

    Raises ValueError for an unknown name, and for a folder that holds something already.
    """
    family(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty; name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        made = Path(temporary) / "model"
        build(name, seed).save_pretrained(made)
        made.rename(folder)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def call_arguments(name: str) -> dict[str, Any]:
    """The arguments of a small call with guidance: two prompts of different length, few tokens, 3 steps."""
    chosen = family(name)
    prompts = {"prompt": "a red circle moving right"}
    if chosen.negative:
        prompts["negative_prompt"] = "blurry photo"
    return {**prompts, **chosen.images(), **chosen.call}
