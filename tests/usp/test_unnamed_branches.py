"""Pipelines that run the model once for each guidance branch and name none: Wan video-to-video and FLUX
Kontext."""

from functools import cache as remember
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import FluxKontextPipeline, WanVideoToVideoPipeline
from PIL import Image

from tests import tiny
from tests.usp.families import ALWAYS, picture_of
from tests.usp.in_ranks import SEED, error_of, seeded
from usp.config import CacheConfig
from usp.demo import tiny as families
from usp.pipeline import ParallelPipeline

STEPS = 4
FP32 = 1e-4  # latents after four steps; a ring's merge and matmuls of fewer rows round differently


class Deaf(WanVideoToVideoPipeline):
    """A pipeline that takes the callback and forgets it."""

    def __call__(self, video, prompt, generator=None, callback_on_step_end=None, **options):
        return super().__call__(video=video, prompt=prompt, generator=generator, **options)


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


def made(name: str, *kind: type) -> tuple[Any, dict[str, Any]]:
    """A pipeline, of another class if one is given, and its call."""
    pipeline, call = PIPELINES[name](*kind)
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


def untold(kind: type, guidance: float, layout: str, **options: Any) -> tuple[str, float]:
    """The error that ends a call of a pipeline of this kind, and how far it is from one process's."""
    pipeline, call = made("video-to-video", kind)
    call["guidance_scale"] = guidance
    want = picture_of(pipeline(**call, generator=seeded(SEED)))
    found: list[Any] = []
    with ParallelPipeline(pipeline, layout, **options) as pipe:
        text = error_of(lambda: found.append(picture_of(pipe(**call, seed=SEED))))
    return text, abs(found[0] - want).max() if found else 0.0


@pytest.mark.parametrize("kind", [Untold, Deaf])
def test_a_cache_is_refused_where_neither_branches_nor_steps_are_told(ranks, kind):
    """Which forward is like which cannot be known; without a cache the same pipeline runs as before."""
    for error, _ in ranks(2).run(partial(untold, cache=ALWAYS), kind, 3.0, "ulysses2"):
        assert f"ran transformer {2 * STEPS} times without naming guidance branches" in error
    for error, distance in ranks(2).run(untold, kind, 3.0, "cfg2"):
        assert error == ""
        assert distance <= FP32


def test_one_branch_needs_neither_name_nor_steps(ranks):
    """Guidance off, and no callback: a forward is a step, and is cached."""
    for error, _ in ranks(2).run(partial(untold, cache=ALWAYS), Untold, 1.0, "ulysses2"):
        assert error == ""


@pytest.mark.parametrize("kind", [WanVideoToVideoPipeline, Untold, Deaf])
def test_an_idle_cfg_rank_is_told(ranks, kind):
    """Guidance off on cfg2: strict makes it an error on all ranks, whether steps are told or not."""
    for error, _ in ranks(2).run(partial(untold, strict=True), kind, 1.0, "cfg2"):
        assert "this call has 1 guidance branch: 1 of 2 cfg ranks are idle" in error


def looking(layout: str, cache: Any, look: bool) -> Any:
    """The latents of a call whose callback runs the model for itself, or does not."""
    pipeline, call = made("video-to-video")

    def on_step_end(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        states = {"hidden_states": tensors["latents"], "encoder_hidden_states": tensors["prompt_embeds"]}
        with torch.no_grad():
            seen = pipeline.transformer(**states, timestep=timestep.expand(1), return_dict=False)[0]
        assert seen.std().item() > 0
        return tensors

    if look:
        call |= {"callback_on_step_end": on_step_end}
        call |= {"callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    with ParallelPipeline(pipeline, layout, cache=cache) as pipe:
        return picture_of(pipe(**call, seed=SEED))


@pytest.mark.parametrize("cache", [None, ALWAYS, CacheConfig(threshold=0.5, warmup_steps=1)])
@pytest.mark.parametrize("layout", ["cfg2", "ulysses2"])
def test_a_callbacks_own_forward_is_of_no_branch(ranks, layout, cache):
    """A callback that looks at the model's prediction changes nothing, also where forwards are counted."""
    plain, looked = (ranks(2).run(looking, layout, cache, look) for look in (False, True))
    assert all((a == b).all() for a, b in zip(plain, looked, strict=True))
