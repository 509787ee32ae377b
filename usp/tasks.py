"""Tasks of the command line: which pipeline a name runs, with which defaults, and the request made of it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.device import Device
from usp.demo import DEFAULTS, MODEL_DIR
from usp.model_folder import ModelFacts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A pipeline class and what it is asked for when the user does not say; sizes in pixels and frames."""

    name: str
    summary: str
    pipeline: str
    width: int
    height: int
    num_frames: int
    num_inference_steps: int
    guidance_scale: float
    fps: int


WAN_T2V = Task(
    name="wan-t2v",
    summary="Text to video with a Wan 2.1 or 2.2 pipeline.",
    pipeline="WanPipeline",
    width=832,
    height=480,
    num_frames=81,
    num_inference_steps=50,
    guidance_scale=5.0,
    fps=16,
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One video, all values settled. Every rank must hold the same."""

    prompt: str
    negative_prompt: str | None
    width: int
    height: int
    num_frames: int
    num_inference_steps: int
    guidance_scale: float
    fps: int

    def call_arguments(self) -> dict[str, Any]:
        """The pipeline's keyword arguments."""
        names = ("prompt", "negative_prompt", "width", "height", "num_frames", "num_inference_steps")
        return {name: getattr(self, name) for name in (*names, "guidance_scale")}


def settle(task: Task, *, bundled: bool, size: str | None, **given: Any) -> Request:
    """The request from what the user gave (None: not given) and the task's or the bundled model's defaults.

    `size` is "WIDTHxHEIGHT". Raises ValueError for a value that no model takes.
    """
    defaults: Any = DEFAULTS if bundled else task
    if size is not None:
        width, by, height = size.lower().partition("x")
        if not (by and width.isdecimal() and height.isdecimal()):
            raise ValueError(f"size {size!r} was given; write WIDTHxHEIGHT in pixels, for example 832x480")
        given |= {"width": int(width), "height": int(height)}
    if given.get("prompt") is None:
        if not bundled:
            raise ValueError("no prompt was given; say what the video shall show with --prompt")
        given["prompt"] = DEFAULTS.prompt
    names = ("width", "height", "num_frames", "num_inference_steps", "guidance_scale", "fps")
    values = {name: given[name] if given.get(name) is not None else getattr(defaults, name) for name in names}
    for name in ("num_inference_steps", "fps"):
        if values[name] < 1:
            raise ValueError(f"{name.replace('_', ' ')} {values[name]} was asked for; use 1 or more")
    if not math.isfinite(values["guidance_scale"]):
        raise ValueError(f"guidance scale {values['guidance_scale']} was asked for; use a number; 1 is off")
    return Request(prompt=given["prompt"], negative_prompt=given.get("negative_prompt"), **values)


def model_path(model: str | None) -> Path | None:
    """The local folder that `model` names (None: the bundled demo), or None if it can only be a hub name.

    Raises ValueError for a path that does not exist.
    """
    if model is None:
        return MODEL_DIR
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    looks_like_hub = model.count("/") == 1 and not model.startswith((".", "/", "~"))
    if not looks_like_hub:
        raise ValueError(
            f"model {model!r} does not exist here; give a diffusers folder, or a hub name like owner/name"
        )
    return None


def choose_dtype(name: str, device: Device) -> torch.dtype:
    """The dtype that a name means; "auto" is fp32 on cpu, where half precision is slower, bf16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.kind == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not known; use auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def load_pipeline(facts: ModelFacts, dtype: torch.dtype, *, quiet: bool) -> Any:
    """The pipeline of a folder in `dtype`, its VAE in fp32 as Wan wants it; `quiet` hides loading bars."""
    import diffusers
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    if quiet:
        diffusers_logging.disable_progress_bar()
        transformers_logging.disable_progress_bar()
    dtypes = {"default": dtype, "vae": torch.float32}
    return getattr(diffusers, facts.pipeline).from_pretrained(
        facts.folder, dtype=dtypes, local_files_only=True
    )
