"""What the planner takes a call for is what the pipeline then does: tokens, guidance branches and pictures,
counted."""

import inspect
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from tests.usp.families import picture_of, transformers_of
from tests.usp.in_ranks import SEED, seeded
from tests.usp.test_planner import DEVICE
from usp.config import parse_parallel
from usp.demo import tiny
from usp.demo.tiny.pictures import picture
from usp.images import at_area
from usp.job import prepare
from usp.model_folder import read_model_folder
from usp.options import JobOptions
from usp.pipeline import ParallelPipeline
from usp.planner import Workload, plan, predict, workload_of_folder, workload_of_pipeline
from usp.planner.cost import Shares
from usp.planner.models import call_with_defaults
from usp.plans import plan_for
from usp.tasks import TASKS
from usp.trees import tensors_in

CROSSED = ("wan-t2v", "ltx-video")  # their text is not joined with the picture's tokens
GUIDANCE = [None, 0.0, 0.5, 1.5]
STEPS = 2


class Seen(Exception):
    """The first block has been reached."""


def lengths(pipeline: Any, model: Any, arguments: dict[str, Any]) -> dict[str, int]:
    """Tokens of each stream that the first block takes; the call goes no further."""
    kind, found = plan_for(model).blocks[0], {}

    def look(block: Any, args: Any, kwargs: Any) -> None:
        given = inspect.signature(block.forward).bind(*args, **kwargs).arguments
        for name in kind.outputs:
            found["+".join(kind.streams(name))] = given[name].shape[1]
        raise Seen

    first = next(iter(model.get_submodule(kind.modules).children()))
    handle = first.register_forward_pre_hook(look, with_kwargs=True)
    pipeline.set_progress_bar_config(disable=True)
    with pytest.raises(Seen):
        pipeline(**(arguments | {"output_type": "latent"}))
    handle.remove()
    return found


def counted(pipeline: Any, arguments: dict[str, Any]) -> tuple[int, int]:
    """Forwards of a step, and the pictures in all of them together."""
    made: Counter[str] = Counter()

    def look(model: Any, args: Any, kwargs: Any) -> None:
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        made["forwards"] += 1
        made["pictures"] += len(given[plan_for(model).output.argument])

    handles = [
        model.register_forward_pre_hook(look, with_kwargs=True)
        for model in transformers_of(pipeline).values()
    ]
    pipeline.set_progress_bar_config(disable=True)
    how = {"num_inference_steps": STEPS, "output_type": "latent", "generator": seeded(0)}
    with torch.no_grad():
        pipeline(**(arguments | how))
    for handle in handles:
        handle.remove()
    return made["forwards"] // STEPS, made["pictures"] // STEPS


def expected(workload: Workload) -> tuple[int, int]:
    """What `counted` finds where the workload is right."""
    return 1 if workload.stacked else workload.branches, workload.branches * workload.batch


def seen_by(family: str, arguments: dict[str, Any]) -> tuple[Any, Workload]:
    """A family's tiny pipeline, and its call as the planner takes it."""
    pipeline = tiny.build(family)
    model = next(iter(transformers_of(pipeline).values()))
    return pipeline, workload_of_pipeline(pipeline, model, arguments)


@pytest.mark.parametrize(
    "family", ["wan-t2v", "qwen-image", "flux", "flux2", "sd3", "hunyuan-video", "cogvideox", "ltx-video"]
)
def test_a_calls_tokens_are_those_that_the_blocks_take(family):
    """Films of every family have as many tokens as they have, not those of one picture."""
    arguments = tiny.call_arguments(family)
    pipeline, found = seen_by(family, arguments)
    text = 0 if family in CROSSED else arguments.get("max_sequence_length", 512)
    model = next(iter(transformers_of(pipeline).values()))
    assert found.tokens - text == lengths(pipeline, model, arguments)["tokens"]


SMALL, LARGE = (96, 64), (1500, 1100)
PUBLISHED_LIMIT = 12845056  # pixels that the text encoder of Qwen-Image-Edit sees; the tiny one sees fewer


@pytest.mark.parametrize(
    ("family", "sizes", "prompt"),
    [
        ("qwen-image-edit", [SMALL], 32),
        ("qwen-image-edit-plus", [SMALL, (64, 80)], 32),
        ("flux2-klein", [SMALL, LARGE], 512),  # padded
    ],
)
def test_input_images_count_as_the_pipeline_brings_them_to_size(tmp_path, family, sizes, prompt):
    """Of the pipeline and of its folder: each image's own tokens, and those that the text encoder sees."""
    images = [picture(seed, size) for seed, size in enumerate(sizes)]
    arguments = tiny.call_arguments(family) | {"image": images if len(images) > 1 else images[0]}
    arguments |= {name: 1.0 for name in ("true_cfg_scale", "guidance_scale") if name in arguments}
    pipeline, found = seen_by(family, arguments)
    if hasattr(pipeline, "processor"):
        pipeline.processor.image_processor.size["longest_edge"] = PUBLISHED_LIMIT
    pipeline.save_pretrained(tmp_path)
    facts = read_model_folder(tmp_path, pipeline=type(pipeline).__name__)
    of_folder = workload_of_folder(facts, call_with_defaults(pipeline, arguments), itemsize=4)
    assert of_folder is not None
    taken = lengths(pipeline, next(iter(transformers_of(pipeline).values())), arguments)
    for one in (found, of_folder):
        seen = one.tokens - taken["tokens"] - 512  # the planner allows 512 tokens for the prompt
        assert 0 < taken["text"] - seen <= prompt
        assert one.latent_bytes == taken["tokens"] * one.patch_channels * one.itemsize


def test_the_command_line_counts_what_it_was_given(tmp_path):
    """`--image`, `--count` and `--cache` reach the workload that `--layouts` and auto see."""
    tiny.save("qwen-image-edit-plus", tmp_path / "model")
    names = [tmp_path / "a.png", tmp_path / "b.png"]
    for name in names:
        picture(0, SMALL).save(name)
    common: dict[str, Any] = {"model": str(tmp_path / "model"), "prompt": "a square", "device": "cpu"}
    found = []
    for more in ({"image": names[:1]}, {"image": names, "count": 3, "cache": 0.1}):
        workload = prepare(TASKS["qwen-image-edit"], JobOptions(**common, **more)).workload
        assert workload is not None
        found.append(workload)
    one, two = found
    edge = 2 * tiny.build("qwen-image-edit-plus").vae_scale_factor
    width, height = at_area(SMALL, 1024 * 1024)
    latents = [w.latent_bytes // w.patch_channels // w.itemsize for w in found]
    assert latents[1] - latents[0] == (width // edge) * (height // edge)
    assert (one.branches, one.batch, one.caches) == (2, 1, 0)
    assert (two.branches, two.batch, two.caches) == (2, 3, 1)


@pytest.mark.parametrize(
    ("family", "distilled"),
    [
        *((family, False) for family in ("wan22-t2v", "qwen-image", "flux", "flux2-klein", "z-image")),
        ("flux2-klein", True),
    ],
)
@pytest.mark.parametrize("negative", [True, False])
def test_a_calls_branches_are_those_that_the_pipeline_makes(family, distilled, negative):
    """Whatever switches guidance in a family: a scale, a negative prompt, distillation."""
    pipeline = tiny.build(family)
    if distilled:
        pipeline.register_to_config(is_distilled=True)
    model = next(iter(transformers_of(pipeline).values()))
    takes = inspect.signature(type(pipeline).__call__).parameters
    scale = "true_cfg_scale" if "true_cfg_scale" in takes else "guidance_scale"
    for guidance in GUIDANCE:
        arguments = tiny.call_arguments(family)
        arguments |= {} if guidance is None else {scale: guidance}
        if not negative:
            arguments.pop("negative_prompt", None)
        found = workload_of_pipeline(pipeline, model, arguments)
        assert expected(found) == counted(pipeline, arguments), (family, guidance)


def two_prompts(family: str, guidance: float, *, each: int = 1) -> dict[str, Any]:
    """A family's call with two prompts of unlike length, `each` pictures of each."""
    arguments = tiny.call_arguments(family)
    takes = inspect.signature(type(tiny.build(family)).__call__).parameters
    arguments["prompt"] = [arguments["prompt"], "a square"]
    arguments["negative_prompt"] = [arguments["negative_prompt"], "blurry"]
    arguments["true_cfg_scale" if "true_cfg_scale" in takes else "guidance_scale"] = guidance
    names = [name for name in ("num_images_per_prompt", "num_videos_per_prompt") if name in takes]
    return arguments | ({names[0]: each} if each > 1 else {})


@pytest.mark.parametrize("guidance", [0.0, 3.0])
@pytest.mark.parametrize(
    ("family", "each"),
    [("wan-t2v", 1), ("flux", 2), ("sd3", 2), ("z-image", 1), ("ltx-video", 2), ("cogvideox", 1)],
)
def test_several_prompts_are_the_forwards_that_the_pipeline_makes(family, each, guidance):
    """Two prompts, some of them twice: one forward of all pictures, or one for each branch."""
    arguments = two_prompts(family, guidance, each=each)
    pipeline, found = seen_by(family, arguments)
    assert found.batch == 2 * each
    assert expected(found) == counted(pipeline, arguments)


def shared(family: str, layout: str, guidance: float) -> tuple[Workload, list[int], int, np.ndarray]:
    """A call of two prompts over ranks: as planned, bytes sent, pictures that this rank computed, latents."""
    arguments = two_prompts(family, guidance) | {"num_inference_steps": STEPS, "output_type": "latent"}
    pipeline, workload = seen_by(family, arguments)
    pipeline.set_progress_bar_config(disable=True)
    kind = plan_for(next(iter(transformers_of(pipeline).values()))).blocks[-1]
    computed = []
    for model in transformers_of(pipeline).values():
        last = list(model.get_submodule(kind.modules).children())[-1]
        last.register_forward_hook(lambda _, args, out: computed.append(len(tensors_in(out)[0])))
    with ParallelPipeline(pipeline, layout, strict=True) as pipe:
        latents = picture_of(pipe(**arguments, seed=SEED))
        assert pipe.report is not None
        return workload, pipe.report.sent_bytes, sum(computed), latents


@pytest.mark.parametrize(
    ("size", "family", "layout", "guidance"),
    [
        (2, "sd3", "cfg2", 0.0),
        (3, "sd3", "cfg3", 3.0),
        (2, "z-image", "cfg2", 0.0),
        (3, "z-image", "cfg3", 3.0),
        (2, "wan-t2v", "cfg2", 3.0),
        (4, "wan-t2v", "cfg2 gather_kv2", 3.0),
    ],
)
def test_several_prompts_are_shared_out_as_planned(ranks, size, family, layout, guidance):
    """What each rank computes and sends is what was predicted; a stacked batch needs no guidance for cfg."""
    config = parse_parallel(layout)
    one = shared(family, "auto", guidance)[-1]
    for here, (workload, sent, computed, latents) in enumerate(
        ranks(size).run(shared, family, layout, guidance)
    ):
        assert config in [candidate.config for candidate in plan(workload, DEVICE, size)]
        assert sent == [STEPS * count for count in predict(workload, DEVICE, config).sent]
        made = Shares.of(workload, config).made
        assert computed == STEPS * made[here // config.sp_degree]
        assert np.abs(latents - one).max() <= 1e-5, "matmuls of other rows"
