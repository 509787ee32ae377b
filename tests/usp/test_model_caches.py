"""The first-block cache on every model that has one: the decisions and results of one process."""

from contextlib import ExitStack, nullcontext
from functools import cache
from typing import Any

import pytest
import torch

from tests.usp.caching import caching, letters
from tests.usp.models import MODELS, SPREAD, Inputs, noise
from usp.plans import PLANS, plan_for

TOLERANCE = 1e-4  # six steps in fp32, each taking the last one's result
STEPS = 7
# What each model's steps are like: a threshold between the changes that its steps make.
OPTIONS: dict[str, dict[str, Any]] = {
    "QwenImageTransformer2DModel": {"masked": True},
    "ZImageTransformer2DModel": {"ragged": True},
}
LAYOUTS = [(2, "gather_kv2"), (3, "ulysses3"), (4, "ulysses2 ring2")]


def steps(name: str, batch: int) -> list[Inputs]:
    """Inputs that drift in some steps and jump in others."""
    row = MODELS[name]
    made = []
    for step in range(STEPS):
        inputs = row.inputs((1, 3, 7), 5, batch, **OPTIONS.get(name, {}))
        key = PLANS[name].output.argument
        move = 0.02 * step if step < 4 else 0.5 * step
        value = inputs[key]
        if isinstance(value, list):
            inputs[key] = [v + move * noise(*v.shape, seed=20) for v in value]
        else:
            inputs[key] = value + move * noise(*value.shape, seed=20)
        made.append(inputs)
    return made


def run(name: str, layout: str | None, threshold: float) -> tuple[list[torch.Tensor], dict[str, str]]:
    """Results of a call's forwards, two branches where the model names them, and the decisions."""
    model = MODELS[name].build()
    plan = plan_for(model)
    names = [None] if plan.stacked else ["cond", "uncond"]
    with ExitStack() as stack, torch.no_grad():
        one = stack.enter_context(caching(model, threshold, plan=plan, layout=layout, warmup_steps=1))
        one.begin_call(is_last=lambda done: done == STEPS - 1)
        out = []
        for inputs in steps(name, 2):
            for branch in names:
                if branch == "uncond":
                    inputs = {**inputs, "encoder_hidden_states": -inputs["encoder_hidden_states"]}
                with model.cache_context(branch) if branch else nullcontext():
                    sample = model(**inputs, return_dict=False)[0]
                out.append(torch.stack(sample) if isinstance(sample, list) else sample)
        return out, {branch: letters(report) for branch, report in one.report().items()}


@cache
def alone(name: str, threshold: float) -> tuple[list[torch.Tensor], dict[str, str]]:
    return run(name, None, threshold)


THRESHOLD = 0.1


@pytest.mark.parametrize("name", SPREAD)
def test_the_cache_skips_and_a_skip_is_near(name):
    """Drifting steps are skipped, jumps are computed; threshold 0 is exact, and a skip is not."""
    results, decisions = alone(name, THRESHOLD)
    exact, none = alone(name, 0.0)
    assert all("s" in text and "c" in text[1:-1] for text in decisions.values()), decisions
    assert all(set(text) == {"c"} for text in none.values())
    for got, want in zip(results, exact, strict=True):
        assert (got - want).abs().max() < 0.5 * want.abs().max()
    assert any(not torch.equal(got, want) for got, want in zip(results, exact, strict=True))


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
@pytest.mark.parametrize("name", SPREAD)
def test_ranks_decide_as_one_process(ranks, name, size, layout):
    """B54, req 22 and 28: double and single blocks, text and picture: the same list, the same results."""
    want, decisions = alone(name, THRESHOLD)
    for got, found in ranks(size).run(run, name, layout, THRESHOLD):
        assert found == decisions
        for a, b in zip(got, want, strict=True):
            assert (a - b).abs().max() <= TOLERANCE


def skip_layer_guidance(layout: str | None) -> tuple[torch.Tensor, dict[str, str]]:
    """Stacked guidance of a batch of two, and in every other step a forward of one that leaves out layers."""
    name = "SD3Transformer2DModel"
    model = MODELS[name].build()
    with (
        caching(model, THRESHOLD, plan=plan_for(model), layout=layout, warmup_steps=1) as one,
        torch.no_grad(),
    ):
        one.begin_call()
        out = []
        for step, inputs in enumerate(steps(name, 2)):
            out.append(model(**inputs)[0])
            if step % 2 == 0:
                half = {key: value[:1] for key, value in inputs.items()}
                out.append(model(**half, skip_layers=[0] if step == 4 else [1])[0])
        return torch.cat(out), {branch: letters(report) for branch, report in one.report().items()}


def test_skip_layer_guidance_is_a_branch_of_its_own(ranks):
    """Req 28: stacked forwards and those with `skip_layers` do not meet; block 0 may be left out."""
    want, decisions = skip_layer_guidance(None)
    assert list(decisions) == ["", "skip_layers=[1]"]
    for got, found in ranks(2).run(skip_layer_guidance, "ulysses2"):
        assert found == decisions
        assert (got - want).abs().max() <= TOLERANCE
