"""Local attention kernels: softmax(q k^T * scale + mask) v, with and without its log-sum-exp.

Shapes: q (B, Sq, H, D), k and v (B, Sk, Hkv, D) where Hkv divides H, mask (B|1, H|1, Sq|1, Sk), bool (True
attends) or additive. A row without any key gives 0, with log-sum-exp -inf; a chip that saturates has its most
negative number there. With a log-sum-exp, both results are fp32 (fp64 for fp64), lse is the natural log,
(B, H, Sq).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from usp.attention import npu_kernels

aten = torch.ops.aten


class Attention(Protocol):
    """This rank's share in, this rank's share out, (B, S, H, D)."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, /
    ) -> torch.Tensor: ...


class LseAttention(Protocol):
    """As Attention, with the fp32 log-sum-exp of each row beside the fp32 result."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, /
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


KernelFunction = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Kernel:
    """A local attention that returns its log-sum-exp, and what it takes.

    `run(q, k, v, mask, scale)`; `takes_mask` is whether it takes any; `head_dims` what D must be a multiple
    of; `limit(q, mask)` says what else it cannot serve, or None.
    """

    name: str
    run: KernelFunction
    device_types: tuple[str, ...]  # () is any
    dtypes: tuple[torch.dtype, ...]
    takes_mask: bool = True
    head_dims: int = 1
    max_head_dim: int = 1 << 30
    limit: Callable[[torch.Tensor, torch.Tensor | None], str | None] | None = None

    def misfit(self, q: torch.Tensor, mask: torch.Tensor | None) -> str | None:
        """Why this kernel cannot serve the call, or None."""
        if self.device_types and q.device.type not in self.device_types:
            return f"runs on {' and '.join(self.device_types)}, not {q.device.type}"
        if q.dtype not in self.dtypes:
            return f"does not take {str(q.dtype).removeprefix('torch.')}"
        if mask is not None and not self.takes_mask:
            return "takes no mask"
        if q.shape[-1] % self.head_dims or q.shape[-1] > self.max_head_dim:
            return f"takes head dims to {self.max_head_dim} in steps of {self.head_dims}, not {q.shape[-1]}"
        return None if self.limit is None else self.limit(q, mask)


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """torch's own attention, which picks its kernel by itself; a row without keys gives 0."""
    if 0 in q.shape or k.shape[1] == 0:
        return torch.zeros_like(q)
    grouped = k.shape[2] != q.shape[2]
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # B H S D
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped).transpose(
        1, 2
    )


def cpu_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's CPU flash kernel, computed in fp32.

    fp32 for half inputs too: the CPU has no faster half path (measured: 58 GFLOP/s fp32, 53 bf16, 30 fp16),
    and the block results then enter the merge unrounded. Two traps of the operator are guarded here: a last
    dim with a stride reads garbage, and a fully masked row has LSE 0. Empty inputs, which kill it, never get
    here (`lse_attention`).
    """
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v = (_dense_last(t.to(work)).transpose(1, 2) for t in _repeat_kv(q, k, v))
    bias = None if mask is None else as_additive(mask, work)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=scale
    )
    if bias is not None:
        lse = lse.masked_fill((bias == -math.inf).all(-1).expand(lse.shape), -math.inf)
    return out.transpose(1, 2), lse


def cuda_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's CUDA flash kernel; no masks."""
    q, k, v = (_dense_last(t).transpose(1, 2) for t in _repeat_kv(q, k, v))
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
    return out.transpose(1, 2).float(), lse[..., : q.shape[2]]


def cuda_efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's CUDA memory-efficient kernel; its LSE is padded to whole tiles."""
    q, k, v = (_dense_last(t).transpose(1, 2) for t in _repeat_kv(q, k, v))
    bias = (
        None if mask is None else _tile_aligned(as_additive(mask, q.dtype).expand(*q.shape[:3], k.shape[2]))
    )
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, False, scale=scale)
    lse = lse[..., : q.shape[2]]
    if bias is None:
        return out.transpose(1, 2).float(), lse
    empty = (bias == -math.inf).all(-1)
    out = out.masked_fill(empty[..., None], 0)
    return out.transpose(1, 2).float(), lse.masked_fill(empty, -math.inf)


def cuda_cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cuDNN's attention through torch; no masks."""
    q, k, v = (_dense_last(t).transpose(1, 2) for t in _repeat_kv(q, k, v))
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, False, False, scale=scale
    )
    return out.transpose(1, 2).float(), lse.reshape(q.shape[:3])


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    *,
    tile: int = 1 << 24,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in plain fp32 operators, for any device; rows are cut so that at most `tile` scores exist at
    once."""
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v = (t.to(work).transpose(1, 2) for t in _repeat_kv(q, k, v))  # B H S D
    keys = k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    outs, lses = [], []
    rows = max(1, tile // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for low in range(0, q.shape[2], rows):
        here = mask if mask is None or mask.shape[2] == 1 else mask[:, :, low : low + rows]
        scores = q[:, :, low : low + rows] @ keys
        if here is not None:
            scores = _masked(scores, here)
        top = scores.amax(-1, keepdim=True)
        if here is not None:  # a row without keys: exp(lowest - 0) is 0, where exp(lowest - lowest) is 1
            top = top.masked_fill(~_shown(here, work).any(-1, keepdim=True), 0)
        weights = (scores - top).exp_()
        total = weights.sum(-1, keepdim=True)
        outs.append((weights @ v) / total.masked_fill(total == 0, 1))
        lses.append((top + total.log()).squeeze(-1))
    return torch.cat(outs, 2).transpose(1, 2), torch.cat(lses, 2)


HALF = (torch.float16, torch.bfloat16)
KERNELS: dict[str, Kernel] = {  # in order of preference
    kernel.name: kernel
    for kernel in (
        Kernel("cuda-flash", cuda_flash, ("cuda",), HALF, takes_mask=False, head_dims=8, max_head_dim=256),
        Kernel("cuda-cudnn", cuda_cudnn, ("cuda",), HALF, takes_mask=False, head_dims=8, max_head_dim=128),
        Kernel("cuda-efficient", cuda_efficient, ("cuda",), (*HALF, torch.float32), head_dims=8),
        Kernel(
            "npu-infer",
            npu_kernels.infer,
            ("npu",),
            HALF,
            head_dims=16,
            max_head_dim=512,
            limit=npu_kernels.infer_limit,
        ),
        Kernel(
            "npu-fusion",
            npu_kernels.fusion,
            ("npu",),
            (*HALF, torch.float32),
            max_head_dim=768,
            limit=npu_kernels.fusion_limit,
        ),
        Kernel("cpu-flash", cpu_flash, ("cpu",), (*HALF, torch.float32, torch.float64)),
        Kernel("plain", plain, (), (*HALF, torch.float32, torch.float64)),
    )
}

# Where torch's own choice may fall back to one matrix of all scores: attention picks from KERNELS instead.
CHOSEN_HERE = frozenset({"npu"})


def check_kernel(name: str, device_type: str) -> None:
    """Raise ValueError unless `name` is "auto", or a kernel that exists and runs on this kind of device."""
    if name == "auto":
        return
    usable = [n for n, k in KERNELS.items() if not k.device_types or device_type in k.device_types]
    if name not in usable:
        why = (
            f"runs on {' and '.join(KERNELS[name].device_types)} only" if name in KERNELS else "is not known"
        )
        raise ValueError(
            f"kernel={name!r} {why}; this rank's device is {device_type}; use auto or one of "
            f"{', '.join(usable)}"
        )


def choose(name: str, q: torch.Tensor, mask: torch.Tensor | None) -> Kernel:
    """The kernel that serves a call: the named one, or for "auto" the first that fits and passes its
    self-test.

    Depends on shapes, dtypes and the device kind only, which are alike on all ranks.
    Raises ValueError if the named one does not fit the call.
    """
    if name != "auto":
        check_kernel(name, q.device.type)
        if why := KERNELS[name].misfit(q, mask):
            raise ValueError(f"kernel={name!r} {why}; use kernel='auto' or 'plain'")
        if fault := lse_fault(KERNELS[name], q.device, q.dtype):
            raise RuntimeError(
                f"kernel={name!r} failed its self-test on {q.device}: {fault}; use kernel='plain'"
            )
        return KERNELS[name]
    return next(
        k for k in KERNELS.values() if k.misfit(q, mask) is None and lse_fault(k, q.device, q.dtype) is None
    )


def choice(name: str, q: torch.Tensor, mask: torch.Tensor | None) -> str:
    """For a report: the kernel that `choose` gives for a call, and why it is that one."""
    chosen = choose(name, q, mask)
    if name != "auto":
        return f"{chosen.name} (as asked)"
    before = list(KERNELS.values())[: list(KERNELS).index(chosen.name)]
    fitting = [k for k in before if not k.device_types or q.device.type in k.device_types]
    reasons = [f"{k.name} {k.misfit(q, mask) or lse_fault(k, q.device, q.dtype)}" for k in fitting]
    return f"{chosen.name} (auto: {'; '.join(reasons) or 'the first with a log-sum-exp that fits'})"


def lse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    kernel: str = "auto",
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with its log-sum-exp from the named kernel; no keys at all give 0 and -inf."""
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    if 0 in q.shape or k.shape[1] == 0:
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=work)
        return torch.zeros_like(q, dtype=work), lse
    out, lse = choose(kernel, q, mask).run(q, k, v, mask, scale)
    return out.to(work), lse


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    kernel: str = "auto",
    scale: float | None = None,
) -> torch.Tensor:
    """Attention without log-sum-exp: torch's own choice for "auto" where that is sound, else a kernel of
    ours."""
    if kernel == "auto" and q.device.type not in CHOSEN_HERE:
        return sdpa(q, k, v, mask, scale=scale)
    if 0 in q.shape or k.shape[1] == 0:
        return torch.zeros_like(q)
    return choose(kernel, q, mask).run(q, k, v, mask, scale)[0].to(q.dtype)


@functools.cache
def lse_fault(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with a kernel's log-sum-exp on this device, or None; computed once per process.

    Zero queries against 8 keys must give ln 8 (a base-2 kernel gives 3), of shape (B, H, Sq); a random case
    must match the plain kernel, and so must a row that is wholly masked.
    """
    try:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, n, 2, 64, generator=generator).to(device, dtype) for n in (5, 8, 8))
        lse = kernel.run(q * 0, k, v, None, None)[1]
        if lse.shape != (2, 2, 5):
            return f"log-sum-exp has shape {tuple(lse.shape)}, not (2, 2, 5)"
        if not torch.allclose(lse.cpu().double(), torch.full((2, 2, 5), math.log(8.0)).double(), atol=1e-3):
            return f"log-sum-exp of 8 equal scores is {lse.flatten()[0].item():.4f}, not ln 8 = 2.0794"
        masks: list[torch.Tensor | None] = [None]
        if kernel.takes_mask:
            masks.append((torch.arange(8) < torch.arange(5)[:, None]).view(1, 1, 5, 8).to(device))
        for mask in masks:
            for got, want in zip(kernel.run(q, k, v, mask, None), plain(q, k, v, mask, None), strict=True):
                if not torch.allclose(got.float(), want.float(), atol=2e-2 if dtype in HALF else 1e-4):
                    return f"differs from plain attention{' with a mask' if mask is not None else ''}"
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def as_additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bool mask as 0 and -inf; an additive one in `dtype`."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def _masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scores with a bool mask's hidden keys at the most negative number, or with an additive mask added."""
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask.to(scores.dtype)


def _shown(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The keys that a mask does not hide: as bool, True is shown; as numbers to add in `dtype`, -inf hides.

    First-generation Ascend chips saturate, and have the most negative number of a dtype for its -inf.
    """
    if mask.dtype == torch.bool:
        return mask
    mask = mask if mask.dtype in HALF else mask.to(dtype)
    return mask > mask.new_full((), torch.finfo(mask.dtype).min) * 2


def _repeat_kv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    repeats = q.shape[2] // k.shape[2]
    if repeats == 1:
        return q, k, v
    return q, k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)


def _dense_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _tile_aligned(bias: torch.Tensor) -> torch.Tensor:
    """The bias with rows that start at multiples of 8 elements, which the efficient kernel wants."""
    width = -(-bias.shape[-1] // 8) * 8
    return F.pad(bias, (0, width - bias.shape[-1]))[..., : bias.shape[-1]]
