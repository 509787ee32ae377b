"""The peers: other packages' way to run the same model on the same ranks, with the least that makes each run.

A change to a peer (a shim) is named in the output. A peer that fails is reported and left out.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ContextParallelConfig
from diffusers.utils import logging as diffusers_logging
from torch import nn

from runtime.process_group import World
from usp.attention.kernels import lse_attention
from usp.bench.contenders import (
    Inputs,
    forward,
    layouts,
    name_of,
    tokens_of,
    transformer_contender,
    transformer_traffic,
    twin,
)
from usp.bench.ideal import BlockStack
from usp.bench.rounds import Contender, Running
from usp.config import ParallelConfig

PEERS = ("diffusers", "yunchang", "xfuser")
COUNT_SHIM = "diffusers, shim: torch.accelerator.device_count says 1, since enable_parallelism divides by it"
LSE_SHIM = "diffusers ring, shim: its native attention is given a log-sum-exp, by our local kernel"


def check_peers(names: list[str], ranks: int) -> None:
    """Raise ValueError for an unknown peer, or for peers on one rank, where there is nothing to compare."""
    for name in names:
        if name not in PEERS:
            raise ValueError(f"peer={name!r} is not known; use one of {', '.join(PEERS)}")
    if names and ranks == 1:
        raise ValueError(
            f"peer={names[0]!r} was asked for on 1 rank; a peer is compared over several; use torchrun"
        )


def peer_contenders(
    name: str, world: World, model: nn.Module, inputs: Inputs, stack: BlockStack
) -> list[Contender]:
    """A contender for each layout that the peer has: Ulysses, ring, and both."""
    configs = [config for config in layouts(world.world_size) if config.gather_kv_degree == 1]
    if name == "diffusers":
        return [_diffusers(world, config, model, inputs, stack) for config in configs]
    configs = [replace(config, engine=name) for config in configs]
    return [transformer_contender(world, config, model, inputs, stack) for config in configs]


def _diffusers(
    world: World, config: ParallelConfig, model: nn.Module, inputs: Inputs, stack: BlockStack
) -> Contender:
    """diffusers' own context parallelism."""
    without_count = torch.accelerator.device_count() == 0
    ring = config.ring_degree > 1

    def build() -> Running:
        # Each rank would say that the feature is experimental, and torch that it is called in an old way.
        diffusers_logging.set_verbosity_error()
        warnings.filterwarnings("ignore", "`torch.distributed._functional", FutureWarning)
        peer: Any = twin(model)
        degrees = ContextParallelConfig(ring_degree=config.ring_degree, ulysses_degree=config.ulysses_degree)
        count = partial(_replaced, torch.accelerator, "device_count", lambda: 1)
        with count() if without_count else nullcontext():
            peer.enable_parallelism(config=degrees)
        run = forward(peer, inputs)
        return Running(partial(_with_lse, run) if ring else run)

    notes = ((COUNT_SHIM,) if without_count else ()) + ((LSE_SHIM,) if ring else ())
    least, work = transformer_traffic(config, inputs, stack), stack.work(config, tokens_of(inputs))
    return Contender(f"diffusers {name_of(config)}", build, least, work, "diffusers", notes=notes)


def _with_lse(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run with an attention that gives diffusers' ring the log-sum-exp it asks for, (B, S, H)."""
    stock = attention_dispatch._native_attention_forward_op

    def native(ctx: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "return_lse")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not given.get("return_lse"):
            return stock(ctx, query, key, value, *args, **kwargs)
        out, lse = lse_attention(query, key, value, None, scale=given.get("scale"))
        return out.to(query.dtype), lse.transpose(1, 2)

    with _replaced(attention_dispatch, "_native_attention_forward_op", native):
        return run()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for the body."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)
