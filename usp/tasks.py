"""From a task and the user's words to one settled request, and to the pipeline that it is made of."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from runtime.device import Device
from usp.demo import DEFAULTS, MODEL_DIR
from usp.images import at_area
from usp.model_folder import ModelFacts
from usp.recipes import TASKS, WAN_T2V, Task

__all__ = ["TASKS", "WAN_T2V", "Request", "Task"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ONE_IMAGE = ("QwenImageEditPipeline",)  # takes more as a batch
OPTIONS = {"negative_prompt": "--negative-prompt", "image": "--image"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One video, or some images of one prompt, all values settled. Every rank must hold the same.

    `size_given` is False where width and height are the task's, and may be fitted to the model.
    """

    prompt: str
    negative_prompt: str | None
    width: int
    height: int
    num_frames: int
    num_inference_steps: int
    guidance_scale: float
    fps: int
    task: Task = WAN_T2V
    images: tuple[Image.Image, ...] = ()
    count: int = 1
    size_given: bool = True

    @property
    def shape(self) -> dict[str, int]:
        """The picture's width, height and number of frames."""
        return {name: getattr(self, name) for name in ("width", "height", "num_frames")}

    def call_arguments(self) -> dict[str, Any]:
        """The pipeline's keyword arguments, less those that keep their default."""
        task = self.task
        names = ("prompt", "width", "height", "num_inference_steps")
        arguments = {name: getattr(self, name) for name in names}
        arguments[task.guidance_argument] = self.guidance_scale
        if self.negative_prompt is not None:
            arguments["negative_prompt"] = self.negative_prompt
        if task.kind == "video":
            arguments["num_frames"] = self.num_frames
        if self.images:
            arguments["image"] = self.images[0] if len(self.images) == 1 else list(self.images)
        if self.count > 1:
            arguments["num_images_per_prompt"] = self.count
        return arguments


def check_words(
    task: Task, *, bundled: bool, size: str | None, images: int = 0, count: int = 1, **given: Any
) -> None:
    """Raise ValueError for what the task refuses whatever the model is and files hold.

    As `settle` takes it, but for `images`, which are counted here.
    """
    if bundled and not task.bundled:
        raise ValueError(f"no model was given; {task.name} has none bundled; name one with --model")
    if size is not None:
        _size(size)
    _check_counts(task, images, count)
    for name, option in (("num_frames", "--frames"), ("fps", "--fps")):
        if task.kind == "image" and given.get(name) is not None:
            raise ValueError(f"{option} {given[name]} was given; {task.name} makes images; leave it away")
    for name in ("num_inference_steps", "fps"):
        value = given.get(name)
        if value is not None and value < 1:
            raise ValueError(f"{name.replace('_', ' ')} {value} was asked for; use 1 or more")
    guidance = given.get("guidance_scale")
    if guidance is not None and not math.isfinite(guidance):
        raise ValueError(f"guidance scale {guidance} was asked for; use a number; 1 is off")


def settle(
    task: Task,
    *,
    bundled: bool,
    size: str | None,
    images: tuple[Image.Image, ...] = (),
    count: int = 1,
    **given: Any,
) -> Request:
    """The request from what the user gave (None: not given) and the task's or the bundled model's defaults.

    `size` is "WIDTHxHEIGHT"; `count` images are made. Raises ValueError for a value that no model takes.
    """
    check_words(task, bundled=bundled, size=size, images=len(images), count=count, **given)
    defaults: Any = DEFAULTS if bundled else task
    if size is not None:
        given |= _size(size)
    elif task.shaped_by_image and images:
        shape = at_area(images[-1].size, task.width * task.height)
        given |= dict(zip(("width", "height"), shape, strict=True))
    if given.get("prompt") is None:
        if not bundled:
            raise ValueError(f"no prompt was given; say what the {task.kind} shall show with --prompt")
        given["prompt"] = DEFAULTS.prompt
    names = ("width", "height", "num_inference_steps", "guidance_scale")
    names += ("num_frames", "fps") if task.kind == "video" else ()
    values = {name: given[name] if given.get(name) is not None else getattr(defaults, name) for name in names}
    return Request(
        task=task,
        prompt=given["prompt"],
        negative_prompt=task.negative_prompt
        if given.get("negative_prompt") is None
        else given["negative_prompt"],
        images=images,
        count=count,
        size_given=size is not None or bundled,
        **{"num_frames": 1, "fps": 1, **values},
    )


def _size(size: str) -> dict[str, int]:
    width, by, height = size.lower().partition("x")
    if not (by and width.isdecimal() and height.isdecimal()):
        raise ValueError(f"size {size!r} was given; write WIDTHxHEIGHT in pixels, for example 832x480")
    return {"width": int(width), "height": int(height)}


def _check_counts(task: Task, images: int, count: int) -> None:
    least, most = task.images
    if images < least or (most is not None and images > most):
        advice = "leave --image away" if most == 0 else "give each with --image FILE"
        takes = f"{least} or more" if most is None else f"{least}" if most == least else f"{least} to {most}"
        raise ValueError(f"{_images(images)} given; {task.name} takes {takes}; {advice}")
    if count < 1:
        raise ValueError(f"{count} images were asked for; use 1 or more")
    if count > 1 and task.kind == "video":
        raise ValueError(f"{count} images were asked for; {task.name} makes one video; leave the count away")


def _images(count: int) -> str:
    return "1 image was" if count == 1 else f"{count} images were"


def fit(request: Request, facts: ModelFacts) -> Request:
    """The request with a size that this model makes, where the user gave none; as it is if one was given."""
    if request.size_given:
        return request
    width, height = facts.fitted(width=request.width, height=request.height)
    return replace(request, width=width, height=height)


def pipeline_class(request: Request, facts: ModelFacts) -> str:
    """The name of the class to load the folder with."""
    return request.task.image_pipeline if request.images and request.task.image_pipeline else facts.pipeline


def check_call(request: Request, facts: ModelFacts) -> None:
    """Raise ValueError unless the pipeline's class takes what is asked of it."""
    name = pipeline_class(request, facts)
    if name in ONE_IMAGE and len(request.images) > 1:
        raise ValueError(
            f"{_images(len(request.images))} given; {name} takes one; use an Edit-Plus model (2509 or later)"
        )
    if name == request.task.image_pipeline and not facts.keeps_first_frame:
        raise ValueError(
            f"--image was given; {facts.folder} holds a model of text alone, not Wan 2.2 5B; leave it away"
        )
    taken = inspect.signature(imported_class(name).__call__).parameters
    for argument in request.call_arguments():
        if argument not in taken:
            option = OPTIONS.get(argument, argument)
            raise ValueError(
                f"{option} was given; {name} takes no {argument.replace('_', ' ')}; leave it away"
            )


def imported_class(name: str) -> Any:
    """The class of diffusers; ValueError if what diffusers imports for it does not load."""
    import diffusers

    try:
        return getattr(diffusers, name)
    except RuntimeError as error:
        first: BaseException = error
        while first.__cause__ or first.__context__:
            first = first.__cause__ or first.__context__ or first
        raise ValueError(
            f"{name} of diffusers does not import ({type(first).__name__}: {first}); it loads every device's "
            "package that is installed; python -m launchers doctor says which does not work here"
        ) from error


def call_with_defaults(request: Request, facts: ModelFacts) -> dict[str, Any]:
    """The call's arguments, with the pipeline class's defaults for the rest."""
    call = inspect.signature(imported_class(pipeline_class(request, facts)).__call__)
    return {name: p.default for name, p in call.parameters.items()} | request.call_arguments()


def parse_weights(texts: Sequence[str]) -> dict[str, Path]:
    """Component -> path or glob, from words such as "transformer=flux1-dev.safetensors".

    Raises ValueError for a word of another form, or a component named twice.
    """
    found: dict[str, Path] = {}
    for text in texts:
        part, separator, path = text.partition("=")
        if not (separator and part.isidentifier() and path) or part in found:
            raise ValueError(
                f"weights {text!r} were given; write each component once, as COMPONENT=FILE, for example "
                "transformer=flux1-dev.safetensors"
            )
        found[part] = Path(path).expanduser()
    return found


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
