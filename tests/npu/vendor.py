"""The vendor's fused operators, as plain maths with the vendor's argument checks. Imported after torch_npu.

What is refused here is refused by the documentation in the wheel, by its Meta functions or by op-plugin's
C++; see the README of this folder. Masks: True, or 1, is masked *out*.
"""

import math
from typing import Any

import torch
import torch_npu

from tests.npu.kernels import RULES
from tests.simulated import CALLS, device_of, on_device, on_host, tensors_in

MAX = 2147483647
A2 = 220  # Ascend910B1, the first chip with these operators
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
COMPRESSED = 2048  # the side of the mask that sparse modes 2 to 4 want
_library = torch.library.Library("npu", "IMPL")
_aten = torch.library.Library("aten", "IMPL")


def refuse_unless(condition: Any, message: str) -> None:
    """An error as the device gives one."""
    if not condition:
        raise RuntimeError(f"{message}\n[ERROR] EZ9999 PTA call acl api failed (simulated)")


def to_bnsd(tensor: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """A tensor of any layout as (B, N, S, D)."""
    if layout == "BNSD":
        return tensor
    if layout == "BSND":
        return tensor.transpose(1, 2)
    if layout == "BSH":
        return tensor.unflatten(2, (heads, -1)).transpose(1, 2)
    return tensor.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)  # SBH


def from_bnsd(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """(B, N, S, D) in any layout, dense."""
    if layout == "BNSD":
        return tensor.contiguous()
    if layout == "BSND":
        return tensor.transpose(1, 2).contiguous()
    if layout == "BSH":
        return tensor.transpose(1, 2).flatten(2).contiguous()
    return tensor.permute(2, 0, 1, 3).flatten(2).contiguous()


def heads_of(tensor: torch.Tensor, layout: str, head_dim: int) -> int:
    """How many heads a key or value has."""
    if layout in ("BSH", "SBH"):
        return tensor.shape[2] // head_dim
    return tensor.shape[{"BNSD": 1, "BSND": 2}[layout]]


def hidden_scores(
    mask: torch.Tensor | None, mode: int, before: int, after: int, rows: int, columns: int
) -> Any:
    """Which scores the mask and the sparse mode leave out; broadcasts to (B, N, rows, columns)."""
    if mask is None:
        refuse_unless(mode in (0, 1), f"sparse_mode {mode} needs an atten_mask")
        return None
    refuse_unless(mask.dtype in (torch.bool, torch.uint8, torch.int8), f"atten_mask of {mask.dtype}")
    distance = torch.arange(columns) - torch.arange(rows)[:, None]
    if mode in (2, 3, 4):
        triangle = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)
        whole = mask.shape[-2:] == triangle.shape and torch.equal(
            mask.reshape(triangle.shape).bool(), triangle
        )
        refuse_unless(
            whole, f"sparse_mode {mode} wants the compressed {COMPRESSED} x {COMPRESSED} atten_mask"
        )
        shift = 0 if mode == 2 else columns - rows
        if mode == 4:
            return (distance - shift > after) | (distance - shift < -before)
        return distance > shift
    refuse_unless(
        mask.shape[-2:] == (rows, columns), f"atten_mask of shape {tuple(mask.shape)} for {rows} x {columns}"
    )
    hidden = mask.bool()
    if mode == 0:
        hidden = hidden | (distance > after) | (distance < -before)
    return hidden


def softmax_parts(
    q: Any, k: Any, v: Any, hidden: Any, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention, the greatest score and the sum of exponentials of each row; (B, N, S, D), fp32 inside."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(repeats, 1) for t in (k, v))
    scores = (q.float() @ k.transpose(2, 3)) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    top = scores.amax(-1, keepdim=True)
    finite = top.masked_fill(top == -math.inf, 0)
    weights = (scores - finite).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights @ v) / total.masked_fill(total == 0, 1), top, total


def prepare(name: str, tensors: list[Any]) -> tuple[torch.device, list[Any]]:
    """The device of an operator's tensors and these on the host, once the stream has come to it."""
    present = tensors_in([t for t in tensors if t is not None])
    device = device_of(present, name)
    assert device is not None, "a fused operator runs on the device"
    CALLS[name] += 1
    RULES.before(device.index)
    return device, [None if t is None else on_host(t) for t in tensors]


def placed(device: torch.device, *results: torch.Tensor) -> list[torch.Tensor]:
    """An operator's results on the device, as far as that has such numbers."""
    RULES.after(list(results))
    return [on_device(result, device) for result in results]


def is_older() -> bool:
    """True on the chips of the first generation."""
    return torch_npu.npu.utils.get_soc_version() < A2


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: Any = None,
    padding_mask: Any = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = MAX,
    next_tockens: int = MAX,
    inner_precise: int = 0,
    *rest: Any,
    sparse_mode: int = 0,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Attention, with the maximum and the sum of each row's softmax as fp32 (B, N, Sq, 8)."""
    sparse_mode = rest[3] if len(rest) > 3 else sparse_mode
    refuse_unless(not is_older(), "npu_fusion_attention is not in the operators of this chip")
    refuse_unless(
        input_layout in ("BSH", "SBH", "BSND", "BNSD"), f"input_layout {input_layout} is not simulated"
    )
    refuse_unless(query.dtype in (torch.float16, torch.bfloat16, torch.float32), f"query is {query.dtype}")
    refuse_unless(query.dtype == key.dtype == value.dtype, "query, key and value must have one dtype")
    refuse_unless(
        pse is None and padding_mask is None and keep_prob == 1.0, "pse and dropout are not simulated"
    )
    dims = len(input_layout) if input_layout in ("BSND", "BNSD") else 3
    refuse_unless(query.ndim == key.ndim == value.ndim == dims, f"{input_layout} has {dims} dims")
    device, (q, k, v, mask) = prepare("npu_fusion_attention", [query, key, value, atten_mask])
    q = to_bnsd(q, input_layout, head_num)
    refuse_unless(q.shape[1] == head_num, f"head_num {head_num}, but the query has {q.shape[1]} heads")
    kv_heads = heads_of(k, input_layout, q.shape[3])
    k, v = (to_bnsd(t, input_layout, kv_heads) for t in (k, v))
    refuse_unless(q.shape[0] == k.shape[0] == v.shape[0], "the batches differ")
    refuse_unless(
        k.shape[:3] == v.shape[:3] and kv_heads and head_num % kv_heads == 0, "key/value heads do not fit"
    )
    refuse_unless(
        head_num <= 256 and 1 <= q.shape[3] <= 768 and q.shape[3] == k.shape[3], "heads or head dim"
    )
    refuse_unless(0 not in q.shape and 0 not in k.shape, "an empty tensor")
    if mask is not None and mask.ndim == 4:
        fits = mask.shape[0] in (1, q.shape[0]) and mask.shape[1] in (1, head_num)
        fits = fits and (mask.shape[1] == 1 or mask.shape[0] == q.shape[0])
        refuse_unless(fits, f"atten_mask of shape {tuple(mask.shape)}: BNSS, B1SS, 11SS or SS")
    CALLS["largest mask"] = max(CALLS["largest mask"], 0 if mask is None else mask.numel())
    hidden = hidden_scores(mask, sparse_mode, pre_tockens, next_tockens, q.shape[2], k.shape[2])
    if (
        hidden is not None
        and inner_precise != 2
        and bool(hidden.expand(*q.shape[:3], k.shape[2]).all(-1).any())
    ):
        CALLS["a masked row without inner_precise=2"] += 1
    out, top, total = softmax_parts(q, k, v, hidden, scale)
    out = from_bnsd(out.to(query.dtype), input_layout)
    top = top.masked_fill(top == -math.inf, torch.finfo(torch.float32).min)
    top, total = (t.expand(-1, -1, -1, 8).contiguous() for t in (top, total))
    out, top, total = placed(device, out, top, total)
    return out, top, total, torch.empty(0, device=device), 0, 0, 0


def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    pse_shift: Any = None,
    atten_mask: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = MAX,
    next_tokens: int = MAX,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    softmax_lse_flag: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, with its log-sum-exp as fp32 (B, N, Sq, 1) where asked for."""
    refuse_unless(not is_older(), "npu_fused_infer_attention_score is not in the operators of this chip")
    refuse_unless(input_layout in ("BSH", "BSND", "BNSD"), f"input_layout {input_layout} is not simulated")
    refuse_unless(
        query.dtype in (torch.float16, torch.bfloat16), f"query of {query.dtype}: float16, bfloat16, int8"
    )
    refuse_unless(query.dtype == key.dtype == value.dtype, "query, key and value must have one dtype")
    given = [t for t in (query, key, value, atten_mask) if t is not None]
    refuse_unless(all(t.is_contiguous() for t in given), "non-contiguous tensors are not supported")
    refuse_unless(pse_shift is None, "pse_shift is not simulated")
    device, (q, k, v, mask) = prepare("npu_fused_infer_attention_score", [query, key, value, atten_mask])
    q, kv_heads = to_bnsd(q, input_layout, num_heads), num_key_value_heads or num_heads
    k, v = (to_bnsd(t, input_layout, kv_heads) for t in (k, v))
    refuse_unless(
        q.shape[1] == num_heads and k.shape[1] == kv_heads, "num_heads, num_key_value_heads and the shapes"
    )
    refuse_unless(num_heads <= 256 and num_heads % kv_heads == 0 and num_heads // kv_heads <= 64, "heads")
    refuse_unless(
        q.shape[3] % 16 == 0 and q.shape[3] <= 512, f"head dim {q.shape[3]}: a multiple of 16 up to 512"
    )
    wide = input_layout != "BNSD" and num_heads * q.shape[3] >= 65535
    refuse_unless(not wide, "N * D must be under 65535 in BSH and BSND")
    refuse_unless(0 not in q.shape and 0 not in k.shape, "an empty tensor")
    if mask is not None and sparse_mode in (0, 1):
        fits = mask.ndim == 2 or mask.shape[:-2] in ((1,), (1, 1), (q.shape[0], 1))
        refuse_unless(
            fits and q.shape[2] > 1, f"atten_mask of shape {tuple(mask.shape)} for {q.shape[2]} rows"
        )
    CALLS["largest mask"] = max(CALLS["largest mask"], 0 if mask is None else mask.numel())
    hidden = hidden_scores(mask, sparse_mode, pre_tokens, next_tokens, q.shape[2], k.shape[2])
    if (
        hidden is not None
        and inner_precise < 2
        and bool(hidden.expand(*q.shape[:3], k.shape[2]).all(-1).any())
    ):
        CALLS["a masked row without inner_precise=2"] += 1
    out, top, total = softmax_parts(q, k, v, hidden, scale)
    lse = (top + total.log()).masked_fill(total == 0, math.inf) if softmax_lse_flag else torch.zeros(1)
    out, lse = placed(device, from_bnsd(out.to(query.dtype), input_layout), lse.contiguous())
    return out, lse


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch_npu's rule: the fused kernel, or the plain one with all scores for what that does not take."""
    additive = attn_mask is not None and attn_mask.dtype != torch.bool
    odd = query.dtype == torch.float32 and query.shape[-1] % 4 != 0
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if (
        additive
        or odd
        or is_older()
        or query.ndim != 4
        or query.shape[-1] > 512
        or query.dtype == torch.float64
        or 0 in key.shape
    ):
        device, (q, k, v, mask) = prepare("sdpa with all scores", [query, key, value, attn_mask])
        options = {"attn_mask": mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return placed(device, torch.nn.functional.scaled_dot_product_attention(q, k, v, **options))[0]
    mask, mode = None, 0
    if is_causal:
        mask = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=query.device).triu(1)
        mode = 2
    elif attn_mask is not None:
        mask = ~attn_mask.expand(
            query.shape[0], attn_mask.shape[1] if attn_mask.ndim == 4 else 1, query.shape[2], key.shape[2]
        )
    CALLS["sdpa fused"] += 1
    return torch.ops.npu.npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1],
        "BNSD",
        atten_mask=mask,
        scale=scale,
        sparse_mode=mode,
        inner_precise=2,
    )[0]


def npu_rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed input in its dtype, and fp32 1 / rms with size-1 tail."""
    refuse_unless(gamma is not None and gamma.dtype == input.dtype, "gamma must have the dtype of the input")
    refuse_unless(input.dtype in FLOATS and 2 <= input.ndim <= 8, f"{input.dtype} of {input.ndim} dims")
    refuse_unless(0 not in input.shape, "an empty tensor")
    tail = gamma.ndim
    refuse_unless(gamma.shape == input.shape[-tail:], "gamma must have the shape of the input's tail")
    device, (x, weight) = prepare("npu_rms_norm", [input, gamma])
    dims = tuple(range(-tail, 0))
    rstd = (x.float().square().mean(dims, keepdim=True) + epsilon).rsqrt()
    out = (x.float() * rstd * weight.float()).to(input.dtype)
    out, rstd = placed(device, out, rstd)
    return out, rstd


def npu_rotary_mul(
    input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half", rotate: Any = None
) -> torch.Tensor:
    """Rotary embedding of a 4-D tensor with cos r1 and sin r2 of the full head dim."""
    refuse_unless(rotary_mode in ("half", "interleave"), f"rotary_mode {rotary_mode}")
    refuse_unless(
        rotary_mode == "half" or not is_older(), "npu_rotary_mul in aclop only support rotary_mode with half"
    )
    refuse_unless({input.dtype, r1.dtype, r2.dtype} <= set(FLOATS), f"{input.dtype} with {r1.dtype}")
    refuse_unless(0 not in input.shape, "an empty tensor")
    refuse_unless(input.ndim == r1.ndim == r2.ndim == 4 and r1.shape == r2.shape, "4-D tensors, cos like sin")
    dim = input.shape[3]
    refuse_unless(
        dim % 2 == 0 and dim < 896 and r1.shape[3] == dim, f"head dim {dim} with cos of {r1.shape[3]}"
    )
    fits = all(r in (1, s) for r, s in zip(r1.shape[:3], input.shape[:3], strict=True))
    refuse_unless(fits, f"cos of shape {tuple(r1.shape)} for {tuple(input.shape)}")
    if rotary_mode == "interleave":
        sizes = tuple(input.shape[:3])
        alone = [tuple(n if i == axis else 1 for i, n in enumerate(sizes)) for axis in range(3)]
        rows = [math.prod(sizes) // n for n, table in zip(sizes, alone, strict=True) if r1.shape[:3] == table]
        refuse_unless(rows, f"interleave: cos of shape {tuple(r1.shape)}: S11D, 1S1D or 11SD")
        refuse_unless(min(rows) < 1000, f"interleave: B * N of {tuple(input.shape)} must be under 1000")
    device, (x, cos, sin) = prepare("npu_rotary_mul", [input, r1, r2])
    cos, sin = cos.to(x.dtype).float(), sin.to(x.dtype).float()
    if rotary_mode == "half":
        low, high = x.float().chunk(2, -1)
        turned = torch.cat([-high, low], -1)
    else:
        turned = torch.stack([-x.float()[..., 1::2], x.float()[..., ::2]], -1).flatten(-2)
    return placed(device, (x.float() * cos + turned * sin).to(x.dtype))[0]


def npu_geglu(
    self: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """One half of a dim times the GELU of the other, and that GELU; `approximate` 0 is exact, 1 by tanh."""
    refuse_unless(self.dtype in FLOATS and 1 <= self.ndim <= 8, f"{self.dtype} of {self.ndim} dims")
    refuse_unless(-self.ndim <= dim < self.ndim and self.shape[dim] % 2 == 0, f"dim {dim} of {self.shape}")
    refuse_unless(approximate in (0, 1), f"approximate {approximate}")
    device, (x,) = prepare("npu_geglu", [self])
    CALLS["npu_geglu by tanh"] += approximate
    left, right = x.float().chunk(2, dim)
    gate, values = (left, right) if activate_left else (right, left)
    gate = torch.nn.functional.gelu(gate, approximate=("none", "tanh")[approximate])
    out, gate = placed(device, (values * gate).to(x.dtype), gate.to(x.dtype))
    return out, gate


def register() -> None:
    """Put these in place of the wheel's."""
    attention = npu_fusion_attention, npu_fused_infer_attention_score
    for function in (*attention, npu_rms_norm, npu_rotary_mul, npu_geglu):
        operator = getattr(torch.ops.npu, function.__name__).default
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            _library.impl(operator, function, key)
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        _aten.impl(torch.ops.aten.scaled_dot_product_attention.default, scaled_dot_product_attention, key)


register()
