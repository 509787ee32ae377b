"""Our shard plans name what is there, and cut what diffusers' own plans cut."""

from typing import Any

import diffusers
import pytest
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

from tests import tiny
from usp.plan import GatherOutput, SplitInput, SplitOutput
from usp.plans import PLANS, plan_for


def cuts(plan: Any) -> set[tuple[Any, ...]]:
    """What a plan of ours cuts and gathers: (what, module, argument or index, dim, ndim)."""
    found: set[tuple[Any, ...]] = {("gather", g.module, None, g.dim) for g in plan.gathers}
    for split in plan.splits:
        if isinstance(split, SplitInput):
            found.add(("split input", split.module, split.argument, split.dim, split.ndim))
        elif isinstance(split, SplitOutput):
            found.add(("split output", split.module, split.index, split.dim, split.ndim))
    return found


def diffusers_cuts(plan: dict[str, Any]) -> set[tuple[Any, ...]]:
    """The same of a `_cp_plan`."""
    found: set[tuple[Any, ...]] = set()
    for module, entry in plan.items():
        if isinstance(entry, ContextParallelOutput):
            found.add(("gather", module, None, entry.gather_dim))
            continue
        for key, cut in entry.items():
            assert isinstance(cut, ContextParallelInput)
            what = "split output" if cut.split_output else "split input"
            found.add((what, module, key, cut.split_dim, cut.expected_dims))
    return found


# How many cuts diffusers' plan of a class has, and what ours cuts beside them.
COMPARED: dict[str, tuple[int, set[tuple[Any, ...]]]] = {
    "LTXVideoTransformer3DModel": (6, {("split input", "", "timestep", 1, 2)}),
    "WanTransformer3DModel": (5, set()),
    "FluxTransformer2DModel": (
        5,
        {
            ("split input", "", "img_ids", 1, 3),
            ("split input", "", "txt_ids", 1, 3),
            ("split input", "", "controlnet_block_samples", 1, 3),
            ("split input", "", "controlnet_single_block_samples", 1, 3),
        },
    ),
    "Flux2Transformer2DModel": (
        5,
        {("split input", "", "img_ids", 0, 2), ("split input", "", "txt_ids", 0, 2)},
    ),
    "QwenImageTransformer2DModel": (7, {("split input", "", "controlnet_block_samples", 1, 3)}),
}


@pytest.mark.parametrize("name", sorted(PLANS))
def test_models_are_cut_where_diffusers_cuts_them(name):
    """Req 7: where a class has a `_cp_plan`, we cut what it cuts and what `COMPARED` names, no more."""
    theirs = getattr(getattr(diffusers, name), "_cp_plan", None)
    if theirs is None:
        assert name not in COMPARED
        return
    size, more = COMPARED[name]
    found = diffusers_cuts(theirs)
    assert len(found) == size, "diffusers changed its plan; look at what is new"
    crossed = (
        name == "LTXVideoTransformer3DModel"
    )  # text that is attended to across: whole with us, no exchange
    found -= {cut for cut in found if crossed and "encoder" in str(cut[2])}
    assert cuts(PLANS[name]) == found | more


def test_wan_shares_exactly_its_self_attention():
    """Req 5: the plan names every self-attention and no cross-attention, known by the module's own flag."""
    plan = PLANS["WanTransformer3DModel"]
    model = tiny.transformer(num_layers=3)
    (entry,) = plan.attentions
    own = {name for name, m in model.named_modules() if getattr(m, "is_cross_attention", None) is False}
    assert own == {f"blocks.{i}.attn1" for i in range(3)}
    assert entry.modules == "blocks.*.attn1"
    assert entry.streams == ("tokens",)


@pytest.mark.parametrize("name", sorted(PLANS))
def test_every_plan_is_for_a_class_that_diffusers_has(name):
    """A plan is found by its model's class name, and reads config entries that the class takes."""
    plan = PLANS[name]
    assert plan.model == name
    taken = getattr(diffusers, name).__init__.__wrapped__.__code__.co_varnames
    assert plan.head_config in taken
    assert plan.head_dim_config in taken or not plan.attentions
    assert {*plan.output.channels, *plan.output.times} <= set(taken)
    assert all(isinstance(g, GatherOutput) for g in plan.gathers)


def test_a_model_without_a_plan_is_told_where_to_add_one():
    """Req 40: the message has the class, the classes with plans, and the file to write."""
    with pytest.raises(
        ValueError, match=r"^LTX2VideoTransformer3DModel has no shard plan \(its audio attends"
    ):
        plan_for(type("LTX2VideoTransformer3DModel", (), {})())
    with pytest.raises(
        ValueError, match=r"^Thing has no shard plan; there are plans for .*WanTransformer3DModel"
    ) as caught:
        plan_for(type("Thing", (), {})())
    assert "write usp/plans/<family>.py and list it in usp/plans/__init__.py" in str(caught.value)
