"""What ranks on simulated NPUs run to compare the vendor's fused norms and rotations with the plain forms."""

import ast
import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import diffusers.models.normalization as library
import numpy as np
import torch
from diffusers.models.normalization import RMSNorm
from torch import nn

from runtime import fused
from tests import simulated
from tests.npu import bodies
from tests.npu.bodies import device
from tests.usp import families
from tests.usp.in_ranks import SEED, error_of
from usp.demo import tiny
from usp.fusing import Fused, fuse
from usp.pipeline import ParallelPipeline
from usp.plans import PLANS, plan_for
from usp.trees import map_tensors, tensors_in

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CALLED = ("npu_rms_norm", "npu_rotary_mul")


class Reached(Exception):
    """The transformer is called."""


def ran() -> dict[str, int]:
    """How often each fused operator ran since the counts were reset."""
    return {name: simulated.CALLS[name] for name in CALLED if simulated.CALLS[name]}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Numbers that are alike on the host and here."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ulps(got: torch.Tensor, want: torch.Tensor) -> float:
    """The greatest difference, in roundings of the dtype at 1; infinite if dtypes or shapes differ."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return float("inf")
    scale = want.double().abs().clamp(min=1) * torch.finfo(want.dtype).eps
    return ((got.cpu().double() - want.double()).abs() / scale).max().item()


def norms() -> dict[str, nn.Module]:
    """Every kind of norm that a transformer has, with a weight that is not 1."""
    made: dict[str, nn.Module] = {}
    for eps in (1e-6, None):
        for affine in (True, False):
            made[f"torch eps {eps} affine {affine}"] = nn.RMSNorm(24, eps=eps, elementwise_affine=affine)
    for affine, bias in ((True, False), (True, True), (False, False)):
        made[f"diffusers affine {affine} bias {bias}"] = RMSNorm(24, 1e-5, affine, bias)
    for norm in made.values():
        for place, parameter in enumerate(norm.parameters()):
            parameter.data = random(24, seed=place + 5)
    return made


def norm_errors() -> dict[str, float]:
    """Each norm on every dtype of input and weight, whole and strided, in ulps of the plain form's."""
    found = {}
    for name, norm in norms().items():
        for weights in DTYPES:
            for dtype in DTYPES:
                for strided in (False, True):
                    step = 2 if strided else 1
                    wide = random(2, 5, 24 * step, dtype=dtype)
                    x = wide[..., ::step]
                    here = copy.deepcopy(norm).to(weights)
                    with on_the_host():
                        want = here(x)
                    there = nn.Sequential(here.to(device()))
                    simulated.reset_counts()
                    with_norm = Fused(there, PLANS["UNet2DConditionModel"])
                    key = f"{name} {dtype} weight {weights} {'strided' if strided else 'whole'}"
                    found[key] = ulps(there(wide.to(device())[..., ::step]), want)
                    assert ran() == {"npu_rms_norm": 1}, key
                    with_norm.close()
                    assert "forward" not in here.__dict__
    return found


@contextlib.contextmanager
def on_the_host() -> Iterator[None]:
    """As where torch_npu is not installed: where it is, norms of diffusers call it with any tensor."""
    asks = library.is_torch_npu_available
    library.is_torch_npu_available = lambda: False
    try:
        yield
    finally:
        library.is_torch_npu_available = asks


def tables(shape: tuple[int, ...], dim: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """cos and sin of angles that come in pairs of neighbours, as `shape`, on the host."""
    angles = random(*shape, dim // 2).repeat_interleave(2, -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


ACCEPTED = {  # x, tables without their last dim
    "BSND": ((2, 7, 3, 16), (1, 7, 1)),
    "BNSD": ((2, 3, 7, 16), (1, 1, 7)),
    "SBND": ((7, 2, 3, 16), (7, 1, 1)),
    "one token": ((1, 1, 3, 16), (1, 1, 1)),
    "smallest": ((1, 4, 1, 2), (1, 4, 1)),
    "head dim 6": ((1, 4, 2, 6), (1, 4, 1)),
    "widest": ((1, 2, 1, 894), (1, 2, 1)),
    "999 rows": ((37, 2, 27, 4), (1, 2, 1)),
    "tables by sample": ((2, 7, 3, 16), (2, 7, 1)),
    "tables by head": ((2, 7, 3, 16), (1, 7, 3)),
    "tables by sample and head": ((2, 7, 3, 16), (2, 7, 3)),
    "tables by head, heads first": ((2, 3, 7, 16), (1, 3, 7)),
    "tables by sample, tokens first": ((7, 2, 3, 16), (7, 2, 1)),
    "1000 rows by head": ((40, 2, 25, 4), (1, 2, 25)),
    "many tables": ((2, 300, 4, 6), (2, 300, 4)),
}
REFUSED = {
    "odd head dim": ((1, 4, 2, 7), (1, 4, 1)),
    "head dim 896": ((1, 2, 1, 896), (1, 2, 1)),
    "1000 rows": ((40, 2, 25, 4), (1, 2, 1)),
    "1000 heads by sample": ((2, 4, 1000, 4), (2, 4, 1)),
    "tables by axes apart": ((2, 3, 4, 8), (2, 1, 4)),
    "three dims": ((4, 2, 8), (4, 1)),
}


def rotation_errors() -> dict[str, float]:
    """Each shape that is accepted, on every dtype, whole and strided, in ulps of the plain form's."""
    found = {}
    for name, (shape, rows) in ACCEPTED.items():
        for dtype in DTYPES:
            for interleaved in (True, False):
                for strided in (False, True):
                    cos, sin = tables(rows, shape[-1])
                    x = random(*shape, dtype=dtype)
                    x = x.transpose(0, 1).contiguous().transpose(0, 1) if strided else x
                    want = fused.plain_rotary(x, cos, sin, interleaved=interleaved)
                    there = [t.to(device()) for t in (x, cos, sin)]
                    simulated.reset_counts()
                    got = fused.rotary(*there, interleaved=interleaved)
                    key = f"{name} {dtype} interleaved {interleaved} strided {strided}"
                    found[key] = ulps(got, want)
                    assert ran() == {"npu_rotary_mul": 1}, key
    return found


def rotation_limits() -> dict[str, str | None]:
    """Why a chip's operator rotates neither neighbours nor halves of a tensor that others take."""
    x, (cos, sin) = random(1, 4, 2, 8).to(device()), [t.to(device()) for t in tables((1, 4, 1), 8)]
    ask = functools.partial(fused.rotary_limit, x.shape, x.dtype, x.device.type, cos, sin)
    return {"neighbours": ask(interleaved=True), "halves": ask(interleaved=False)}


def handed_back() -> dict[str, str]:
    """Why each call is refused; each gives the plain result and calls no fused operator."""
    found = {}
    cases = {
        name: (random(*shape), *tables(rows, shape[-1] + shape[-1] % 2))
        for name, (shape, rows) in REFUSED.items()
    }
    x, (cos, sin) = random(1, 4, 2, 8), tables((1, 4, 1), 8)
    cases["fp64"] = x.double(), cos, sin
    cases["fp64 tables"] = x, cos.double(), sin.double()
    cases["half tables"] = x, cos[..., ::2], sin[..., ::2]
    cases["empty"] = x[:, :0], cos[:, :0], sin[:, :0]
    for name, (x, cos, sin) in cases.items():
        there = [t.to(device()) for t in (x, cos, sin)]
        why = fused.rotary_limit(x.shape, x.dtype, "npu", *there[1:], interleaved=True)
        found[name] = str(why)
        if cos.shape[-1] == x.shape[-1]:
            simulated.reset_counts()
            got = fused.rotary(*there, interleaved=True).cpu()
            assert torch.allclose(got, fused.plain_rotary(x, cos, sin, interleaved=True), atol=1e-6), name
            assert ran() == {}, name
    for name, x, weight in (
        ("norm of fp64", random(2, 8).double(), None),
        ("norm with a weight of fp64", random(2, 8), random(8).double()),
        ("norm of one dim", random(8), random(8)),
        ("norm of nine dims", random(*[1] * 8, 8), random(8)),
        ("norm of nothing", random(0, 8), random(8)),
    ):
        there = x.to(device()), None if weight is None else weight.to(device())
        found[name] = str(fused.rms_norm_limit(*there))
        simulated.reset_counts()
        assert torch.allclose(fused.rms_norm(*there, 1e-6).cpu(), fused.rms_norm(x, weight, 1e-6), atol=1e-6)
        assert ran() == {}, name
    return found


def gate_errors() -> tuple[dict[str, float], dict[str, str]]:
    """A GEGLU of each dtype and shape that is taken, in ulps of the plain form's, and why others are not."""
    found, refused = {}, {}
    shapes = {
        "one dim": (8,),
        "tokens": (2, 5, 24),
        "eight dims": (1, 2, 1, 3, 1, 2, 1, 4),
        "nothing": (0, 8),
    }
    for name, shape in shapes.items():
        for dtype in DTYPES:
            for strided in (False, True):
                step = 2 if strided else 1
                wide = random(*shape[:-1], shape[-1] * step, dtype=dtype)
                there = wide.to(device())[..., ::step]
                simulated.reset_counts()
                got, want = fused.geglu(there), fused.plain_geglu(wide[..., ::step])
                found[f"{name} {dtype} strided {strided}"] = ulps(got, want) if want.numel() else 0.0
                assert simulated.CALLS["npu_geglu"] == 1
    for name, x in (("fp64", random(2, 8).double()), ("nine dims", random(*[1] * 8, 8))):
        simulated.reset_counts()
        refused[name] = str(fused.geglu_limit(x.to(device())))
        assert torch.allclose(fused.geglu(x.to(device())).cpu(), fused.plain_geglu(x), atol=1e-6), name
        assert simulated.CALLS["npu_geglu"] == 0
    return found, refused


def first_call(family: str, **changes: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A tiny pipeline's transformer and what it is called with first, on the host."""
    pipeline = tiny.build(family)
    pipeline.set_progress_bar_config(disable=True)
    model = getattr(pipeline, "transformer", None) or pipeline.unet
    seen: list[Any] = []

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))
        raise Reached

    handle = model.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with on_the_host():
            pipeline(**tiny.call_arguments(family) | changes, generator=torch.Generator().manual_seed(0))
    except Reached:
        handle.remove()
    return model, *seen[0]


def state_of(model: nn.Module) -> list[Any]:
    """All that hooks and replaced forwards leave on modules."""
    return [
        (sorted(m.__dict__), [list(hooks) for name, hooks in sorted(m.__dict__.items()) if "_hooks" in name])
        for m in model.modules()
    ]


def result_of(output: Any) -> list[torch.Tensor]:
    """The tensors of what a transformer gives, on the host."""
    return [t.cpu() for t in tensors_in(output)]


@torch.no_grad()
def transformer(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A family's transformer, fused and plain on the device and on the host: errors, counts, what is left."""
    model, args, kwargs = first_call(family, **changes)
    kwargs["return_dict"] = False
    with on_the_host():
        want = result_of(model(*args, **kwargs))
    model.to(device())
    there = map_tensors(lambda t: t.to(device()), args), map_tensors(lambda t: t.to(device()), kwargs)
    before, found = state_of(model), {}
    for mode in ("on", "off"):
        made = fuse(model, plan_for(model), mode, "npu")
        assert made is not None
        simulated.reset_counts()
        got = result_of(model(*there[0], **there[1]))
        found[mode] = {
            "error": max((a - b).abs().max().item() for a, b in zip(got, want, strict=True)),
            "ran": ran(),
            "complex": simulated.WIDE.get("mul", 0),
            "said": str(made),
            "counts": (made.norms, made.rotations),
        }
        made.close()
        assert state_of(model) == before, "close leaves a trace"
    return found


def unet_with(mode: str) -> str:
    """What a model without a norm or a rotation says."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        block_out_channels=(8,), norm_num_groups=4, layers_per_block=1, cross_attention_dim=8,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",), mid_block_type=None,
    )  # fmt: skip
    made: list[Any] = []
    text = error_of(lambda: made.append(fuse(model, plan_for(model), mode, "npu")))
    return text or str(made[0])


def demo(layout: str, mode: str) -> Any:
    """`bodies.demo` with or without fused operators."""
    return bodies.demo(layout, fused=mode)


def shared(family: str, cell: families.Cell) -> tuple[np.ndarray, dict[str, int]]:
    """A family's latents, fused and over the ranks of a cell, and how often each operator ran for them."""
    with ParallelPipeline(families.pipeline_of(family, cell), cell.layout, fused="on") as pipe:
        simulated.reset_counts()
        result = pipe(**families.call_of(family, cell, pipe.pipeline), seed=SEED)
    return bodies.host(result.frames if hasattr(result, "frames") else result.images), ran()


def options_when_weights_move() -> list[tuple[bool, str]]:
    """Whether just-in-time compiling is off, and private formats, whenever a transformer's tensors move."""
    npu: Any = torch.get_device_module("npu")
    npu.set_compile_mode(jit_compile=True)
    npu.config.allow_internal_format = True
    pipeline, seen = tiny.build("wan-t2v"), []
    apply = pipeline.transformer._apply

    def watched(*args: Any, **kwargs: Any) -> nn.Module:
        formats = sys.modules["torch_npu"]._C._npu_getOption("ALLOW_INTERNAL_FORMAT")  # no public way
        seen.append((npu.is_jit_compile_false(), formats.decode()))
        return apply(*args, **kwargs)

    pipeline.transformer._apply = watched
    ParallelPipeline(pipeline, "auto").close()
    return seen


def keywords() -> dict[str, list[str]]:
    """Which arguments each call of an operator in `runtime.fused` names, by operator."""
    found = {}
    for node in ast.walk(ast.parse(inspect.getsource(fused))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.ops.npu."):
            name = ast.unparse(node.func).removeprefix("torch.ops.npu.")
            arguments = [a.name for a in getattr(torch.ops.npu, name).default._schema.arguments]
            found[name] = [str(k.arg) for k in node.keywords if k.arg in arguments]
    return found
