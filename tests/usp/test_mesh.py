"""Who shares what with whom: a pure function, and the communicators made from it."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests import tiny
from tests.usp.in_ranks import SEED, STEADY, alone, forward, largest, rank
from usp.adapter import sharded
from usp.attention import SequenceAttention
from usp.config import AXES, ParallelConfig, parse_parallel
from usp.mesh import Group, axis_ranks, make_groups
from usp.pipeline import ParallelPipeline
from usp.plans.wan import WAN

CONFIGS = st.builds(
    lambda cfg, ring, gather_kv, ulysses: ParallelConfig(
        cfg_degree=cfg,
        ring_degree=ring,
        gather_kv_degree=gather_kv if ring == 1 else 1,
        ulysses_degree=ulysses,
    ),
    *[st.integers(1, 3)] * 4,
)


def test_b50_eight_ranks_by_hand():
    """B50, req 13: cfg 2 x ring 2 x ulysses 2; Ulysses ranks are neighbours, cfg halves are far apart."""
    groups = axis_ranks(ParallelConfig(cfg_degree=2, ring_degree=2, ulysses_degree=2))
    assert groups == {
        "cfg": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "ring": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "gather_kv": [(r,) for r in range(8)],
        "ulysses": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "sp": [(0, 1, 2, 3), (4, 5, 6, 7)],
    }
    assert list(groups) == [*AXES, "sp"], "all ranks create groups in this order"


@STEADY
@given(config=CONFIGS)
def test_b50_every_rank_is_in_exactly_one_group_per_axis(config):
    """B50, req 13: each axis parts the world into groups of its degree; sp is made of the inner axes."""
    groups = axis_ranks(config)
    for axis, found in groups.items():
        assert sorted(r for ranks in found for r in ranks) == list(range(config.world_size))
        assert {len(ranks) for ranks in found} == {config.sp_degree if axis == "sp" else config.degree(axis)}
        assert all(list(ranks) == sorted(ranks) for ranks in found)
    for axis in ("ring", "gather_kv", "ulysses"):
        assert all(any(set(ranks) <= set(sp) for sp in groups["sp"]) for ranks in groups[axis])
    for cfg in groups["cfg"]:  # the two halves hold the same share of the sequence
        assert len({next(sp.index(r) for sp in groups["sp"] if r in sp) for r in cfg}) == 1


def membership(layout: str) -> tuple[dict[str, tuple[Any, ...]], list[tuple[int, ...]]]:
    """This rank's place in each group, a sum over each, and the communicators in the order of making."""
    made: list[tuple[int, ...]] = []
    real = dist.new_group

    def spy(ranks: list[int], **options: Any) -> Any:
        made.append(tuple(ranks))
        return real(ranks, **options)

    dist.new_group = spy
    try:
        groups = make_groups(parse_parallel(layout), rank=rank())
    finally:
        dist.new_group = real
    found = {}
    for axis in (*AXES, "sp"):
        group = getattr(groups, axis)
        total = torch.tensor([float(rank())])
        if group.handle is not None:
            dist.all_reduce(total, group=group.handle)
        found[axis] = (group.ranks, group.rank, group.size, total.item(), group.handle is None)
    groups.close()
    groups.close()
    assert dist.is_initialized(), "the caller's default group is not ours to destroy"
    assert all(group.handle is None for group in groups.all)
    return found, made


@pytest.mark.parametrize(
    "layout", ["ulysses2 ring2", "cfg2 ulysses2", "cfg2 ring2", "ulysses4", "gather_kv2 ulysses2"]
)
def test_b50_communicators_join_the_ranks_that_the_function_names(ranks, layout):
    """B50: four ranks make the same groups in the same order, each once; a sum runs over the right ranks."""
    named = axis_ranks(parse_parallel(layout))
    results = ranks(4).run(membership, layout)
    for here, (found, made) in enumerate(results):
        assert made == results[0][1]
        assert len(set(made)) == len(made)
        assert all(1 < len(r) < 4 for r in made), (
            "the world has a communicator already, a lone rank needs none"
        )
        for axis, (members, place, size, total, lone) in found.items():
            assert here in members
            assert members in named[axis]
            assert (members[place], size) == (here, len(members))
            assert total == sum(members)
            assert lone == (len(members) == 1)


def communicators_reported(layout: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]], int]:
    """The memory rows before and after a buffer is kept, and how many communicators torch made here."""
    before = len(dist.distributed_c10d._world.pg_map)
    groups = make_groups(parse_parallel(layout), rank=rank())
    made = len(dist.distributed_c10d._world.pg_map) - before
    rows = groups.rows(400 * 2**20)
    groups.ulysses.buffer("k", 2**18, torch.float32, torch.device("cpu"))
    later = groups.rows()
    groups.close()
    return rows, later, made


@pytest.mark.parametrize(
    ("layout", "of_rank_3"),
    [
        ("ulysses4", []),
        ("ulysses2 ring2", ["ring (1, 3)", "ulysses (2, 3)"]),
        ("cfg2 gather_kv2", ["cfg (1, 3)", "gather_kv+sp (2, 3)"]),
    ],
)
def test_hazard_17_communicators_are_counted_and_listed(ranks, layout, of_rank_3):
    """The memory report names each communicator of a rank once, with its axes; the count is torch's own."""
    rows, later, made = ranks(4).run(communicators_reported, layout)[3]
    named = ", ".join(["all 4 ranks", *of_rank_3])
    assert rows == [("communicators", f"{1 + len(of_rank_3)}: {named}; 400 MiB of buffers each")]
    assert later == [
        ("communicators", f"{1 + len(of_rank_3)}: {named}"),
        ("receive buffers", "1.00 MiB kept"),
    ]
    assert made == len(of_rank_3)


def made_and_closed(layout: str, times: int) -> int:
    for _ in range(times):
        make_groups(parse_parallel(layout), rank=rank()).close()
    return times


def test_groups_may_be_closed_as_soon_as_they_are_made(ranks):
    """No rank is still dialling when another hangs up: 7 of 10 tries of 50 rounds failed so before."""
    assert ranks(4).run(made_and_closed, "ulysses2 ring2", 40) == [40] * 4


def test_a_lone_rank_reports_no_communicators():
    """World 1 makes none, so there is no row."""
    assert make_groups(parse_parallel("ulysses1"), rank=0).rows(1) == []


def unlike_halves(layout: str) -> tuple[float, dict[str, int]]:
    """Each cfg half runs a forward of its own, of another length; the error, and the bytes by axis."""
    groups = make_groups(parse_parallel(layout), rank=rank())
    model = tiny.transformer()
    half = groups.cfg.rank
    inputs = tiny.model_inputs(((1, 1, 13), (1, 3, 7))[half], seed=half)
    with torch.no_grad(), sharded(model, WAN, SequenceAttention(groups)) as shard:
        out = model(**inputs, return_dict=False)[0]
        assert shard.tokens_total == (13, 21)[half]
    sent = {axis: sum(getattr(groups, axis).sent.values()) for axis in AXES}
    groups.close()
    return largest(out, forward(model, inputs)), sent


@pytest.mark.parametrize("layout", ["cfg2 ulysses2", "cfg2 ring2", "cfg2 gather_kv2"])
def test_b50_halves_do_not_mix(ranks, layout):
    """B50: cfg 2 x 2, unlike inputs per half: each equals one process, 1e-5; nothing crosses cfg."""
    inner = layout.split()[1][:-1]
    for error, sent in ranks(4).run(unlike_halves, layout):
        assert error <= 1e-5
        assert sent["cfg"] == 0
        assert sent[inner] > 0


def pipeline_latents(layout: str) -> np.ndarray:
    with ParallelPipeline(tiny.build("t2v"), layout) as pipe:
        return pipe(**tiny.call("t2v"), seed=SEED).frames.numpy()


@pytest.mark.parametrize("layout", ["cfg2 ulysses2", "ulysses2 ring2"])
def test_b50_mixed_layouts_with_a_whole_pipeline(ranks, layout):
    """B50: cfg 2 x ulysses 2 and ulysses 2 x ring 2 give one process's latents at 1e-5 on every rank."""
    want = alone("t2v", {})
    for result in ranks(4).run(pipeline_latents, layout):
        assert np.abs(result - want).max() <= 1e-5


def test_kept_buffers_are_kept_and_counted():
    """A tag's buffer is the same memory until it must grow; tags and dtypes have their own; release frees."""
    group = Group((0,), 0)
    cpu = torch.device("cpu")
    first = group.buffer("a", 10, torch.float32, cpu)
    assert group.buffer("a", 6, torch.float32, cpu).data_ptr() == first.data_ptr()
    assert group.buffer("a", 6, torch.float32, cpu).shape == (6,)
    others = [group.buffer("b", 10, torch.float32, cpu), group.buffer("a", 10, torch.bfloat16, cpu)]
    assert len({t.data_ptr() for t in (first, *others)}) == 3
    assert group.buffer_bytes == 40 + 40 + 20
    group.buffer("a", 100, torch.float32, cpu)
    assert group.buffer_bytes == 400 + 40 + 20
    with torch.inference_mode():
        assert not group.buffer("c", 4, torch.float32, cpu).is_inference()
    group.release()
    assert group.buffer_bytes == 0
