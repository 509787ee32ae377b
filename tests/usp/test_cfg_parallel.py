"""Guidance branches on different ranks give one process's result, however a pipeline uses them."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.usp.in_ranks import SEED, alone, error_of, hooks, rank, seeded
from usp import comm
from usp.branches import Branches
from usp.cfg_parallel import BranchExchange, CfgParallel
from usp.config import parse_parallel
from usp.deferred import concrete
from usp.mesh import make_groups
from usp.pipeline import ParallelPipeline
from usp.plans import plan_for

# fp32: a branch is computed by the same kernels as in one process, so cfg adds no error. Cutting the sequence
# adds its own: matmuls of fewer rows, and ring's merge.
EXACT, SEQUENCE = 0.0, 1e-5

CASES = [
    ("t2v", {}),
    ("t2v", {"negative_prompt": None, "tokens": (1, 1, 13)}),
    ("t2v", {"prompt": ["red circle", "a"], "negative_prompt": ["blue", "left right"]}),
    ("ti2v_image", {"tokens": (3, 1, 5)}),
    ("two_experts", {"guidance_scale": 4.0, "guidance_scale_2": 2.0}),
    ("i2v", {"tokens": (1, 1, 3), "num_inference_steps": 2}),
]


def unlike_lengths() -> dict[str, Any]:
    """Embeddings of a prompt of 5 tokens and a negative prompt of 2."""
    states = torch.randn(1, 7, tiny.TEXT_DIM, generator=seeded(1))
    texts = {"prompt": None, "negative_prompt": None}
    return {**texts, "prompt_embeds": states[:, :5], "negative_prompt_embeds": states[:, 5:]}


def together(layout: str, cases: list[tuple[str, dict[str, Any]]]) -> list[np.ndarray]:
    results = []
    for kind, changes in cases:
        with ParallelPipeline(tiny.build(kind), layout) as pipe:
            results.append(np.asarray(pipe(**tiny.call(kind, **changes), seed=SEED).frames))
            again = np.asarray(pipe(**tiny.call(kind, **changes), seed=SEED).frames)
            assert np.array_equal(again, results[-1]), "call 2 equals call 1"
    return results


@pytest.mark.parametrize(
    ("size", "layout", "tolerance"),
    [
        (2, "cfg2", EXACT),
        (4, "cfg2 ulysses2", SEQUENCE),
        (4, "cfg2 ring2", SEQUENCE),
        (4, "cfg2 gather_kv2", SEQUENCE),
    ],
)
def test_cfg_and_sequence_match_one_process(ranks, size, layout, tolerance):
    """B24, B50, requirement 24: T2V, I2V, TI2V, two experts, unlike prompt lengths, with every strategy
    inside."""
    cases = [*CASES, ("t2v", unlike_lengths())]
    by_rank = ranks(size).run(together, layout, cases)
    for place, (kind, changes) in enumerate(cases):
        want = alone(kind, changes)
        for results in by_rank:
            assert np.abs(results[place] - want).max() <= tolerance, (kind, changes)


def one_branch(guidance: float, strict: bool) -> tuple[Any, list[str]]:
    told: list[str] = []
    logger = logging.getLogger("usp.cfg_parallel")
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    try:
        with ParallelPipeline(tiny.build("t2v"), "cfg2", strict=strict) as pipe:
            arguments = tiny.call("t2v", guidance_scale=guidance)
            if strict:
                return error_of(pipe, **arguments, seed=SEED), told
            return np.asarray(pipe(**arguments, seed=SEED).frames), told
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("guidance", [0.0, 1.0])
def test_b25_one_branch_is_exact_and_said(ranks, guidance):
    """B25, B46: with guidance off one cfg rank is idle: same result, no hang, one line that says so."""
    want = alone("t2v", {"guidance_scale": guidance})
    for result, told in ranks(2).run(one_branch, guidance, False, timeout_s=20):
        assert np.array_equal(result, want)
        assert len(told) == 1
        assert "cfg_degree=2, but this call has 1 guidance branch: 1 of 2 cfg ranks are idle" in told[0]


def test_b25_strict_makes_an_idle_axis_an_error(ranks):
    """B25, requirement 40: `strict` refuses on every rank."""
    for error, _ in ranks(2).run(one_branch, 1.0, True, timeout_s=20):
        assert error.startswith("ValueError: cfg_degree=2, but this call has 1 guidance branch")


def one_step(strict: bool) -> tuple[str, list[str], list[str]]:
    """The error and the lines of a call of one step without guidance, and the lines of one where guidance
    ends after the first of three steps."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("usp.cfg_parallel").addHandler(handler)

    def ends(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipeline._guidance_scale = 1.0
        return tensors

    try:
        with ParallelPipeline(tiny.build("t2v"), "cfg2", strict=strict) as pipe:
            arguments = tiny.call("t2v", guidance_scale=1.0, num_inference_steps=1)
            error = error_of(pipe, **arguments, seed=SEED)
            once, told[:] = list(told), []
            if not strict:
                call = tiny.call("t2v", num_inference_steps=3)
                pipe(**call, seed=SEED, callback_on_step_end=ends)
            return error, once, told
    finally:
        logging.getLogger("usp.cfg_parallel").removeHandler(handler)


@pytest.mark.parametrize("strict", [False, True])
def test_b25_an_idle_axis_is_said_in_a_call_of_one_step(ranks, strict):
    """B25: no second step is needed to see it; guidance that ends in a call is not an early use."""
    for error, once, later in ranks(2).run(one_step, strict, timeout_s=20):
        if strict:
            assert error.startswith("ValueError: cfg_degree=2, but this call has 1 guidance branch")
            continue
        assert error == ""
        assert len(once) == 1
        assert "1 of 2 cfg ranks are idle" in once[0]
        assert not any("needs a branch's value" in line for line in later), later
        assert not later, "most of the guidance kept both busy for a step"


Loop = Callable[[Any, dict[str, torch.Tensor]], torch.Tensor]


def three_branches(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """A step with three branches; the first two are combined before the third is called."""
    x = inputs["hidden_states"]
    for step in range(3):
        text = inputs["encoder_hidden_states"]
        with model.cache_context("cond"):
            cond = model(**{**inputs, "hidden_states": x}, return_dict=False)[0]
        with model.cache_context("uncond"):
            uncond = model(**{**inputs, "hidden_states": x, "encoder_hidden_states": -text}).sample
        guided = uncond + 2.0 * (cond - uncond)
        with model.cache_context("image"):
            image = model(**{**inputs, "hidden_states": x, "encoder_hidden_states": 0 * text})[0]
        x = x - 0.1 * (guided + 0.5 * (cond - image)) / (step + 1)
    return x


def early_value(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Needs a number from the first branch before the second is called."""
    x = inputs["hidden_states"]
    for _ in range(3):
        with model.cache_context("cond"):
            cond = model(**{**inputs, "hidden_states": x})[0]
        scale = 2.0 if cond.mean().item() > 0 else 3.0
        with model.cache_context("uncond"):
            uncond = model(**{**inputs, "hidden_states": x, "timestep": inputs["timestep"] / 2})[0]
        x = x - 0.1 * (uncond + scale * (cond - uncond))
    return x


def cut_and_cast(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Slices, casts and arithmetic on one branch before the next is called, with an operand that changes
    after."""
    x = inputs["hidden_states"]
    for _ in range(3):
        factor = torch.full((1,), 2.0)
        with model.cache_context("cond"):
            cond = model(**{**inputs, "hidden_states": x})[0]
        first, second = (-cond[:, :, :, :4].double() * factor).split(2, dim=3)
        factor.fill_(100.0)  # must not reach the record
        with model.cache_context("uncond"):
            uncond = model(**{**inputs, "hidden_states": x, "timestep": inputs["timestep"] / 2})[0]
        joined = torch.cat([first, second], dim=3).float()
        assert joined.shape == uncond[:, :, :, :4].shape
        x = x - 0.1 * (uncond - torch.nn.functional.pad(joined, (0, 0, 0, uncond.shape[3] - 4)))
    return x


def changed_in_place(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """A branch, and a view of it, are written to after arithmetic on them was recorded."""
    x = inputs["hidden_states"]
    for _ in range(3):
        with model.cache_context("cond"):
            cond = model(**{**inputs, "hidden_states": x})[0]
        doubled, kept, first = 2.0 * cond, cond.clone(), cond[:, :1]
        with model.cache_context("uncond"):
            uncond = model(**{**inputs, "hidden_states": x, "timestep": inputs["timestep"] / 2})[0]
        cond.sub_(uncond)
        tripled = 3.0 * first
        first.mul_(0.5)
        x = x - 0.1 * (uncond + cond + 0.1 * doubled + 0.2 * kept + 0.1 * tripled)
    return x


def guidance_comes_and_goes(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The second branch is called in some steps only."""
    x = inputs["hidden_states"]
    for guidance in (3.0, 1.0, 2.0, 1.0, 1.0):
        with model.cache_context("cond"):
            pred = model(**{**inputs, "hidden_states": x})[0]
        if guidance > 1:
            with model.cache_context("uncond"):
                uncond = model(**{**inputs, "hidden_states": x, "timestep": inputs["timestep"] / 2})[0]
            pred = uncond + guidance * (pred - uncond)
        x = x - 0.1 * pred
    return x


def stacked(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """All branches in one batch, with a name for it and without."""
    x = inputs["hidden_states"]
    for context in ("cond_uncond", None):
        batch = {name: torch.cat([value, value.flip(-1)]) for name, value in inputs.items()}
        batch["timestep"] = torch.cat([inputs["timestep"]] * 2)
        batch["hidden_states"] = torch.cat([x, x])
        if context is None:
            both = model(**batch)[0]
        else:
            with model.cache_context(context):
                both = model(**batch, return_dict=False)[0]
        first, second = both.chunk(2)
        x = x - 0.1 * (second + 2.0 * (first - second))
    return x


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        *(three_branches, early_value, cut_and_cast, changed_in_place, guidance_comes_and_goes),
        stacked,
    )
}


def run_loop(name: str, batch: int, cfg_degree: int) -> tuple[torch.Tensor, int, list[str], int]:
    """The loop's result, how often ranks exchanged, what was warned of, forwards computed on this rank."""
    config = parse_parallel(f"cfg{cfg_degree}")
    model = tiny.transformer()
    groups = make_groups(config, rank=rank())
    exchange, branches = BranchExchange(groups.cfg), Branches(model)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("usp.cfg_parallel").addHandler(handler)
    computed = []
    model.proj_out.register_forward_hook(lambda *_: computed.append(1))
    exchanges = []
    gather = comm.gather
    comm.gather = lambda *args, **kwargs: (exchanges.append(1), gather(*args, **kwargs))[1]
    shard = CfgParallel(model, plan_for(model), exchange, branches)
    try:
        with torch.no_grad():
            result = concrete(LOOPS[name](model, tiny.model_inputs((1, 3, 7), batch=batch)))
    finally:
        comm.gather = gather
        logging.getLogger("usp.cfg_parallel").removeHandler(handler)
        shard.close()
        branches.close()
        groups.close()
    assert "forward" not in model.__dict__
    assert "cache_context" not in model.__dict__
    assert type(result) is torch.Tensor
    return result, len(exchanges), told, len(computed)


def reference(name: str, batch: int) -> torch.Tensor:
    with torch.no_grad():
        return LOOPS[name](tiny.transformer(), tiny.model_inputs((1, 3, 7), batch=batch))


@pytest.mark.parametrize("size", [2, 3])
def test_b46_three_branches(ranks, size):
    """B46: three branches on 2 and on 3 cfg ranks; each is computed once, and all meet."""
    want = reference("three_branches", 1)
    results = ranks(size).run(run_loop, "three_branches", 1, size)
    assert all(torch.equal(result, want) for result, *_ in results)
    assert sorted(computed for *_, computed in results) == ([3, 6] if size == 2 else [3, 3, 3])


def test_an_early_value_is_exact_and_said_once(ranks):
    """`.item()` on the first branch exchanges at once on all ranks: same result, one warning."""
    want = reference("early_value", 1)
    for result, exchanges, told, _ in ranks(2).run(run_loop, "early_value", 1, 2):
        assert torch.equal(result, want)
        assert exchanges == 6
        assert len(told) == 1
        assert "before it has called all 2 guidance branches" in told[0]


def test_cuts_and_casts_are_recorded(ranks):
    """Views, casts and arithmetic on one branch wait: one exchange a step, operands as they were."""
    want = reference("cut_and_cast", 1)
    for result, exchanges, told, computed in ranks(2).run(run_loop, "cut_and_cast", 1, 2):
        assert torch.equal(result, want)
        assert (exchanges, told, computed) == (3, [], 3)


def test_what_was_recorded_does_not_see_later_writes(ranks):
    """In-place arithmetic on a branch leaves what was computed from it before, and reaches its views."""
    want = reference("changed_in_place", 1)
    for result, *_ in ranks(2).run(run_loop, "changed_in_place", 1, 2):
        assert torch.equal(result, want)


def test_guidance_that_changes_over_steps(ranks):
    """B25: steps with one branch between steps with two; no hang, same bits."""
    want = reference("guidance_comes_and_goes", 1)
    for result, *_ in ranks(2).run(run_loop, "guidance_comes_and_goes", 1, 2, timeout_s=20):
        assert torch.equal(result, want)


@pytest.mark.parametrize(("size", "batch"), [(2, 1), (2, 3), (3, 1), (4, 1), (4, 3)])
def test_stacked_branches_are_cut_along_the_batch(ranks, size, batch):
    """A pipeline that stacks its branches: each rank computes its share, down to none; 1e-6 for other matmul
    rows."""
    want = reference("stacked", batch)
    for result, _, told, _ in ranks(size).run(run_loop, "stacked", batch, size):
        assert (result - want).abs().max() <= 1e-6
        assert bool(told) == (size > 2 * batch), "idle ranks, and only they, are told of"


def drift() -> tuple[str, int]:
    """A model whose result is not what the plan foresees."""
    pipeline = tiny.build("t2v")
    before = hooks(pipeline.transformer)
    pipeline.transformer.register_to_config(out_channels=tiny.CHANNELS + 1)
    with ParallelPipeline(pipeline, "cfg2") as pipe:
        error = error_of(pipe, **tiny.call("t2v", num_inference_steps=1), seed=SEED)
    return error, hooks(pipeline.transformer) - before


def test_an_unforeseen_result_is_named(ranks):
    """Requirement 23: shapes are agreed before the exchange; a plan that does not fit is an error with both
    shapes."""
    pool = ranks(2)
    try:
        for error, left in pool.run(drift, timeout_s=20):
            assert "the plan's `output` does not fit this version" in error
            assert left == 0
    finally:
        pool.stop()
