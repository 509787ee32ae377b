"""What the planner takes a call for is what the pipeline then does: tokens and guidance branches, counted."""

import inspect
from typing import Any

import pytest
import torch

from tests.usp.families import transformers_of
from tests.usp.in_ranks import seeded
from usp.demo import tiny
from usp.planner import workload_of_pipeline
from usp.plans import plan_for

CROSSED = ("wan-t2v", "ltx-video")  # their text is not joined with the picture's tokens
GUIDANCE = [None, 0.0, 0.5, 1.5]


def counted(pipeline: Any, model: Any, arguments: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the picture that the first block takes, and branches of the first step."""
    plan, found = plan_for(model), {}

    def of_block(block: Any, args: Any, kwargs: Any) -> None:
        given = inspect.signature(block.forward).bind(*args, **kwargs).arguments
        name = next((n for n in kind.outputs if kind.streams(n) == ("tokens",)), kind.outputs[0])
        found.setdefault("tokens", given[name].shape[1])

    def of_model(model: Any, args: Any, kwargs: Any) -> None:
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        found.setdefault("rows", []).append(len(given[plan.output.argument]))

    kind = plan.blocks[0]
    first = next(iter(model.get_submodule(kind.modules).children()))
    handles = [first.register_forward_pre_hook(of_block, with_kwargs=True)]
    for one in transformers_of(pipeline).values():
        handles.append(one.register_forward_pre_hook(of_model, with_kwargs=True))
    pipeline.set_progress_bar_config(disable=True)
    how = {"num_inference_steps": 4, "output_type": "latent", "generator": seeded(0)}
    try:
        pipeline(**(arguments | how))
    finally:
        for handle in handles:
            handle.remove()
    return found["tokens"], sum(found["rows"]) // 4


@pytest.mark.parametrize(
    "family", ["wan-t2v", "qwen-image", "flux", "flux2", "sd3", "hunyuan-video", "cogvideox", "ltx-video"]
)
def test_a_calls_tokens_are_those_that_the_blocks_take(family):
    """Films of every family have as many tokens as they have, not those of one picture."""
    pipeline = tiny.build(family)
    model = next(iter(transformers_of(pipeline).values()))
    arguments = tiny.call_arguments(family)
    found = workload_of_pipeline(pipeline, model, arguments)
    text = 0 if family in CROSSED else arguments.get("max_sequence_length", 512)
    assert found.tokens - text == counted(pipeline, model, arguments)[0]


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
        with torch.no_grad():
            made = counted(pipeline, model, arguments)[1]
        assert found.branches == made, (family, guidance)
