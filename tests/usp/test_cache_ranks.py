"""The first-block cache on several ranks: one decision for all, the one that one process takes."""

from functools import cache as remember

import pytest
import torch
import torch.distributed as dist

import usp.cache
from tests import tiny
from tests.usp.caching import (
    ALONE,
    ALWAYS,
    caching,
    call,
    half_still,
    letters,
    pipeline_call,
    transformer,
)
from tests.usp.in_ranks import EVERY_LAYOUT, SEED
from tests.usp.test_attention import cached_groups
from usp import comm
from usp.attention import SequenceAttention
from usp.config import CacheConfig, parse_parallel
from usp.pipeline import ParallelPipeline

FP32 = 1e-5  # what ring, and matmuls of other shapes, may differ by; ten times what comes out
STEPS = 8


def one_list(threshold, tokens, **options):
    """The decisions and changes for `half_still` tokens, here."""
    model = transformer()
    with caching(model, threshold, warmup_steps=1, **options) as cache:
        call(model, cache, half_still(tokens, STEPS))
        return cache.report()[""]


def several_lists(layout, tokens, thresholds, **options):
    return [one_list(threshold, tokens, layout=layout, **options) for threshold in thresholds]


@remember
def mixed_thresholds(tokens):
    """Thresholds at which some steps are skipped and some not, each well away from every change."""
    changes = one_list(0.0, tokens).changes[1:]
    found = [min(changes) + (max(changes) - min(changes)) * part for part in (0.2, 0.5, 0.8)]
    for threshold in found:
        report = one_list(threshold, tokens)
        assert min(abs(c / threshold - 1) for c in report.changes) > 1e-3, "too close to call in fp32"
    return found


def shares(tokens, size):
    return [len(t) for t in torch.tensor_split(torch.arange(tokens), size)]


def changes_of_shares(tokens, size):
    """What each rank would see in its own tokens from one step to the next: a row of `size` per step."""
    model, before, residuals = transformer(), [], []
    model.blocks[0].register_forward_pre_hook(lambda m, a: before.append(a[0]))
    model.blocks[0].register_forward_hook(lambda m, a, out: residuals.append(out - before.pop()))
    with torch.no_grad():
        for step in half_still(tokens, STEPS):
            model(**step)
    parts = [residual.split(shares(tokens, size), 1) for residual in residuals]
    return [
        [((new - old).abs().sum() / old.abs().sum()).item() for new, old in zip(*pair, strict=True)]
        for pair in zip(parts[1:], parts[:-1], strict=True)
    ]


@pytest.mark.parametrize(
    ("size", "layout", "tokens"),
    [
        *((2, layout, 13) for layout in ("ulysses2", "gather_kv2", "ring2")),
        (3, "gather_kv3", 13),
        *((4, layout, 21) for layout in ("ulysses4", "gather_kv4", "ring4", "ulysses2 ring2")),
    ],
)
def test_b10_every_rank_decides_as_one_process(ranks, size, layout, tokens):
    """B10, requirement 22: uneven shares, one half still, one moving: the one-process list on every rank."""
    thresholds = mixed_thresholds(tokens)
    want = [one_list(threshold, tokens) for threshold in thresholds]
    assert len({report.skipped for report in want}) > 1, "the thresholds are meant to matter"
    local = changes_of_shares(tokens, size)
    assert any(min(row) < t < max(row) for row in local for t in thresholds), "ranks are meant to disagree"
    by_rank = ranks(size).run(several_lists, layout, tokens, thresholds)
    assert all(reports == by_rank[0] for reports in by_rank), "the same bits on every rank"
    for got, expected in zip(by_rank[0], want, strict=True):
        assert got.skipped == expected.skipped
        assert got.changes == pytest.approx(expected.changes, rel=FP32)


def deciding_alone(layout, tokens, thresholds):
    """This rank's lists when it asks nobody; its attention stays local, or the ranks would hang."""
    attend, agree = SequenceAttention.__call__, usp.cache.agree_sums
    local = torch.nn.functional.scaled_dot_product_attention

    def attend_here(self, *qkv, **_):
        return local(*(t.transpose(1, 2) for t in qkv)).transpose(1, 2)

    SequenceAttention.__call__ = attend_here
    usp.cache.agree_sums = lambda sums, *, group: sums.tolist()
    try:
        return [report.skipped for report in several_lists(layout, tokens, thresholds)]
    finally:
        SequenceAttention.__call__, usp.cache.agree_sums = attend, agree


def test_these_tests_would_see_a_decision_taken_alone(ranks):
    """Without the agreement the two ranks' lists differ at the thresholds that are used above."""
    first, second = ranks(2).run(deciding_alone, "ulysses2", 13, mixed_thresholds(13))
    assert first != second


@pytest.mark.parametrize(("size", "tokens"), [(2, 1), (3, 2), (4, 2), (4, 3)])
def test_an_empty_share_does_not_count(ranks, size, tokens):
    """Fewer tokens than ranks: the token that carries an empty share is in no sum."""
    thresholds = [0.0, 0.4]
    want = several_lists(None, tokens, thresholds)
    for layout in (f"ulysses{size}", f"gather_kv{size}", f"ring{size}"):
        for got in ranks(size).run(several_lists, layout, tokens, thresholds):
            for report, expected in zip(got, want, strict=True):
                assert report.skipped == expected.skipped
                assert report.changes == pytest.approx(expected.changes, rel=FP32)


def in_either_order(layout, threshold):
    return [one_list(threshold, 13, layout=layout, cache_first=first).skipped for first in (False, True)]


@pytest.mark.parametrize(("size", "layout"), EVERY_LAYOUT)
def test_cache_and_plan_may_be_applied_in_either_order(ranks, size, layout):
    """With every strategy, the cache applied before or after the adapter's hooks: the same decisions."""
    threshold = mixed_thresholds(13)[1]
    want = one_list(threshold, 13).skipped
    assert ranks(size).run(in_either_order, layout, threshold) == [[want, want]] * size


def results_at(layout, tokens, threshold):
    """The results and decisions of a call; without a cache at work where the threshold is None."""
    model, steps = transformer(), half_still(tokens, STEPS)
    if threshold is None:
        with caching(model, ALWAYS, layout=layout), torch.no_grad():  # no call has begun
            return [model(**step).sample for step in steps], ""
    with caching(model, threshold, layout=layout, warmup_steps=2) as cache:
        return call(model, cache, steps), letters(cache.report()[""])


def off_never_always(layout, tokens):
    return [results_at(layout, tokens, threshold) for threshold in (None, 0.0, ALWAYS)]


@pytest.mark.parametrize(("size", "layout"), [e for e in EVERY_LAYOUT if e[0] == 4])
def test_b29_shapes_and_values_hold_whichever_path_is_taken(ranks, size, layout):
    """B29, requirement 28: 22 tokens: 0 gives the bits of no cache; 10 skips, and equals one process."""
    want, decisions = results_at(None, 22, ALWAYS)
    assert decisions == "ccssscsc"
    for (off, _), (never, none), (always, skipped) in ranks(size).run(off_never_always, layout, 22):
        assert none == 8 * "c"
        assert all(map(torch.equal, off, never))
        assert skipped == decisions
        assert [got.shape for got in always] == [expected.shape for expected in want]
        assert max((got - expected).abs().max() for got, expected in zip(always, want, strict=True)) <= FP32
        assert not torch.equal(always[2], off[2]), "a skipped step is meant to differ"


def agreements(layout, tokens):
    """How many forwards this rank ran, how often it entered the agreement, and what it said there."""
    said, agree = [], usp.cache.agree_sums

    def spy(sums, *, group):
        said.append(sums.tolist())
        return agree(sums, group=group)

    usp.cache.agree_sums = spy
    try:
        return len(one_list(ALWAYS, tokens, layout=layout).skipped), said
    finally:
        usp.cache.agree_sums = agree


@pytest.mark.parametrize(("size", "tokens"), [(2, 13), (4, 3)])
def test_every_rank_enters_the_agreement_in_every_forward(ranks, size, tokens):
    """B10: first, warm-up, skipped and last forwards, also with an empty share; no hang in 20 s."""
    ranks(size).run(shares, 1, 1)  # the start of the pool is not timed
    found = ranks(size).run(agreements, f"ulysses{size}", tokens, timeout_s=20.0)
    for share, (forwards, said) in zip(shares(tokens, size), found, strict=True):
        assert forwards == len(said) == STEPS
        assert said[0] == [0.0, 0.0]
        assert all((previous > 0) == (share > 0) for _, previous in said[1:])


def branch_steps():
    """A branch that moves, and a still one with fewer steps."""
    return [("cond", half_still(13, 9, seed=3)), ("uncond", half_still(13, 1, seed=5) * 6)]


def one_branch_each(layout):
    """Each half of the ranks runs its own branch, and not equally often: its reports."""
    groups = cached_groups(parse_parallel(layout))
    name, steps = branch_steps()[groups.cfg.rank]
    model = transformer()
    with caching(model, 0.3, layout=layout, warmup_steps=1) as cache:
        call(model, cache, steps, name=name)
        return {branch: letters(report) for branch, report in cache.report().items()}


@pytest.mark.parametrize("layout", ["cfg2 ulysses2", "cfg2 ring2"])
def test_guidance_halves_are_not_coupled(ranks, layout):
    """B10, B54: each cfg half agrees among its own ranks, as one process does, whatever the other runs."""
    alone = {}
    for name, steps in branch_steps():
        model = transformer()
        with caching(model, 0.3, warmup_steps=1) as cache:
            call(model, cache, steps, name=name)
            alone[name] = {name: letters(cache.report()[name])}
    assert "c" in alone["cond"]["cond"][1:-1]
    assert alone["uncond"] == {"uncond": "cssscc"}
    cond, uncond = alone.values()
    assert ranks(4).run(one_branch_each, layout) == [cond, cond, uncond, uncond]


def whole_call(kind, layout, threshold):
    frames, reports = pipeline_call(
        tiny.build(kind), threshold, kind, layout=layout, tokens=(1, 1, 13), num_inference_steps=12
    )
    decisions = {
        (name, branch): letters(report)
        for name, branches in reports.items()
        for branch, report in branches.items()
    }
    return frames, decisions


@pytest.mark.parametrize(("size", "layout"), [(2, "ulysses2"), (3, "gather_kv3"), (4, "ring4")])
def test_a_pipeline_of_two_experts_gives_one_processs_latents(ranks, size, layout):
    """B54, B56: guidance and two experts, 13 tokens: four lists and the latents as in one process."""
    want, decisions = whole_call("two_experts", None, 0.12)
    assert len(decisions) == 4
    assert {"c", "s"} == set("".join(d[1:-1] for d in decisions.values()))
    for frames, found in ranks(size).run(whole_call, "two_experts", layout, 0.12):
        assert found == decisions
        assert (frames - want).abs().max() <= FP32


def parallel_calls(layout, kind):
    """Two calls of one ParallelPipeline: latents, decisions, and the rows of the report."""
    policy = CacheConfig(threshold=0.12, warmup_steps=1)
    with ParallelPipeline(tiny.build(kind), layout, cache=policy) as pipe:
        found = []
        for _ in range(2):
            result = pipe(**tiny.call(kind, tokens=(1, 1, 13), num_inference_steps=10), seed=SEED).frames
            lists = {name: branch["skipped"] for name, branch in pipe.report.as_json()["cache"].items()}
            found.append((result, lists, [name for name, _ in pipe.report.rows() if "cache" in name]))
        return found


@pytest.mark.parametrize(
    ("size", "layout"), [(2, "cfg2"), (2, "gather_kv2"), (3, "ulysses3"), (4, "cfg2 ring2")]
)
def test_b54_cfg_parallel_decides_as_sequential_guidance_does(ranks, size, layout):
    """B54, B56: through ParallelPipeline, two experts: the lists and latents of one process, every call."""
    ((want, lists, rows), _) = parallel_calls("auto", "two_experts")
    assert rows == [*(f"cache {name}" for name in lists), "cache saved"]
    assert len(lists) == 4
    for calls in ranks(size).run(parallel_calls, layout, "two_experts"):
        for frames, found, _ in calls:
            assert found == lists
            assert (frames - want).abs().max() <= FP32


def agreed(dtype):
    """What comes back here for numbers that differ by rank, and the traffic that was counted."""
    groups = cached_groups(parse_parallel(f"ulysses{dist.get_world_size()}"))
    mine = torch.tensor([0.1 * (dist.get_rank() + 1), 1e8 * dist.get_rank()], dtype=dtype)
    return comm.agree_sums(mine, group=groups.sp), dict(groups.sp.sent)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_agreed_sums_are_the_same_bits_on_every_rank(ranks, size):
    """Sums in rank order, in float64 also of fp32 numbers; not counted as traffic; alone, one's own."""
    for dtype in (torch.float64, torch.float32):
        rows = [torch.tensor([0.1 * (r + 1), 1e8 * r], dtype=dtype).tolist() for r in range(size)]
        want = [sum(column) for column in zip(*rows, strict=True)]
        for sums, sent in ranks(size).run(agreed, dtype):
            assert sums == want
            assert "agree_sums" not in sent
    assert comm.agree_sums(torch.tensor([1.0, 2.0]), group=ALONE) == [1.0, 2.0]
