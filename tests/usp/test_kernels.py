"""Local kernels: each with a log-sum-exp that is right, or is found out before a ring can use it."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from usp.attention import kernels
from usp.attention.kernels import (
    KERNELS,
    Kernel,
    attention,
    check_kernel,
    choose,
    lse_attention,
    lse_fault,
    plain,
    sdpa,
)
from usp.attention.ring import MergedAttention

CPU = torch.device("cpu")
USABLE = [name for name, kernel in KERNELS.items() if kernel.device_types in ((), ("cpu",))]
ROOT = Path(__file__).parents[2]


def tensors(
    queries: int, keys: int, *, heads: int = 3, dim: int = 16, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """q, k and v, BSHD."""
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = [(2, n, heads, dim) for n in (queries, keys, keys)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exp in float64, written down once more."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return (scores.softmax(-1).nan_to_num(0) @ v).transpose(1, 2), scores.logsumexp(-1)


def base_2(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel whose log-sum-exp is to base 2."""
    out, lse = plain(*args)
    return out, lse / math.log(2)


def transposed(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel whose log-sum-exp is (B, S, H), as in some releases of flash-attention."""
    out, lse = plain(*args)
    return out, lse.transpose(1, 2)


def all_zero(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel that hands back zeros for its log-sum-exp, as yunchang's TORCH_MATH does."""
    out, lse = plain(*args)
    return out, torch.zeros_like(lse)


def wrong_out(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel that is right for equal keys only."""
    out, lse = plain(*args)
    return args[2].float().mean(1, keepdim=True).expand_as(out), lse


def mask_dropped(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel that says it takes masks, and drops them."""
    return plain(*args[:3], None, args[4])


def masked_row_0(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> Any:
    """A kernel whose log-sum-exp is 0 for a wholly masked row, as torch's own CPU operator has it."""
    out, lse = plain(q, k, v, mask, scale)
    return out, lse.masked_fill(lse == -math.inf, 0)


def raises(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel that was not built for this device."""
    raise RuntimeError("no kernel image is available\nfor execution")


FAULTY = {
    base_2: "log-sum-exp of 8 equal scores is 3.0000, not ln 8 = 2.0794",
    transposed: "log-sum-exp has shape (2, 5, 2), not (2, 2, 5)",
    all_zero: "log-sum-exp of 8 equal scores is 0.0000, not ln 8 = 2.0794",
    wrong_out: "differs from plain attention",
    mask_dropped: "differs from plain attention with a mask",
    masked_row_0: "differs from plain attention with a mask",
    raises: "RuntimeError: no kernel image is available",
}


@pytest.mark.parametrize("function", FAULTY)
def test_b35_a_wrong_kernel_is_skipped_by_auto_and_refused_by_name(monkeypatch, function):
    """B35, req 10: base 2, another shape, all zeros, dropped masks: the self-test finds it and says why."""
    faulty = Kernel("faulty", function, (), (torch.float32,))
    monkeypatch.setattr(kernels, "KERNELS", {"faulty": faulty, **KERNELS})
    q, k, v = tensors(5, 7)
    assert lse_fault(faulty, CPU, torch.float32) == FAULTY[function]
    assert choose("auto", q, None).name == "cpu-flash"
    with pytest.raises(RuntimeError, match=r"^kernel='faulty' failed its self-test on cpu: ") as caught:
        lse_attention(q, k, v, None, kernel="faulty")
    assert str(caught.value).endswith(f"{FAULTY[function]}; use kernel='plain'")


def test_b35_the_self_test_runs_once_per_process(monkeypatch):
    """B35, req 10: each kernel is tested at its first use for a dtype, and not again."""
    calls = []

    def counted(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(args[0].dtype)
        return plain(*args)

    kernel = Kernel("counted", counted, (), (torch.float32, torch.bfloat16))
    monkeypatch.setattr(kernels, "KERNELS", {"counted": kernel, **KERNELS})
    q, k, v = tensors(5, 7)
    lse_attention(q, k, v, None)
    first = len(calls)
    lse_attention(q, k, v, None)
    assert (first > 1, len(calls)) == (True, first + 1)
    lse_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), None)
    assert len(calls) > first + 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", USABLE)
def test_b35_every_kernel_here_passes(name, dtype):
    """B35: natural log, (B, H, S), for each kernel and dtype that this machine runs."""
    assert lse_fault(KERNELS[name], CPU, dtype) is None


@pytest.mark.parametrize("name", USABLE)
def test_a_row_without_keys_is_0_with_minus_infinity(name):
    """Req 9: wholly masked rows, and no keys or queries at all, which kill torch's CPU operator; no NaN."""
    q, k, v = tensors(5, 7)
    mask = torch.ones(1, 1, 5, 7, dtype=torch.bool)
    mask[..., 2, :] = False
    for given in (mask, torch.zeros(mask.shape).masked_fill(~mask, -math.inf)):
        out, lse = lse_attention(q, k, v, given, kernel=name)
        assert (lse[:, :, 2] == -math.inf).all()
        assert (out[:, 2] == 0).all()
        assert torch.isfinite(out).all()
        assert torch.isfinite(lse[:, :, [0, 1, 3, 4]]).all()
        assert torch.equal(attention(q, k, v, given, kernel=name), out)
    out, lse = lse_attention(q, k[:, :0], v[:, :0], None, kernel=name)
    assert out.shape == q.shape
    assert lse.shape == (2, 3, 5)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    for empty in ((q[:, :0], k, v), (q[:, :, :0], k[:, :, :0], v[:, :, :0]), (q[:0], k[:0], v[:0])):
        out, lse = lse_attention(*empty, None, kernel=name)
        assert out.shape == empty[0].shape
        assert lse.shape == (empty[0].shape[0], empty[0].shape[2], empty[0].shape[1])
        assert attention(*empty, None, kernel=name).shape == empty[0].shape


def test_torchs_own_attention_gives_0_for_rows_without_keys():
    """Req 9: what "auto" takes without a log-sum-exp keeps the same promise, also for no keys at all."""
    q, k, v = tensors(5, 7)
    mask = torch.ones(1, 1, 5, 7, dtype=torch.bool)
    mask[..., 2, :] = False
    out = sdpa(q, k, v, mask)
    assert (out[:, 2] == 0).all()
    assert torch.isfinite(out).all()
    assert torch.equal(sdpa(q, k[:, :0], v[:, :0], None), torch.zeros_like(q))
    assert sdpa(q[:, :0], k, v, None).shape == (2, 0, 3, 16)


@pytest.mark.parametrize("name", ["auto", *USABLE])
def test_strided_inputs_are_read_right(name):
    """torch's CPU operator reads garbage from a strided last dim: same result as from contiguous memory."""
    contiguous = tensors(5, 7)
    strided = [torch.stack([t, torch.full_like(t, 9.0)], -1).flatten(-2)[..., ::2] for t in contiguous]
    assert all(t.stride(-1) == 2 for t in strided)
    sliced = [torch.cat([t, t], 2)[:, :, :3] for t in contiguous]
    for changed in (strided, sliced, [t.transpose(1, 2).contiguous().transpose(1, 2) for t in contiguous]):
        assert torch.allclose(
            attention(*changed, None, kernel=name), attention(*contiguous, None, kernel=name), atol=1e-6
        )


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    # Rounding over 16-wide sums of values near 1: 1e-15 in fp64, 1e-6 in fp32. Halves are read as they are
    # and worked on in fp32, so they differ from float64 no more than fp32 does.
    [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 2e-6), (torch.float16, 2e-6)],
)
def test_results_are_as_exact_as_their_working_type(name, dtype, bound):
    """B33, req 9: fp64 stays fp64, halves are accumulated and returned in fp32 with their log-sum-exp."""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    for queries, keys in ((5, 7), (1, 1), (33, 65)):
        q, k, v = tensors(queries, keys, dtype=dtype)
        out, lse = lse_attention(q, k, v, None, kernel=name)
        assert (out.dtype, lse.dtype) == (work, work)
        want_out, want_lse = exact(q, k, v)
        assert (out - want_out).abs().max() <= bound
        assert (lse - want_lse).abs().max() <= bound * 4  # values up to 8
        assert attention(q, k, v, None, kernel=name).dtype == dtype


@pytest.mark.parametrize("masked", [None, "rows", "keys"])
def test_plain_in_tiles_equals_plain_whole(masked):
    """Rows are independent, so cutting them changes rounding at most: 1e-6, for tiles of 1 row, some, all."""
    q, k, v = tensors(13, 9)
    generator = torch.Generator().manual_seed(0)
    rows = {"rows": 13, "keys": 1}.get(masked or "", 1)
    mask = None if masked is None else torch.rand(2, 1, rows, 9, generator=generator) > 0.3
    whole = plain(q, k, v, mask, None)
    for tile in (1, 2 * 3 * 9, 2 * 3 * 9 * 4, 2 * 3 * 9 * 13):
        for got, want in zip(plain(q, k, v, mask, None, tile=tile), whole, strict=True):
            assert got.shape == want.shape
            assert torch.allclose(got, want, atol=1e-6)
    for got, want in zip(whole, exact(q, k, v, mask), strict=True):
        assert torch.allclose(got.double(), want, atol=2e-6)


class Saturating(TorchDispatchMode):
    """A chip without infinities: an operator gives the greatest finite number for inf, and 0 for NaN.

    With `refuses` none may be given to an operator as a number, either.
    """

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self._refuses = refuses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [a for a in args if isinstance(a, float) and math.isinf(a)]
        assert not (self._refuses and given), f"{func} was given {given}"
        result = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        for tensor in [] if is_view else tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.nan_to_num_(nan=0.0)
        return result


def masks_of(shown: torch.Tensor) -> dict[str, torch.Tensor]:
    """A bool mask, and the same as additive ones, as the chip in force makes them."""
    made = {
        dtype: torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, -math.inf)
        for dtype in (torch.float32, torch.float16)
    }
    return {"bool": shown, **{str(dtype): mask for dtype, mask in made.items()}}


@pytest.mark.parametrize("tile", [1, 1 << 24])
def test_h43_plain_attention_masks_without_infinities(tile):
    """No -inf is used; where it is the most negative number hidden keys weigh 0, and rows of them give 0."""
    q, k, v = tensors(5, 7)
    shown = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)) > 0.4
    shown[:, :, 2] = False
    want, want_lse = exact(q, k, v, shown)
    masks = masks_of(shown)
    with Saturating():
        masks |= {f"{name} made there": mask for name, mask in masks_of(shown).items()}
    with Saturating(refuses=True):
        found = {name: plain(q, k, v, mask, None, tile=tile) for name, mask in masks.items()}
    for name, (out, lse) in found.items():
        assert torch.equal(out[:, 2], torch.zeros_like(out[:, 2])), name
        assert (lse[:, :, 2] == torch.finfo(torch.float32).min).all(), name
        assert torch.allclose(out.double(), want, atol=2e-6), name
        rows = [0, 1, 3, 4]
        assert torch.allclose(lse[:, :, rows].double(), want_lse[:, :, rows], atol=8e-6), name


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_h43_blocks_merge_without_infinities(order):
    """A block that shows a row nothing counts for nothing, before, between and after others; no row, 0."""
    q, k, v = tensors(5, 9)
    shown = torch.rand(1, 1, 5, 9, generator=torch.Generator().manual_seed(1)) > 0.4
    shown[..., 2, :] = False  # no key anywhere
    shown[..., 1, :3] = shown[..., 3, 3:6] = False  # none in one block
    shown[..., 4, 3:] = False  # none but in the first
    want, _ = exact(q, k, v, shown)
    columns = [slice(3 * block, 3 * block + 3) for block in order]
    with Saturating():
        merged = MergedAttention()
        for here in columns:
            merged.add(*lse_attention(q, k[:, here], v[:, here], shown[..., here], kernel="plain"))
        out = merged.result()
    assert torch.equal(out[:, 2], torch.zeros_like(out[:, 2]))
    assert torch.allclose(out.double(), want, atol=2e-6)


def test_plain_holds_no_more_scores_than_its_tile(monkeypatch):
    """On a device without a fused kernel memory is bounded: no score block is larger than `tile`."""
    largest = []
    real = torch.Tensor.exp_
    monkeypatch.setattr(torch.Tensor, "exp_", lambda t: (largest.append(t.numel()), real(t))[1])
    q, k, v = tensors(64, 32)
    plain(q, k, v, None, None, tile=2 * 3 * 32 * 5)
    assert max(largest) == 2 * 3 * 32 * 5
    assert sum(largest) == 2 * 3 * 64 * 32


@pytest.mark.parametrize("name", ["auto", *USABLE])
def test_a_scale_is_kept(name):
    """A model's own softmax scale replaces 1/sqrt(D)."""
    q, k, v = tensors(5, 7)
    want = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), scale=0.7).transpose(1, 2)
    assert torch.allclose(attention(q, k, v, None, kernel=name, scale=0.7), want, atol=1e-6)


def test_b21_a_named_kernel_is_used_or_refused():
    """B21, req 40: unknown, for another device, or unfit: an error with the reason and what is usable."""
    check_kernel("auto", "cpu")
    check_kernel("plain", "npu")
    with pytest.raises(ValueError, match="is not known") as caught:
        check_kernel("flash-attn", "cpu")
    assert str(caught.value) == (
        "kernel='flash-attn' is not known; this rank's device is cpu; use auto or one of cpu-flash, plain"
    )
    with pytest.raises(ValueError, match="runs on cpu only") as caught:
        check_kernel("cpu-flash", "cuda")
    assert str(caught.value).endswith("use auto or one of cuda-flash, cuda-cudnn, cuda-efficient, plain")
    q = torch.zeros(1, 2, 1, 8, dtype=torch.complex64)
    with pytest.raises(
        ValueError, match=r"^kernel='plain' does not take complex64; use kernel='auto' or 'plain'$"
    ):
        choose("plain", q, None)


def test_kernels_say_what_they_do_not_take():
    """What `choose` skips by: device, dtype, mask and head size, each in words."""
    flash = KERNELS["cuda-flash"]
    on_cpu = torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16)
    there = on_cpu.to("meta")
    moved = Kernel("moved", flash.run, ("meta",), flash.dtypes, False, 8, 256)
    assert flash.misfit(on_cpu, None) == "runs on cuda, not cpu"
    assert moved.misfit(there, None) is None
    assert moved.misfit(there.float(), None) == "does not take float32"
    assert moved.misfit(there, torch.ones(1)) == "takes no mask"
    for dim in (12, 264):
        assert moved.misfit(there.new_empty(1, 2, 1, dim), None) == (
            f"takes head dims to 256 in steps of 8, not {dim}"
        )


BLOCKED = """
import sys
BLOCKED = {"flash_attn", "xformers", "sageattention", "yunchang", "xfuser", "torch_npu", "torch_musa"}
asked = set()
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            asked.add(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import torch
from tests.ranks import Ranks
from tests.usp import test_attention as t

def go():
    q, k, v = t.tensors(0, 13, 3)
    want = t.reference(q, k, v)
    layouts = ("ulysses2", "gather_kv2", "ring2")
    return [(t.attend(layout, q, k, v) - want).abs().max().item() for layout in layouts]

if __name__ == "__main__":
    pool = Ranks(2)
    errors = [error for found in pool.run(go) for error in found]
    pool.stop()
    assert max(errors) <= 1e-5, errors
    assert not BLOCKED & set(sys.modules)
    print("fine")
"""


def test_b21_nothing_beyond_torch_is_needed():
    """B21, req 18: flash-attn, xformers, sageattention, yunchang, vendors' torch absent: all works on CPU."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKED], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fine\n"
