"""Attention on Ascend NPUs: the two fused operators of torch_npu that give their softmax statistics.

Both take BSHD tensors as they are ("BSND" there), hide what a bool mask marks *True*, and multiply by 1
unless told a scale. Neither takes an additive mask. Source: torch_npu 2.13.0, `_op_plugin_docs.py`; the
operators are in `torch.ops` once that package is imported.
"""

import math
from collections.abc import Callable

import torch

from usp.layout import split_sizes

MAX_HEADS = 256
MAX_TOKENS = 1 << 20
MASK_BYTES = 1 << 28  # of a mask at once: it is dense, one byte for each query and key
FIX_EMPTY_ROWS = 2  # inner_precise: costs time, and is wanted where a row may be wholly masked


def infer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by `npu_fused_infer_attention_score`, in q's dtype, and its fp32 log-sum-exp."""
    return _in_parts(_infer, q, k, v, mask, scale)


def _infer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = None if mask is None else _hidden(mask, q, k)
    out, lse = torch.ops.npu.npu_fused_infer_attention_score(
        *(t.contiguous() for t in (q, k, v)),
        atten_mask=hidden,
        num_heads=q.shape[2],
        num_key_value_heads=k.shape[2],
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        input_layout="BSND",
        inner_precise=0 if hidden is None else FIX_EMPTY_ROWS,
        softmax_lse_flag=True,
    )
    return _without_empty_rows(out, lse.squeeze(-1), hidden)


def fusion(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by `npu_fusion_attention`, in q's dtype, and its fp32 log-sum-exp."""
    return _in_parts(_fusion, q, k, v, mask, scale)


def _fusion(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = None if mask is None else _hidden(mask, q, k)
    out, greatest, total, *_ = torch.ops.npu.npu_fusion_attention(
        *(t.contiguous() for t in (q, k, v)),
        q.shape[2],
        "BSND",
        atten_mask=hidden,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        inner_precise=0 if hidden is None else FIX_EMPTY_ROWS,
    )
    return _without_empty_rows(out, log_sum_exp(greatest, total), hidden)


def log_sum_exp(greatest: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Each row's natural log-sum-exp, fp32 (B, H, Sq), of the softmax_max and softmax_sum of
    `npu_fusion_attention`.

    It gives the greatest score and the sum of exponentials as (B, H, Sq, 8), the same number eight times,
    whether its input_layout is BSH, SBH, BSND or BNSD. From TND come three dims, which by default hold heads
    before tokens whatever their shape says; nothing here asks for it, and it is refused.
    """
    assert greatest.ndim == 4, f"statistics of shape {tuple(greatest.shape)} are those of TND"
    return greatest[..., 0] + total[..., 0].log()


def infer_limit(q: torch.Tensor, mask: torch.Tensor | None) -> str | None:
    """Why `infer` cannot serve a call that has the right dtype and head dim, or None."""
    tokens, heads, dim = q.shape[1:]
    if tokens == 1:
        return "has another path for a single query"
    if heads * dim >= 65535:
        return f"takes heads x head dim under 65535, not {heads} x {dim}"
    if mask is not None and mask.shape[1] > 1:
        return "takes one mask for all heads"
    return fusion_limit(q, mask)


def fusion_limit(q: torch.Tensor, mask: torch.Tensor | None) -> str | None:
    """Why `fusion` cannot serve a call that has the right dtype and head dim, or None."""
    if mask is not None and mask.dtype != torch.bool:
        return "takes no additive mask"
    if q.shape[2] > MAX_HEADS:
        return f"takes {MAX_HEADS} heads at most, not {q.shape[2]}"
    if q.shape[1] > MAX_TOKENS:
        return f"takes {MAX_TOKENS} tokens at most, not {q.shape[1]}"
    return None


def _in_parts(
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention whose mask the operator never gets larger than MASK_BYTES.

    A mask of keys alone is not given to it: hidden keys are left out, one sample at a time, which waits for
    the device. Any other is cut by queries, each of which has a result of its own.
    """
    if mask is None:
        return run(q, k, v, None, scale)
    if mask.shape[1:3] == (1, 1):
        if mask.shape[0] == 1:
            return _without_keys(run, q, k, v, mask.flatten(), scale)
        samples = zip(q.split(1), k.split(1), v.split(1), mask.flatten(1), strict=True)
        parts = [_without_keys(run, *sample, scale) for sample in samples]
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs), torch.cat(lses)
    row = (mask.shape[0] if mask.shape[1] == 1 else q.shape[0]) * mask.shape[1] * k.shape[1]
    most = max(3, MASK_BYTES // row)  # so that no part has a single query, which is another path
    sizes = split_sizes(q.shape[1], -(-q.shape[1] // most))
    masks = mask.split(sizes, 2) if mask.shape[2] > 1 else [mask] * len(sizes)
    parts = [run(part, k, v, shown, scale) for part, shown in zip(q.split(sizes, 1), masks, strict=True)]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 2)


def _without_keys(
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shown_S: torch.Tensor,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the keys that are shown."""
    places = shown_S.nonzero().flatten()
    if len(places) == 0:
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=torch.float32)
        return torch.zeros_like(q), lse
    if len(places) < k.shape[1]:
        k, v = (t.index_select(1, places) for t in (k, v))
    return run(q, k, v, None, scale)


def _hidden(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The mask as the vendor wants it: True is hidden, (B|1, 1, Sq, Sk) or (B, H, Sq, Sk), dense."""
    batch = mask.shape[0] if mask.shape[1] == 1 else q.shape[0]
    return mask.logical_not().expand(batch, mask.shape[1], q.shape[1], k.shape[1]).contiguous()


def _without_empty_rows(
    out_BSHD: torch.Tensor, lse_BHS: torch.Tensor, hidden: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """0 and -inf in rows without a key, whatever the operator gives there."""
    if hidden is None:
        return out_BSHD, lse_BHS
    empty = hidden.all(-1).expand(lse_BHS.shape)
    return out_BSHD.masked_fill(empty.transpose(1, 2)[..., None], 0), lse_BHS.masked_fill(empty, -math.inf)
