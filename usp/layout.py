"""Who holds which tokens and heads: pure arithmetic, no communication.

Every rank can compute every other rank's share from the whole length and the number of ranks, so no size ever
travels at run time.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch


def split_sizes(total: int, parts: int) -> tuple[int, ...]:
    """The sizes of `total` things over `parts` ranks, as `torch.tensor_split` cuts: they differ by one, may
    be 0."""
    each, extra = divmod(total, parts)
    return tuple(each + 1 if i < extra else each for i in range(parts))


def offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Where each share starts."""
    return tuple(accumulate(sizes, initial=0))[:-1]


@dataclass(frozen=True)
class Split:
    """How the token axis of one attention is held by the ranks that share it.

    `streams` are the whole lengths of the sequences that are joined in it, in local order: (tokens,) for
    self-attention, (text, image) for a joint one. Each stream is cut by the same rule, and each rank's local
    sequence is its share of the first stream, then its share of the second. `inner` ranks that follow one
    another (the Ulysses axis) make one block of the outer axis (ring or gather-KV).
    """

    streams: tuple[int, ...]
    parts: int
    inner: int = 1

    @property
    def total(self) -> int:
        """Tokens on all ranks together."""
        return sum(self.streams)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens on each rank."""
        return tuple(map(sum, zip(*(split_sizes(s, self.parts) for s in self.streams), strict=True)))

    @property
    def blocks(self) -> tuple[int, ...]:
        """Tokens in each outer block, the sum over its `inner` ranks."""
        return tuple(sum(self.sizes[i : i + self.inner]) for i in range(0, self.parts, self.inner))

    def key_order(self) -> torch.Tensor | None:
        """Where each token of the rank-by-rank order stands in the whole stream-by-stream order; None if
        alike.

        A mask made for the whole joined sequence is indexed with this, since keys arrive rank by rank.
        """
        if len(self.streams) == 1:
            return None
        starts = offsets(self.streams)
        shares = [split_sizes(s, self.parts) for s in self.streams]
        spans = []
        for rank in range(self.parts):
            for start, sizes in zip(starts, shares, strict=True):
                low = start + offsets(sizes)[rank]
                spans.append(torch.arange(low, low + sizes[rank]))
        return torch.cat(spans)


def kv_heads_of(heads: int, kv_heads: int, parts: int, part: int) -> tuple[range, range]:
    """The query heads that rank `part` computes, and the key/value heads that these need.

    Query heads are cut like tokens. With grouped queries one key/value head serves `heads // kv_heads` query
    heads, and is sent to each rank that has any of them. Raises ValueError if `kv_heads` does not divide
    `heads`.
    """
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{heads} query heads with {kv_heads} key/value heads: grouped queries need a multiple; repeat "
            f"the key/value heads to a divisor of {heads}"
        )
    sizes = split_sizes(heads, parts)
    low = offsets(sizes)[part]
    high = low + sizes[part]
    group = heads // kv_heads
    return range(low, high), range(low // group, -(-high // group) if high > low else low // group)
