"""The first-block cache: one decision for all ranks, the one that one process takes."""

import math
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import usp.cache
from tests import tiny
from tests.usp.in_ranks import EVERY_LAYOUT, error_of, hooks, seeded
from tests.usp.test_attention import cached_groups
from usp import comm
from usp.adapter import sharded
from usp.attention import SequenceAttention
from usp.branches import Branches
from usp.cache import BranchReport, cached
from usp.config import CacheConfig, parse_parallel
from usp.mesh import Group
from usp.plan import ShardPlan, SplitInput
from usp.plans.wan import WAN

ALONE = Group((0,), 0)
ALWAYS = 10.0  # a threshold that every change is under
FP32 = 1e-5  # what ring, and matmuls of other shapes, may differ by; ten times what comes out


@contextmanager
def caching(model, threshold, *, plan=WAN, layout=None, cache_first=False, outputs=("hidden_states",), **policy):
    """A cache on `model`, alone or with its tokens over the ranks of `layout`; closed at the end."""
    branches, made = Branches(model), {}
    groups = cached_groups(parse_parallel(layout)) if layout else None

    def shard():
        if groups is not None:
            made["shard"] = sharded(model, plan, SequenceAttention(groups))

    if not cache_first:
        shard()
    cache = cached(
        model,
        plan,
        CacheConfig(threshold=threshold, **policy),
        group=groups.sp if groups else ALONE,
        branches=branches,
        share_of=(lambda stream: made["shard"].share_of(stream)) if groups else None,
        outputs=outputs,
    )
    if cache_first:
        shard()
    try:
        yield cache
    finally:
        for part in (cache, branches, *made.values()):
            part.close()


def half_still(tokens, steps, *, seed=0):
    """One row of tokens over some steps: the first half is constant, the second half moves ever more."""
    inputs = tiny.model_inputs((1, 1, tokens), seed=seed)
    moving = torch.zeros(2 * tokens)
    moving[tokens // 2 * 2 :] = 1.0
    noise = [torch.randn(inputs["hidden_states"].shape, generator=seeded(seed + 1 + k)) for k in range(steps)]
    pace = [0.15 * (1 + k % 3) for k in range(steps)]
    return [
        {**inputs, "hidden_states": inputs["hidden_states"] + p * n * moving}
        for p, n in zip(pace, noise, strict=True)
    ]


def forwards(model, cache, steps, *, last=True, name=None):
    """A call of one forward a step: the result of each."""
    cache.begin_call(is_last=(lambda done: done == len(steps) - 1) if last else None)
    results = []
    for step in steps:
        with model.cache_context(name) if name else nullcontext(), torch.no_grad():
            results.append(model(**step).sample)
    cache.end_call()
    return results


def transformer():
    """Three layers: one block before and one behind a block in the middle."""
    return tiny.transformer(num_layers=3)


def one_list(threshold, tokens, steps=10, **options):
    """The decisions and changes for `half_still` tokens, here."""
    model = transformer()
    with caching(model, threshold, warmup_steps=1, **options) as cache:
        forwards(model, cache, half_still(tokens, steps))
        return cache.report()[""]


def several_lists(layout, tokens, thresholds, **options):
    return [one_list(threshold, tokens, layout=layout, **options) for threshold in thresholds]


def mixed_thresholds(tokens, count=4):
    """Thresholds at which some steps are skipped and some not, each well away from every change."""
    low, high = min(one_list(0.0, tokens).changes[1:]), max(one_list(0.0, tokens).changes[1:])
    found = [low + (high - low) * (i + 0.5) / count for i in range(count)]
    for threshold in found:
        report = one_list(threshold, tokens)
        assert min(abs(c / threshold - 1) for c in report.changes) > 1e-3, "too close to call in fp32"
    return found


def changes_of_shares(tokens, sizes, steps=10):
    """What each rank would see in its own tokens from one step to the next: (steps - 1, ranks)."""
    model, before, residuals = transformer(), [], []
    model.blocks[0].register_forward_pre_hook(lambda m, a: before.append(a[0]))
    model.blocks[0].register_forward_hook(lambda m, a, out: residuals.append(out - before.pop()))
    with torch.no_grad():
        for step in half_still(tokens, steps):
            model(**step)
    pairs = zip(residuals[1:], residuals[:-1], strict=True)
    split = [(new.split(sizes, 1), old.split(sizes, 1)) for new, old in pairs]
    return [[((n - o).abs().sum() / o.abs().sum()).item() for n, o in zip(*both, strict=True)] for both in split]


@pytest.mark.parametrize(
    ("size", "layout", "tokens"),
    [(2, layout, 13) for layout in ("ulysses2", "gather_kv2", "ring2")]
    + [(4, layout, 21) for layout in ("ulysses4", "gather_kv4", "ring4", "ulysses2 ring2")]
    + [(3, "gather_kv3", 13)],
)
def test_b10_every_rank_decides_as_one_process(ranks, size, layout, tokens):
    """B10, requirement 22: uneven shares, one half still and one moving: the one-process list on each rank."""
    thresholds = mixed_thresholds(tokens)
    want = [one_list(threshold, tokens) for threshold in thresholds]
    assert len({report.skipped for report in want}) > 1, "the thresholds are meant to matter"
    sizes = [len(t) for t in torch.tensor_split(torch.arange(tokens), size)]
    local = changes_of_shares(tokens, sizes)
    assert any(min(row) < t < max(row) for row in local for t in thresholds), "ranks are meant to disagree"
    by_rank = ranks(size).run(several_lists, layout, tokens, thresholds)
    assert all(reports == by_rank[0] for reports in by_rank), "the same bits on every rank"
    for got, expected in zip(by_rank[0], want, strict=True):
        assert got.skipped == expected.skipped
        assert got.changes == pytest.approx(expected.changes, rel=FP32)


def deciding_alone(layout, tokens, threshold):
    """The list of this rank when it asks nobody; attention to local tokens only, or the ranks would hang."""
    whole, asked = SequenceAttention.__call__, usp.cache.agree_sums
    local = torch.nn.functional.scaled_dot_product_attention
    SequenceAttention.__call__ = lambda self, *qkv, **_: local(*(t.transpose(1, 2) for t in qkv)).transpose(1, 2)
    usp.cache.agree_sums = lambda sums, *, group: sums.tolist()
    try:
        model = transformer()
        model.proj_out.register_forward_hook(lambda m, a, out: out)
        with caching(model, threshold, layout=layout, warmup_steps=1) as cache:
            forwards(model, cache, half_still(tokens, 10))
            return cache.report()[""].skipped
    finally:
        SequenceAttention.__call__, usp.cache.agree_sums = whole, asked


def test_these_tests_would_see_a_decision_taken_alone(ranks):
    """Without the agreement the two ranks' lists differ at some of the thresholds used above."""
    lists = [ranks(2).run(deciding_alone, "ulysses2", 13, t) for t in mixed_thresholds(13)]
    assert any(first != second for first, second in lists)


@pytest.mark.parametrize(("size", "tokens"), [(2, 1), (4, 3), (3, 2), (4, 2)])
def test_an_empty_share_does_not_count(ranks, size, tokens):
    """Fewer tokens than ranks: the token that carries an empty share is in no sum."""
    want = several_lists(None, tokens, [0.0, 0.4])
    for layout in (f"ulysses{size}", f"gather_kv{size}", f"ring{size}"):
        for got in ranks(size).run(several_lists, layout, tokens, [0.0, 0.4]):
            assert [r.skipped for r in got] == [r.skipped for r in want]
            for report, expected in zip(got, want, strict=True):
                assert report.changes == pytest.approx(expected.changes, rel=FP32)


def in_either_order(layout):
    return [several_lists(layout, 13, [0.5], cache_first=first) for first in (False, True)]


@pytest.mark.parametrize(("size", "layout"), EVERY_LAYOUT)
def test_cache_and_plan_may_be_applied_in_either_order(ranks, size, layout):
    """With every strategy, the cache under or over the adapter's hooks: the same decisions."""
    want = one_list(0.5, 13).skipped
    for before, after in ranks(size).run(in_either_order, layout):
        assert [before[0].skipped, after[0].skipped] == [want, want]


def outputs_at(layout, tokens, threshold):
    """The results of a call with a cache, and without one where the threshold is None."""
    model, steps = transformer(), half_still(tokens, 8)
    if threshold is None:
        with caching(model, ALWAYS, layout=layout), torch.no_grad():  # not begun: forwards pass
            return [model(**step).sample for step in steps], ()
    with caching(model, threshold, layout=layout, warmup_steps=2) as cache:
        return forwards(model, cache, steps), cache.report()[""].skipped


def never_and_always(layout, tokens):
    return [outputs_at(layout, tokens, threshold) for threshold in (None, 0.0, ALWAYS)]


@pytest.mark.parametrize(("size", "layout"), [e for e in EVERY_LAYOUT if e[0] in (2, 4)])
def test_b29_shapes_and_values_hold_whichever_path_is_taken(ranks, size, layout):
    """B29, requirement 28: 22 tokens; threshold 0 gives the bits of no cache, 10 skips and equals one process."""
    alone = outputs_at(None, 22, ALWAYS)
    assert alone[1] == (False, False, True, True, True, False, True, False)
    for plain, never, always in ranks(size).run(never_and_always, layout, 22):
        assert all(map(torch.equal, plain[0], never[0]))
        assert not any(never[1])
        assert always[1] == alone[1]
        for got, expected in zip(always[0], alone[0], strict=True):
            assert got.shape == expected.shape
            assert (got - expected).abs().max() <= FP32
        assert not torch.equal(always[0][2], plain[0][2]), "a skipped step is meant to differ"


def collectives(layout, tokens):
    """How many forwards there were here, and how often this rank entered the agreement."""
    entered, real = [], usp.cache.agree_sums
    usp.cache.agree_sums = lambda sums, *, group: entered.append(sums.tolist()) or real(sums, group=group)
    try:
        return len(several_lists(layout, tokens, [ALWAYS])[0].skipped), len(entered), entered[0], entered[-1]
    finally:
        usp.cache.agree_sums = real


@pytest.mark.parametrize(("size", "tokens"), [(2, 13), (4, 3)])
def test_every_rank_enters_the_agreement_in_every_forward(ranks, size, tokens):
    """First, warm-up, skipped and last forwards, and an empty share: one collective each; no hang in 20 s."""
    ranks(size).run(collectives, f"ulysses{size}", tokens)  # the pool's start is not timed
    found = ranks(size).run(collectives, f"ulysses{size}", tokens, timeout_s=20.0)
    for share, (count, entered, first, last) in zip(tokens_of(tokens, size), found, strict=True):
        assert count == entered == 10
        assert first == [0.0, 0.0]
        assert (last[1] > 0) == (share > 0)


def tokens_of(tokens, size):
    return [len(t) for t in torch.tensor_split(torch.arange(tokens), size)]


def one_branch_each(layout):
    """Each half of the ranks runs its own branch, and not equally often: its decisions."""
    groups = cached_groups(parse_parallel(layout))
    name, steps = branch_steps()[groups.cfg.rank]
    model = transformer()
    with caching(model, 0.3, layout=layout, warmup_steps=1) as cache:
        forwards(model, cache, steps, name=name)
        return cache.report()


def branch_steps():
    """A branch that moves, and a still one with fewer steps."""
    return [("cond", half_still(13, 9, seed=3)), ("uncond", half_still(13, 1, seed=5) * 6)]


def test_guidance_halves_are_not_coupled(ranks):
    """B10, B54: cfg 2 x ulysses 2: each half agrees among its own ranks, as in one process, however long the other runs."""
    alone = {}
    for name, steps in branch_steps():
        model = transformer()
        with caching(model, 0.3, warmup_steps=1) as cache:
            forwards(model, cache, steps, name=name)
            alone |= cache.report()
    assert alone["cond"].skipped != alone["uncond"].skipped
    found = ranks(4).run(one_branch_each, "cfg2 ulysses2", timeout_s=60.0)
    for report, name in zip(found, ("cond", "cond", "uncond", "uncond"), strict=True):
        assert {n: r.skipped for n, r in report.items()} == {name: alone[name].skipped}


def agreed(dtype):
    groups = cached_groups(parse_parallel(f"ulysses{dist.get_world_size()}"))
    mine = torch.tensor([0.1 * (dist.get_rank() + 1), 1e8 * dist.get_rank()], dtype=dtype)
    return comm.agree_sums(mine, group=groups.sp), dict(groups.sp.sent)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_agreed_sums_are_the_same_bits_on_every_rank(ranks, size):
    """Sums in rank order, float64 also of fp32 numbers; not counted as traffic; alone they are one's own."""
    for dtype in (torch.float64, torch.float32):
        results = ranks(size).run(agreed, dtype)
        rows = [[torch.tensor(v, dtype=dtype).item() for v in (0.1 * (r + 1), 1e8 * r)] for r in range(size)]
        assert all(sums == [sum(column) for column in zip(*rows, strict=True)] for sums, _ in results)
        assert all("agree_sums" not in sent for _, sent in results)
    assert comm.agree_sums(torch.tensor([1.0, 2.0]), group=ALONE) == [1.0, 2.0]
