"""Guidance branches and batches on different ranks, for every model: one process's result."""

from functools import cache
from typing import Any

import pytest
import torch

from tests.usp.in_ranks import error_of, rank
from tests.usp.models import MODELS, Inputs
from usp.assembly import assemble
from usp.branches import Branches
from usp.cfg_parallel import BranchExchange, CfgParallel
from usp.config import parse_parallel
from usp.deferred import concrete
from usp.mesh import make_groups
from usp.plans import PLANS, plan_for
from usp.trees import map_tensors

EXACT, ROWS = 0.0, 1e-6  # branches: the same kernels; part of a batch: matmuls of fewer rows
NAMED = [name for name, plan in PLANS.items() if not plan.stacked]
GRID = (1, 2, 3)
# Inputs of the branches that differ in more than values: the second prompt is longer.
OPTIONS: dict[str, dict[str, Any]] = {
    "QwenImageTransformer2DModel": {"masked": True, "references": ((1, 1, 2),)},
    "ZImageTransformer2DModel": {"ragged": True},
}


def step(inputs: Inputs, name: str, sample: Any) -> Inputs:
    """The inputs of the next step, from the sample of the last."""
    key = PLANS[name].output.argument
    move = [0.1 * s for s in sample] if isinstance(sample, list) else 0.1 * sample
    now = inputs[key]
    moved = [a + b for a, b in zip(now, move, strict=True)] if isinstance(now, list) else now + move
    return {**inputs, key: concrete(moved)}


def named(model: Any, name: str) -> Any:
    """Two steps of two branches, each in its context."""
    row, key = MODELS[name], PLANS[name].output.argument
    cond, uncond = (row.inputs(GRID, text, 1, **OPTIONS.get(name, {})) for text in (3, 5))
    for _ in range(2):
        uncond = {**uncond, key: cond[key]}
        with model.cache_context("cond"):
            first = model(**cond, return_dict=False)[0]
        with model.cache_context("uncond"):
            second = model(**uncond).sample
        cond = step(cond, name, second + 2.0 * (first - second))
    return cond[key]


def stacked(model: Any, name: str, batch: int) -> Any:
    """Two steps of a batch in one forward."""
    inputs = MODELS[name].inputs(GRID, 3, batch, **OPTIONS.get(name, {}))
    for place in range(2):
        sample = model(**inputs).sample if place else model(**inputs, return_dict=False)[0]
        inputs = step(inputs, name, sample)
    return inputs[PLANS[name].output.argument]


def skipped(model: Any, name: str) -> Any:
    """Stacked guidance, and a third forward of one picture without a layer."""
    inputs = MODELS[name].inputs(GRID, 3, 2)
    half = {key: value[:1] for key, value in inputs.items()}
    for _ in range(2):
        both = model(**inputs)[0]
        less = model(**half, skip_layers=[1])[0]
        first, second = both.chunk(2)
        moved = step(half, name, second + 2.0 * (first - second) + (first - less))["hidden_states"]
        inputs, half = {**inputs, "hidden_states": moved.repeat(2, 1, 1, 1)}, {**half, "hidden_states": moved}
    return half["hidden_states"]


LOOPS = {loop.__name__: loop for loop in (named, stacked, skipped)}


@cache
@torch.no_grad()
def alone(loop: str, name: str, *options: Any) -> Any:
    return LOOPS[loop](MODELS[name].build(), name, *options)


@torch.no_grad()
def in_ranks(calls: list[tuple[Any, ...]], size: int) -> list[tuple[Any, int]]:
    """For each loop: its result, and how many forwards this rank computed."""
    groups = make_groups(parse_parallel(f"cfg{size}"), rank=rank())
    found = []
    for loop, name, *options in calls:
        model = MODELS[name].build()
        branches = Branches(model, plan_for(model).told_apart_by)
        computed: list[int] = []
        next(model.children()).register_forward_hook(lambda *_, c=computed: c.append(1))
        shard = CfgParallel(model, plan_for(model), BranchExchange(groups.cfg), branches, strict=True)
        found.append((map_tensors(torch.clone, concrete(LOOPS[loop](model, name, *options))), len(computed)))
        shard.close()
        branches.close()
    groups.close()
    return found


def check(ranks: Any, size: int, calls: list[tuple[Any, ...]], tolerance: float) -> list[list[int]]:
    """Compare with one process; the forwards computed on each rank, by call."""
    by_rank = ranks(size).run(in_ranks, calls, size)
    for results in by_rank:
        for call, (got, _) in zip(calls, results, strict=True):
            want = alone(*call)
            for a, b in zip(got, want, strict=True):
                assert a.shape == b.shape, call
                assert (a - b).abs().max() <= tolerance, call
    return [[computed for _, computed in one] for one in zip(*by_rank, strict=True)]


def test_named_branches_of_every_model(ranks):
    """B24, req 24: prompts of unlike lengths, masks, references, guidance: each branch on its own rank."""
    check(ranks, 2, [("named", name) for name in NAMED], EXACT)


@pytest.mark.parametrize(("size", "batch"), [(2, 2), (2, 3), (3, 4)])
def test_a_batch_is_cut_whatever_the_model_takes(ranks, size, batch):
    """B24, req 8 and 24: stacked guidance, several pictures: lists, tuples, dicts, masks, one timestep."""
    check(ranks, size, [("stacked", name, batch) for name in MODELS], ROWS)


def test_skip_layer_guidance_beside_a_stacked_batch(ranks):
    """B46: SD3's third forward holds one picture: one rank computes it, and no rank counts as idle."""
    (computed,) = check(ranks, 2, [("skipped", "SD3Transformer2DModel")], ROWS)
    assert computed == [4, 2]


@torch.no_grad()
def arguments_refused() -> list[str]:
    """FLUX.2's cache of reference tokens, spread over cfg and over sequence ranks; a UNet over the latter."""
    found = []
    for layout in ("cfg2", "ulysses2"):
        model = MODELS["Flux2Transformer2DModel"].build()
        made = assemble(
            {"transformer": model}, parse_parallel(layout), make_groups(parse_parallel(layout), rank=rank())
        )
        inputs = MODELS["Flux2Transformer2DModel"].inputs(GRID, 3)
        found.append(error_of(model, **inputs, kv_cache_mode="extract", num_ref_tokens=2))
        assert error_of(model, **inputs, kv_cache_mode=None) == ""
        made.close()
    unet = MODELS["UNet2DConditionModel"].build()
    config = parse_parallel("gather_kv2")
    found.append(error_of(assemble, {"unet": unet}, config, make_groups(config, rank=rank())))
    return found


def test_what_a_plan_cannot_serve_is_refused_with_its_reason(ranks):
    """Req 40: an argument, and a degree, that do not go with a model are one sentence on every rank."""
    for *arguments, unet in ranks(2).run(arguments_refused):
        for text in arguments:
            assert text.startswith(
                "ValueError: kv_cache_mode was given to Flux2Transformer2DModel: the cache of"
            )
        assert unet.startswith(
            "ValueError: UNet2DConditionModel was to share one sequence over 2 ranks; a UNet"
        )
        assert "sequence parallelism does not apply; give the ranks to cfg" in unet
