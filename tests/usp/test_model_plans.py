"""Every plan on its model: one process's result, for every strategy, length and form of input."""

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.usp.in_ranks import EVERY_LAYOUT, forward, largest
from tests.usp.models import MODELS, SPREAD, Inputs
from usp.adapter import matches, matching
from usp.plan import ShardPlan, SplitCount, SplitInput
from usp.plans import PLANS, plan_for

TOLERANCE = 1e-5  # one forward in fp32, several ranks against one: 2e-6 comes out
SMALL, ODD = (1, 1, 3), (1, 3, 7)

Case = tuple[str, dict[str, Any], Inputs]  # a model, changes to its config, and the options of its inputs

# Each model by itself: a name for the case, changes to the config, and options of the inputs.
FORMS: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "WanTransformer3DModel": [({}, {"per_token": True, "batch": 2})],
    "Flux2Transformer2DModel": [({}, {"batched_ids": False})],
    "FluxTransformer2DModel": [
        ({"guidance_embeds": False}, {"guidance": False}),
        ({}, {"batched_ids": True}),
        ({}, {"controlnet": True}),
    ],
    "QwenImageTransformer2DModel": [
        ({}, {"batch": 2, "masked": True}),
        ({}, {"references": ((1, 2, 3), (1, 1, 5))}),
        ({"zero_cond_t": True}, {"references": ((1, 2, 3), (1, 1, 5)), "batch": 2, "masked": True}),
        ({"use_layer3d_rope": True}, {"references": ((1, 3, 7),)}),
        ({}, {"controlnet": True}),
    ],
    "SD3Transformer2DModel": [
        ({"dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}, {}),
        ({}, {"skip_layers": [0, 2]}),
        ({}, {"controlnet": True}),
    ],
    "HunyuanVideoTransformer3DModel": [
        ({}, {"batch": 2}),
        ({"image_condition_type": "token_replace"}, {"grid": (3, 1, 4)}),
        ({"image_condition_type": "token_replace"}, {"grid": (1, 1, 2), "batch": 2}),
    ],
    "LTXVideoTransformer3DModel": [({}, {"per_token": True, "batch": 2})],
    "ZImageTransformer2DModel": [
        ({}, {"batch": 2, "ragged": True}),
        ({}, {"batch": 2, "omni": True}),
        ({}, {"controlnet": True}),
    ],
}


@cache
def model(name: str, *config: tuple[str, Any]) -> Any:
    return MODELS[name].build(**dict(config))


def result(case: Case, layout: str | None = None, plan: ShardPlan | None = None) -> Any:
    """A forward's result, as one tensor; by the model's own plan unless another is given."""
    name, config, options = case
    made = model(name, *config.items())
    out = forward(made, MODELS[name].inputs(**options), layout, plan or plan_for(made))
    return torch.stack(out) if isinstance(out, list) else out


def one_process(case: Case, known: dict[str, Any] = {}) -> Any:  # noqa: B006  kept over many tests
    """The result that every layout is compared with."""
    if str(case) not in known:
        known[str(case)] = result(case)
    return known[str(case)]


def results(cases: list[Case], layout: str) -> list[Any]:
    return [result(case, layout) for case in cases]


def errors(ranks: Any, size: int, layout: str, cases: list[Case]) -> dict[str, list[float]]:
    """For each case, how far each rank is from one process."""
    found: dict[str, list[float]] = {}
    for by_case in ranks(size).run(results, cases, layout):
        for case, got in zip(cases, by_case, strict=True):
            found.setdefault(str(case), []).append(largest(got, one_process(case)))
    return found


def wrong(found: dict[str, list[float]]) -> dict[str, list[float]]:
    return {case: by_rank for case, by_rank in found.items() if not max(by_rank) <= TOLERANCE}


@pytest.mark.parametrize(("size", "layout"), EVERY_LAYOUT)
@pytest.mark.parametrize("name", SPREAD)
def test_every_strategy_matches_one_process(ranks, name, size, layout):
    """B01, B03, req 1 and 6: 21 tokens of picture, 5 and 7 of text, 4 heads on 2 to 4 ranks, batch of two."""
    cases: list[Case] = [
        (name, {}, {"grid": ODD, "text": 5}),
        (name, {}, {"grid": ODD, "text": 7, "batch": 2}),
    ]
    assert not wrong(errors(ranks, size, layout, cases))


@pytest.mark.parametrize(("size", "layout"), [(2, "ulysses2"), (3, "gather_kv3"), (3, "ring3")])
@pytest.mark.parametrize("name", SPREAD)
def test_any_lengths_match_one_process(ranks, name, size, layout):
    """B01, B67, req 1 and 2: text of 1 to 512 tokens with 1 to 32 of picture; shares may be empty."""
    pairs = [((1, 1, 1), 1), (SMALL, 1), ((1, 1, 13), 2), (ODD, 13), (SMALL, 77), (SMALL, 226), (SMALL, 512)]
    # as many tokens as the width, a head's size or its half: only a token axis may be taken for one
    pairs += [((1, 4, 8), 8), ((1, 2, 4), 32), ((1, 2, 5), 10), ((1, 4, 5), 5)]
    cases: list[Case] = [(name, {}, {"grid": grid, "text": text}) for grid, text in pairs]
    assert not wrong(errors(ranks, size, layout, cases))


@pytest.mark.parametrize(
    ("size", "layout"),
    [(2, "ulysses2"), (2, "ring2"), (3, "ulysses3"), (3, "gather_kv3"), (4, "ulysses2 ring2")],
)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_input_matches_one_process(ranks, name, size, layout):
    """B13, B66, req 3, 4 and 7: masked text, several pictures, modulation by token, skipped layers."""
    cases: list[Case] = [
        (name, config, {"grid": SMALL if text == 5 else ODD, "text": text, **options})
        for config, options in FORMS[name]
        for text in (1, 5, 13)
    ]
    assert not wrong(errors(ranks, size, layout, cases))


def test_every_plan_has_a_row():
    """A plan that no row tests is no support."""
    assert set(MODELS) == set(PLANS)


@pytest.mark.parametrize("name", sorted(PLANS))
def test_the_installed_model_takes_what_its_plan_names(name):
    """Req 40: every argument that a plan names is in the forward of every module that the entry matches."""
    plan = PLANS[name]
    made = MODELS[name].build()
    takes = inspect.signature(made.forward).parameters
    output = plan.output
    named = {output.argument, *output.batched, *output.batched_inside, *plan.told_apart_by}
    named |= {entry.argument for entry in plan.refused}
    assert named <= set(takes), f"{name} no longer takes {named - set(takes)}"
    for entry, where, module in matches(made, plan):
        if isinstance(entry, (SplitInput, SplitCount)):
            assert entry.argument in inspect.signature(module.forward).parameters, where
    for blocks in plan.blocks:
        for where, block in matching(made, f"{blocks.modules}.*"):
            known = {entry.argument for entry in (*blocks.held, *blocks.whole)} | set(blocks.outputs)
            assert known <= set(inspect.signature(block.forward).parameters), where


def unneeded(name: str) -> list[str]:
    """The entries of a plan without which every form of input still gives one process's result."""
    plan = PLANS[name]
    forms: list[Case] = [
        (name, config, {"grid": ODD, "text": 5, **options})
        for config, options in [({}, {}), *FORMS.get(name, [])]
    ]
    found = []
    for part in ("splits", "gathers", "attentions"):
        entries = getattr(plan, part)
        for entry in entries:
            less = replace(plan, **{part: tuple(e for e in entries if e is not entry)})
            results = [same(case, less) for case in forms]  # each form on every rank, which may disagree
            if all(results):
                found.append(str(entry))
    return found


def same(case: Case, plan: ShardPlan) -> bool:
    """Whether a forward with this plan ends well, with the result of one process."""
    want = one_process(case)
    try:
        got = result(case, "ulysses2", plan)
    except (ValueError, RuntimeError):  # alike on both ranks
        return False
    return largest(got, want) <= 100 * TOLERANCE


@pytest.mark.parametrize("name", SPREAD)
def test_no_entry_of_a_plan_can_be_left_out(ranks, name):
    """B20, B66: without any one entry a form of input is an error, or wrong: these tests would see it."""
    first, second = ranks(2).run(unneeded, name)
    assert not {*first} & {*second}
