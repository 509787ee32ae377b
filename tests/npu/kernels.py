"""The simulated NPU's operators: CPU kernels over the device's memory.

To be imported after torch_npu, in a process of its own. Every ATen operator for which the wheel has an NPU
kernel gets a CPU kernel in its place, with the device's rules: all tensors on one device, and in the order of
the stream. What the wheel has no kernel for is left to torch_npu, whose answer is to run on the host, or an
error that names the operator with TORCH_NPU_FALLBACK_CPU_DISABLE=1.
"""

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch_npu

CALLS: Counter[str] = Counter()  # operator -> how often it ran on the simulated device
_ready: set[int] = set()  # devices whose streams have been made
WIDE: Counter[str] = Counter()  # those of them that had a float64 or complex tensor
_library = torch.library.Library("aten", "IMPL")
_acl = ctypes.CDLL("libascendcl.so")
_acl.simulated_count.restype = ctypes.c_long

# What needs no computing works in the wheel as it is: memory and views.
OF_THE_WHEEL = ("empty", "set_", "resize_", "record_stream", "pin_memory", "is_pinned", "_local_scalar_dense")
# Indices may lie on the host.
MIXED = ("index", "copy", "_to_copy", "where", "masked_")


def counted(what: str) -> int:
    """How often the simulated CANN was asked for `what`, such as "HcclAllReduce" or "HcclCommInit"."""
    return int(_acl.simulated_count(what.encode()))


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a CPU tensor; only to be used inside a kernel, while `tensor` lives."""
    if tensor.device.type != "npu":
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


def wait_for_stream(index: int) -> None:
    """Wait for what was queued before on the current stream; an error of that work is raised here."""
    if index not in _ready:
        with torch.npu.device(index):
            _ready.add(index)
            torch.npu.current_stream(index).synchronize()
    torch.npu.current_stream(index).synchronize()


def tensors_in(values: Any) -> list[torch.Tensor]:
    """All tensors in arguments that may be lists."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (tuple, list)):
        return [tensor for value in values for tensor in tensors_in(value)]
    return []


def device_of(tensors: list[torch.Tensor], name: str) -> torch.device | None:
    """The one device of an operator's tensors; zero-dimensional ones may be on the host."""
    devices = list(dict.fromkeys(t.device for t in tensors if t.device.type == "npu"))
    strays = [t for t in tensors if t.device.type != "npu" and t.ndim > 0]
    if len(devices) > 1 or (devices and strays and not name.startswith(MIXED)):
        others = {str(d) for d in devices} | {str(t.device) for t in strays}
        raise RuntimeError(
            f"{name}: Expected all tensors to be on the same device, but found {', '.join(sorted(others))}"
        )
    return devices[0] if devices else None


def generator_on_host(generator: Any, index: int) -> torch.Generator:
    """A CPU generator at the device's state: other numbers than a CPU generator of that seed."""
    own = torch.npu.default_generators[index] if generator is None else generator
    if own.device.type != "npu":
        raise RuntimeError(f"Expected a 'npu' device type for generator but found '{own.device.type}'")
    state = own.get_state()
    made = torch.Generator().manual_seed(hash(bytes(state.tolist())) & 0x7FFFFFFF)
    own.set_state(_advanced(state))
    return made


def _advanced(state: torch.Tensor) -> torch.Tensor:
    """A Philox state (seed, offset; 8 bytes each) with the next offset."""
    words = state.clone().view(torch.int64)
    words[1] += 4
    return words.view(torch.uint8)


def cpu_kernel(operator: Any) -> Callable[..., Any]:
    """The operator's CPU kernel, run on device memory by the rules above."""
    name = operator._schema.name.split("::")[1]
    schema = operator._schema
    names = [a.name for a in schema.arguments]
    random = "generator" in names

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in((*args, *kwargs.values()))
        device = device_of(tensors, name)
        given = kwargs.get("device") or (
            args[names.index("device")] if "device" in names[: len(args)] else None
        )
        device = device or (given if given is not None else torch.device("npu", torch.npu.current_device()))
        device = torch.device("npu", torch.npu.current_device()) if device.index is None else device
        CALLS[name] += 1
        if any(t.dtype == torch.float64 or t.is_complex() for t in tensors):
            WIDE[name] += 1
        wait_for_stream(device.index)
        host_args, host_kwargs = [_host(a) for a in args], {k: _host(v) for k, v in kwargs.items()}
        if random:
            host_kwargs["generator"] = generator_on_host(kwargs.get("generator"), device.index)
        result = operator(*host_args, **host_kwargs)
        given_back = (*zip(args, host_args, strict=True), *((kwargs[k], host_kwargs[k]) for k in kwargs))
        return _returned(result, [pair for pair in given_back if isinstance(pair[0], torch.Tensor)], device)

    return kernel


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


def copy_(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """aten::copy_ between devices and the host, in the order of the streams."""
    CALLS["copy_"] += 1
    for tensor in (to, source):
        if tensor.device.type == "npu":
            wait_for_stream(tensor.device.index)
    if to.numel():
        on_host(to).copy_(on_host(source))
    return to


def to_copy(
    tensor: torch.Tensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> torch.Tensor:
    """aten::_to_copy: to another dtype, device, or memory format."""
    host = on_host(tensor)
    device = tensor.device if device is None else device
    if device.type == "npu" and device.index is None:
        device = torch.device("npu", torch.npu.current_device())
    like = torch.empty_like(host, dtype=dtype, memory_format=memory_format or torch.preserve_format)
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return copy_(made, tensor)


def register() -> None:
    """Put the CPU kernels in place of the wheel's."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    special = {"copy_": copy_, "_to_copy": to_copy}
    for full in registered:
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        packet = getattr(torch.ops.aten, name, None) if space == "aten" else None
        operator = getattr(packet, overload or "default", None)
        if operator is None or name.startswith(OF_THE_WHEEL) or name.startswith(("npu_", "_npu_")):
            continue
        returns = operator._schema.returns
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            continue  # a view
        _library.impl(operator, special.get(name) or cpu_kernel(operator), "PrivateUse1", with_keyset=False)


def reset_counts() -> None:
    """Start CALLS and WIDE afresh."""
    CALLS.clear()
    WIDE.clear()


assert torch_npu.npu.is_available(), "the simulated NPU has no devices"
register()
