"""Ring attention: keys and values travel from rank to rank while each attends to the block at hand."""

import math
from collections.abc import Sequence

import torch

from usp import comm
from usp.attention.kernels import LseAttention
from usp.layout import offsets
from usp.mesh import Group


def ring(
    q_BSHD: torch.Tensor,
    k_BSHD: torch.Tensor,
    v_BSHD: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    split: Sequence[int],
    group: Group,
    attention_lse: LseAttention,
) -> torch.Tensor:
    """Attend local queries to the keys of every rank in `group`, one block at a time.

    All tensors are this rank's share, (batch, tokens held here, heads, head_dim); so is the result. `split`
    has the tokens of each rank. `mask` (B|1, H|1, rows, keys) has one row, or one for each local query, and a
    column for each key of the group in rank order; each block takes its columns. K and V travel in one
    message; the next block is in flight while the current one is attended to, and no more than two are held.
    Block results are merged in fp32 and rounded once, at the end. Not causal. Collective: every rank of
    `group` must call it. Source: Ring Attention, arXiv 2310.01889; the merge of softmax blocks is
    FlashAttention-2's, arXiv 2307.08691.
    """
    if group.size == 1:
        return attention_lse(q_BSHD, k_BSHD, v_BSHD, mask)[0].to(q_BSHD.dtype)
    batch, _, heads, dim = k_BSHD.shape
    room = max(split)
    block = comm.pack_kv(k_BSHD, v_BSHD, room=room, group=group)
    spare = group.buffer("ring_1", 2 * batch * room * heads * dim, block.dtype, block.device)
    first = group.buffer("ring_0", 2 * batch * room * heads * dim, block.dtype, block.device)
    merged = MergedAttention()
    for step in range(group.size):
        owner = (group.rank - step) % group.size
        pending = incoming = None
        if step + 1 < group.size:
            tokens = split[(owner - 1) % group.size]
            incoming = spare[: 2 * batch * tokens * heads * dim].view(2, batch, tokens, heads, dim)
            pending = comm.ring_exchange(block, incoming, group=group)
        columns = None if mask is None else mask.narrow(-1, offsets(tuple(split))[owner], split[owner])
        merged.add(*attention_lse(q_BSHD, block[0], block[1], columns))
        if pending is not None and incoming is not None:
            pending.wait()
            block, first, spare = incoming, spare, first
    return merged.result().to(q_BSHD.dtype)


class MergedAttention:
    """The attention over all blocks of keys added so far, kept as a running softmax in fp32.

    With blocks a and b: m = max(lse_a, lse_b), w = exp(lse - m), out = (w_a out_a + w_b out_b) / (w_a + w_b).
    A block that is wholly masked has out = 0, lse = -inf and weight 0; rows with no key in any block give 0.
    So they do where a chip saturates, and lse is the most negative number: its weight is 0 beside any key.
    """

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None  # B S H D, weighted by exp(lse - top)
        self._weight: torch.Tensor | None = None  # B H S
        self._top: torch.Tensor | None = None  # B H S, the largest lse so far

    def add(self, out_BSHD: torch.Tensor, lse_BHS: torch.Tensor) -> None:
        """Merge in one block's fp32 result and log-sum-exp; the first result is kept and written to."""
        if self._sum is None or self._weight is None or self._top is None:
            self._sum, self._top = out_BSHD, lse_BHS
            self._weight = torch.ones_like(lse_BHS)
            return
        top = torch.maximum(self._top, lse_BHS)
        finite = top.masked_fill(top == -math.inf, 0)  # exp(-inf - 0) is 0; exp(-inf - -inf) would be NaN
        keep, new = (self._top - finite).exp(), (lse_BHS - finite).exp()
        self._sum.mul_(_per_row(keep)).addcmul_(out_BSHD, _per_row(new))  # the first block's result is ours
        self._weight.mul_(keep).add_(new)
        self._top = top

    def result(self) -> torch.Tensor:
        """The merged attention, fp32. Call it once, at the end."""
        assert self._sum is not None, "no block was added"
        assert self._weight is not None, "every block brings its weight"
        return self._sum.div_(_per_row(self._weight.masked_fill(self._weight == 0, 1)))


def _per_row(value_BHS: torch.Tensor) -> torch.Tensor:
    return value_BHS.transpose(1, 2).unsqueeze(-1)  # B S H 1
