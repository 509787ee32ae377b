"""Shares and key order are pure arithmetic that all ranks can do alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.usp.in_ranks import STEADY
from usp.layout import Split, kv_heads_of, offsets, split_sizes

SPLITS = st.builds(
    lambda streams, outer, inner: Split(tuple(streams), outer * inner, inner),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 3),
)


@STEADY
@given(total=st.integers(0, 10_000), parts=st.integers(1, 64))
def test_shares_are_tensor_splits(total, parts):
    """B01, req 2: sizes sum to the whole, differ by one at most, larger first, as `tensor_split` cuts."""
    sizes = split_sizes(total, parts)
    assert sum(sizes) == total
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == tuple(len(t) for t in torch.tensor_split(torch.empty(total), parts))


@STEADY
@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12))
def test_offsets_are_where_shares_start(sizes):
    """Each share begins where the one before ends."""
    starts = offsets(tuple(sizes))
    assert len(starts) == len(sizes)
    assert [start + size for start, size in zip(starts, sizes, strict=True)] == [*starts[1:], sum(sizes)]


@STEADY
@given(split=SPLITS)
def test_a_split_counts_every_token_once(split):
    """Req 6, 7: shares and blocks sum to the whole; blocks are `inner` ranks; streams are cut alike."""
    assert sum(split.sizes) == split.total == sum(split.streams)
    assert len(split.sizes) == split.parts
    assert sum(split.blocks) == split.total
    assert len(split.blocks) * split.inner == split.parts
    for i, block in enumerate(split.blocks):
        assert block == sum(split.sizes[i * split.inner : (i + 1) * split.inner])
    for rank, size in enumerate(split.sizes):
        assert size == sum(split_sizes(stream, split.parts)[rank] for stream in split.streams)


@STEADY
@given(split=SPLITS)
def test_key_order_is_a_permutation_into_the_joined_streams(split):
    """Req 6: no key is lost or counted twice; rank r's part is its share of each stream in order."""
    order = split.key_order()
    if len(split.streams) == 1:
        assert order is None
        return
    assert sorted(order.tolist()) == list(range(split.total))
    whole = torch.arange(split.total)
    shares = [stream.tensor_split(split.parts) for stream in whole.split(list(split.streams))]
    by_rank = torch.cat([torch.cat([stream[rank] for stream in shares]) for rank in range(split.parts)])
    assert torch.equal(order, by_rank)


@STEADY
@given(kv_heads=st.integers(1, 12), group=st.integers(1, 6), parts=st.integers(1, 9))
def test_every_query_head_finds_its_key_head(kv_heads, group, parts):
    """B03, B35: query heads are cut without gap; a rank has the key heads that they need, no others."""
    heads = kv_heads * group
    spans = [kv_heads_of(heads, kv_heads, parts, part) for part in range(parts)]
    assert [h for queries, _ in spans for h in queries] == list(range(heads))
    for queries, keys in spans:
        assert {h // group for h in queries} == set(keys)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 4), (5, 2), (4, 8), (4, 0)])
def test_key_heads_that_do_not_divide_are_refused(heads, kv_heads):
    """Req 12: grouped queries need a multiple; the message has both numbers and a way out."""
    with pytest.raises(ValueError, match="grouped queries need a multiple") as caught:
        kv_heads_of(heads, kv_heads, 2, 0)
    assert str(caught.value) == (
        f"{heads} query heads with {kv_heads} key/value heads: grouped queries need a multiple; "
        f"repeat the key/value heads to a divisor of {heads}"
    )
