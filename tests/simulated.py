"""Operators of a simulated device: CPU kernels over its memory, with the device's rules.

For whatever device holds torch's PrivateUse1 slot in this process, npu or musa; import its package first.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

KIND = torch._C._get_privateuse1_backend_name()
CALLS: Counter[str] = Counter()  # operator -> how often it ran on the simulated device
WIDE: Counter[str] = Counter()  # those of them that had a float64 or complex tensor on the device
REFUSED: dict[str, tuple[torch.dtype, ...]] = {}  # operator -> dtypes that the vendor's kernel does not take
_library = torch.library.Library("aten", "IMPL")

# Indices may lie on the host.
MIXED = ("index", "copy", "_to_copy", "where", "masked_")


class Rules:
    """What differs by device: how a kernel waits for work queued before it, what numbers it cannot give, how
    random numbers are drawn."""

    def before(self, index: int) -> None:
        """Called before each kernel, with the device's index."""

    def after(self, results: list[torch.Tensor]) -> None:
        """Called after each kernel, with its results, still on the host, to be changed in place."""

    def generator(self, own: torch.Generator) -> torch.Generator:
        """A CPU generator at the state of the device's; after it was used, `used` is called."""
        return torch.Generator().set_state(own.get_state())

    def used(self, own: torch.Generator, host: torch.Generator) -> None:
        """Advance the device's generator."""
        own.set_state(host.get_state())


def module() -> Any:
    """The device's module, such as torch.npu."""
    return torch.get_device_module(KIND)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a CPU tensor; only to be used inside a kernel, while `tensor` lives."""
    if tensor.device.type != KIND:
        return tensor
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype)
    if storage.nbytes() == 0:
        return empty.as_strided(tensor.shape, tensor.stride()) if tensor.numel() else empty.view(tensor.shape)
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a CPU tensor on the device."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        on_host(made).copy_(tensor)
    return made


def tensors_in(values: Any) -> list[torch.Tensor]:
    """All tensors in arguments that may be lists."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (tuple, list)):
        return [tensor for value in values for tensor in tensors_in(value)]
    return []


def device_of(tensors: list[torch.Tensor], name: str) -> torch.device | None:
    """The one device of an operator's tensors; zero-dimensional ones may be on the host."""
    devices = list(dict.fromkeys(t.device for t in tensors if t.device.type == KIND))
    strays = [t for t in tensors if t.device.type != KIND and t.ndim > 0]
    if len(devices) > 1 or (devices and strays and not name.startswith(MIXED)):
        others = {str(d) for d in devices} | {str(t.device) for t in strays}
        raise RuntimeError(
            f"{name}: Expected all tensors to be on the same device, but found {', '.join(sorted(others))}"
        )
    return devices[0] if devices else None


def cpu_kernel(operator: Any, rules: Rules) -> Callable[..., Any]:
    """The operator's CPU kernel, run on device memory by the rules."""
    name = operator._schema.name.split("::")[1]
    names = [argument.name for argument in operator._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in((*args, *kwargs.values()))
        given = kwargs.get("device") or (
            args[names.index("device")] if "device" in names[: len(args)] else None
        )
        device = with_index(device_of(tensors, name) or given or torch.device(KIND))
        CALLS[name] += 1
        there = [t for t in tensors if t.device.type == KIND]
        for dtype in {t.dtype for t in there} & set(REFUSED.get(name, ())):
            raise RuntimeError(f"call aclnn operator failed: {name} is not implemented for {dtype}, 161002")
        if any(t.dtype == torch.float64 or t.is_complex() for t in there):
            WIDE[name] += 1
        rules.before(device.index)
        host_args, host_kwargs = [_host(a) for a in args], {k: _host(v) for k, v in kwargs.items()}
        own = None
        if "generator" in names:
            own = kwargs.get("generator") or module().default_generators[device.index]
            if own.device.type != KIND:
                raise RuntimeError(
                    f"Expected a '{KIND}' device type for generator but found '{own.device.type}'"
                )
            host_kwargs["generator"] = rules.generator(own)
        result = operator(*host_args, **host_kwargs)
        if own is not None:
            rules.used(own, host_kwargs["generator"])
        rules.after(tensors_in(result))
        given_back = (*zip(args, host_args, strict=True), *((kwargs[k], host_kwargs[k]) for k in kwargs))
        return _returned(result, [pair for pair in given_back if isinstance(pair[0], torch.Tensor)], device)

    return kernel


def with_index(device: torch.device) -> torch.device:
    """The device, with the current one's index if it has none."""
    return device if device.index is not None else torch.device(KIND, module().current_device())


def _host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return on_host(value)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, (tuple, list)):
        return [_host(item) for item in value]
    return value


def _returned(result: Any, given: list[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> Any:
    """Results on the device; an argument that was written to comes back as itself, with its new size."""
    if isinstance(result, (tuple, list)):
        return type(result)(_returned(item, given, device) for item in result)
    if not isinstance(result, torch.Tensor):
        return result
    for original, host in given:
        if result is host:
            if original.shape != host.shape:  # an `out` argument that was resized
                original.resize_(host.shape)
                on_host(original).copy_(host)
            return original
    return on_device(result, device)


def copies(rules: Rules) -> dict[str, Callable[..., Any]]:
    """aten::copy_ and aten::_to_copy between devices and the host, in the order of the streams."""

    def copy_(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        CALLS["copy_"] += 1
        for tensor in (to, source):
            if tensor.device.type == KIND:
                rules.before(tensor.device.index)
        if to.numel():
            on_host(to).copy_(on_host(source))
            if to.device.type == source.device.type == KIND:
                rules.after([on_host(to)])
        return to

    def to_copy(tensor: torch.Tensor, *, device: Any = None, **options: Any) -> torch.Tensor:
        wanted = {k: v for k, v in options.items() if k in ("dtype", "memory_format") and v is not None}
        like = torch.empty_like(on_host(tensor), **wanted)
        there = tensor.device if device is None else device
        there = with_index(there) if there.type == KIND else there
        return copy_(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=there), tensor)

    return {"copy_": copy_, "_to_copy": to_copy}


def register(registered: Iterable[str], kept: tuple[str, ...], rules: Rules) -> None:
    """Give the device a CPU kernel for each of these operators, but for names that begin with `kept`."""
    special = copies(rules)
    for full in dict.fromkeys([*registered, *(f"aten::{name}" for name in special)]):
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        packet = getattr(torch.ops.aten, name, None) if space == "aten" else None
        operator = getattr(packet, overload or "default", None)
        if operator is None or name.startswith(kept):
            continue
        if any(r.alias_info is not None and not r.alias_info.is_write for r in operator._schema.returns):
            continue  # a view
        _library.impl(operator, special.get(name) or cpu_kernel(operator, rules), "PrivateUse1")


def reset_counts() -> None:
    """Start CALLS and WIDE afresh."""
    CALLS.clear()
    WIDE.clear()
