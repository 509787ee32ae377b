"""Pipelines that diffusers and accelerate offload, under the wrapper, on a CPU: the hooks are the real ones,
and lend weights from the CPU to the CPU."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.usp.families import ALWAYS, lora_for
from tests.usp.in_ranks import SEED, alone, hooks, offload
from tests.usp.test_planner import DEVICE
from usp.pipeline import ParallelPipeline

CPU = torch.device("cpu")
# "layers" is what enable_sequential_cpu_offload asks of accelerate, but for the device: diffusers 0.42 makes
# it cpu:0, from which accelerate 1.15 cannot put weights back.
WAYS = ("model", "layers", "leaf_level", "block_level")
TOLERANCE = 1e-5  # two ranks against one, see test_pipeline.py


def models_of(pipeline: Any) -> list[torch.nn.Module]:
    """The pipeline's models."""
    return [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]


def offloaded(layout: str, way: str) -> tuple[list[np.ndarray], set[str], bool]:
    """Two calls of a pipeline that is offloaded, decoded; where its weights lie then; whether its hooks are
    those of before."""
    pipeline = tiny.build("t2v")
    offload(pipeline, way, CPU)
    before = hooks(pipeline.transformer)
    call = tiny.call("t2v", num_inference_steps=2, output_type="np")
    with ParallelPipeline(pipeline, layout) as pipe:
        films = [np.asarray(pipe(**call, seed=SEED).frames) for _ in range(2)]
    places = {parameter.device.type for model in models_of(pipeline) for parameter in model.parameters()}
    return films, places, hooks(pipeline.transformer) == before


@pytest.mark.parametrize(
    ("layout", "way"), [("ulysses2", way) for way in WAYS] + [("cfg2", "model"), ("cfg2", "leaf_level")]
)
def test_an_offloaded_pipeline_stays_offloaded_and_matches_one_process(ranks, layout, way):
    """Text encoder to decoded frames, twice; "meta" is accelerate's sign for weights that are put away."""
    one = alone("t2v", {"num_inference_steps": 2, "output_type": "np"})
    for films, places, left in ranks(2).run(offloaded, layout, way):
        assert places == {"meta" if way == "layers" else "cpu"}
        assert max(np.abs(film - one).max() for film in films) <= TOLERANCE
        assert left


CALLS = ({"tokens": (1, 1, 5)}, {"guidance_scale": 1.0}, {"tokens": (1, 1, 3)})
Found = tuple[str, np.ndarray, list[list[bool]]]  # layout, latents, what each branch skipped


def everything_on(way: str | None) -> list[Found]:
    """Calls that auto lays out in turns, with a cache, a LoRA, and an offload if there is a way."""
    pipeline = tiny.build("t2v")
    pipeline.load_lora_weights(lora_for("transformer", pipeline.transformer), adapter_name="test")
    if way is not None:
        offload(pipeline, way, CPU)
    _, *inner = pipeline.transformer.modules()  # diffusers itself wraps the whole anew after each call
    before = [module.forward for module in inner]
    found = []
    with ParallelPipeline(pipeline, "auto", cache=ALWAYS) as pipe:
        if pipe.world.world_size > 1:
            assert pipe._auto is not None
            pipe._auto._machine = DEVICE  # the same choices on any machine
        for changes in CALLS:
            call = tiny.call("t2v", num_inference_steps=4, **changes)
            latents = np.asarray(pipe(**call, seed=SEED).frames)
            assert pipe.report is not None
            skipped = [branch["skipped"] for branch in pipe.report.cache.values()]
            found.append((str(pipe.parallel), latents, skipped))
    assert [module.forward for module in inner] == before, "as it was"
    return found


@cache
def plain() -> list[Found]:
    """The same in one process, without an offload."""
    found = everything_on(None)
    for changes, (_, latents, skipped) in zip(CALLS, found, strict=True):
        without = alone("t2v", {"num_inference_steps": 4, **changes})
        assert np.abs(latents - without).max() > 1e-3, "the LoRA is meant to matter"
        assert any(map(any, skipped)), "and so is the cache"
    return found


@pytest.mark.parametrize("way", WAYS)
def test_auto_changes_layouts_with_a_cache_a_lora_and_an_offload_in_force(ranks, way):
    """Each call's latents and skips are those of one process, whatever was taken off and put on between."""
    for found in ranks(2).run(everything_on, way):
        layouts = [layout for layout, *_ in found]
        assert layouts[0] == layouts[2] == "cfg2" != layouts[1]
        for (_, latents, skipped), (_, want, decided) in zip(found, plain(), strict=True):
            assert skipped == decided
            assert np.abs(latents - want).max() <= TOLERANCE
