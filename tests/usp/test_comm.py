"""Every collective with uneven and empty shares, every dtype and layout in memory, on both transports."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.usp.in_ranks import error_of, rank
from usp import comm
from usp.config import ParallelConfig
from usp.layout import offsets, split_sizes
from usp.mesh import Group, make_groups

TRANSPORTS = ("auto", "all_to_all", "p2p")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.bool,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
SIZES = {  # uneven, empty at the start, in the middle, at the end, and all but one
    1: ((5,), (0,)),
    2: ((3, 2), (0, 4), (4, 0), (0, 0)),
    3: ((2, 2, 1), (0, 3, 1), (1, 0, 3), (0, 0, 2)),
    4: ((2, 1, 1, 1), (0, 2, 0, 1), (1, 1, 0, 0), (0, 0, 0, 3)),
}


def group_of(transport: str) -> Group:
    """All ranks as one axis."""
    return make_groups(
        ParallelConfig(ulysses_degree=dist.get_world_size(), transport=transport), rank=rank()
    ).ulysses


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Whole numbers that every dtype here holds exactly."""
    values = torch.randint(
        0, 2 if dtype == torch.bool else 8, shape, generator=torch.Generator().manual_seed(seed)
    )
    return values.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.contiguous().view(torch.uint8) for t in (a, b))) if a.numel() else True


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory that is not contiguous."""
    wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
    wide[..., ::2] = tensor
    return wide[..., ::2]


def gathers() -> list[str]:
    """`split` then `gather` for every dtype, size table, transport and memory layout; what was wrong."""
    wrong = []
    for transport in TRANSPORTS:
        group = group_of(transport)
        for dtype in DTYPES:
            for sizes in SIZES[group.size]:
                for dim in (0, 1, -1) if dtype == torch.float32 else (1,):
                    shape = [2, 3, 2]
                    shape[dim] = sum(sizes)
                    whole = numbers(tuple(shape), dtype)
                    share = comm.split(whole, dim=dim, sizes=sizes, group=group)
                    low = offsets(sizes)[group.rank]
                    fits = (
                        same_bits(share, whole.narrow(dim, low, sizes[group.rank])) and share.is_contiguous()
                    )
                    for held in (share, strided(share)):
                        back = comm.gather(held, dim=dim, sizes=sizes, group=group)
                        fits = fits and same_bits(back, whole) and back.is_contiguous()
                    if not fits:
                        wrong.append(f"{transport} {dtype} {sizes} dim {dim}")
    return wrong


def exchanges() -> list[str]:
    """Messages of unlike and no length to each peer, for every dtype and transport; what was wrong."""
    wrong = []
    size, here = dist.get_world_size(), rank()

    def count(source: int, target: int, case: int) -> int:
        return (source + 2 * target + case) % 3 if case else 0

    for transport in TRANSPORTS:
        group = group_of(transport)
        for dtype in DTYPES:
            for case in range(4):
                table = [
                    [numbers((count(s, t, case),), dtype, 10 * s + t) for t in range(size)]
                    for s in range(size)
                ]
                send, due = torch.cat(table[here]), torch.cat([table[s][here] for s in range(size)])
                receive = torch.empty_like(due)
                sizes = [
                    [count(here, t, case) for t in range(size)],
                    [count(s, here, case) for s in range(size)],
                ]
                before = group.sent["test"]
                comm.exchange(send, sizes[0], receive, sizes[1], group, "test").wait()
                sent = group.sent["test"] - before
                if (
                    not same_bits(receive, due)
                    or sent != (sum(sizes[0]) - sizes[0][here]) * send.element_size()
                ):
                    wrong.append(f"{transport} {dtype} case {case}")
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", [gathers, exchanges])
def test_b30_every_dtype_and_share_travels_unharmed(ranks, size, check):
    """B30, req 23: uneven and empty shares, bool to FP8, strided, each transport: the same bits, counted."""
    assert ranks(size).run(check) == [[]] * size


def attention_layouts(transport: str) -> list[bool]:
    """seq_to_heads, heads_to_seq, gather_kv_pair of strided, grouped tensors against slices of the whole."""
    group = group_of(transport)
    size, here = group.size, group.rank
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        for tokens, heads, kv_heads in ((7, 5, 5), (2, 3, 1), (9, 4, 2), (1, 1, 1)):
            split = split_sizes(tokens, size)
            whole = [numbers((2, tokens, h, 4), dtype, i) for i, h in enumerate((heads, kv_heads, kv_heads))]
            q, k, v = (strided(comm.split(t, dim=1, sizes=split, group=group)) for t in whole)
            counts = split_sizes(heads, size)
            low = offsets(counts)[here]
            mine = slice(low, low + counts[here])
            q_heads, k_heads, v_heads = comm.seq_to_heads(q, k, v, split=split, group=group)
            found.append(same_bits(q_heads, whole[0][:, :, mine]))
            per_key = counts[here] // max(1, k_heads.shape[2])
            for got, all_heads in ((k_heads, whole[1]), (v_heads, whole[2])):
                got = got.view(torch.uint8) if got.element_size() == 1 else got
                wanted = all_heads.view(torch.uint8) if all_heads.element_size() == 1 else all_heads
                wanted = wanted.repeat_interleave(heads // kv_heads, 2)[:, :, mine]
                found.append(counts[here] == 0 or torch.equal(got.repeat_interleave(per_key, 2), wanted))
            back = comm.heads_to_seq(q_heads.clone(), heads=heads, split=split, group=group)
            found.append(same_bits(back, q))
            pair = comm.gather_kv_pair(k, v, split=split, group=group)
            found += [same_bits(got, want) for got, want in zip(pair, whole[1:], strict=True)]
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_b30_tokens_are_traded_for_heads_and_back(ranks, size, transport):
    """B03, B30: fewer heads or tokens than ranks, strided FP8: each gets its heads, then its tokens."""
    for found in ranks(size).run(attention_layouts, transport):
        assert all(found), found


def mismatches() -> list[tuple[str, int]]:
    """Calls with sizes that do not fit: the error, and how many exchanges were begun."""
    group = group_of("auto")
    begun = []
    names = ("all_to_all_single", "batch_isend_irecv", "all_gather")
    real = {name: getattr(dist, name) for name in names}

    def spy(name: str) -> Callable[..., Any]:
        return lambda *a, **k: (begun.append(name), real[name](*a, **k))[1]

    three, four = torch.zeros(3), torch.zeros(4)
    q = torch.zeros(1, 3, 2, 4)
    calls: list[Callable[[], Any]] = [
        lambda: comm.exchange(three, [1, 1], four, [2, 2], group, "ring"),
        lambda: comm.exchange(four, [2, 2], three, [2, 2], group, "ring"),
        lambda: comm.exchange(four, [4], four, [4], group, "ring"),
        lambda: comm.exchange(torch.zeros(8)[::2], [2, 2], four, [2, 2], group, "ring"),
        lambda: comm.gather(three, dim=0, sizes=(5, 5), group=group),
        lambda: comm.split(three, dim=0, sizes=(5, 5), group=group),
        lambda: comm.seq_to_heads(q, q, q, split=(5, 5), group=group),
        lambda: comm.seq_to_heads(q, q, q, split=(3, 3, 3), group=group),
        lambda: comm.heads_to_seq(q, heads=2, split=(5, 5), group=group),
        lambda: comm.heads_to_seq(q, heads=2, split=(2, 1), group=group),
        lambda: comm.gather_kv_pair(q, q, split=(5, 5), group=group),
    ]
    found = []
    for name in names:
        setattr(dist, name, spy(name))
    try:
        for call in calls:
            found.append((error_of(call), len(begun)))
    finally:
        for name in names:
            setattr(dist, name, real[name])
    return found


def test_b30_sizes_are_asserted_before_anything_is_sent(ranks):
    """B30, req 23: gloo ends the process when ranks disagree; a mismatch is an error before that."""
    wanted = [
        "AssertionError: ring: 3 elements to send, sizes say 2",
        "AssertionError: ring: room for 3 elements, sizes say 4",
        "AssertionError: ring: one size per rank of the group",
        "AssertionError: ring: the message must be contiguous",
        "AssertionError: rank {} holds 3 tokens, the split table has 5",
        "ValueError: a tensor of shape (3,) is to be split along dim 0 over 2 ranks, but the split table is",
        "AssertionError: rank {} holds 3 tokens, the split table has 5",
        "AssertionError: the split table has 3 shares for 2 ranks",
        "AssertionError: 3 tokens to hand back, the split table has 10",
        "AssertionError: 2 heads here, the head table has 1",
        "AssertionError: rank {} holds 3 tokens, the split table has 5",
    ]
    for here, found in enumerate(ranks(2).run(mismatches)):
        assert [begun for _, begun in found] == [0] * len(wanted)
        for (text, _), want in zip(found, wanted, strict=True):
            assert text.startswith(want.format(here))


def kept_memory() -> dict[str, list[Any]]:
    """Addresses of what the exchanges return in three calls, and the bytes that are held after each."""
    group = group_of("auto")
    found: dict[str, list[Any]] = {"heads": [], "kv": [], "bytes": [], "gather": []}
    for tokens in (8, 6, 8):
        q = torch.ones(1, tokens, 4, 8)
        split = (tokens,) * group.size
        found["heads"].append(
            comm.seq_to_heads(q, q, q, split=split, group=group)[0].untyped_storage().data_ptr()
        )
        found["kv"].append(
            comm.gather_kv_pair(q, q, split=split, group=group)[0].untyped_storage().data_ptr()
        )
        found["bytes"].append(group.buffer_bytes)
    fresh = [comm.gather(torch.ones(3), dim=0, sizes=(3,) * group.size, group=group) for _ in range(2)]
    found["gather"] = [t.data_ptr() for t in fresh]
    group.release()
    found["bytes"].append(group.buffer_bytes)
    return found


def test_receive_buffers_are_kept_and_counted(ranks):
    """Fresh receive buffers cost 2-3 x the transfer: one memory serves all calls; `gather` gives its own."""
    for found in ranks(2).run(kept_memory):
        assert len(set(found["heads"])) == 1
        assert len(set(found["kv"])) == 1
        first, *later, after = found["bytes"]
        assert first > 0
        assert later == [first, first]
        assert after == 0
        assert len(set(found["gather"])) == 2


def roundtrip(length: int, dim: int, extra: int, dtype: str, transport: str) -> bool:
    group = group_of(transport)
    shape = [extra, extra]
    shape.insert(dim, length)
    whole = numbers(tuple(shape), getattr(torch, dtype), length)
    sizes = split_sizes(length, group.size)
    share = comm.split(whole, dim=dim, sizes=sizes, group=group)
    return same_bits(comm.gather(share, dim=dim, sizes=sizes, group=group), whole)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(
    size=st.integers(1, 4),
    length=st.integers(0, 40),
    dim=st.integers(0, 2),
    extra=st.integers(0, 3),
    dtype=st.sampled_from(["float32", "bfloat16", "bool", "int8"]),
    transport=st.sampled_from(TRANSPORTS),
)
def test_gather_is_the_inverse_of_split(ranks, size, length, dim, extra, dtype, transport):
    """Req 2 as a property: any length, also 0, along any dim, also of tensors without elements."""
    assert all(ranks(size).run(roundtrip, length, dim, extra, dtype, transport))


def sums() -> list[float]:
    group = group_of("auto")
    return comm.agree_sums(torch.tensor([1.0 + rank(), 0.1 * 3 ** -rank()], dtype=torch.float64), group=group)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_are_the_same_bits_on_every_rank(ranks, size):
    """Req 22: what ranks branch on is added in one order everywhere, so it is equal and not just close."""
    results = ranks(size).run(sums)
    assert all(result == results[0] for result in results)
    assert results[0] == [sum(1.0 + r for r in range(size)), sum(0.1 * 3**-r for r in range(size))]
