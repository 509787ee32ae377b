"""Random weights that keep activations of order 1, the same for a seed whatever the library starts with."""

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def built(make: Callable[[], Any], seed: int) -> Any:
    """The pipeline that `make` gives, every weight drawn anew from `seed`; the caller's random state is kept.

    Weights are fp32; all modules are in eval mode.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every vendor's devices too
        pipeline = make()
    for name, part in pipeline.components.items():
        if isinstance(part, nn.Module):
            draw_weights_(part.eval(), seed + zlib.crc32(name.encode()))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@torch.no_grad()
def draw_weights_(module: nn.Module, seed: int) -> None:
    """Fill all parameters: matrices of variance 1 / fan-in, norms near 1, the rest small. None is left at 0.

    Some start at 0 or unset (gates, padding tokens), where a wrong exchange would not show.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if name.endswith("gamma") or (weight.ndim == 1 and name.endswith("weight")):
            weight.copy_(1 + 0.1 * drawn)
        elif weight.ndim < 2:
            weight.copy_(0.1 * drawn)
        else:
            weight.copy_(drawn * weight[0].numel() ** -0.5)
