"""gather-KV: each rank attends with its own queries to everybody's keys."""

from collections.abc import Sequence

import torch

from usp import comm
from usp.attention.kernels import Attention
from usp.mesh import Group


def gather_kv(
    q_BSHD: torch.Tensor,
    k_BSHD: torch.Tensor,
    v_BSHD: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    split: Sequence[int],
    group: Group,
    attention: Attention,
) -> torch.Tensor:
    """Attend local queries to the keys and values of every rank in `group`.

    All tensors are this rank's share, (batch, tokens held here, heads, head_dim); so is the result. `split`
    has the tokens of each rank. `mask` (B|1, H|1, rows, keys) has one row, or one for each local query, and a
    column for each key of the group in rank order. Receives the other ranks' K and V once per call, in one
    message from each; holds both whole. Collective: every rank of `group` must call it. Source: Llama 3
    report, section 3.3.2 (arXiv 2407.21783).
    """
    if group.size == 1:
        return attention(q_BSHD, k_BSHD, v_BSHD, mask)
    k, v = comm.gather_kv_pair(k_BSHD, v_BSHD, split=split, group=group)
    return attention(q_BSHD, k, v, mask)
