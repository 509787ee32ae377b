"""What the ranks of several tests run, and the one-process results that they are compared with."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import cpu_offload
from hypothesis import HealthCheck, settings
from torch import nn

from tests import tiny
from usp.adapter import sharded
from usp.attention import SequenceAttention
from usp.config import parse_parallel
from usp.mesh import Groups, make_groups
from usp.pipeline import ParallelPipeline
from usp.plan import ShardPlan
from usp.plans.wan import WAN

LAYOUTS = {
    2: ("ulysses2", "gather_kv2", "ring2"),
    3: ("ulysses3", "gather_kv3", "ring3"),
    4: ("ulysses4", "gather_kv4", "ring4", "ulysses2 ring2", "ulysses2 gather_kv2"),
}
EVERY_LAYOUT = [(size, layout) for size, layouts in LAYOUTS.items() for layout in layouts]
SEED = 7
# For properties: the same examples every time, and no limit on how long one takes on a machine that is busy.
STEADY = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

Case = tuple[str, dict[str, Any]]  # a kind of pipeline, and changes to its call


def seeded(seed: int) -> torch.Generator:
    """A CPU generator."""
    return torch.Generator().manual_seed(seed)


def alone(kind: str, changes: dict[str, Any], *, pipeline: Any = None) -> np.ndarray:
    """What one process gives for a call with SEED, or with the whole numbers given as `generator`."""
    arguments = tiny.call(kind, **changes)
    seeds = arguments.pop("generator", SEED)
    generator = [seeded(s) for s in seeds] if isinstance(seeds, list) else seeded(seeds)
    pipeline = pipeline or tiny.build(kind)
    return np.asarray(pipeline(**arguments, generator=generator).frames)


def together(layout: str, cases: Sequence[Case], **config: Any) -> list[np.ndarray]:
    """What this rank gets for the same calls when all ranks share them."""
    results = []
    for kind, changes in cases:
        with ParallelPipeline(tiny.build(kind, **config), layout) as pipe:
            arguments = tiny.call(kind, **changes)
            seed = None if "generator" in arguments else SEED
            results.append(np.asarray(pipe(**arguments, seed=seed).frames))
    return results


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The error that a call ends with, as "ValueError: text"; "" if it ends well."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def hooks(model: nn.Module) -> int:
    """How many forward hooks and pre-hooks a model and its modules hold."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def offload(pipeline: Any, way: str, device: torch.device) -> None:
    """Have diffusers and accelerate keep a pipeline's weights on the host and lend them to a device.

    "layers" is what "sequential" asks of accelerate, without the index that diffusers gives every device.
    """
    if way == "model":
        pipeline.enable_model_cpu_offload(device=device)
    elif way == "sequential":
        pipeline.enable_sequential_cpu_offload(device=device)
    elif way == "layers":
        for model in (part for part in pipeline.components.values() if isinstance(part, nn.Module)):
            cpu_offload(model, device, offload_buffers=len(model._parameters) > 0)
    else:
        blocks = {"num_blocks_per_group": 1} if way == "block_level" else {}
        pipeline.enable_group_offload(onload_device=device, offload_type=way, **blocks)
    marks = ("_hf_hook", "_diffusers_hook")
    assert any(hasattr(pipeline.transformer, mark) for mark in marks), "it is offloaded"


def rank() -> int:
    """This rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def groups_of(layout: str, cache: dict[Any, Groups] = {}) -> Groups:  # noqa: B006  kept over many calls
    """This rank's groups for a layout."""
    key = (id(dist.group.WORLD), layout)
    if key not in cache:
        cache[key] = make_groups(parse_parallel(layout), rank=rank())
    return cache[key]


@torch.no_grad()
def forward(
    model: nn.Module, inputs: dict[str, Any], layout: str | None = None, plan: ShardPlan = WAN
) -> torch.Tensor:
    """The result of one forward of a Wan transformer, in this process alone or over the ranks of a layout."""
    if layout is None:
        return model(**inputs, return_dict=False)[0]
    with sharded(model, plan, SequenceAttention(groups_of(layout))):
        return model(**inputs, return_dict=False)[0]


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; NaN if the shapes differ."""
    return (a - b).abs().max().item() if a.shape == b.shape else float("nan")
