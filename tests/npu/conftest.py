"""Fixtures of the simulated NPU: a server that forks ranks, and pools of ranks by size and knobs."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.npu import stand_in
from tests.npu.pool import DeviceRanks, Server

NpuRanks = Callable[..., DeviceRanks]


@pytest.fixture(scope="session")
def npu_environment() -> dict[str, str]:
    """Variables of a process that sees simulated NPUs; skips, aloud, where they cannot be had.

    With USP_REQUIRE_NPU=1, as in CI, that is a failure.
    """
    try:
        release = torch.__version__.split("+")[0]
        if release != stand_in.VERSION:
            raise stand_in.Unavailable(f"torch is {release}, the wheel pairs with {stand_in.VERSION} alone")
        return stand_in.environment()
    except stand_in.Unavailable as error:
        reason = f"NO NPU TEST RUNS HERE: {error}"
        if os.environ.get("USP_REQUIRE_NPU") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="package")
def npu_pools(npu_environment: dict[str, str]) -> Iterator[NpuRanks]:
    """`npu_pools(size, NAME="value")`: ranks on simulated NPUs with these knobs, kept for the tests of this
    folder."""
    servers: dict[str, Server] = {}
    pools: dict[tuple[int, tuple[tuple[str, str], ...]], DeviceRanks] = {}

    def ranks(size: int, **knobs: str) -> DeviceRanks:
        cann = knobs.get("SIMULATED_CANN", "")  # torch_npu asks for it when it is imported
        if cann not in servers:
            environment = npu_environment | ({"SIMULATED_CANN": cann} if cann else {})
            servers[cann] = Server(environment, "tests.npu.server")
        key = (size, tuple(sorted(knobs.items())))
        return pools.setdefault(key, DeviceRanks(servers[cann], size, knobs))

    yield ranks
    for pool in pools.values():
        pool.stop()
    for server in servers.values():
        server.stop()


@pytest.fixture
def npu(npu_pools: NpuRanks) -> Iterator[NpuRanks]:
    """`npu(2).run(function, *args)` runs it on 2 ranks; `npu(2, SIMULATED_HCCL_DELAY_MS="9")` with knobs.

    Ranks with knobs end with the test, so that no idle ones pile up.
    """
    with_knobs = []

    def ranks(size: int, **knobs: str) -> DeviceRanks:
        pool = npu_pools(size, **knobs)
        if knobs:
            with_knobs.append(pool)
        return pool

    yield ranks
    for pool in with_knobs:
        pool.stop()
