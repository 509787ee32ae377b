"""The backend mccl of the stand-in: gloo on the cards' memory, with MCCL's rules.

One card per rank, contiguous tensors in collectives, no int16.
"""

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

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


def _started(work: Any, *tensors: Any) -> Any:
    """Work in flight that holds its tensors and can be asked whether it is over, which gloo's cannot."""
    future: Any = torch.futures.Future()

    def finish(held: Any = tensors) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result([])

    threading.Thread(target=finish, daemon=True).start()
    return _create_work_from_future(future)


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
        return _started(
            self._gloo.allreduce(self._on_card(tensors), options or dist.AllreduceOptions()), tensors
        )

    def broadcast(self, tensors: Any, options: Any) -> Any:
        """As in c10d."""
        return _started(self._gloo.broadcast(self._on_card(tensors), options), tensors)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """As in c10d."""
        return _started(
            self._gloo.allgather(self._on_card(outputs), _host(inputs), options or dist.AllgatherOptions()),
            outputs,
            inputs,
        )

    def alltoall_base(
        self, output: Any, given: Any, take: list[int], give: list[int], options: Any = None
    ) -> Any:
        """As in c10d."""
        return _started(
            self._gloo.alltoall_base(self._on_card(output), _host(given), take, give, dist.AllToAllOptions()),
            output,
            given,
        )

    all_to_all_single = alltoall_base  # torch 2.13 calls it so

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """As in c10d."""
        return _started(self._gloo.send(self._on_card(tensors), peer, tag), tensors)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """As in c10d."""
        return _started(self._gloo.recv(self._on_card(tensors), peer, tag), tensors)

    def barrier(self, options: Any = None) -> Any:
        """As in c10d."""
        return _started(self._gloo.barrier(options or dist.BarrierOptions()))


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroupMCCL:
    return ProcessGroupMCCL(store, rank, size, timeout)


dist.Backend.register_backend("mccl", _create, devices=["musa"])
