"""First-block cache: a forward whose first block changes little reuses the other blocks' work.

The first block runs in every forward. If its residual (output - input) has changed little since the last
computed forward, the other blocks are left out, and what they added then is added again, to each stream.
Applied from outside to the lists of blocks that a plan names, one after another; the ranks that share a
forward decide together. Off unless asked for.

Source: ParaAttention's first-block cache, after TeaCache (arXiv 2411.19108).
"""

import functools
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import nn

from runtime.device import Device
from usp.branches import Branches
from usp.comm import agree_sums
from usp.config import CacheConfig
from usp.mesh import Group
from usp.plan import Blocks, ShardPlan

DECIDES = "tokens"  # the stream whose residual is compared: the picture's, (B, S, D)

Result = torch.Tensor | tuple[torch.Tensor | None, ...]  # what a block returns
Streams = Mapping[str, torch.Tensor | None]  # the same, by stream; a last block may drop the text


@dataclass(frozen=True)
class BranchReport:
    """What one guidance branch did in a call: for each forward, whether it was skipped, and the change seen.

    The change is relative to the last computed forward; infinite where there was none to compare with.
    """

    skipped: tuple[bool, ...]
    changes: tuple[float, ...]

    @property
    def hits(self) -> int:
        """Forwards that were skipped."""
        return sum(self.skipped)

    def as_json(self) -> dict[str, Any]:
        """A dict of plain values; an infinite change is None."""
        changes = [round(c, 6) if math.isfinite(c) else None for c in self.changes]
        return {"hits": self.hits, "skipped": list(self.skipped), "changes": changes}

    def __str__(self) -> str:
        steps = [i for i, skipped in enumerate(self.skipped, start=1) if skipped]
        return f"{self.hits} of {len(self.skipped)} skipped" + (f": {_ranges(steps)}" if steps else "")


def cached(
    model: nn.Module,
    plan: ShardPlan,
    config: CacheConfig,
    *,
    group: Group,
    branches: Branches,
    share_of: Callable[[str], int] | None = None,
) -> "FirstBlockCache":
    """A cache on the blocks that `plan` names, which works between its `begin_call` and `end_call`, until
    closed.

    `group` has the ranks that share a forward. `share_of` gives this rank's true token count of a stream
    (`Sharded.share_of`); None if this rank holds all tokens. Holds, per token held here and branch, twice the
    hidden width in the hidden states' dtype: 20 KiB for Wan 14B in bf16. Raises ValueError, before anything
    is changed, if the model does not fit.
    """
    return FirstBlockCache(model, plan, config, group, branches, share_of)


@dataclass
class _State:
    """One branch's last computed forward, and its decisions so far."""

    residual: torch.Tensor | None = None  # of the first block
    rest: Streams | None = None  # what the other blocks added
    streak: int = 0
    skipped: list[bool] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)


@dataclass
class _Forward:
    """The forward at hand, from the end of the first block to the end of the last."""

    state: _State
    first: Streams  # what the first block returned
    shown: dict[str, Result]  # the same, as a block of each list returns it
    residual: torch.Tensor
    result: Streams  # when skipped, what the last block is to return; else a copy of `first`
    skipped: bool


class FirstBlockCache:
    """A model with its first-block cache; `close()` gives the blocks their own forwards back."""

    def __init__(
        self,
        model: nn.Module,
        plan: ShardPlan,
        config: CacheConfig,
        group: Group,
        branches: Branches,
        share_of: Callable[[str], int] | None,
    ) -> None:
        self.config = config
        self._group, self._branches, self._share_of = group, branches, share_of
        self._in_call = False
        self._is_last: Callable[[int], bool] | None = None
        self._states: dict[str, _State] = {}
        self._marks: list[tuple[float, bool]] = []  # when each decision of the call was taken, and which
        self._now: _Forward | None = None
        first, *middle, last = _blocks(model, plan)
        around = [(first, self._around_first), *((one, self._around_middle) for one in middle)]
        around.append((last, self._around_last))
        wrapped = [(block, wrap(block.forward, kind)) for (kind, block), wrap in around]
        self._restore = [_set_forward(block, forward) for block, forward in wrapped]
        self._restore.append(model.register_forward_pre_hook(self._begin_forward).remove)

    def begin_call(self, *, is_last: Callable[[int], bool] | None = None) -> None:
        """Forget the call before, also one that failed, and start to work.

        `is_last(done)` is asked at each forward whether it belongs to the call's last step, which is then
        computed; `done` counts the earlier forwards of this branch on this model. Only the caller knows: a
        scheduler may take several forwards a step (Heun two), and two models may share the steps. It must
        answer alike on all ranks.
        """
        self._states.clear()
        self._marks.clear()
        self._now, self._is_last, self._in_call = None, is_last, True

    def end_call(self) -> None:
        """Free the tensors and let forwards pass; the report stays until the next call. May be called
        again."""
        for state in self._states.values():
            state.residual = state.rest = None
        self._now, self._is_last, self._in_call = None, None, False

    def close(self) -> None:
        """Give the model back as it was. May be called again.

        A forward that somebody has wrapped since stays under that wrapper, and only passes through.
        """
        self.end_call()
        for restore in self._restore:
            restore()
        self._restore.clear()

    def __enter__(self) -> "FirstBlockCache":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def report(self) -> dict[str, BranchReport]:
        """What each branch did in the call at hand, or in the last one, by the branch's name; alike on all
        ranks."""
        return {n: BranchReport(tuple(s.skipped), tuple(s.changes)) for n, s in self._states.items()}

    def seconds_saved(self) -> float:
        """About what the skips of this call have saved on this rank, in seconds.

        Each decision waits for the device, so the time from one to the next is what the first one cost.
        """
        cost: dict[bool, list[float]] = {True: [], False: []}
        for (start, skipped), (end, _) in pairwise(self._marks):
            cost[skipped].append(end - start)
        if not cost[True] or not cost[False]:
            return 0.0
        hits = sum(skipped for _, skipped in self._marks)
        return hits * max(0.0, median(cost[False]) - median(cost[True]))

    def notice(self) -> str:
        """A sentence for the log if forwards ran and none was skipped; "" if all is well."""
        branches = self.report().values()
        forwards = [len(branch.skipped) for branch in branches]
        if not forwards or any(branch.hits for branch in branches):
            return ""
        warm_up = self.config.warmup_steps
        changes = [c for branch in branches for c in branch.changes[max(1, warm_up) : -1] if math.isfinite(c)]
        asked = f"the cache skipped none of {sum(forwards)} forwards at threshold {self.config.threshold:g}; "
        if not changes:
            return asked + (
                f"a branch had {max(forwards)}, and the first {warm_up} and the last are always computed; "
                "take more steps, lower warmup_steps, or leave the cache off"
            )
        return asked + (
            f"the smallest change from one to the next was {min(changes):.3g}; set the threshold above it, "
            "or leave the cache off"
        )

    def _begin_forward(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        self._now = None  # the last forward may have failed, or left out its last block

    def _around_first(self, original: Callable[..., Result], kind: Blocks) -> Callable[..., Result]:
        signature = inspect.signature(original)
        deciding = next((name for name in kind.outputs if kind.streams(name) == (DECIDES,)), None)
        if deciding is None or not {*kind.outputs} <= signature.parameters.keys():
            raise ValueError(
                f"a cache was asked for that continues {', '.join(kind.outputs)}, one of them the {DECIDES}; "
                f"the first blocks take {', '.join(signature.parameters)}; correct the plan's `outputs` and "
                "`held`"
            )

        # It exchanges and reads values: compiled blocks are cut here. No decorator of the method, which would
        # import the compiler with this module, seconds for a command line that only prints its help.
        decide: Any = torch.compiler.disable(self._decide)

        @functools.wraps(original)  # hooks read the signature
        def forward(*args: Any, **kwargs: Any) -> Result:
            if not self._in_call:
                return original(*args, **kwargs)
            # A copy: the block may change its input in place.
            before = signature.bind(*args, **kwargs).arguments[deciding].detach().clone()
            output = original(*args, **kwargs)
            first = _by_stream(output, kind, {})
            tokens = first[DECIDES]
            assert tokens is not None, f"the first block gave no {DECIDES}"
            self._now = now = decide(first, tokens.detach() - before)
            now.shown[kind.modules] = output
            return output

        return forward

    def _around_middle(self, original: Callable[..., Result], kind: Blocks) -> Callable[..., Result]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Result:
            now = self._now
            if now is None or not now.skipped:
                return original(*args, **kwargs)
            if kind.modules not in now.shown:
                now.shown[kind.modules] = _as_result(now.first, kind)
            return now.shown[kind.modules]

        return forward

    def _around_last(self, original: Callable[..., Result], kind: Blocks) -> Callable[..., Result]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Result:
            now, self._now = self._now, None
            if now is not None and now.skipped:
                return _as_result(now.result, kind)
            output = original(*args, **kwargs)
            if now is not None:
                now.state.residual = now.residual
                last = _by_stream(output, kind, now.result)
                now.state.rest = _each(lambda last, first: last.detach() - first, last, now.result)
            return output

        return forward

    def _decide(self, first: Streams, residual: torch.Tensor) -> _Forward:
        """The one place that branches: on sums that all ranks of the group share, and on counts."""
        state = self._states.setdefault(self._branches.current, _State())
        if state.residual is not None and state.residual.shape != residual.shape:
            state.residual = None  # guidance has come or gone with part of the batch, on all ranks alike
        # Entered in every forward, whatever is known here: no rank may wait for one that did not come.
        changed, previous = agree_sums(self._sums(residual, state.residual), group=self._group)
        change = changed / previous if previous > 0 else math.inf
        done = len(state.skipped)
        skip = (
            change < self.config.threshold  # not so for NaN
            and done >= self.config.warmup_steps
            and state.streak < self.config.max_skip_streak
            and not (self._is_last is not None and self._is_last(done))
        )
        state.skipped.append(skip)
        state.changes.append(change)
        state.streak = state.streak + 1 if skip else 0
        self._marks.append((time.perf_counter(), skip))
        if skip:
            assert state.rest is not None, "a change is finite only after a forward that was computed"
            result = _each(torch.add, first, state.rest)
        else:
            state.residual = state.rest = None  # freed before the other blocks take their memory
            result = _each(lambda one, _: one.detach().clone(), first, first)  # may be changed in place
        return _Forward(state, first, {}, residual, result, skip)

    def _sums(self, residual: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        """This rank's part of [sum |residual - previous|, sum |previous|], over its true tokens.

        Each token's sum is taken in fp32, or the model's dtype if that is wider, and these in float64 where
        the device has it: so the result hardly depends on how the tokens are cut.
        """
        wide = Device(residual.device.type).supports_float64
        dtype = torch.float64 if wide else torch.float32
        if previous is None:
            return torch.zeros(2, dtype=dtype, device=residual.device)
        tokens = residual.shape[1] if self._share_of is None else self._share_of(DECIDES)
        residual, previous = residual[:, :tokens], previous[:, :tokens]
        within = torch.promote_types(residual.dtype, torch.float32)
        sums = [t.abs().sum(-1, dtype=within).sum(dtype=dtype) for t in (residual - previous, previous)]
        return torch.stack(sums)


def _blocks(model: nn.Module, plan: ShardPlan) -> list[tuple[Blocks, nn.Module]]:
    """The blocks to work on, with their kind. Raises ValueError if the model is not one that can be
    cached."""
    name = type(model).__name__
    if not plan.stacked and not hasattr(model, "cache_context"):
        raise ValueError(
            f"a cache was asked for; {name} has no cache_context, so its guidance branches cannot be told "
            "apart; leave the cache off"
        )
    if getattr(model, "is_cache_enabled", False):
        raise ValueError(
            f"a cache was asked for; {name} has one of diffusers' own enabled already; call its "
            "disable_cache() first"
        )
    lists = [kind for kind in plan.blocks if kind.cached]
    modules = dict(model.named_modules())
    blocks = [(k, b) for k in lists for b in modules.get(k.modules, nn.ModuleList()).children()]
    if len(blocks) < 2:
        raise ValueError(
            f"a cache was asked for; {name} has {len(blocks)} blocks in "
            f"{' and '.join(repr(kind.modules) for kind in lists) or 'its plan'}, and the first always runs; "
            "leave the cache off"
        )
    return blocks


def _set_forward(block: nn.Module, forward: Callable[..., Result]) -> Callable[[], None]:
    """Give one module another forward; what comes back undoes it, unless somebody has wrapped it since."""
    own = block.__dict__.get("forward")
    block.forward = forward

    def restore() -> None:
        if block.__dict__.get("forward") is forward:
            del block.forward
            if own is not None:
                block.forward = own

    return restore


def _by_stream(output: Result, kind: Blocks, like: Streams) -> dict[str, torch.Tensor | None]:
    """A block's result by stream; one that joins several is cut at their lengths in `like`."""
    found: dict[str, torch.Tensor | None] = {}
    elements = (output,) if isinstance(output, torch.Tensor) else output
    for name, tensor in zip(kind.outputs, elements, strict=True):
        streams = kind.streams(name)
        if tensor is None or len(streams) == 1:
            found.update(dict.fromkeys(streams, tensor))
            continue
        lengths = [one.shape[1] for s in streams if (one := like[s]) is not None]
        found.update(zip(streams, tensor.split(lengths, dim=1), strict=True))
    return found


def _as_result(streams: Streams, kind: Blocks) -> Result:
    """What a block of this kind returns for its streams."""
    elements = []
    for name in kind.outputs:
        parts = [part for s in kind.streams(name) if (part := streams[s]) is not None]
        elements.append(torch.cat(parts, dim=1) if len(parts) > 1 else parts[0] if parts else None)
    return elements[0] if len(elements) == 1 and elements[0] is not None else tuple(elements)


def _each(
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], streams: Streams, other: Streams
) -> Streams:
    """Each stream combined with its counterpart; None where either has none."""
    found: dict[str, torch.Tensor | None] = {}
    for name, one in streams.items():
        two = other[name]
        found[name] = combine(one, two) if one is not None and two is not None else None
    return found


def _ranges(numbers: Sequence[int]) -> str:
    """[3, 4, 5, 9] as "3-5 9"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return " ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True))
