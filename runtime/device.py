"""The one object that knows vendors: which device this rank owns, which backend it talks, what it cannot do.

Every other file asks a `Device`. No vendor package is imported until its device is asked for or seen.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from glob import glob
from types import ModuleType

import torch
import torch.distributed as dist

# Order of detection. npu and musa come first: their compatibility shims can make cuda look available.
KINDS = ("npu", "musa", "cuda", "xpu", "mps", "cpu")
UNINDEXED = frozenset({"mps", "cpu"})
ALIASES = {"rocm": "cuda"}

BACKENDS = {"cuda": "nccl", "npu": "hccl", "musa": "mccl", "xpu": "xccl", "mps": "gloo", "cpu": "gloo"}
# nccl alone is bound to a device at init: hccl refuses device_id in torch 2.8. mccl would take it; but a
# rank's device is current by then, and each collective of ours has a tensor on it.
TAKES_DEVICE_ID = frozenset({"nccl"})
# gloo moves cuda tensors through host memory; it cannot carry the others.
GLOO_CARRIES = frozenset({"cuda", "mps", "cpu"})

# xpu: Arc A-series has no float64 units. mps, npu: float64 and complex are refused or run on the host.
NO_FLOAT64 = frozenset({"npu", "mps", "xpu"})
NO_COMPLEX = frozenset({"npu", "mps", "musa"})
# torch_npu 2.13.0 has a kernel of torch.inverse, but none of torch.linalg.solve.
NO_SOLVE = frozenset({"npu"})

# Kinds that live in a package of their own, and the files that show such a card is plugged in.
VENDOR_PACKAGES = {"npu": "torch_npu", "musa": "torch_musa"}
VENDOR_FILES = {"npu": "/dev/davinci[0-9]*", "musa": "/dev/mtgpu*"}


# What each vendor's torch reads from the environment; "rocm" is cuda on a HIP build. Allocator variables of a
# row mean the same: with two of them torch_npu aborts, and others ignore one.
VISIBLE_VARIABLES = {
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
    "cuda": "CUDA_VISIBLE_DEVICES",
    "rocm": "HIP_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
}
ALLOCATOR_VARIABLES = {
    "npu": ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    "musa": ("PYTORCH_MUSA_ALLOC_CONF",),
    "cuda": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    "rocm": ("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    "xpu": ("PYTORCH_ALLOC_CONF",),
}
# Backends that keep buffers for each communicator: the variable that sizes them in MB, its default, how many.
COMMUNICATOR_BUFFERS = {"hccl": ("HCCL_BUFFSIZE", 200, 2)}
# How a profiler's trace names the kernels of a backend's collectives.
COLLECTIVE_KERNELS = {"nccl": "nccl", "hccl": "hcom_", "mccl": "mccl", "xccl": "oneccl"}


@dataclass(frozen=True)
class Device:
    """The device of one rank: a kind and, where the machine can hold several, an index."""

    kind: str
    index: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"device={self.kind}: unknown kind; use one of {', '.join(KINDS)}")
        if self.kind in UNINDEXED and self.index is not None:
            raise ValueError(f"device={self.kind}:{self.index}: {self.kind} has no index; use {self.kind}")

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"

    @property
    def torch_device(self) -> torch.device:
        """This device as torch names it, always with its index."""
        return torch.device(str(self))

    @property
    def backend(self) -> str:
        """The communication backend that belongs to this kind, whether or not it is built in."""
        return BACKENDS[self.kind]

    @property
    def takes_device_id(self) -> bool:
        """True if `init_process_group` may be given device_id with this kind's own backend."""
        return self.backend in TAKES_DEVICE_ID

    @property
    def supports_float64(self) -> bool:
        """False if no float64 tensor may be made on this device."""
        return self.kind not in NO_FLOAT64

    @property
    def supports_complex(self) -> bool:
        """False if no complex tensor may be made on this device."""
        return self.kind not in NO_COMPLEX

    @property
    def supports_solve(self) -> bool:
        """False if torch.linalg.solve has no kernel on this device, and so runs on the host."""
        return self.kind not in NO_SOLVE

    @property
    def rope_dtype(self) -> torch.dtype:
        """The widest dtype in which rotary angles may be computed on this device."""
        return torch.float64 if self.supports_float64 else torch.float32

    @property
    def allocator_variables(self) -> tuple[str, ...]:
        """Variables that configure this device's memory allocator, of which at most one may be set."""
        return ALLOCATOR_VARIABLES.get(_row(self.kind), ())

    @property
    def profiler(self) -> ModuleType:
        """The module whose `profile` records this device: torch.profiler, or the vendor's own."""
        return importlib.import_module("torch_npu.profiler" if self.kind == "npu" else "torch.profiler")

    def make_current(self) -> None:
        """Make this the calling thread's device; to be done before the process group and before any load."""
        if self.index is None:
            return
        module = self._module()
        module.set_device(self.index)
        if self.kind == "npu":
            # Else `Module.to` may cast convolution weights to a private layout, and to fp16 on some chips.
            module.config.allow_internal_format = False
            module.set_compile_mode(jit_compile=False)

    def synchronize(self) -> None:
        """Wait until everything queued on this device is done."""
        if self.kind == "mps":
            torch.mps.synchronize()
        elif self.index is not None:
            self._module().synchronize(self.index)

    def empty_cache(self) -> None:
        """Give cached, unused blocks back to the device; nothing to do on cpu."""
        if self.kind == "mps":
            torch.mps.empty_cache()
        elif self.index is not None:
            self._module().empty_cache()

    def memory_total(self) -> int:
        """Bytes this device has; on cpu the machine's memory or the container's limit, whichever is less."""
        if self.kind == "mps":
            return int(torch.mps.recommended_max_memory())
        if self.index is not None:
            return int(self._module().get_device_properties(self.index).total_memory)
        return _host_memory()

    def memory_peak(self) -> int:
        """Highest bytes held by this process since `reset_memory_peak`; on cpu since the process started.

        cpu counts the whole process (ru_maxrss; 0 where the system does not tell), mps what is held now.
        """
        if self.kind == "mps":
            return int(torch.mps.driver_allocated_memory())
        if self.index is not None:
            return int(self._module().max_memory_allocated(self.index))
        return _process_peak()

    def reset_memory_peak(self) -> None:
        """Start `memory_peak` afresh, where the device counts peaks."""
        if self.index is not None:
            self._module().reset_peak_memory_stats(self.index)

    def _module(self) -> ModuleType:
        return torch.get_device_module(self.kind)


def backend_available(name: str) -> bool:
    """True if this torch has the communication backend `name`."""
    return dist.is_available() and dist.is_backend_available(name)


def backend_for(
    kind: str, *, choice: str | None = None, available: Callable[[str], bool] = backend_available
) -> tuple[str, str | None]:
    """Return the backend for `kind` and a note for the log if it is not the usual one.

    `choice` wins. Raises ValueError if the choice is not built in or cannot carry this kind, RuntimeError if
    nothing that carries it is built in.
    """
    usual = BACKENDS[kind]
    if choice is not None:
        _check_backend(kind, choice, available)
        return (
            choice,
            None if choice == usual else f"backend {choice}, as asked; {kind} usually talks {usual}",
        )
    if available(usual):
        return usual, None
    if usual != "gloo" and kind in GLOO_CARRIES and available("gloo"):
        return "gloo", f"{usual} is not built into this torch: using gloo, which copies through host memory"
    raise RuntimeError(
        f"several ranks on {kind} talk {usual}; this torch has no {usual}; "
        f"install a torch build with {usual}, or run on one device"
    )


def _check_backend(kind: str, choice: str, available: Callable[[str], bool]) -> None:
    """Refuse a choice that cannot work; a composite such as cpu:gloo,cuda:nccl is checked by its parts."""
    parts = dict(part.split(":", 1) for part in choice.split(",") if ":" in part) or {kind: choice}
    for name in parts.values():
        if not available(name):
            known = [b for b in sorted(set(BACKENDS.values())) if available(b)]
            raise ValueError(
                f"backend={choice}; this torch has no {name}, only {', '.join(known) or 'none'}; "
                f"leave the backend out or use one of these"
            )
    carrier = parts.get(kind)
    if carrier != BACKENDS[kind] and not (carrier == "gloo" and kind in GLOO_CARRIES):
        raise ValueError(f"backend={choice} on {kind}; it cannot carry {kind} tensors; use {BACKENDS[kind]}")


def resolve_device(
    kind: str,
    *,
    local_rank: int,
    count: int,
    index: int | None = None,
    world_size: int = 1,
    share: bool = False,
) -> Device:
    """Return the device of a rank: its local rank's card out of `count` on this host. Pure.

    An `index` is taken only when the rank is alone. `share` lets ranks beyond `count` double up on a card.
    Raises ValueError with both numbers when there are more local ranks than devices.
    """
    if kind == "cpu":
        return Device(kind, index)
    if index is not None and world_size > 1:
        raise ValueError(
            f"device={kind}:{index} on {world_size} ranks; that would put every rank on card {index}; "
            f"use {kind}, each rank takes the card of its LOCAL_RANK"
        )
    chosen = local_rank if index is None else index
    if chosen >= count and not (share and count and index is None):
        asked = f"LOCAL_RANK={local_rank}" if index is None else f"device={kind}:{index}"
        raise ValueError(
            f"{asked} needs {kind} device {chosen}; this host has {count} {kind} device{'s' * (count != 1)}; "
            + (f"start at most {count} per host" if index is None else f"use an index below {count}")
            + (
                f", or show more in {VISIBLE_VARIABLES[_row(kind)]}"
                if _row(kind) in VISIBLE_VARIABLES
                else ""
            )
        )
    return Device(kind, None if kind in UNINDEXED else chosen % count)


def detect_device(choice: str | None, *, local_rank: int, world_size: int, share: bool = False) -> Device:
    """Return the device of this rank: `choice` ("cuda", "npu:1", "cpu"), or the first kind that is there.

    Order: npu, musa, cuda, xpu, mps, cpu. Without a choice a vendor package is imported only if it is
    loaded already, or installed and its device file exists; if it then does not load, that is a RuntimeError,
    not a silent run on cpu. With the choice "cpu" nothing is probed.
    Raises ValueError if the choice is not available; the message names what is.
    """
    if choice is None:
        kind, index = next(kind for kind in KINDS if _seen(kind)), None
    else:
        kind, index = _parse_choice(choice)
        _require(kind, choice)
    return resolve_device(
        kind, local_rank=local_rank, count=device_count(kind), index=index, world_size=world_size, share=share
    )


def device_count(kind: str) -> int:
    """Number of usable devices of `kind` on this host; 1 for cpu. Never raises because a kind is absent."""
    if kind == "cpu":
        return 1
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    try:
        module = torch.get_device_module(kind)
        return module.device_count() if module.is_available() else 0
    except (AttributeError, AssertionError, ImportError, RuntimeError):
        return 0  # absent from this build, or its driver is: what "not available" looks like per vendor


def available_kinds() -> list[str]:
    """The kinds that can be used here, in order of preference, cpu last."""
    return [kind for kind in KINDS if _seen(kind)]


def _seen(kind: str) -> bool:
    """True if a device of this kind is here, without importing a vendor package that nothing points to."""
    package = VENDOR_PACKAGES.get(kind)
    if kind == "cpu":
        return True
    if package is None:
        # Asks the C++ side first: a torch without accelerators is settled before a vendor module is touched.
        compiled = torch.accelerator.current_accelerator()
        return compiled is not None and compiled.type == kind and device_count(kind) > 0
    if package in sys.modules:
        return device_count(kind) > 0
    files = glob(VENDOR_FILES[kind])
    if not files or importlib.util.find_spec(package) is None:
        return False
    _import_vendor(kind, f"{files[0]} shows a {kind} device")
    return device_count(kind) > 0


def _require(kind: str, choice: str) -> None:
    """Refuse a chosen kind that is not here, naming the kinds that are."""
    package = VENDOR_PACKAGES.get(kind)
    reason = f"no {kind} device is usable here"
    if package is not None and importlib.util.find_spec(package) is None and package not in sys.modules:
        reason = f"{package} is not installed"
    elif package is not None:
        try:
            _import_vendor(kind, f"device={choice}")
        except RuntimeError as error:  # the user's choice cannot be had: a usage error with the same words
            raise ValueError(str(error)) from error
    if device_count(kind) == 0:
        others = [k for k in available_kinds() if k != kind]
        raise ValueError(f"device={choice}; {reason}; available: {', '.join(others)}")


def _import_vendor(kind: str, asked: str) -> None:
    """Import a vendor's package, which registers its device with torch; its error is told in words."""
    package = VENDOR_PACKAGES[kind]
    try:
        module = importlib.import_module(package)
    except Exception as error:
        raise RuntimeError(
            f"{asked}; {package} does not load ({type(error).__name__}: {error}); "
            f"set up the vendor's libraries for this shell, or use device=cpu"
        ) from error
    ours, theirs = (_release(getattr(m, "__version__", "")) for m in (torch, module))
    if theirs and ours != theirs:
        raise RuntimeError(
            f"{asked}; {package} {'.'.join(theirs)} is loaded into torch {'.'.join(ours)}; "
            f"install the {package} release made for torch {'.'.join(ours)}"
        )


def _release(version: str) -> Sequence[str]:
    """("2", "13") of "2.13.0.post1+cpu": a vendor's package pairs with a minor release of torch."""
    return version.split("+")[0].split(".")[:2] if version else ()


def _row(kind: str) -> str:
    """The row of the tables of variables: what torch calls cuda may be rocm."""
    return "rocm" if kind == "cuda" and torch.version.hip else kind


def _parse_choice(choice: str) -> tuple[str, int | None]:
    kind, colon, number = choice.partition(":")
    kind = ALIASES.get(kind, kind)
    if kind not in KINDS or (colon and not number.isdecimal()):
        raise ValueError(
            f'device="{choice}" is not a device; use one of {", ".join(KINDS)}, or an index as in npu:1'
        )
    return kind, int(number) if colon else None


def _host_memory() -> int:
    """Bytes of memory this process may use at most."""
    if not hasattr(os, "sysconf"):
        return 0
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if os.path.exists(path):
            with open(path) as file:
                limit = file.read().strip()
            return min(total, int(limit)) if limit.isdecimal() else total
    return total


def _process_peak() -> int:
    """Highest resident bytes of this process so far."""
    if importlib.util.find_spec("resource") is None:  # Windows
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
