"""A model's RMSNorms, rotary embeddings and gates, computed by the device's fused operators until closed.

From outside, like the adapter: no class, module-level function or processor is replaced. A norm or a gate
gets a forward of its own instance. Rotations are formulas inside diffusers' processors, right behind the
norms of query and key (`usp.rotations`); so the attention is called without its angles, and hooks on those
norms rotate what they give: the same numbers, one module earlier. What an operator refuses is left as it
was and said once; but complex angles become real in any case, as complex products may run on the host, and
are picked from their table as real numbers also where nothing is fused. On a device that has neither such
operators nor complex numbers this is all that is done, by the plain rotation.
"""

import functools
import inspect
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from runtime import fused
from runtime.device import Device
from runtime.log import get_logger
from usp.adapter import matching
from usp.plan import ShardPlan
from usp.rotations import ROTATIONS, UNSERVED, Call, Rotation, Tables

logger = get_logger(__name__)

SMALLEST = torch.finfo(torch.float32).eps  # what torch adds where a norm's eps is None


def fuse(model: nn.Module, plan: ShardPlan, mode: str, kind: str) -> "Fused | None":
    """Fuse what `mode` ("auto", "on", "off") asks for on a device of this kind; None if that is nothing.

    Whatever the mode, complex angles become real on a device without fused operators and complex numbers.

    Raises ValueError, leaving the model as it was, if "on" finds nothing to fuse.
    """
    fused.check_fused(mode, kind)
    if kind not in fused.KINDS:
        real = None if Device(kind).supports_complex else Fused(model, plan, fusing=False, angles_only=True)
        return real if real is not None and real.real_angles else None
    made = Fused(model, plan, fusing=mode != "off", pairs_limit=fused.pairs_limit(kind))
    if mode == "on" and not made.norms and not made.rotations and not made.gates:
        made.close()
        raise ValueError(
            f"fused=on, and {type(model).__name__} has no norm or rotation or gate that a fused operator "
            f"computes ({made}); use fused=auto"
        )
    return made


class Fused:
    """A model with its norms, rotations and gates fused, or with `fusing` False plain; `close()` undoes it.

    With `angles_only`, and `fusing` False, its complex angles become real and the rest is left as it is.

    `norms`, `rotations` and `gates` are how many there are: as many calls of the vendor's operators in a
    forward of the whole model, where each takes what comes. `pairs_limit` is why this device's operator
    rotates none, or None. `real_angles` tells whether there were complex ones. Says so itself, as text.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardPlan,
        *,
        fusing: bool = True,
        pairs_limit: str | None = None,
        angles_only: bool = False,
    ) -> None:
        assert not (fusing and angles_only), "angles_only fuses nothing"
        self.norms = self.rotations = self.gates = 0
        self.left: dict[str, int] = {}  # why one was left as it was, and how many
        self._name, self._fusing, self._pairs_limit = type(model).__name__, fusing, pairs_limit
        self._closed, self._angles_only, self.real_angles = False, angles_only, False
        self._model: Any = model
        self._said: set[str] = set()
        self._forwards: list[tuple[nn.Module, Any]] = []
        self._handles: list[Any] = []
        # The tables of the forward at hand: of which angles, in which call, for which norms.
        self._made: tuple[Any, Call, tuple[Tables, ...]] | None = None
        from diffusers.models.activations import GEGLU
        from diffusers.models.normalization import RMSNorm  # late: rank 0 alone may say what importing says

        for module in () if angles_only else model.modules():
            if type(module) in (nn.RMSNorm, RMSNorm):
                self._take_norm(module)
            elif type(module) is GEGLU and self._replace_forward(module, _gate_forward):
                self.gates += fusing
        self._embedder = getattr(model, "rope_embedder", None)
        if type(self._embedder).__name__ == "RopeEmbedder":
            self._model.rope_embedder = PickedAsReal(self._embedder)
            self.real_angles = True
        planned = [m for entry in plan.attentions for _, m in matching(model, entry.modules)]
        for module in model.modules() if fusing or angles_only else ():
            known = ROTATIONS.get(_processor_of(module))
            across = getattr(module, "is_cross_attention", False)
            if module in planned or (known is not None and not known.planned and not across):
                self._take_rotation(module)

    def close(self) -> None:
        """Give the model back as it was. May be called again."""
        for norm, forward in self._forwards:
            if norm.__dict__.get("forward") is forward:
                del norm.__dict__["forward"]
        # A forward that an offload hook has wrapped since stays, and is the plain one.
        self._fusing, self._closed = False, True
        for handle in self._handles:
            handle.remove()
        if isinstance(getattr(self._model, "rope_embedder", None), PickedAsReal):
            self._model.rope_embedder = self._embedder
        self._forwards.clear()
        self._handles.clear()
        self._made = None

    def __str__(self) -> str:
        norms, rotations = f"{self.norms} norms", f"{self.rotations} rotations"
        counts = f"{norms}, {rotations} and {self.gates} gates" if self.gates else f"{norms} and {rotations}"
        plain = "off, complex angles as real numbers" if self._angles_only else "off"
        counts = f"{counts} fused" if self._fusing else plain
        left = ", ".join(f"{number} not: {why}" for why, number in self.left.items())
        return f"{counts}; {left}" if left else counts

    def _take_norm(self, norm: Any) -> None:
        """Give one norm a forward; the library's own might call the vendor's operator, on what it refuses."""
        if self._fusing and type(norm) is nn.RMSNorm and len(norm.normalized_shape) > 1:
            return self._leave("a norm over several dims")
        if (self._fusing or type(norm) is not nn.RMSNorm) and self._replace_forward(norm, _norm_forward):
            self.norms += self._fusing
        return None

    def _replace_forward(self, module: nn.Module, forward: Any) -> bool:
        """Give a norm or a gate `forward(self, module, x)`; False, and noted, where a hook did so before."""
        if not self._is_plain(module):
            kind = "gate" if forward is _gate_forward else "norm"
            self._leave(f"a {kind} whose forward another hook has replaced")
            return False
        module.forward = functools.partial(forward, self, module)
        self._forwards.append((module, module.forward))
        return True

    @staticmethod
    def _is_plain(module: nn.Module) -> bool:
        """True unless a module's forward is replaced.

        What accelerate's hooks leave behind is what they found: the class's own, or ours of a closed owner.
        """
        found = module.__dict__.get("forward")
        if isinstance(found, functools.partial) and found.func in (_norm_forward, _gate_forward):
            return found.args[0]._closed and found.args[1] is module
        if isinstance(found, MethodType):
            return found.__self__ is module and found.__func__ is type(module).forward
        return found is None

    def norm(self, norm: Any, x: torch.Tensor) -> torch.Tensor:
        """What the norm's own forward gives, by the vendor's operator where that takes it."""
        limit = fused.rms_norm_limit(x, norm.weight) if self._fusing else "off"
        if limit is not None:
            if self._fusing:
                self._say(limit)
            return nn.RMSNorm.forward(norm, x) if type(norm) is nn.RMSNorm else plain_norm(norm, x)
        out = fused.rms_norm(x, norm.weight, norm.eps if norm.eps is not None else SMALLEST)
        out = out.to(norm_dtype(norm, x))
        bias = getattr(norm, "bias", None)
        return out if bias is None else out + bias

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """What a GEGLU makes of its projection, by the vendor's operator where that takes it."""
        limit = fused.geglu_limit(x) if self._fusing else "off"
        if limit is not None and self._fusing:
            self._say(limit)
        return fused.plain_geglu(x) if limit is not None else fused.geglu(x)

    def _take_rotation(self, attention: Any) -> None:
        """Hook one attention and its norms, if its processor is a known one."""
        processor = _processor_of(attention)
        rotation = ROTATIONS.get(processor)
        if rotation is None:
            return self._leave(f"{processor} {UNSERVED.get(processor, 'is not a processor that we know')}")
        if self._angles_only and not rotation.complex:
            return None
        norms = [name for name in rotation.norms if isinstance(getattr(attention, name, None), nn.Module)]
        if norms[:2] != list(rotation.norms[:2]):
            return self._leave(f"{processor} without norms of query and key")
        if self._pairs_limit is not None:
            self._leave(self._pairs_limit)
            if not rotation.complex:
                return None
        rotated = _Rotated(rotation, norms, inspect.signature(attention.forward))
        before = functools.partial(self._before, rotated)
        self._handles.append(attention.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(attention.register_forward_hook(rotated.after, always_call=True))
        for name in norms:
            hook = functools.partial(rotated.rotate, name)
            self._handles.append(getattr(attention, name).register_forward_hook(hook))
        self.rotations += len(norms) if self._fusing and self._pairs_limit is None else 0
        self.real_angles |= rotation.complex
        return None

    def _before(
        self, rotated: "_Rotated", attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Take the angles out of a call and keep them for the norms, unless the operator refuses them."""
        rotated.pending.clear()
        bound = rotated.signature.bind(*args, **kwargs)
        name = rotated.rotation.angles
        place = _holder(name, bound)
        if place is None or ROTATIONS.get(_processor_of(attention)) is not rotated.rotation:
            return None
        found = self._tables(rotated.rotation, attention, place[name], bound.arguments)
        assert len(found) == len(rotated.norms), f"{len(found)} tables for {rotated.norms}"
        for tables in found:
            limit = _limit(rotated.rotation, attention, bound.arguments["hidden_states"], tables)
            if limit is not None:
                if self._fusing:
                    self._say(limit)
                if not rotated.rotation.complex:  # else plainly by `fused.rotary`, in real numbers
                    return None
        rotated.pending.update(zip(rotated.norms, found, strict=True))
        place[name] = None
        return bound.args, bound.kwargs

    def _tables(
        self, rotation: Rotation, attention: Any, angles: Any, arguments: dict[str, Any]
    ) -> tuple[Tables, ...]:
        """The tables of these angles, made once for all attentions that get the same object."""
        text = arguments.get("encoder_hidden_states")
        joined = getattr(attention, "add_q_proj", None) is None
        call = Call(0 if text is None else text.shape[1], joined, attention.heads)
        if self._made is None or self._made[0] is not angles or self._made[1] != call:
            self._made = angles, call, rotation.tables(angles, call)
        return self._made[2]

    def _leave(self, why: str) -> None:
        self.left[why] = self.left.get(why, 0) + 1

    def _say(self, why: str) -> None:
        """Log once why an operator handed a call back."""
        if why not in self._said:
            self._said.add(why)
            logger.info("%s: computed plainly: %s", self._name, why)


@dataclass
class _Rotated:
    """One attention whose norms rotate; `pending` has the tables of the norms that have not run yet."""

    rotation: Rotation
    norms: list[str]
    signature: inspect.Signature
    pending: dict[str, Tables] = field(default_factory=dict)

    def rotate(self, name: str, norm: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> Any:
        """A norm's hook: what it gives, rotated; (B, S, H x D) is rotated by heads."""
        tables = self.pending.pop(name, None)
        if tables is None:
            return None
        x = output if output.ndim == 4 else output.unflatten(-1, (-1, tables[0].shape[-1]))
        return fused.rotary(x, *tables, interleaved=True).reshape(output.shape)

    def after(self, attention: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The attention's hook, also after an error."""
        missed = list(self.pending)
        self.pending.clear()
        if missed and output is not None:
            raise RuntimeError(
                f"{', '.join(missed)} of {type(attention).__name__} did not run, so its query and key were "
                "not rotated; the installed diffusers differs from the one this is for; use fused=off"
            )


def _limit(rotation: Rotation, attention: Any, hidden_states: torch.Tensor, tables: Tables) -> str | None:
    """Why the operator cannot rotate what a norm of this attention will give, or None."""
    batch, heads, (rows, columns, dim) = hidden_states.shape[0], attention.heads, tables[0].shape[1:]
    shape = (batch, heads, columns, dim) if rotation.heads_first else (batch, rows, heads, dim)
    kind = hidden_states.device.type
    return fused.rotary_limit(shape, hidden_states.dtype, kind, *tables, interleaved=True)


def _processor_of(attention: Any) -> str:
    return type(getattr(attention, "processor", None)).__name__


def _holder(name: str, bound: inspect.BoundArguments) -> dict[str, Any] | None:
    """The dict that holds an argument which is not None: the bound ones, or those of a `**kwargs`."""
    inner = [value for value in bound.arguments.values() if isinstance(value, dict)]
    return next((d for d in (bound.arguments, *inner) if d.get(name) is not None), None)


def _norm_forward(owner: Fused, norm: Any, x: torch.Tensor) -> torch.Tensor:
    """A norm's forward while it is fused. Module and owner are arguments, so that copies have their own."""
    return owner.norm(norm, x)


def _gate_forward(owner: Fused, geglu: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """A GEGLU's forward while it is fused.

    Its own calls the vendor's operator wherever torch_npu is installed, with another GELU than its plain
    form's: tanh. Source: diffusers 0.42.1, `models/activations.py`.
    """
    return owner.gate(geglu.proj(hidden_states))


def norm_dtype(norm: Any, x: torch.Tensor) -> torch.dtype:
    """The dtype that a norm gives: torch's keeps its input's, that of diffusers goes by its weight."""
    if type(norm) is nn.RMSNorm or norm.weight is None:
        return x.dtype
    if norm.weight.dtype in (torch.float16, torch.bfloat16):
        return norm.weight.dtype
    return torch.promote_types(x.dtype, norm.weight.dtype)


def plain_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """The norm of diffusers in torch's operators.

    Its own forward calls the vendor's operator wherever torch_npu is installed, also on mixed dtypes, which
    that does not take. Source: diffusers 0.42.1, `models/normalization.py`.
    """
    normed = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.weight is None:
        return normed.to(x.dtype)
    half = norm.weight.dtype in (torch.float16, torch.bfloat16)
    scaled = (normed.to(norm.weight.dtype) if half else normed) * norm.weight
    return scaled if norm.bias is None else scaled + norm.bias


class PickedAsReal:
    """Z-Image's table of complex angles, picked from in real numbers: the vendor's index takes no others.

    The bits are the same. Source: CANN's aclnnIndex; diffusers 0.42.1, `RopeEmbedder`.
    """

    def __init__(self, embedder: Any) -> None:
        self._embedder = embedder

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """The angles of places, (S, axes) whole numbers, as complex numbers (S, D / 2)."""
        own = self._embedder
        made = own.freqs_cis or own.precompute_freqs_cis(own.axes_dims, own.axes_lens, theta=own.theta)
        own.freqs_cis = [table.to(ids.device) for table in made]
        picked = [torch.view_as_real(table)[ids[:, axis]] for axis, table in enumerate(own.freqs_cis)]
        return torch.view_as_complex(torch.cat(picked, dim=-2))
