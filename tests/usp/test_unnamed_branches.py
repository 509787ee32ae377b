"""Pipelines that run the model once for each guidance branch and name none: Wan video-to-video and FLUX
Kontext."""

from functools import cache as remember
from typing import Any

import pytest
from diffusers import FluxKontextPipeline, WanVideoToVideoPipeline
from PIL import Image

from tests import tiny
from tests.usp.families import ALWAYS, picture_of
from tests.usp.in_ranks import SEED, error_of, seeded
from usp.demo import tiny as families
from usp.pipeline import ParallelPipeline

STEPS = 4
FP32 = 1e-4  # latents after four steps; a ring's merge and matmuls of fewer rows round differently


class Untold(WanVideoToVideoPipeline):
    """A pipeline that calls nobody back after a step."""

    def __call__(self, video, prompt, generator=None, **options):
        return super().__call__(video=video, prompt=prompt, generator=generator, **options)


def video_to_video(kind: type = WanVideoToVideoPipeline) -> tuple[Any, dict[str, Any]]:
    """Wan's pipeline on a red film, and the call."""
    known = tiny.build("t2v")
    parts = ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")
    call = {"video": [Image.new("RGB", (48, 32), "red")] * 5, "height": 32, "width": 48, "strength": 1.0}
    call |= {"prompt": "red circle", "guidance_scale": 3.0, "max_sequence_length": tiny.TEXT_LENGTH}
    return kind(**{name: getattr(known, name) for name in parts}), call


def kontext() -> tuple[Any, dict[str, Any]]:
    """FLUX Kontext with a negative prompt, and the call."""
    known = families.build("flux").components
    names = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer")
    call = families.call_arguments("flux")
    call |= {"image": Image.new("RGB", (112, 80), "blue"), "negative_prompt": "a red square"}
    call |= {"max_area": call["height"] * call["width"], "_auto_resize": False}
    return FluxKontextPipeline(**{name: known[name] for name in names}), call


PIPELINES = {"video-to-video": video_to_video, "kontext": kontext}


def made(name: str) -> tuple[Any, dict[str, Any]]:
    """A pipeline and its call."""
    pipeline, call = PIPELINES[name]()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline, {**call, "num_inference_steps": STEPS, "output_type": "latent"}


@remember
def one_process(name: str) -> Any:
    """The latents of the pipeline by itself."""
    pipeline, call = made(name)
    return picture_of(pipeline(**call, generator=seeded(SEED)))


def several(name: str, layout: str, cache: Any = None, calls: int = 1) -> tuple[Any, int, dict[str, str]]:
    """The latents of the last call, how often the last block ran here in it, and what the cache did."""
    pipeline, call = made(name)
    ran = []
    with ParallelPipeline(pipeline, layout, cache=cache) as pipe:
        pipeline.transformer.proj_out.register_forward_pre_hook(lambda *_: ran.append(1))
        for _ in range(calls):
            ran.clear()
            found = picture_of(pipe(**call, seed=SEED))
        return found, len(ran), {n: branch["text"] for n, branch in pipe.report.cache.items()}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize(("size", "layout"), [(2, "cfg2"), (3, "cfg3"), (4, "cfg2 ring2")])
def test_the_forwards_of_a_step_are_its_branches(ranks, name, size, layout):
    """The picture of one process, each branch on its own ranks: a forward a step instead of two."""
    want = one_process(name)
    assert want.std() > 0.1
    every = ranks(size).run(several, name, layout)
    for rank, (found, ran, _) in enumerate(every):
        assert abs(found - want).max() <= FP32
        assert ran == (0 if rank == 2 and size == 3 else STEPS)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("layout", ["ulysses2", "cfg2"])
def test_each_has_its_own_state_in_a_cache(ranks, name, layout):
    """Two calls: both branches skip the same two steps, and the second call is like a first one."""
    want, _, reports = several(name, "auto", ALWAYS)
    assert list(reports) == ["transformer/", "transformer/forward 2"]
    assert all("2 of 4 skipped: 2-3" in report for report in reports.values())
    assert abs(want - one_process(name)).max() > FP32, "the cache is meant to matter"
    seen: set[str] = set()
    for found, _, texts in ranks(2).run(several, name, layout, ALWAYS, 2):
        assert abs(found - want).max() <= FP32
        assert set(texts.values()) == set(reports.values())
        seen |= set(texts)
    assert seen == set(reports)


def untold(cache: Any, guidance: float) -> str:
    """How a call ends of a pipeline that tells neither branches nor steps."""
    pipeline, call = video_to_video(Untold)
    pipeline.set_progress_bar_config(disable=True)
    call |= {"num_inference_steps": STEPS, "output_type": "latent", "guidance_scale": guidance}
    with ParallelPipeline(pipeline, "ulysses2", cache=cache) as pipe:
        return error_of(pipe, **call, seed=SEED)


def test_a_cache_is_refused_where_neither_branches_nor_steps_are_told(ranks):
    """Which forward is like which cannot be known; without a cache the same pipeline runs."""
    for error in ranks(2).run(untold, ALWAYS, 3.0):
        assert f"ran transformer {2 * STEPS} times without naming guidance branches" in error
    assert ranks(2).run(untold, None, 3.0) == ["", ""]
