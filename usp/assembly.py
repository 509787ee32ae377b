"""Everything that is applied to a pipeline's transformers, put on together and taken off together."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import nn

from runtime.log import get_logger
from runtime.report import format_bytes
from usp.adapter import Sharded, sharded
from usp.attention import SequenceAttention
from usp.attention.interop import external_attention
from usp.branches import Branches
from usp.cache import FirstBlockCache, cached
from usp.cfg_parallel import BranchExchange, CfgParallel
from usp.config import CacheConfig, ParallelConfig
from usp.fusing import Fused, fuse
from usp.mesh import Groups
from usp.plans import check_sequence, head_dim_of, heads_of, plan_for

logger = get_logger(__name__)


@dataclass
class Applied:
    """What is on one transformer; None where the config does not ask for it."""

    model: Any
    shard: Sharded | None = None
    fused: Fused | None = None
    branches: Branches | None = None
    cache: FirstBlockCache | None = None
    cfg: CfgParallel | None = None

    @property
    def parts(self) -> list[Any]:
        """What is applied, the outermost first, which is the order to take it off."""
        return [p for p in (self.cfg, self.cache, self.branches, self.fused, self.shard) if p is not None]


@dataclass
class Assembly:
    """All transformers of a pipeline on all ranks, until `close()`. Use `assemble` to make one."""

    config: ParallelConfig
    groups: Groups
    attention: SequenceAttention
    exchange: BranchExchange | None
    applied: dict[str, Applied] = field(default_factory=dict)

    def begin_call(self, *, is_last_step: Callable[[], bool], steps_told: bool) -> None:
        """Forget the call before, also one that failed. `steps_told`: `end_step` is to follow each step."""
        if self.exchange is not None:
            self.exchange.begin_call()
        for one in self.applied.values():
            if one.branches is not None:
                one.branches.begin_call(steps_told=steps_told)
            if one.cfg is not None:
                one.cfg.begin_call()
            if one.cache is not None:
                one.cache.begin_call(is_last=lambda done: is_last_step())

    def end_step(self) -> None:
        """A step of the call has ended."""
        for one in self.applied.values():
            if one.branches is not None:
                one.branches.end_step()

    def end_call(self) -> None:
        """Free what a call keeps."""
        for one in self.applied.values():
            if one.cache is not None:
                one.cache.end_call()

    def aside(self) -> ExitStack:
        """A context for the user's callback, whose own forwards are of none of the pipeline's branches."""
        stack = ExitStack()
        for one in self.applied.values():
            if one.branches is not None:
                stack.enter_context(one.branches.aside())
        return stack

    def check_used(self, steps: int) -> None:
        """After a call of so many steps that went well: raise ValueError, or warn, for what it did not use.

        That is a cfg axis that was idle, and a cache that could not tell branches from steps.
        """
        for name, one in self.applied.items():
            if one.branches is None:  # then there is neither cfg nor cache
                continue
            told, untold = one.branches.steps_told, one.branches.unnamed  # 0 if each step was told
            if one.cfg is not None:
                one.cfg.check_used(ceil(untold / steps) if told and untold > 1 else None)
            if one.cache is not None and untold > (1 if told else steps):
                raise ValueError(
                    f"a cache was asked for; the pipeline ran {name} {untold} times without naming guidance "
                    "branches (cache_context), and told of no step (callback_on_step_end), so the cache "
                    "cannot tell a branch from a step; leave the cache off"
                )

    def abandon(self) -> None:
        """Leave the forwards of a call that was broken off."""
        for one in self.applied.values():
            if one.shard is not None:
                one.shard.abandon()

    def close(self) -> None:
        """Give the transformers back as they were and end the communicators. May be called again."""
        for one in self.applied.values():
            for part in one.parts:
                part.close()
        self.applied.clear()
        if self.attention.external is not None:
            self.attention.external.close()
        self.groups.close()

    @property
    def tokens(self) -> dict[str, tuple[int, int]]:
        """For each transformer that ran over ranks: this rank's and all ranks' tokens in its last forward."""
        shards = {name: one.shard for name, one in self.applied.items()}
        return {n: (s.tokens_here, s.tokens_total) for n, s in shards.items() if s and s.tokens_total}

    def cache_report(self) -> dict[str, dict[str, Any]]:
        """What the cache did on this rank in the last call: by "transformer/branch", plain values."""
        found = {}
        for name, one in self.applied.items():
            for branch, report in one.cache.report().items() if one.cache else ():
                found[f"{name}/{branch}"] = {**report.as_json(), "text": str(report)}
        return found

    def cache_seconds_saved(self) -> float:
        """About what the cache saved on this rank in the last call."""
        return sum(one.cache.seconds_saved() for one in self.applied.values() if one.cache)

    def tell_cache(self) -> None:
        """Log a notice for a cache that skipped nothing."""
        for name, one in self.applied.items():
            if one.cache and (notice := one.cache.notice()):
                logger.warning("%s: %s", name, notice)

    def rows(self, device: torch.device) -> list[tuple[str, str]]:
        """Rows of the start-up report, from what was really applied."""
        rows = []
        world_size = self.config.world_size
        for name, one in self.applied.items():
            heads = heads_of(one.model)
            size = sum(p.numel() * p.element_size() for p in one.model.parameters())
            copies = f", weights replicated x{world_size}" if world_size > 1 else ""
            patched = f", {one.shard.attention_modules} attention modules over ranks" if one.shard else ""
            counted = "" if heads is None else f", {heads} heads"
            what = f"{type(one.model).__name__}, {format_bytes(size)}{copies}{counted}{patched}"
            rows.append((name, what))
            if heads is not None and heads < self.config.ulysses_degree:
                idle = self.config.ulysses_degree - heads
                logger.warning(
                    "ulysses_degree=%d with %d heads: %d ranks have no attention to compute; ring or "
                    "gather_kv would use them",
                    self.config.ulysses_degree,
                    heads,
                    idle,
                )
            if one.shard:
                kernel = self.attention.chosen_kernel(one.model.dtype, head_dim_of(one.model), device)
                rows.append(("kernel", kernel))
            if one.fused:
                rows.append(("fused", str(one.fused)))
            if one.cache:
                rows.append(("cache", str(one.cache.config)))
        return rows


def assemble(
    models: dict[str, nn.Module],
    config: ParallelConfig,
    groups: Groups,
    *,
    kernel: str = "auto",
    cache: CacheConfig | None = None,
    strict: bool = False,
    fused: str = "auto",
    device_type: str = "cpu",
) -> Assembly:
    """Apply plans, cache, cfg parallel and fused operators to the named transformers, alike on all ranks.

    `fused` is auto, on or off; `device_type` is where the transformers run. Takes over `groups`.
    Raises ValueError, leaving the models as they were, for what does not fit.
    """
    external = external_attention(config, groups, kernel=kernel)
    exchange = BranchExchange(groups.cfg) if config.cfg_degree > 1 else None
    made = Assembly(config, groups, SequenceAttention(groups, kernel, external), exchange)
    try:
        for name, model in models.items():
            made.applied[name] = one = Applied(model)
            _apply(one, made, cache, strict)
            one.fused = fuse(model, plan_for(model), fused, device_type)
    except BaseException:
        made.close()
        raise
    return made


def _apply(one: Applied, made: Assembly, cache: CacheConfig | None, strict: bool) -> None:
    """The plan first, then what works on whole forwards of blocks and of the model."""
    plan = plan_for(one.model)
    check_sequence(one.model, made.config.sp_degree)
    if made.config.sp_degree > 1:
        one.shard = sharded(one.model, plan, made.attention)
    if cache is not None or made.exchange is not None:
        one.branches = Branches(one.model, plan.told_apart_by, stacked=plan.stacked)
    if cache is not None and one.branches is not None:
        share_of = one.shard.share_of if one.shard else None
        one.cache = cached(
            one.model, plan, cache, group=made.groups.sp, branches=one.branches, share_of=share_of
        )
    if made.exchange is not None and one.branches is not None:
        length_of = one.shard.length_of if one.shard else None
        one.cfg = CfgParallel(
            one.model, plan, made.exchange, one.branches, strict=strict, length_of=length_of
        )
