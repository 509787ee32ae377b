"""The one seam with models: applies a shard plan to a module from outside, with hooks that come off again.

No forward, processor or class is replaced, so adapters, offload hooks, processors and arguments that a model
gains later keep working. While a module that the plan names runs, a scoped `TorchFunctionMode` hands its
`scaled_dot_product_attention` to the strategy; other modules and other models do not see it.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from usp import comm
from usp.attention import SequenceAttention
from usp.layout import Split, split_sizes
from usp.mesh import Group
from usp.plan import GatherOutput, ShardPlan, SharedAttention, SplitInput, SplitOutput


def sharded(model: nn.Module, plan: ShardPlan, attention: SequenceAttention) -> "Sharded":
    """Spread the tokens of `model` over the ranks of `attention`, until the result is closed or left as a
    context.

    Raises ValueError, before anything is changed, if an entry of the plan matches no module or argument.
    All ranks must hold the same model, and call it together with the same inputs.
    """
    return Sharded(model, plan, attention)


@dataclass
class _Target:
    """One entry of a plan on one module, with its hooks."""

    entry: Any
    name: str
    module: nn.Module
    handles: list[Any] = field(default_factory=list)


class Sharded:
    """A model with its shard plan applied; `close()` takes every hook off."""

    def __init__(self, model: nn.Module, plan: ShardPlan, attention: SequenceAttention) -> None:
        self.model = model
        self.plan = plan
        self._attention = attention
        self._group = attention.groups.sp
        self._lengths: dict[str, int] = {}  # whole length of each stream in the forward at hand
        self._running: dict[str, _Redirect] = {}
        self.tokens_here = 0  # this rank's tokens in the last forward
        self.tokens_total = 0
        self._targets = [_Target(entry, name, module) for entry, name, module in self._match()]
        self.attention_modules = sum(isinstance(t.entry, SharedAttention) for t in self._targets)
        self._handles = [model.register_forward_pre_hook(self._begin, prepend=True)]
        for target in self._targets:
            target.handles = self._attach(target.entry, target.name, target.module)
        for name, block in _matching(model, f"{plan.blocks}.*"):
            check = self._check_block(name, block)
            self._handles.append(block.register_forward_pre_hook(check, with_kwargs=True))

    def close(self) -> None:
        """Give the model back as it was. May be called again."""
        self.abandon()
        for handle in (*self._handles, *(h for target in self._targets for h in target.handles)):
            handle.remove()
        self._handles.clear()
        self._targets.clear()

    def abandon(self) -> None:
        """Leave the attention of a forward that was broken off, for example by Ctrl-C.

        torch runs a module's last hooks after an Exception, not after a KeyboardInterrupt.
        """
        for redirect in reversed(self._running.values()):
            redirect.__exit__(None, None, None)
        self._running.clear()

    def __enter__(self) -> "Sharded":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _match(self) -> list[tuple[Any, str, nn.Module]]:
        """Every (entry, module name, module) of the plan. Raises ValueError if an entry matches nothing."""
        found = []
        for entry in (*self.plan.splits, *self.plan.gathers, *self.plan.attentions):
            pattern = entry.modules if isinstance(entry, SharedAttention) else entry.module
            modules = _matching(self.model, pattern)
            if not modules:
                raise ValueError(
                    f"the plan for {self.plan.model} names module {pattern!r}, which this "
                    f"{type(self.model).__name__} does not have; the installed version differs from the one "
                    "the plan is for"
                )
            for name, module in modules:
                if (
                    isinstance(entry, SplitInput)
                    and entry.argument not in inspect.signature(module.forward).parameters
                ):
                    raise ValueError(
                        f"the plan for {self.plan.model} splits argument {entry.argument!r} of "
                        f"{name or 'the model'}, which takes "
                        f"{', '.join(inspect.signature(module.forward).parameters)}"
                    )
                found.append((entry, name, module))
        return found

    def _attach(self, entry: Any, name: str, module: nn.Module) -> list[Any]:
        """Put one entry's hooks on a module; returns their handles."""
        if isinstance(entry, SplitInput):
            hook = self._split_input(entry, inspect.signature(module.forward))
            return [module.register_forward_pre_hook(hook, with_kwargs=True)]
        if isinstance(entry, SplitOutput):
            return [module.register_forward_hook(self._split_output(entry, name))]
        if isinstance(entry, GatherOutput):
            return [module.register_forward_hook(self._gather_output(entry))]
        return [
            module.register_forward_pre_hook(self._enter_attention(entry, name)),
            module.register_forward_hook(self._leave_attention(name), always_call=True),
        ]

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.abandon()
        self._lengths.clear()
        for target in self._targets:  # an adapter may have wrapped a module since
            current = self.model.get_submodule(target.name)
            if current is not target.module:
                for handle in target.handles:
                    handle.remove()
                target.module = current
                target.handles = self._attach(target.entry, target.name, current)

    def sizes(self, stream: str) -> tuple[int, ...]:
        """Tokens of a stream on each rank of the sequence, in the forward at hand."""
        return split_sizes(self._lengths[stream], self._group.size)

    def share_of(self, stream: str) -> int:
        """This rank's tokens of a stream in the forward at hand; 0 where one copied token carries an empty
        share."""
        return self.sizes(stream)[self._group.rank]

    def _share(self, tensor: torch.Tensor, entry: SplitInput | SplitOutput) -> torch.Tensor:
        length = self._lengths.setdefault(entry.stream, tensor.shape[entry.dim])
        if tensor.shape[entry.dim] != length:
            raise ValueError(
                f"{entry} got {tensor.shape[entry.dim]} tokens where stream {entry.stream!r} has {length}; "
                "all tensors of a stream must have one length"
            )
        return _own_share(tensor, entry.dim, self.sizes(entry.stream), self._group)

    def _split_input(self, entry: SplitInput, signature: inspect.Signature) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            bound = signature.bind(*args, **kwargs)
            value = bound.arguments.get(entry.argument)
            if not isinstance(value, torch.Tensor) or value.ndim != entry.ndim:
                return None
            bound.arguments[entry.argument] = self._share(value, entry)
            return bound.args, bound.kwargs

        return hook

    def _split_output(self, entry: SplitOutput, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not isinstance(output, tuple) or not isinstance(output[entry.index], torch.Tensor):
                raise ValueError(
                    f"{entry}: {name} gave {type(output).__name__}, not a tuple with a tensor there"
                )
            if output[entry.index].ndim != entry.ndim:
                return None
            share = self._share(output[entry.index], entry)
            return (*output[: entry.index], share, *output[entry.index + 1 :])

        return hook

    def _gather_output(self, entry: GatherOutput) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
            sizes = self.sizes(entry.stream)
            share = output.narrow(entry.dim, 0, sizes[self._group.rank])
            return comm.gather(share, dim=entry.dim, sizes=sizes, group=self._group)

        return hook

    def _enter_attention(self, entry: SharedAttention, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            split = self._attention.split(tuple(self._lengths[s] for s in entry.streams))
            shares = [self.sizes(s)[self._group.rank] for s in entry.streams]
            self.tokens_here, self.tokens_total = sum(shares), split.total
            self._running[name] = _Redirect(self._attention, split, shares, name)
            self._running[name].__enter__()

        return hook

    def _leave_attention(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            redirect = self._running.pop(name, None)
            if redirect is None:  # its own pre-hook raised
                return
            redirect.__exit__(None, None, None)
            if output is not None and redirect.calls == 0:
                raise RuntimeError(
                    f"{name} did not call torch's scaled_dot_product_attention, so its attention saw only "
                    "this rank's tokens; reset its processor and attention backend to the native ones"
                )

        return hook

    def _check_block(self, name: str, block: nn.Module) -> Callable[..., None]:
        signature = inspect.signature(block.forward)
        exempt = {(entry.argument, entry.ndim) for entry in self.plan.replicated}

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            whole = {n for n, size in self._lengths.items() if size > 1 and self._group.size > 1}
            if not whole:
                return
            for argument, value in signature.bind(*args, **kwargs).arguments.items():
                for tensor in _tensors(value):
                    if (argument, tensor.ndim) in exempt:
                        continue
                    for stream in whole:
                        if tensor.ndim > 1 and tensor.shape[1] == self._lengths[stream]:
                            raise ValueError(
                                f"{name} got {argument!r} of shape {tuple(tensor.shape)} with an uncut axis "
                                f"of {self._lengths[stream]} {stream}; the plan for {self.plan.model} must "
                                "split it or list it as replicated"
                            )

        return hook


class _Redirect(TorchFunctionMode):
    """Hands `scaled_dot_product_attention` to the strategy while one attention module runs."""

    def __init__(self, attention: SequenceAttention, split: Split, shares: Sequence[int], name: str) -> None:
        super().__init__()
        self._attention, self._split, self._shares, self._name = attention, split, shares, name
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """scaled_dot_product_attention over the tokens of all ranks; (B, H, S, D) in and out."""
        if is_causal or dropout_p:
            raise ValueError(
                f"{self._name} asks for is_causal={is_causal}, dropout_p={dropout_p}; attention over ranks "
                "is neither causal nor random; call the model in eval mode"
            )
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            raise RuntimeError(
                f"{self._name} records gradients; attention over ranks is for inference only; call the model "
                "under torch.no_grad()"
            )
        present = [
            max(1, share) for share in self._shares
        ]  # an empty share is carried by one token (`_own_share`)
        if any(t.shape[2] != sum(present) for t in (query, key, value)):
            raise ValueError(
                f"{self._name} attends from {query.shape[2]} to {key.shape[2]} tokens, this rank's share is "
                f"{sum(present)}; the plan names it as self-attention over the split tokens"
            )
        padded = present != self._shares
        q, k, v = (_drop_padding(t.transpose(1, 2), present, self._shares) for t in (query, key, value))
        out = self._attention(q, k, v, split=self._split, mask=attn_mask, scale=scale)
        if padded:
            out = _restore_padding(out, present, self._shares)
        return out.transpose(1, 2)


def _own_share(tensor: torch.Tensor, dim: int, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """This rank's share; an empty one is carried by a copy of the first token, which no other rank ever sees.

    Models and vendor operators need not cope with empty tensors; the token is dropped before attention and
    gather.
    """
    if sizes[group.rank] == 0:
        return tensor.narrow(dim, 0, 1).contiguous()
    return comm.split(tensor, dim=dim, sizes=sizes, group=group)


def _drop_padding(tensor_BSHD: torch.Tensor, present: Sequence[int], shares: Sequence[int]) -> torch.Tensor:
    if list(present) == list(shares):
        return tensor_BSHD
    pieces = tensor_BSHD.split(list(present), dim=1)
    return torch.cat([p[:, :share] for p, share in zip(pieces, shares, strict=True)], dim=1)


def _restore_padding(out_BSHD: torch.Tensor, present: Sequence[int], shares: Sequence[int]) -> torch.Tensor:
    pieces = out_BSHD.split(list(shares), dim=1)
    return torch.cat(
        [F.pad(p, (0, 0, 0, 0, 0, n - p.shape[1])) for p, n in zip(pieces, present, strict=True)], dim=1
    )


def _matching(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    parts = pattern.split(".")
    return [
        (name, module)
        for name, module in model.named_modules()
        if len(name.split(".")) == len(parts) and all(map(fnmatchcase, name.split("."), parts))
    ]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
