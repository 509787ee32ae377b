"""The backend mccl of the stand-in: gloo on the cards' memory, with MCCL's rules.

One card per rank, contiguous tensors in collectives, no int16.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

REFUSED = (torch.int16, torch.complex64, torch.complex128)


def _host(tensors: Any) -> Any:
    """The same memory for gloo, once MCCL's rules are kept."""
    from tests.simulated import on_host

    if isinstance(tensors, (list, tuple)):
        return [_host(tensor) for tensor in tensors]
    if tensors.device.type != "musa":
        raise RuntimeError(f"No backend type associated with device type {tensors.device.type}")
    if tensors.dtype in REFUSED:
        raise TypeError(f"Input tensor data type is not supported for MCCL process group: {tensors.dtype}")
    if not tensors.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    return on_host(tensors)


class _Done:
    """A collective that is over."""

    def __init__(self, work: Any) -> None:
        work.wait()

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class ProcessGroupMCCL(dist.ProcessGroup):
    """Collectives of musa tensors."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._card: int | None = None

    def _on_card(self, tensors: Any) -> Any:
        flat = tensors
        while isinstance(flat, (list, tuple)):
            flat = flat[0]
        if self._card not in (None, flat.device.index):
            raise RuntimeError(f"this rank talks from musa:{self._card}, but a tensor is on {flat.device}")
        self._card = flat.device.index
        return _host(tensors)

    def getBackendName(self) -> str:
        """As torch asks for it."""
        return "mccl"

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        """As in c10d."""
        return _Done(self._gloo.allreduce(self._on_card(tensors), options or dist.AllreduceOptions()))

    def broadcast(self, tensors: Any, options: Any) -> Any:
        """As in c10d."""
        return _Done(self._gloo.broadcast(self._on_card(tensors), options))

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """As in c10d."""
        return _Done(
            self._gloo.allgather(self._on_card(outputs), _host(inputs), options or dist.AllgatherOptions())
        )

    def alltoall_base(
        self, output: Any, given: Any, take: list[int], give: list[int], options: Any = None
    ) -> Any:
        """As in c10d."""
        return _Done(
            self._gloo.alltoall_base(self._on_card(output), _host(given), take, give, dist.AllToAllOptions())
        )

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """As in c10d."""
        return self._gloo.send(self._on_card(tensors), peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """As in c10d."""
        return self._gloo.recv(self._on_card(tensors), peer, tag)

    def barrier(self, options: Any = None) -> Any:
        """As in c10d."""
        return _Done(self._gloo.barrier(options or dist.BarrierOptions()))


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroupMCCL:
    return ProcessGroupMCCL(store, rank, size, timeout)


dist.Backend.register_backend("mccl", _create, devices=["musa"])
