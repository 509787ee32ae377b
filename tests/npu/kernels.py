"""The simulated NPU's operators: a CPU kernel for every ATen operator for which the wheel has an NPU kernel.

To be imported after torch_npu, in a process of its own. What the wheel has no kernel for is left to it: that
runs on the host, or, with TORCH_NPU_FALLBACK_CPU_DISABLE=1, ends with an error that names the operator.
"""

import ctypes
import functools

import torch
import torch_npu

from tests.simulated import REFUSED, Rules, module, register

_ready: set[int] = set()  # devices whose streams have been made
_acl = ctypes.CDLL("libascendcl.so")
_acl.simulated_count.restype = ctypes.c_long

# What needs no computing works in the wheel as it is: memory and views.
OF_THE_WHEEL = ("empty", "set_", "resize_", "record_stream", "pin_memory", "is_pinned", "_local_scalar_dense")


class NpuRules(Rules):
    """Kernels come in the order of the current stream; random numbers are other than the CPU's for a seed.

    Where torch_npu says that the device has no infinities, as it does of Ascend910A, results saturate.
    """

    def before(self, index: int) -> None:
        """Wait for what was queued on the current stream; an error of that work is raised here."""
        if index not in _ready:
            with module().device(index):
                _ready.add(index)
                module().current_stream(index).synchronize()
        _stream(*torch_npu._C._npu_getCurrentStream(index)).synchronize()

    def after(self, results: list[torch.Tensor]) -> None:
        """Numbers that a saturating device cannot give: the greatest finite one for inf, 0 for NaN."""
        if _saturates():
            for result in results:
                if result.is_floating_point() and result.element_size() > 1:
                    result.nan_to_num_(nan=0.0)

    def generator(self, own: torch.Generator) -> torch.Generator:
        """A CPU generator that the Philox state (seed, offset) seeds."""
        return torch.Generator().manual_seed(hash(bytes(own.get_state().tolist())) & 0x7FFFFFFF)

    def used(self, own: torch.Generator, host: torch.Generator) -> None:
        """The next offset."""
        words = own.get_state().clone().view(torch.int64)
        words[1] += 4
        own.set_state(words.view(torch.uint8))


@functools.cache
def _saturates() -> bool:
    return not torch_npu.npu.utils.is_support_inf_nan()


@functools.cache
def _stream(stream: int, index: int, kind: int) -> torch.Stream:
    """The stream of that number; `current_stream` makes the object anew in each call."""
    return torch_npu.npu.Stream(stream_id=stream, device_index=index, device_type=kind)


RULES = NpuRules()


def counted(what: str) -> int:
    """How often the simulated CANN was asked for `what`, such as "HcclAllReduce" or "HcclCommInit"."""
    return int(_acl.simulated_count(what.encode()))


# By CANN's aclnnIndex, and diffusers' pull requests 10820 and 13689, which met these on cards.
REFUSED["index"] = (torch.complex64, torch.complex128)
REFUSED["repeat_interleave"] = (torch.float64,)

assert torch_npu.npu.is_available(), "the simulated NPU has no devices"
register(
    torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"),
    (*OF_THE_WHEEL, "npu_", "_npu_"),
    RULES,
)
