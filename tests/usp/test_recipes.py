"""Each task is true of a model of its kind: its folder is read, its request fits, its pipeline makes it."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from runtime.device import Device
from usp.demo import tiny
from usp.demo.tiny.pictures import picture
from usp.job import prepare
from usp.loading import load_pipeline
from usp.model_folder import LAYOUTS, ModelFacts, read_model_folder
from usp.options import JobOptions
from usp.recipes import TASKS
from usp.tasks import Request, check_call, fit, pipeline_class, settle

Folder = Callable[[str], Path]
# A task, a tiny model that it runs, the number of its input images, and of images that it makes.
RUNS = [
    ("wan-t2v", "wan-t2v", 0, 1),
    ("wan-t2v", "wan22-t2v", 0, 1),
    ("wan-i2v", "wan-i2v", 1, 1),
    ("wan-i2v", "wan22-i2v", 1, 1),
    ("wan-ti2v", "wan-ti2v", 0, 1),
    ("wan-ti2v", "wan-ti2v", 1, 1),
    ("qwen-image", "qwen-image", 0, 2),
    ("qwen-image-edit", "qwen-image-edit", 1, 1),
    ("qwen-image-edit", "qwen-image-edit-plus", 2, 1),
    ("flux", "flux", 0, 2),
    ("flux", "flux2", 1, 1),
    ("flux", "flux2-klein", 0, 1),
    ("sd3", "sd3", 0, 2),
    ("z-image", "z-image", 0, 2),
    ("sd15", "sd15", 0, 2),
]
EMBEDDERS = ("patch_embedding", "img_in", "x_embedder", "pos_embed", "all_x_embedder", "conv_in")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """`folder(name)` is a folder with that tiny model, written once."""
    root = tmp_path_factory.mktemp("tiny")

    def written(name: str) -> Path:
        if not (root / name).exists():
            tiny.save(name, root / name)
        return root / name

    return written


def images(count: int) -> tuple[Image.Image, ...]:
    """So many input images."""
    return tuple(picture(seed) for seed in range(count))


def asked(task: str, facts: ModelFacts, given: int = 0, **changes: Any) -> Request:
    """A small request of 5 x 3 of the model's smallest units."""
    step = facts.spatial_multiple
    return settle(
        TASKS[task],
        bundled=False,
        size=f"{5 * step}x{3 * step}",
        images=images(given),
        prompt="a red circle",
        num_inference_steps=2,
        **({"num_frames": 5} if TASKS[task].kind == "video" else {}),
        **changes,
    )


@pytest.mark.parametrize(("task", "model", "given", "count"), RUNS)
def test_a_task_makes_what_was_asked(folder, task, model, given, count):
    """Settled, checked, loaded and called as the command line does: as many, and as large, as asked for."""
    facts = read_model_folder(folder(model), pipeline=TASKS[task].pipeline)
    request = asked(task, facts, given, count=count)
    facts.check_size(width=request.width, height=request.height, num_frames=request.num_frames)
    check_call(request, facts)
    name = pipeline_class(request, facts)
    pipeline, _ = load_pipeline(
        facts.folder, pipeline=name, device=Device("cpu"), dtypes={"default": torch.float32}
    )
    pipeline.set_progress_bar_config(disable=True)
    assert type(pipeline) is getattr(diffusers, name)
    generator = torch.Generator().manual_seed(0)
    made = pipeline(**request.call_arguments(), generator=generator, output_type="np")
    size = (request.height, request.width, 3)
    if TASKS[task].kind == "video":
        assert np.asarray(made.frames).shape == (1, request.num_frames, *size)
    else:
        assert np.asarray(made.images).shape == (count, *size)


def embedded_tokens(pipeline: Any, call: dict[str, Any]) -> int:
    """The tokens that the model's embedder gives in the first step of a call, padding included."""
    counts: list[int] = []

    def count(module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        counts.append(
            {2: output.shape[0], 3: output.shape[1]}.get(output.ndim, int(np.prod(output.shape[2:])))
        )

    model = getattr(pipeline, "transformer", None) or pipeline.unet
    embedder = next(module for name in EMBEDDERS if (module := getattr(model, name, None)) is not None)
    embedder = embedder["2-1"] if isinstance(embedder, torch.nn.ModuleDict) else embedder
    handle = embedder.register_forward_hook(count)
    pipeline(**call, output_type="latent")
    handle.remove()
    return counts[0]


@pytest.mark.parametrize("model", sorted({model for _, model, _, _ in RUNS}))
def test_tokens_and_heads_are_the_models(folder, model):
    """What a folder's configs say is what its transformer works on."""
    pipeline = tiny.build(model)
    call = tiny.call_arguments(model)
    facts = read_model_folder(folder(model), pipeline=type(pipeline).__name__)
    size = {"width": call["width"], "height": call["height"], "num_frames": call.get("num_frames", 1)}
    facts.check_size(**size)
    seen = embedded_tokens(pipeline, call)
    if model == "z-image":  # both branches in one row, each filled up to a multiple of 32
        assert seen == 2 * -(-facts.tokens(**size) // 32) * 32
    elif model.startswith("qwen-image-edit"):  # the input images follow, each of 8 x 8 tokens or so
        assert facts.tokens(**size) == 3 * 5 < seen
    else:
        assert facts.tokens(**size) == seen
    model_config = getattr(pipeline, LAYOUTS[facts.pipeline].parts[0]).config
    assert facts.heads == model_config[LAYOUTS[facts.pipeline].heads]
    for name in ("width", "height"):
        with pytest.raises(ValueError, match=f"^{name} {size[name] + 1} was asked for"):
            facts.check_size(**{**size, name: size[name] + 1})


@pytest.mark.parametrize(("task", "model", "given", "count"), RUNS)
def test_a_size_that_is_not_given_is_one_that_the_model_makes(folder, task, model, given, count):
    """The task's own size is lowered to the model's steps and positions; one that was given stays."""
    facts = read_model_folder(folder(model), pipeline=TASKS[task].pipeline)
    open_size = settle(TASKS[task], bundled=False, size=None, images=images(given), prompt="a cat")
    fitted = fit(open_size, facts)
    facts.check_size(width=fitted.width, height=fitted.height, num_frames=fitted.num_frames)
    assert fitted.width <= open_size.width
    assert fitted.height <= open_size.height
    odd = settle(TASKS[task], bundled=False, size="1x3", images=images(given), prompt="a cat")
    assert fit(odd, facts) == odd


@pytest.mark.parametrize(("task", "size", "expected"), [
    ("qwen-image-edit", (300, 200), (1248, 832)),  # diffusers' own for 3:2
    ("qwen-image-edit", (64, 64), (1024, 1024)),
    ("wan-i2v", (480, 832), (480, 832)),
    ("wan-i2v", (832, 480), (832, 480)),
    ("wan-ti2v", (1280, 704), (1280, 704)),
])  # fmt: skip
def test_an_input_image_gives_the_shape(task, size, expected):
    """Nothing is squeezed: without a size the output has the last image's shape, at the task's area."""
    given = (picture(0), picture(1, size)) if TASKS[task].images[1] is None else (picture(1, size),)
    request = settle(TASKS[task], bundled=False, size=None, images=given, prompt="a cat")
    assert (request.width, request.height) == expected
    named = settle(TASKS[task], bundled=False, size="640x320", images=given, prompt="a cat")
    assert (named.width, named.height) == (640, 320)


@pytest.mark.parametrize("name", TASKS)
def test_a_tasks_classes_have_their_arguments(name):
    """The classes exist, their configs are known, and each takes the request that the task makes of it."""
    task = TASKS[name]
    classes = (task.pipeline,) if isinstance(task.pipeline, str) else task.pipeline
    least = task.images[0]
    request = settle(task, bundled=False, size=None, images=images(least), prompt="a cat")
    for kind in classes:
        assert hasattr(diffusers, kind)
        facts = ModelFacts(
            folder=Path(), pipeline=kind, heads=4, spatial_multiple=16, temporal_factor=4, spatial_factor=8,
            patch_size=(1, 2, 2), keeps_first_frame=True,
        )  # fmt: skip
        assert kind in LAYOUTS
        check_call(request, facts)
    if task.image_pipeline:
        check_call(replace(request, images=images(1)), facts)
    assert task.suffix == (".mp4" if task.kind == "video" else ".png")


def test_guidance_has_the_name_that_the_pipeline_gives_it():
    """Qwen-Image's guidance_scale is for distilled models; it also needs a negative prompt to be on."""
    request = settle(TASKS["qwen-image"], bundled=False, size=None, prompt="a cat", guidance_scale=3.0)
    arguments = request.call_arguments()
    assert arguments["true_cfg_scale"] == 3.0
    assert arguments["negative_prompt"] == " "
    assert "guidance_scale" not in arguments
    own = settle(TASKS["qwen-image"], bundled=False, size=None, prompt="a cat", negative_prompt="a dog")
    assert own.call_arguments()["negative_prompt"] == "a dog"


@pytest.mark.parametrize(("task", "given", "message"), [
    ("wan-t2v", 1, "1 image was given; wan-t2v takes 0; leave --image away"),
    ("wan-i2v", 0, "0 images were given; wan-i2v takes 1; give each with --image FILE"),
    ("wan-i2v", 2, "2 images were given; wan-i2v takes 1; give each with --image FILE"),
    ("wan-ti2v", 2, "2 images were given; wan-ti2v takes 0 to 1; give each with --image FILE"),
    ("qwen-image-edit", 0,
     "0 images were given; qwen-image-edit takes 1 or more; give each with --image FILE"),
])  # fmt: skip
def test_the_number_of_images_is_checked(task, given, message):
    """What was given, what the task takes, what to do."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        settle(TASKS[task], bundled=False, size=None, images=images(given), prompt="a cat")


@pytest.mark.parametrize(("task", "changes", "message"), [
    ("flux", {"num_frames": 5}, "--frames 5 was given; flux makes images; leave it away"),
    ("flux", {"fps": 8}, "--fps 8 was given; flux makes images; leave it away"),
    ("flux", {"count": 0}, "0 images were asked for; use 1 or more"),
    ("wan-t2v", {"count": 2}, "2 images were asked for; wan-t2v makes one video; leave the count away"),
    ("sd15", {"bundled": True}, "no model was given; sd15 has none bundled; name one with --model"),
    ("sd15", {"prompt": None}, "no prompt was given; say what the image shall show with --prompt"),
])  # fmt: skip
def test_what_a_task_does_not_take_is_refused(task, changes, message):
    """An option without an effect is an error, not silence."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        settle(TASKS[task], **{"bundled": False, "size": None, "prompt": "a cat", **changes})


@pytest.mark.parametrize(("task", "kind", "given", "changes", "message"), [
    ("flux", "Flux2Pipeline", 0, {"negative_prompt": "a dog"},
     "--negative-prompt was given; Flux2Pipeline takes no negative prompt; leave it away"),
    ("flux", "FluxPipeline", 1, {}, "--image was given; FluxPipeline takes no image; leave it away"),
    ("qwen-image-edit", "QwenImageEditPipeline", 2, {},
     "2 images were given; QwenImageEditPipeline takes one; use an Edit-Plus model (2509 or later)"),
])  # fmt: skip
def test_what_a_class_does_not_take_is_refused(task, kind, given, changes, message):
    """Before weights are read, with the option's name."""
    request = settle(TASKS[task], bundled=False, size=None, images=images(given), prompt="a cat", **changes)
    facts = ModelFacts(
        folder=Path(), pipeline=kind, heads=4, spatial_multiple=16, temporal_factor=1, spatial_factor=8,
        patch_size=(1, 2, 2),
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_call(request, facts)


def test_an_image_for_a_model_of_text_alone_is_refused(folder):
    """Wan 2.1 and 2.2 14B have a WanPipeline like 5B, and no place for an image; the folder tells."""
    facts = read_model_folder(folder("wan-t2v"), pipeline=TASKS["wan-ti2v"].pipeline)
    with pytest.raises(ValueError, match=r"^--image was given; .* holds a model of text alone, not Wan"):
        check_call(asked("wan-ti2v", facts, 1), facts)
    five = read_model_folder(folder("wan-ti2v"), pipeline=TASKS["wan-ti2v"].pipeline)
    check_call(asked("wan-ti2v", five, 1), five)


def test_a_task_of_several_classes_names_them(folder):
    """Point 9: a folder of another kind is refused with the kinds that would do."""
    with pytest.raises(ValueError, match="holds a WanPipeline; this task runs a FluxPipeline or Flux2Pipe"):
        read_model_folder(folder("wan-t2v"), pipeline=TASKS["flux"].pipeline)


@pytest.mark.parametrize(("model", "part"), [
    ("sd15", "unet"), ("sd3", "text_encoder_3"), ("flux", "text_encoder_2"), ("wan-i2v", "image_encoder"),
])  # fmt: skip
def test_every_part_must_have_weights(tmp_path, model, part):
    """The UNet, and each of several encoders."""
    tiny.save(model, tmp_path / "model")
    for file in (tmp_path / "model" / part).glob("*.safetensors"):
        file.unlink()
    kind = type(tiny.build(model)).__name__
    with pytest.raises(ValueError, match=f"{part} holds no weights"):
        read_model_folder(tmp_path / "model", pipeline=kind)


def test_a_negative_prompt_without_effect_is_told_of_truly(folder, caplog):
    """FLUX.1 embeds its guidance: it is not off at 3.5, but there is no branch for the words."""
    options = JobOptions(model=str(folder("flux")), prompt="a cat", negative_prompt="blue", device="cpu")
    with caplog.at_level("WARNING"):
        prepare(TASKS["flux"], options)
    assert [r.getMessage() for r in caplog.records] == [
        "the negative prompt has no effect: the model runs one branch only"
    ]
