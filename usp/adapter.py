"""The one seam with models: applies a shard plan to a module from outside, with hooks that come off again.

No forward, processor or class is replaced, so adapters, offload hooks, processors and arguments that a model
gains later keep working. While a module that the plan names runs, a scoped `TorchFunctionMode` hands its
`scaled_dot_product_attention` to the strategy (`usp.redirect`); other modules and other models do not see it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from usp import comm
from usp.attention import SequenceAttention
from usp.layout import offsets, split_sizes
from usp.plan import (
    Blocks,
    GatherOutput,
    Held,
    ShardPlan,
    SharedAttention,
    SplitCount,
    SplitInput,
    SplitMask,
    SplitOutput,
)
from usp.redirect import Redirect, own_share
from usp.refusing import refuse
from usp.trees import map_tensors, tensors_in

Entry = SplitInput | SplitOutput | SplitCount | GatherOutput | SharedAttention


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
        self._masks: dict[str, torch.Tensor] = {}  # whole key mask of each stream that has one, (B, S)
        self._joint_masks: dict[tuple[str, ...], torch.Tensor] = {}  # the same, of joined streams
        self._running: dict[str, Redirect] = {}
        self.tokens_here = 0  # this rank's tokens in the last forward
        self.tokens_total = 0
        self._targets = [_Target(entry, name, module) for entry, name, module in matches(model, plan)]
        self.attention_modules = sum(isinstance(t.entry, SharedAttention) for t in self._targets)
        self._handles = [model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)]
        for target in self._targets:
            target.handles = self._attach(target.entry, target.name, target.module)
        for blocks in plan.blocks:
            for name, block in matching(model, f"{blocks.modules}.*"):
                check = self._check_block(blocks, name, block)
                self._handles.append(block.register_forward_pre_hook(check, with_kwargs=True))

    def close(self) -> None:
        """Give the model back as it was. May be called again."""
        self.abandon()
        for handle in (*self._handles, *(h for target in self._targets for h in target.handles)):
            handle.remove()
        self._handles.clear()
        self._targets.clear()
        self._masks.clear()
        self._joint_masks.clear()

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

    def _attach(self, entry: Any, name: str, module: nn.Module) -> list[Any]:
        """Put one entry's hooks on a module; returns their handles."""
        if isinstance(entry, SplitInput):
            hook = self._split_input(entry, inspect.signature(module.forward))
            return [module.register_forward_pre_hook(hook, with_kwargs=True)]
        if isinstance(entry, SplitCount):
            hook = self._split_count(entry, inspect.signature(module.forward))
            return [module.register_forward_pre_hook(hook, with_kwargs=True)]
        if isinstance(entry, SplitOutput):
            return [module.register_forward_hook(self._split_output(entry, name))]
        if isinstance(entry, GatherOutput):
            return [module.register_forward_hook(self._gather_output(entry))]
        return [
            module.register_forward_pre_hook(self._enter_attention(entry, name)),
            module.register_forward_hook(self._leave_attention(name), always_call=True),
        ]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.abandon()
        self._lengths.clear()
        self._masks.clear()
        self._joint_masks.clear()
        if self.plan.refused:
            refuse(self.plan, inspect.signature(module.forward).bind(*args, **kwargs))
        for target in self._targets:  # an adapter may have wrapped a module since
            current = self.model.get_submodule(target.name)
            if current is not target.module:
                for handle in target.handles:
                    handle.remove()
                target.module = current
                target.handles = self._attach(target.entry, target.name, current)

    def sizes(self, stream: str) -> tuple[int, ...]:
        """Tokens of a stream on each rank of the sequence, in the forward at hand."""
        if stream not in self._lengths:
            raise RuntimeError(
                f"nothing of stream {stream!r} was cut in this forward of {type(self.model).__name__}; the "
                f"plan for {self.plan.model} must split it before its first use"
            )
        return split_sizes(self._lengths[stream], self._group.size)

    def length_of(self, stream: str) -> int:
        """All ranks' tokens of a stream in the forward at hand."""
        return sum(self.sizes(stream))

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
        return own_share(tensor, entry.dim, self.sizes(entry.stream), self._group)

    def _split_input(self, entry: SplitInput, signature: inspect.Signature) -> Callable[..., Any]:
        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return self._share(tensor, entry) if tensor.ndim == entry.ndim else tensor

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            bound = signature.bind(*args, **kwargs)
            value = bound.arguments.get(entry.argument)
            if value is None:
                return None
            if isinstance(entry, SplitMask) and self._masks.get(entry.stream) is not value:
                self._masks[entry.stream] = value
                self._joint_masks.clear()
            bound.arguments[entry.argument] = map_tensors(cut, value)
            return bound.args, bound.kwargs

        return hook

    def _split_count(self, entry: SplitCount, signature: inspect.Signature) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            bound = signature.bind(*args, **kwargs)
            count = bound.arguments.get(entry.argument)
            if count is None:
                return None
            sizes = self.sizes(entry.stream)
            here = count - offsets(sizes)[self._group.rank]
            bound.arguments[entry.argument] = min(max(here, 0), sizes[self._group.rank])
            return bound.args, bound.kwargs

        return hook

    def _split_output(self, entry: SplitOutput, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            tensor = output
            if entry.index is not None:
                tensor = output[entry.index] if isinstance(output, tuple) else None
            if not isinstance(tensor, torch.Tensor):
                expected = "a tensor" if entry.index is None else "a tuple with a tensor there"
                raise ValueError(f"{entry}: {name} gave {type(output).__name__}, not {expected}")
            if tensor.ndim != entry.ndim:
                return None
            share = self._share(tensor, entry)
            if entry.index is None:
                return share
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
            shares = [self.sizes(s)[self._group.rank] for s in entry.streams]
            split = self._attention.split(tuple(self._lengths[s] for s in entry.streams))
            self.tokens_here, self.tokens_total = sum(shares), split.total
            known = any(stream in self._masks for stream in entry.streams)
            key_mask = partial(self._key_mask, entry.streams) if known else None
            self._running[name] = Redirect(self._attention, split, shares, name, key_mask)
            self._running[name].__enter__()

        return hook

    def _key_mask(self, streams: tuple[str, ...]) -> torch.Tensor:
        """The mask of all ranks' keys of these streams, (B, S); alike on all ranks."""
        if streams in self._joint_masks:
            return self._joint_masks[streams]
        found = next(self._masks[stream] for stream in streams if stream in self._masks)
        parts = [
            self._masks[stream].bool()
            if stream in self._masks
            else found.new_ones(found.shape[0], self._lengths[stream], dtype=torch.bool)
            for stream in streams
        ]
        self._joint_masks[streams] = torch.cat(parts, dim=1)
        return self._joint_masks[streams]

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

    def _check_block(self, blocks: Blocks, name: str, block: nn.Module) -> Callable[..., None]:
        signature = inspect.signature(block.forward)
        known = {(entry.argument, entry.ndim) for entry in (*blocks.whole, *blocks.held)}

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = signature.bind(*args, **kwargs).arguments
            for held in blocks.held:
                self._check_held(name, held, arguments.get(held.argument))
            for argument, value in arguments.items():
                for tensor in tensors_in(value):
                    if (argument, tensor.ndim) not in known:
                        self._check_unknown(name, argument, tensor)

        return hook

    def _check_held(self, name: str, held: Held, value: Any) -> None:
        """Raise ValueError unless what a block was given is this rank's share."""
        if isinstance(value, (tuple, list)) and held.index is not None:
            value = value[held.index]
        expected = sum(max(1, self.share_of(stream)) for stream in held.streams)
        for tensor in tensors_in(value):
            if tensor.ndim == held.ndim and tensor.shape[held.dim] != expected:
                raise ValueError(
                    f"{name} got {held.argument!r} of shape {tuple(tensor.shape)}, where this rank's share "
                    f"of {' and '.join(held.streams)} is {expected} along dim {held.dim}; the plan for "
                    f"{self.plan.model} must split it before"
                )

    def _check_unknown(self, name: str, argument: str, tensor: torch.Tensor) -> None:
        """Raise ValueError if a tensor that the plan does not know has an axis as long as a whole stream."""
        whole = {s: n for s, n in self._lengths.items() if n > 1 and self._group.size > 1}
        for stream, length in whole.items():
            if tensor.ndim > 1 and tensor.shape[1] == length:
                raise ValueError(
                    f"{name} got {argument!r} of shape {tuple(tensor.shape)} with an uncut axis of {length} "
                    f"{stream}; the plan for {self.plan.model} must split it, or list it as whole"
                )


def matches(model: nn.Module, plan: ShardPlan) -> list[tuple[Entry, str, nn.Module]]:
    """Every entry of the plan with each module that it names: (entry, the module's name, the module).

    Raises ValueError if an entry that must match names no module, or an argument that is not there.
    """
    found = []
    for entry in (*plan.splits, *plan.gathers, *plan.attentions):
        pattern = entry.modules if isinstance(entry, SharedAttention) else entry.module
        modules = matching(model, pattern)
        if not modules and not getattr(entry, "optional", False):
            raise ValueError(
                f"the plan for {plan.model} names module {pattern!r}, which this {type(model).__name__} does "
                "not have; the installed version differs from the one the plan is for"
            )
        for name, module in modules:
            takes = inspect.signature(module.forward).parameters
            if isinstance(entry, SplitCount) and entry.argument not in takes:
                continue
            if isinstance(entry, SplitInput) and entry.argument not in takes:
                raise ValueError(
                    f"the plan for {plan.model} splits argument {entry.argument!r} of {name or 'the model'}, "
                    f"which takes {', '.join(takes)}"
                )
            found.append((entry, name, module))
    return found


def matching(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The modules that a plan's pattern names."""
    modules = dict(model.named_modules())
    parts = pattern.split(".")
    for place, part in enumerate(parts):
        if part == "-1":
            siblings = modules.get(".".join(parts[:place]), nn.ModuleList())
            parts[place] = str(len(list(siblings.children())) - 1)
    return [
        (name, module)
        for name, module in modules.items()
        if len(name.split(".")) == len(parts) and all(map(fnmatchcase, name.split("."), parts))
    ]
