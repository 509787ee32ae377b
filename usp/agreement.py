"""What ranks compare before they work together: short descriptions that differ when it matters."""

import functools
import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

MAY_DIFFER = ("generator", "output_type")  # the first is made alike; a rank may leave decoding to another
SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(model: nn.Module) -> str:
    """A digest of the names, shapes, dtypes and values of all parameters, and of the adapters in force."""
    return fingerprint_tensors(model.named_parameters(), _adapters(model))


def fingerprint_tensors(named: Iterable[tuple[str, torch.Tensor]], more: str = "") -> str:
    """A digest of the names, shapes, dtypes and values of tensors, and of `more`.

    Values enter as sums of their bit patterns along the first and the other axes, weighted by position:
    exact in any order of summation, computed where the weights are. Tensors without data (offloaded to meta)
    count by shape.
    """
    digest = hashlib.sha256(more.encode())
    odd = functools.cache(lambda count, device: 2 * torch.arange(count, device=device) + 1)
    sums = []
    for name, parameter in named:
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if not parameter.is_meta and parameter.numel() and parameter.element_size() in SAME_SIZE:
            bits = parameter.detach().view(SAME_SIZE[parameter.element_size()])
            rows = bits.reshape(bits.shape[0] if bits.ndim else 1, -1)
            for totals in (rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64)):
                sums.append((totals * odd(totals.numel(), totals.device)).sum())
    digest.update(str([int(value) for value in sums]).encode())
    return digest.hexdigest()[:16]


def weight_state(model: nn.Module) -> str:
    """A cheap digest, for this rank alone, that changes when parameters or adapters are added or written
    to."""
    digest = hashlib.sha256(_adapters(model).encode())
    for name, parameter in model.named_parameters():
        version = 0 if parameter.is_inference() else parameter._version
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {version}".encode())
    return digest.hexdigest()[:16]


def _adapters(model: nn.Module) -> str:
    """The settings of adapter layers that are no parameters."""
    settings = []
    for name, module in model.named_modules():
        for setting in ("scaling", "active_adapters", "merged_adapters", "disable_adapters"):
            if isinstance(value := getattr(module, setting, None), (dict, list, bool)):
                settings.append(f"{name} {setting} {value}")
    return "\n".join(settings)


def describe_call(arguments: dict[str, Any]) -> dict[str, Any]:
    """What ranks must agree on of a call's arguments."""
    return {name: _describe(value) for name, value in arguments.items() if name not in MAY_DIFFER}


def describe_scheduler(pipeline: Any) -> Any:
    """The class and settings of a pipeline's scheduler, and the shift that was set on it since; or None."""
    scheduler: Any = getattr(pipeline, "scheduler", None)
    if not hasattr(scheduler, "config"):
        return None
    settings = {name: value for name, value in scheduler.config.items() if not name.startswith("_")}
    return type(scheduler).__name__, _describe(settings), _describe(vars(scheduler).get("_shift"))


def _describe(value: Any) -> Any:
    """Plain values as they are; tensors, arrays and images by kind, shape and a digest of their bytes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): _describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_describe(item) for item in value]
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"tensor {tuple(value.shape)} {value.dtype} {_digest(raw)}"
    if isinstance(value, np.ndarray):
        return f"array {value.shape} {value.dtype} {_digest(value.tobytes())}"
    if hasattr(value, "tobytes") and hasattr(value, "size"):  # an image
        return f"{type(value).__name__} {value.size} {_digest(value.tobytes())}"
    return type(value).__name__


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:12]
