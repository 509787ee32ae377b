"""First-block cache: a forward whose first block changes little reuses the other blocks' work.

The first block runs in every forward. If its residual (output - input) has changed little since the last
computed forward, the other blocks are left out, and what they added then is added again. Applied from outside
to the blocks that a plan names; the ranks that share a forward decide together. Off unless asked for.

Source: ParaAttention's first-block cache, after TeaCache (arXiv 2411.19108).
"""

import functools
import inspect
import math
import time
from collections.abc import Callable, Sequence
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
from usp.plan import ShardPlan, SplitInput

DECIDES = "hidden_states"  # the block argument whose residual is compared: the picture's tokens, (B, S, D)

Result = torch.Tensor | tuple[torch.Tensor | None, ...]  # what a block returns


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
    outputs: Sequence[str] = (DECIDES,),
) -> "FirstBlockCache":
    """A cache on the blocks that `plan` names, which works between its `begin_call` and `end_call`, until
    closed.

    `group` has the ranks that share a forward. `share_of` gives this rank's true token count of a stream
    (`Sharded.share_of`); None if this rank holds all tokens. `outputs` has, for each element of a block's
    result, the name of the argument that it continues. Holds, per token held here and branch, twice the
    hidden width in the hidden states' dtype: 20 KiB for Wan 14B in bf16.
    Raises ValueError, before anything is changed, if the model does not fit.
    """
    return FirstBlockCache(model, plan, config, group, branches, share_of, tuple(outputs))


@dataclass
class _State:
    """One branch's last computed forward, and its decisions so far."""

    residual: torch.Tensor | None = None  # of the first block
    rest: Result | None = None  # what the other blocks added
    streak: int = 0
    skipped: list[bool] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)


@dataclass
class _Forward:
    """The forward at hand, from the end of the first block to the end of the last."""

    state: _State
    first: Result  # what the first block returned
    residual: torch.Tensor
    result: Result  # when skipped, what the last block is to return; else a copy of `first`
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
        outputs: tuple[str, ...],
    ) -> None:
        self.config = config
        self._group, self._branches, self._outputs = group, branches, outputs
        self._share_of = share_of
        self._stream = _stream(plan) if share_of is not None else ""
        self._in_call = False
        self._is_last: Callable[[int], bool] | None = None
        self._states: dict[str, _State] = {}
        self._marks: list[tuple[float, bool]] = []  # when each decision of the call was taken, and which
        self._now: _Forward | None = None
        first, *middle, last = _blocks(model, plan)
        self._restore = [_set_forward(first, self._around_first(first.forward))]
        self._restore += [_set_forward(block, self._around_middle(block.forward)) for block in middle]
        self._restore.append(_set_forward(last, self._around_last(last.forward)))

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

    def _around_first(self, original: Callable[..., Result]) -> Callable[..., Result]:
        signature = inspect.signature(original)
        if not {DECIDES, *self._outputs} <= signature.parameters.keys():
            raise ValueError(
                f"a cache was asked for that compares {DECIDES!r} and continues {', '.join(self._outputs)}; "
                f"the blocks take {', '.join(signature.parameters)}; give `outputs` names of these"
            )

        @functools.wraps(original)  # hooks read the signature
        def forward(*args: Any, **kwargs: Any) -> Result:
            if not self._in_call:
                return original(*args, **kwargs)
            # A copy: the block may change its input in place.
            before = signature.bind(*args, **kwargs).arguments[DECIDES].detach().clone()
            output = original(*args, **kwargs)
            self._now = self._decide(output, self._main(output).detach() - before)
            return output

        return forward

    def _around_middle(self, original: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Result:
            if self._now is not None and self._now.skipped:
                return self._now.first
            return original(*args, **kwargs)

        return forward

    def _around_last(self, original: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Result:
            now = self._now
            if now is not None and now.skipped:
                self._now = None
                return now.result
            output = original(*args, **kwargs)
            if now is not None:
                now.state.residual = now.residual
                now.state.rest = _each(lambda last, first: last.detach() - first, output, now.result)
                self._now = None
            return output

        return forward

    @torch.compiler.disable()  # it exchanges and reads values; compiled blocks are cut here
    def _decide(self, output: Result, residual: torch.Tensor) -> _Forward:
        """The one place that branches: on sums that all ranks of the group share, and on counts."""
        state = self._states.setdefault(self._branches.current, _State())
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
            result = _each(torch.add, output, state.rest)
        else:
            state.residual = state.rest = None  # freed before the other blocks take their memory
            result = _each(lambda first, _: first.detach().clone(), output, output)  # may be changed in place
        return _Forward(state, output, residual, result, skip)

    def _sums(self, residual: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        """This rank's part of [sum |residual - previous|, sum |previous|], over its true tokens.

        Each token's sum is taken in fp32, or the model's dtype if that is wider, and these in float64 where
        the device has it: so the result hardly depends on how the tokens are cut.
        """
        wide = Device(residual.device.type).supports_float64
        dtype = torch.float64 if wide else torch.float32
        if previous is None:
            return torch.zeros(2, dtype=dtype, device=residual.device)
        tokens = residual.shape[1] if self._share_of is None else self._share_of(self._stream)
        residual, previous = residual[:, :tokens], previous[:, :tokens]
        within = torch.promote_types(residual.dtype, torch.float32)
        sums = [t.abs().sum(-1, dtype=within).sum(dtype=dtype) for t in (residual - previous, previous)]
        return torch.stack(sums)

    def _main(self, output: Result) -> torch.Tensor:
        """The element of a block's result that decides."""
        tensor = output if isinstance(output, torch.Tensor) else output[self._outputs.index(DECIDES)]
        assert tensor is not None, f"the first block gave no {DECIDES}"
        return tensor


def _blocks(model: nn.Module, plan: ShardPlan) -> list[nn.Module]:
    """The blocks to work on. Raises ValueError if the model is not one that can be cached."""
    name = type(model).__name__
    if not hasattr(model, "cache_context"):
        raise ValueError(
            f"a cache was asked for; {name} has no cache_context, so its guidance branches cannot be told "
            "apart; leave the cache off"
        )
    if getattr(model, "is_cache_enabled", False):
        raise ValueError(
            f"a cache was asked for; {name} has one of diffusers' own enabled already; call its "
            "disable_cache() first"
        )
    blocks = list(dict(model.named_modules()).get(plan.blocks, nn.ModuleList()).children())
    if len(blocks) < 2:
        raise ValueError(
            f"a cache was asked for; {name} has {len(blocks)} blocks in {plan.blocks!r}, and the first "
            "always runs; leave the cache off"
        )
    return blocks


def _stream(plan: ShardPlan) -> str:
    """The stream that the deciding tokens belong to."""
    for entry in plan.splits:
        if isinstance(entry, SplitInput) and entry.argument == DECIDES:
            return entry.stream
    raise ValueError(
        f"a cache was asked for; the plan for {plan.model} does not say where {DECIDES!r} is split; leave "
        "the cache off"
    )


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


def _each(
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], output: Result, other: Result
) -> Result:
    """A block's result, each tensor combined with its counterpart; None where either has none."""
    if isinstance(output, torch.Tensor):
        assert isinstance(other, torch.Tensor), "blocks of one list return alike"
        return combine(output, other)
    pairs = zip(output, other, strict=True)
    return tuple(combine(a, b) if a is not None and b is not None else None for a, b in pairs)


def _ranges(numbers: Sequence[int]) -> str:
    """[3, 4, 5, 9] as "3-5 9"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return " ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True))
