"""How a pipeline finds its ranks and its device: a group that exists, or torchrun's environment, or alone."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from runtime.device import detect_device
from runtime.process_group import World, connect, read_rank_env


def ranks_running(world: World | None) -> int:
    """The world size, known before any group exists."""
    if world is not None:
        return world.world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return read_rank_env().world_size


def default_group() -> Any:
    """The default process group, or None."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def join(choice: str | None, timeout_s: float) -> World:
    """All ranks, on the chosen device or the first found. Collective."""
    env = read_rank_env()
    local_rank, ranks = env.local_rank, env.world_size
    if ranks == 1 and default_group() is not None and torch.accelerator.is_available():
        local_rank = torch.accelerator.current_device_index()  # the caller made the group, and set the device
    device = detect_device(choice, local_rank=local_rank, world_size=ranks)
    return connect(device, env=env, timeout_s=timeout_s)


def move_pipeline(pipeline: Any, world: World) -> None:
    """Put the pipeline on this rank's device, unless offload hooks or a device map place it."""
    placed = getattr(pipeline, "hf_device_map", None) or any(
        hasattr(c, "_hf_hook") or hasattr(c, "_diffusers_hook")
        for c in pipeline.components.values()
        if isinstance(c, nn.Module)
    )
    if not placed and world.device.kind != "cpu":
        pipeline.to(world.device.torch_device)
