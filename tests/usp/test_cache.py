"""The first-block cache in one process: when it skips, what it then gives, and what it leaves behind."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests import tiny
from tests.usp.caching import (
    ALONE,
    ALWAYS,
    JOINT,
    TOY,
    InPlace,
    Joint,
    Plain,
    Still,
    Toy,
    caching,
    call,
    half_still,
    letters,
    pipeline_call,
    tokens,
    toy_call,
    transformer,
)
from tests.usp.in_ranks import error_of, hooks
from usp.branches import Branches
from usp.cache import BranchReport, cached
from usp.config import CacheConfig
from usp.plan import Blocks
from usp.plans.wan import WAN
from usp.schedulers import with_scheduler


@pytest.mark.parametrize(
    ("steps", "policy", "want"),
    [
        (30, {}, "cccc" + 6 * "sssc" + "sc"),
        (4, {}, "cccc"),
        (5, {}, "ccccc"),
        (30, {"warmup_steps": 0, "max_skip_streak": 1}, 14 * "cs" + "cc"),
        (8, {"warmup_steps": 2, "max_skip_streak": 100}, "ccsssssc"),
        (1, {"warmup_steps": 0}, "c"),
    ],
)
def test_b55_warm_up_streak_and_last_step_are_honoured(steps, policy, want):
    """B55, requirement 28: at a threshold that nothing exceeds, exactly these forwards are computed."""
    model = tiny.transformer()
    with caching(model, ALWAYS, **policy) as cache:
        call(model, cache, half_still(3, steps))
        assert letters(cache.report()[""]) == want


def test_threshold_0_gives_the_bits_of_no_cache_and_10_does_not():
    """Off and never are the same bits; always differs where it skips, and only there."""
    model, steps = transformer(), half_still(5, 6)
    with torch.no_grad():
        plain = [model(**step).sample for step in steps]
    with caching(model, 0.0) as never:
        assert all(map(torch.equal, plain, call(model, never, steps)))
        call(model, never, steps[:1] * 8)
        assert letters(never.report()[""]) == 8 * "c", "not even where nothing changes"
    with caching(model, ALWAYS, warmup_steps=2) as always:
        same = list(map(torch.equal, plain, call(model, always, steps)))
        assert same == [True, True, False, False, False, True]


def test_a_skipped_forward_adds_what_the_other_blocks_added():
    """The first block's output now, plus (last output - first output) of the last computed forward."""
    model = Toy(Plain)
    results, report = toy_call(model, ALWAYS)
    assert letters(report) == "cssscc"
    first = [model.blocks[0](tokens(k)) for k in range(4)]
    rest = model(hidden_states=tokens(0)) - first[0]
    residuals = [first[k] - tokens(k) for k in range(4)]
    for k in (1, 2, 3):  # compared with the last computed forward, so that a slow drift adds up
        assert torch.equal(results[k], first[k] + rest)
        change = (residuals[k] - residuals[0]).abs().sum() / residuals[0].abs().sum()
        assert report.changes[k] == pytest.approx(change.item(), rel=1e-6)


def test_a_skipped_forward_runs_the_first_block_alone():
    """B20: attention of the other blocks runs in computed forwards only."""
    model, ran = transformer(), []
    for place, block in enumerate(model.blocks):
        block.attn1.register_forward_hook(lambda m, a, out, place=place: ran.append(place))
    with caching(model, ALWAYS, warmup_steps=2) as cache:
        call(model, cache, half_still(5, 8))
        assert letters(cache.report()[""]) == "ccssscsc"
    assert [ran.count(place) for place in range(3)] == [8, 4, 4]


@pytest.mark.parametrize("threshold", [0.0, 0.06, ALWAYS])
def test_a_block_may_change_its_input_in_place(threshold):
    """Blocks that write over their input: the results, decisions and changes of blocks that do not."""
    plain, in_place = toy_call(Toy(Plain), threshold), toy_call(Toy(InPlace), threshold)
    assert all(map(torch.equal, plain[0], in_place[0]))
    assert plain[1] == in_place[1]
    assert (plain[1].hits > 0) == (threshold > 0)


def test_both_streams_of_joint_blocks_are_cached():
    """Blocks that return (text, picture): both residuals are reused; a text that ends stays None."""
    model = Toy(Joint, count=2)
    never, always = (toy_call(model, threshold, plan=JOINT)[0] for threshold in (0.0, ALWAYS))
    assert torch.equal(never[0], always[0])
    assert not torch.equal(never[1], always[1])
    seen = []
    model.blocks[1].register_forward_hook(lambda m, a, out: seen.append(out))
    toy_call(model, ALWAYS, plan=JOINT)
    text = torch.ones(1, 2, 4)
    firsts = [model.blocks[0](tokens(k), text) for k in (0, 1)]
    lasts = model.blocks[1](firsts[0][1], firsts[0][0])
    for got, first, now, last in zip(seen[1], *firsts, lasts, strict=True):
        assert torch.equal(got, now + (last - first))
    results, report = toy_call(Toy(Joint), ALWAYS, plan=JOINT)
    assert letters(report) == "cssscc"
    assert all(torch.isfinite(r).all() for r in results)


def test_a_zero_denominator_means_compute():
    """A first block that adds nothing, and one that gives NaN: every forward is computed."""
    model = Toy(Plain)
    model.blocks[0] = Still(0)
    results, report = toy_call(model, ALWAYS)
    assert letters(report) == "cccccc"
    assert report.changes == (float("inf"),) * 6
    assert torch.equal(results[3], model(hidden_states=tokens(3)))
    model.blocks[0] = Plain(float("nan"))
    assert letters(toy_call(model, ALWAYS)[1]) == "cccccc"


def test_b54_each_branch_has_its_own_state():
    """B54: two forwards a step, one branch still and one moving: each as if it were alone."""
    moving, still = half_still(5, 8, seed=3), half_still(5, 1, seed=9) * 8
    model, alone = transformer(), {}
    with caching(model, 0.1, warmup_steps=2) as cache:
        for name, steps in (("cond", moving), ("uncond", still)):
            results = call(model, cache, steps, name=name)
            alone[name] = (results, cache.report()[name])
        cache.begin_call(is_last=lambda done: done == 7)
        for k, steps in enumerate(zip(moving, still, strict=True)):
            for name, step in zip(("cond", "uncond"), steps, strict=True):
                with model.cache_context(name), torch.no_grad():
                    assert torch.equal(model(**step).sample, alone[name][0][k])
        assert cache.report() == {name: report for name, (_, report) in alone.items()}
        assert letters(alone["cond"][1]) != letters(alone["uncond"][1]) == "ccssscsc"


def test_b56_each_expert_has_its_own_cache():
    """B56, requirement 30: two experts, two branches: four lists; an expert's first forward is computed."""
    for kind, lists in (
        ("two_experts", {"transformer": "cssscsssc", "transformer_2": "csc"}),
        ("low_noise_only", {"transformer_2": "cssscssscssc"}),
    ):
        _, reports = pipeline_call(tiny.build(kind), ALWAYS, kind, num_inference_steps=12)
        found = {name: {letters(r) for r in report.values()} for name, report in reports.items()}
        assert all(set(report) == {"cond", "uncond"} for report in reports.values())
        assert found == {name: {text} for name, text in lists.items()}


def test_a_scheduler_may_call_the_model_twice_a_step():
    """Heun: 6 steps are 11 forwards of each branch, all counted, the last one computed."""
    pipe = tiny.build("t2v")
    pipe.scheduler = with_scheduler(pipe.scheduler, "heun")
    _, reports = pipeline_call(pipe, ALWAYS, "t2v", num_inference_steps=6)
    assert {letters(r) for r in reports["transformer"].values()} == {"csss" + "csss" + "csc"}


def test_call_n_equals_a_fresh_one_also_after_an_error():
    """Requirement 27: neither an exception between blocks nor going on after it reaches the next call."""
    model, steps = transformer(), half_still(5, 8)
    with caching(model, ALWAYS, warmup_steps=2) as cache:
        fresh = call(model, cache, steps)
        report = cache.report()
        for place, block in ((1, 0), (1, 1), (5, 1), (3, 2)):
            count = [0]

            def fail(*_, count=count, place=place):
                count[0] += 1
                if count[0] > place:
                    raise OSError("unplugged")

            handle = model.blocks[block].register_forward_hook(fail)
            with pytest.raises(OSError, match="unplugged"):
                call(model, cache, steps)
            handle.remove()
            with torch.no_grad():
                assert torch.isfinite(model(**steps[0]).sample).all()  # the same call goes on
            assert all(map(torch.equal, fresh, call(model, cache, steps)))
            assert cache.report() == report


def test_nothing_of_a_call_is_held_after_it():
    """After `end_call` the tensors are gone and forwards pass; the report stays, also after `close`."""
    model, steps, held = transformer(), half_still(5, 4), []
    with caching(model, ALWAYS, warmup_steps=1) as cache:
        peek = model.blocks[1].attn1.register_forward_hook(lambda *_: held.append(cache._states[""].rest))
        call(model, cache, steps)
        peek.remove()
        assert held == [None, None], "a computed forward does not hold the last one's tensors beside its own"
        assert all(s.residual is None and s.rest is None for s in cache._states.values())
        with torch.no_grad():
            outside = model(**steps[2]).sample
        assert len(cache.report()[""].skipped) == 4
    with torch.no_grad():
        assert torch.equal(outside, model(**steps[2]).sample)
    assert letters(cache.report()[""]) == "cssc"


def test_close_gives_the_model_back():
    """Attributes, hooks and bits as before; twice; an own forward is put back; a later wrapper stays."""
    model, steps = transformer(), half_still(5, 3)
    own = model.blocks[1].forward
    model.blocks[1].forward = own  # as offload hooks do
    before, hooked = [dict(b.__dict__) for b in model.blocks], hooks(model)
    with torch.no_grad():
        want = model(**steps[0]).sample
    with caching(model, ALWAYS, warmup_steps=0) as cache:
        call(model, cache, steps)
    cache.close()
    assert [dict(b.__dict__) for b in model.blocks] == before
    assert hooks(model) == hooked
    with torch.no_grad():
        assert torch.equal(model(**steps[0]).sample, want)
    with caching(model, ALWAYS, warmup_steps=0):
        under = model.blocks[2].forward
        model.blocks[2].forward = later = lambda *a, **k: under(*a, **k)
    assert model.blocks[2].forward is later
    with torch.no_grad():
        assert torch.equal(model(**steps[0]).sample, want)


def test_hooks_of_others_run_in_every_forward():
    """Hooks are called whether or not a block is skipped; one that changes the last result does so once."""
    model, calls = Toy(Plain), []
    for block in model.blocks:
        block.register_forward_hook(lambda m, a, out: calls.append(m))
    model.blocks[2].register_forward_hook(lambda m, a, out: 2 * out)
    results, report = toy_call(model, ALWAYS)
    assert report.hits == 3
    assert [calls.count(block) for block in model.blocks] == [6, 6, 6]
    doubled, _ = toy_call(Toy(Plain), ALWAYS)
    assert all(torch.equal(got, 2 * want) for got, want in zip(results, doubled, strict=True))


def test_b71_compiled_blocks_decide_alike():
    """B71: blocks under torch.compile (eager backend): the same bits and decisions, in few graphs."""
    model, steps = tiny.transformer(), half_still(5, 5)
    with caching(model, ALWAYS, warmup_steps=2) as cache:
        want, report = call(model, cache, steps), cache.report()
    for block in model.blocks:
        block.compile(backend="eager")
    with caching(model, ALWAYS, warmup_steps=2) as cache:
        assert all(map(torch.equal, want, call(model, cache, steps)))
        assert cache.report() == report


def test_half_precision_is_cached_as_it_is():
    """bf16: residuals are held in bf16; the change is measured in fp32 or wider, within 2 % of fp32's."""
    model, steps = transformer(), half_still(13, 4)
    with caching(model, 0.0) as cache:
        call(model, cache, steps)
        want = cache.report()[""].changes
    model = model.to(torch.bfloat16)
    steps = [{k: v.bfloat16() if v.is_floating_point() else v for k, v in step.items()} for step in steps]
    with caching(model, 0.0) as cache:
        cache.begin_call()
        with torch.no_grad():
            results = [model(**step).sample for step in steps]
        assert cache._states[""].residual.dtype == results[0].dtype == torch.bfloat16
        assert cache.report()[""].changes == pytest.approx(want, rel=0.02)


def test_the_report_says_what_was_skipped():
    """Text with ranges from 1, JSON that is JSON, time saved, and a notice when nothing was skipped."""
    report = BranchReport((False, False, True, True, True, False, True), (float("inf"), 0.5) + 5 * (0.1,))
    assert str(report) == "4 of 7 skipped: 3-5 7"
    assert str(BranchReport((False, False), (float("inf"), 0.1))) == "0 of 2 skipped"
    assert json.loads(json.dumps(report.as_json(), allow_nan=False))["changes"][:2] == [None, 0.5]
    assert report.as_json()["hits"] == 4
    model, steps = tiny.transformer(num_layers=8), half_still(21, 8)
    with caching(model, ALWAYS, warmup_steps=2) as cache:
        assert (cache.notice(), cache.report()) == ("", {})
        call(model, cache, steps)
        assert cache.notice() == ""
        assert cache.seconds_saved() > 0.0
    with caching(model, 1e-3) as cache:
        call(model, cache, steps)
        least = min(cache.report()[""].changes[4:-1])
        assert cache.notice() == (
            "the cache skipped none of 8 forwards at threshold 0.001; the smallest change from one to the "
            f"next was {least:.3g}; set the threshold above it, or leave the cache off"
        )
        assert cache.seconds_saved() == 0.0
        call(model, cache, steps[:4])
        assert "a branch had 4, and the first 4 and the last are always computed; take more" in cache.notice()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"threshold": -0.1},
            "threshold=-0.1 was asked for; it is a relative change, a finite number of 0 or more",
        ),
        ({"threshold": float("nan")}, "threshold=nan was asked for"),
        ({"threshold": float("inf")}, "threshold=inf was asked for"),
        ({"threshold": True}, "threshold=True was asked for"),
        ({"threshold": "0.1"}, "threshold='0.1' was asked for"),
        (
            {"threshold": 0.1, "warmup_steps": -1},
            "warmup_steps=-1 was asked for; it is a whole number of steps, 0",
        ),
        ({"threshold": 0.1, "warmup_steps": 1.0}, "warmup_steps=1.0 was asked for"),
        (
            {"threshold": 0.1, "max_skip_streak": 0},
            "max_skip_streak=0 was asked for; it is a whole number of steps, 1",
        ),
    ],
)
def test_wrong_settings_are_refused(options, text):
    """A setting that cannot mean anything is refused with what was asked, what is so and what to do."""
    assert text in error_of(CacheConfig, **options)
    assert "leave" in error_of(CacheConfig, **options)


def test_models_that_cannot_be_cached_are_refused_untouched():
    """One block, no cache_context, diffusers' own cache, other argument names: refused by name."""
    assert "Toy has 1 blocks in 'blocks', and the first always runs" in error_of(toy_call, Toy(Plain, 1), 0.1)
    bare = nn.Module()
    assert "Module has no cache_context" in error_of(
        cached, bare, WAN, CacheConfig(threshold=0.1), group=ALONE, branches=Branches(bare)
    )
    theirs = Toy(Plain)
    theirs.is_cache_enabled = True
    assert "call its disable_cache() first" in error_of(toy_call, theirs, 0.1)
    model = Toy(Plain)
    for outputs, held in ((("hidden_states", "text"), TOY.blocks[0].held), (("hidden_states",), ())):
        plan = replace(TOY, blocks=(Blocks(modules="blocks", outputs=outputs, held=held),))
        found = error_of(toy_call, model, 0.1, plan=plan)
        assert f"that continues {', '.join(outputs)}, one of them the tokens; the first blocks take" in found
        assert not any("forward" in block.__dict__ for block in model.blocks)
    found = error_of(toy_call, model, 0.1, plan=replace(TOY, blocks=()))
    assert "Toy has 0 blocks in its plan" in found
