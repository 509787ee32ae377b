"""Ulysses: each rank attends with a few heads over all tokens."""

from collections.abc import Sequence

import torch

from usp import comm
from usp.attention.kernels import Attention
from usp.layout import offsets, split_sizes
from usp.mesh import Group


def ulysses(
    q_BSHD: torch.Tensor,
    k_BSHD: torch.Tensor,
    v_BSHD: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    split: Sequence[int],
    group: Group,
    attention: Attention,
) -> torch.Tensor:
    """Attend with this rank's heads over the tokens of every rank in `group`.

    All tensors are this rank's share, (batch, tokens held here, heads, head_dim); so is the result. `split`
    has the tokens of each rank; heads are cut like tokens, and a rank beyond the last head only passes
    tokens. `mask` (B|1, H|1, rows, keys) has one row, or one for each token of the group, and all heads.
    `attention` sees (batch, tokens of the group, heads here, head_dim); put `ring` or `gather_kv` there for
    USP. Two messages per peer: q, k, v together, and the result. Bit-equal to one process for a head-wise
    `attention`. Collective: every rank of `group` must call it. Raises ValueError if the key/value heads do
    not divide the query heads. Source: DeepSpeed-Ulysses, arXiv 2309.14509.
    """
    if group.size == 1:
        return attention(q_BSHD, k_BSHD, v_BSHD, mask)
    heads = q_BSHD.shape[2]
    q, k, v = comm.seq_to_heads(q_BSHD, k_BSHD, v_BSHD, split=split, group=group)
    if mask is not None and mask.shape[1] > 1:
        sizes = split_sizes(heads, group.size)
        mask = mask.narrow(1, offsets(sizes)[group.rank], sizes[group.rank])
    out = attention(q, k, v, mask)
    return comm.heads_to_seq(out, heads=heads, split=split, group=group)
