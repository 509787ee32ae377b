"""The process that imports torch_npu and forks ranks on simulated NPUs; started by `tests.npu.pool`."""

import ctypes
import os
import traceback
import warnings
from typing import Any

import torch

from tests.npu.bodies import WORLD, kind, on_devices
from tests.npu.pool import serve


def prepare() -> None:
    """Import what ranks need; no device is touched, so that forking stays possible."""
    warnings.filterwarnings("ignore")
    import torch_npu  # noqa: F401

    import tests.npu.kernels
    import tests.npu.vendor  # noqa: F401

    on_devices()


def sleep_coarsely() -> None:
    """Let every sleep of this process and its threads last up to 5 ms longer.

    A thread of torch_npu asks for work every microsecond, for ever; a dozen idle ranks would fill two cores.
    """
    set_timer_slack, nanoseconds = 29, 5_000_000
    ctypes.CDLL(None).prctl(set_timer_slack, nanoseconds, 0, 0, 0)


def begin(pipe: Any) -> None:
    """A rank: join the others, then run what comes through the pipe, on this rank's device."""
    from runtime.device import detect_device
    from runtime.process_group import connect, read_rank_env

    torch.set_num_threads(1)
    sleep_coarsely()
    error = ""
    try:
        env = read_rank_env()
        device = detect_device(kind(), local_rank=env.local_rank, world_size=env.world_size)
        WORLD.append(connect(device, env=env, timeout_s=float(os.environ.get("TIMEOUT_S", "60"))))
        torch.manual_seed(1000 + env.rank)
    except BaseException:
        error = traceback.format_exc()
    while True:
        try:
            function, args, _ = pipe.recv()  # torch_npu and torch warn of themselves: no test's filters here
        except (EOFError, OSError):
            os._exit(0)
        try:
            if error:
                raise RuntimeError(error)
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


if __name__ == "__main__":
    serve(prepare, begin)
