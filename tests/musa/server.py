"""The process that imports the stand-in for torch_musa and forks ranks; started by `tests.npu.pool`."""

import warnings

import torch
import torch_musa  # noqa: F401

from tests.npu.bodies import on_devices
from tests.npu.pool import serve
from tests.npu.server import begin
from tests.simulated import Rules, register

# Made in C++, or views.
OWN = ("empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "resize_", "set_")

# Composed of others elsewhere; a device brings its own.
BROUGHT = ("aten::convolution", "aten::scaled_dot_product_attention")


def prepare() -> None:
    """A CPU kernel for every operator that has one: which ones the real package has is not known here."""
    warnings.filterwarnings("ignore")
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    register((*registered, *BROUGHT), ("empty", *OWN[1:]), Rules())
    on_devices()


if __name__ == "__main__":
    serve(prepare, begin)
