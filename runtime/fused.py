"""Fused RMSNorm, rotary embedding and GEGLU of the vendors that have them, and the plain form of each.

Each function picks the vendor's operator by device, dtype and shape, and gives the plain form's result either
way; `..._limit` says in words why an operator cannot serve a call. Only Ascend has operators here. Source:
torch_npu 2.13.0, `_op_plugin_docs.py`; they are in `torch.ops` once that package is imported.
"""

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

KINDS = ("npu",)  # devices with fused operators
MODES = ("auto", "on", "off")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 895
MAX_ROWS = 999  # batch x heads if interleaved, else each of them
FIRST_INTERLEAVED = "Ascend910B1"  # older chips have another operator, for halves alone


def check_fused(mode: str, kind: str) -> None:
    """Raise ValueError unless `mode` is auto, on or off, and can be had on a device of this kind."""
    if mode not in MODES:
        raise ValueError(f"fused={mode!r} was given; use one of {', '.join(MODES)}")
    if mode == "on" and kind not in KINDS:
        raise ValueError(
            f"fused=on on {kind}; only {', '.join(KINDS)} has fused norms and rotations; use auto or off"
        )


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, the mean over the last dim; in the wider dtype of x and weight.

    `weight` is as long as the last dim; without it the norm is not scaled. Half inputs are summed in fp32.
    """
    if rms_norm_limit(x, weight) is not None:
        wide = x if weight is None else x.to(torch.promote_types(x.dtype, weight.dtype))
        return F.rms_norm(wide, wide.shape[-1:], None if weight is None else weight.to(wide.dtype), eps)
    weight = x.new_ones(x.shape[-1]) if weight is None else weight
    dtype = torch.promote_types(x.dtype, weight.dtype)  # the operator wants one
    return torch.ops.npu.npu_rms_norm(x.to(dtype).contiguous(), weight.to(dtype), epsilon=eps)[0]


def rms_norm_limit(x: torch.Tensor, weight: torch.Tensor | None) -> str | None:
    """Why the vendor's RMSNorm cannot serve this call, or None."""
    if x.device.type not in KINDS:
        return f"{x.device.type} has no fused norm"
    for tensor in (x,) if weight is None else (x, weight):
        if tensor.dtype not in DTYPES:
            return f"the fused norm does not take {_name(tensor.dtype)}"
    if weight is not None and (weight.device != x.device or weight.shape != x.shape[-1:]):
        return f"the fused norm takes a weight of the last dim on {x.device}, not {_text(weight)}"
    if not 2 <= x.ndim <= 8:
        return f"the fused norm takes 2 to 8 dims, not {x.ndim}"
    return "the fused norm takes no empty tensor" if 0 in x.shape else None


def geglu(x: torch.Tensor) -> torch.Tensor:
    """The first half of x's last dim, which is even, times the exact GELU of the second."""
    if geglu_limit(x) is not None:
        return plain_geglu(x)
    exact = 0  # the default is the approximation by tanh
    return torch.ops.npu.npu_geglu(x, dim=-1, approximate=exact)[0]


def geglu_limit(x: torch.Tensor) -> str | None:
    """Why the vendor's GEGLU cannot serve this call, or None."""
    if x.device.type not in KINDS:
        return f"{x.device.type} has no fused GEGLU"
    if x.dtype not in DTYPES:
        return f"the fused GEGLU does not take {_name(x.dtype)}"
    return None if 1 <= x.ndim <= 8 else f"the fused GEGLU takes 1 to 8 dims, not {x.ndim}"


def plain_geglu(x: torch.Tensor) -> torch.Tensor:
    """`geglu` in torch's operators, for any device."""
    values, gate = x.chunk(2, dim=-1)
    return values * F.gelu(gate)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """x * cos + turned(x) * sin in x's dtype, computed in fp32.

    All are 4-D; the tables broadcast to x, have the whole head dim as last one, and values in [-1, 1].
    `turned` takes each pair (a, b) to (-b, a): pairs are neighbours if `interleaved`, else D/2 apart.
    """
    limit = rotary_limit(x.shape, x.dtype, x.device.type, cos, sin, interleaved=interleaved)
    if limit is not None:
        return plain_rotary(x, cos, sin, interleaved=interleaved)
    mode = "interleave" if interleaved else "half"
    before, long, behind = _folded(x.shape, cos.shape)
    shapes = (before, long, behind, x.shape[3]), (1, long, 1, x.shape[3]), (1, long, 1, x.shape[3])
    # The operator rounds the tables to x's dtype; angles in half precision are another rotation.
    there = [t.float().reshape(shape).contiguous() for t, shape in zip((x, cos, sin), shapes, strict=True)]
    turned = torch.ops.npu.npu_rotary_mul(*there, rotary_mode=mode)
    return turned.reshape(x.shape).to(x.dtype)


def rotary_limit(
    shape: Sequence[int],
    dtype: torch.dtype,
    kind: str,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
) -> str | None:
    """Why the vendor's rotation cannot serve a tensor of this shape, dtype and kind of device, or None."""
    if kind not in KINDS:
        return f"{kind} has no fused rotation"
    for given in (dtype, cos.dtype, sin.dtype):
        if given not in DTYPES:
            return f"the fused rotation does not take {_name(given)}"
    if len(shape) != 4 or cos.ndim != 4 or cos.shape != sin.shape:
        return f"the fused rotation takes 4 dims and equal tables, not {len(shape)} with {_text(cos)}"
    if 0 in shape:
        return "the fused rotation takes no empty tensor"
    if shape[3] % 2 or shape[3] > MAX_HEAD_DIM or cos.shape[3] != shape[3]:
        return (
            f"the fused rotation takes even head dims to {MAX_HEAD_DIM} and whole tables, not {shape[3]} "
            f"with {cos.shape[3]}"
        )
    if interleaved and (limit := pairs_limit(kind)) is not None:
        return limit
    return _table_limit(shape, cos, interleaved)


def pairs_limit(kind: str) -> str | None:
    """Why the vendor's rotation turns no neighbouring pairs on this process's devices of a kind, or None."""
    if kind in KINDS and _is_older(kind):
        return f"the fused rotation of neighbouring pairs is in {FIRST_INTERLEAVED} and newer chips"
    return None


def _table_limit(shape: Sequence[int], cos: torch.Tensor, interleaved: bool) -> str | None:
    """Why the operator cannot take tables of this shape, folded."""
    long = [place for place in range(3) if cos.shape[place] != 1]
    # Axes apart would need both tables as large as x; no model has such ones.
    if long == [0, 2] or any(cos.shape[place] != shape[place] for place in long):
        return f"the fused rotation takes tables by neighbouring axes of {tuple(shape)}, not {_text(cos)}"
    before, _, behind = _folded(shape, cos.shape)
    if (before * behind if interleaved else max(before, behind)) > MAX_ROWS:
        how = "batch x heads" if interleaved else "batch and heads"
        return f"the fused rotation takes {how} to {MAX_ROWS}, not {before} x {behind}"
    return None


def _folded(shape: Sequence[int], tables: Sequence[int]) -> tuple[int, int, int]:
    """The first three dims of a shape as (B, S, N), where only S is long in the tables.

    The operator takes one table for all samples and heads, (1, S, 1, D), but any S: neighbouring axes on
    which tables differ are one axis to it.
    """
    long = [place for place in range(3) if tables[place] != 1]
    first, last = (long[0], long[-1] + 1) if long else (1, 1)
    return math.prod(shape[:first]), math.prod(shape[first:last]), math.prod(shape[last:3])


@functools.cache
def _is_older(kind: str) -> bool:
    """True if this process's chips are older than FIRST_INTERLEAVED, as are just those without bf16."""
    return not torch.get_device_module(kind).is_bf16_supported()


def plain_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """`rotary` in torch's operators, for any device; fp64 stays fp64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if interleaved:
        turned = torch.stack((-wide[..., 1::2], wide[..., ::2]), dim=-1).flatten(-2)
    else:
        low, high = wide.chunk(2, dim=-1)
        turned = torch.cat((-high, low), dim=-1)
    return (wide * cos + turned * sin).to(x.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} on {tensor.device}"
