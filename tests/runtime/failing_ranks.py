"""A program for torchrun whose ranks fail as told: `failing_ranks.py FOLDER SCENARIO`."""

import ctypes
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.device import Device
from runtime.process_group import connect, ending_together
from tests.runtime.processes import mark


def main(folder: Path, scenario: str) -> None:
    step = 0
    with connect(Device("cpu")) as world, ending_together(world, lambda: f"step {step}"):
        for step in range(1, 4):  # noqa: B007 (read by the lambda)
            dist.all_reduce(torch.ones(4))
        mark(folder, world.rank)
        if scenario == "rank 1 raises" and world.rank == 1:
            raise ValueError("no such frame")
        if scenario == "rank 0 raises":
            if world.rank == 0:
                raise ValueError("no such frame")
            try:
                time.sleep(60)
            finally:
                (folder / f"tidied-{world.rank}").touch()
        if scenario == "stuck" and world.rank == 1:
            lock = ctypes.create_string_buffer(64)  # a pthread mutex; a signal does not end the wait for it
            for _ in range(2):
                ctypes.CDLL(None).pthread_mutex_lock(lock)
        while True:
            dist.all_reduce(torch.ones(4))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
