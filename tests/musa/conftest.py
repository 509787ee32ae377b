"""Fixtures of the simulated MUSA: its library, built once, and pools of ranks."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.npu.conftest import NpuRanks
from tests.npu.pool import DeviceRanks, Server
from tests.npu.stand_in import Unavailable, cache_folder, made_once, run

HERE = Path(__file__).parent


def build() -> Path:
    """The library with the device, for the torch that is installed. Raises Unavailable."""
    source = HERE / "device.cpp"
    digest = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    folder = cache_folder() / f"musa-{digest}"
    torch_folder = Path(torch.__file__).parent
    includes = [f"-I{torch_folder / path}" for path in ("include", "include/torch/csrc/api/include")]
    options = ["-std=c++20", "-O0", "-fPIC", "-shared", "-w", *includes]
    link = [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    with made_once(folder) as unfinished:
        if unfinished is not None:
            target = str(unfinished / "libmusa.so")
            run(["g++", *options, "-o", target, str(source), *link], "the device does not build")
    return folder / "libmusa.so"


@pytest.fixture(scope="session")
def musa_environment() -> dict[str, str]:
    """Variables of a process that can import the stand-in for torch_musa."""
    try:
        library = build()
    except Unavailable as error:
        if os.environ.get("USP_REQUIRE_NPU") == "1":
            pytest.fail(f"NO MUSA TEST RUNS HERE: {error}")
        pytest.skip(f"NO MUSA TEST RUNS HERE: {error}")
    path = os.pathsep.join([str(HERE / "package"), str(HERE.parents[1])])
    return {**os.environ, "PYTHONPATH": path, "SIMULATED_MUSA_LIBRARY": str(library), "RANKS_ON": "musa"}


@pytest.fixture(scope="package")
def musa(musa_environment: dict[str, str]) -> Iterator[NpuRanks]:
    """`musa(2).run(function, *args)` runs it on 2 ranks on simulated MUSA cards."""
    server = Server(musa_environment, "tests.musa.server")
    pools: dict[tuple[int, tuple[tuple[str, str], ...]], DeviceRanks] = {}

    def ranks(size: int, **knobs: str) -> DeviceRanks:
        key = (size, tuple(sorted(knobs.items())))
        return pools.setdefault(key, DeviceRanks(server, size, knobs))

    yield ranks
    for pool in pools.values():
        pool.stop()
    server.stop()
