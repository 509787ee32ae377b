"""From tensors in files to a module on its device: everything checked first, then one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from runtime.checkpoint import FileTensor, open_checkpoint, resolve_files
from runtime.device import UNINDEXED, Device
from runtime.report import format_bytes

__all__ = ["LoadReport", "check_tensors", "load_module", "open_checkpoint", "resolve_files"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What one load did; sizes in bytes."""

    module: str
    device: str
    tensors: int
    bytes_in_files: int
    bytes_held: int
    cast: int  # tensors that changed dtype

    def __str__(self) -> str:
        change = f", {self.cast} cast" if self.cast else ""
        return (
            f"{self.module} on {self.device}: {self.tensors} tensors, "
            f"{format_bytes(self.bytes_in_files)} in files, {format_bytes(self.bytes_held)} held{change}"
        )


class _Place(NamedTuple):
    """Where a tensor goes: the module that owns it, its name there, and what it is there now."""

    owner: nn.Module
    leaf: str
    now: torch.Tensor


def load_module(
    module: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    *,
    device: Device,
    dtype: torch.dtype | None = None,
    stays_fp32: Callable[[str], bool] = lambda _: False,
) -> LoadReport:
    """Fill `module`, whose parameters are on the meta device, with `tensors`, and put it on `device`.

    `tensors` come from `open_checkpoint`, under the module's names. Floating ones become `dtype` (None: what
    the file has), or fp32 where `stays_fp32(name)`. Each is copied from the mapped file right to its place,
    so the most held beside the module is one tensor and a window of the file. The copy owns its memory, also
    where nothing changes: a view of the file is unaligned, would be read again from disk under memory
    pressure, and would end the process if the file were cut short.
    Not a collective; ranks that load alike hold alike. Parameters that are one object in `module` stay tied.
    Raises ValueError, naming file and key, before anything is read: for a key too many or too few, a shape, a
    dtype, or a device that should have an index and has none.
    """
    if device.index is None and device.kind not in UNINDEXED:
        raise ValueError(
            f"device {device} has no index, so every rank might load to card 0; use the device of this rank"
        )
    named = {name: (tensors[name], where) for name, where in check_tensors(module, tensors).items()}
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, (tensor, where) in named.items():
        if id(where) not in made:
            wanted = _wanted(tensor, dtype, fp32=stays_fp32(name))
            value = torch.empty(tensor.shape, dtype=wanted, device=device.torch_device)
            value.copy_(tensor.read() if isinstance(tensor, FileTensor) else tensor)
            made[id(where)] = tensor, value
            _put(where, value)
    module.to(device.torch_device)  # buffers that are in no file
    return LoadReport(
        module=type(module).__name__,
        device=str(device),
        tensors=len(made),
        bytes_in_files=sum(tensor.nbytes for tensor, _ in made.values()),
        bytes_held=sum(value.nbytes for _, value in made.values()),
        cast=sum(tensor.dtype != value.dtype for tensor, value in made.values()),
    )


def check_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, list[_Place]]:
    """Where each of `tensors` goes in `module`; reads no values.

    Raises ValueError, naming file and key, for a key too many or too few, a shape or a dtype.
    """
    places = _places(module)
    _check_keys(module, places, tensors)
    found = {name: places[name] for name in tensors}
    for name, where in found.items():
        _check_fit(module, name, tensors[name], where[0].now)
    return found


def _places(module: nn.Module) -> dict[str, list[_Place]]:
    """By each name in the module's state: the places of its tensor, one list for all names of a tied one."""
    found: dict[str, list[_Place]] = {}
    tied: dict[int, list[_Place]] = {}
    state = module.state_dict(keep_vars=True)
    for name, now in state.items():
        path, _, leaf = name.rpartition(".")
        places = tied.setdefault(id(now), [])
        places.append(_Place(module.get_submodule(path), leaf, now))
        found[name] = places
    return found


def _check_keys(
    module: nn.Module, places: Mapping[str, list[_Place]], tensors: Mapping[str, torch.Tensor]
) -> None:
    given = {id(places[name]) for name in tensors if name in places}
    missing = [name for name in places if id(places[name]) not in given]
    extra = [name for name in tensors if name not in places]
    if not missing and not extra:
        return
    said = []
    if missing:
        said.append(
            f"{missing[0]!r} is in none of them ({len(missing)} of its {len(places)} tensors are missing)"
        )
    if extra:
        origin = _origin(tensors[extra[0]], extra[0])
        said.append(f"it has no place for {extra[0]!r} ({origin}; {len(extra)} such)")
    raise ValueError(
        f"{_files(tensors)} do not fit {type(module).__name__}: {', and '.join(said)}; "
        f"give the files of this model, or the config that belongs to them"
    )


def _check_fit(module: nn.Module, name: str, tensor: torch.Tensor, now: torch.Tensor) -> None:
    origin, owner = _origin(tensor, name), f"{type(module).__name__}'s {name}"
    if tensor.shape != now.shape:
        raise ValueError(
            f"{origin} has the shape {tuple(tensor.shape)}; {owner} has {tuple(now.shape)}; "
            f"give the config that belongs to this file"
        )
    fits = tensor.dtype in FLOATS if now.dtype.is_floating_point else tensor.dtype == now.dtype
    if not fits:
        floats = now.dtype.is_floating_point
        takes = "float16, bfloat16, float32 or float64" if floats else _name(now.dtype)
        raise ValueError(
            f"{origin} is {_name(tensor.dtype)}; {owner} takes {takes}; give a file that is not quantised"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wanted(tensor: torch.Tensor, dtype: torch.dtype | None, *, fp32: bool) -> torch.dtype:
    if dtype is None or not tensor.dtype.is_floating_point:
        return tensor.dtype
    return torch.float32 if fp32 else dtype


def _put(places: list[_Place], value: torch.Tensor) -> None:
    first = places[0].now
    filled = (
        nn.Parameter(value, requires_grad=first.requires_grad) if isinstance(first, nn.Parameter) else value
    )
    for owner, leaf, _ in places:
        if isinstance(filled, nn.Parameter):
            owner._parameters[leaf] = filled
        else:
            owner._buffers[leaf] = filled


def _origin(tensor: torch.Tensor, name: str) -> str:
    return tensor.origin if isinstance(tensor, FileTensor) else f"tensor {name!r}"


def _files(tensors: Mapping[str, torch.Tensor]) -> str:
    """The files that tensors come from, as the subject of a sentence."""
    found = dict.fromkeys(
        tensor.origin.split(": key ")[0] for tensor in tensors.values() if isinstance(tensor, FileTensor)
    )
    names = list(found)
    if len(names) <= 1:
        return f"the tensors of {names[0]}" if names else "the given tensors"
    return f"the tensors of {len(names)} files, {names[0]} to {names[-1]},"
