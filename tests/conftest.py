"""Fixtures of all tests: one thread per process, and pools of ranks."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.ranks import Ranks

torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, Ranks]]:
    pools: dict[int, Ranks] = {}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture
def ranks(_pools: dict[int, Ranks]) -> Callable[[int], Ranks]:
    """`ranks(n)` is the session's pool of n ranks."""
    return lambda size: _pools.setdefault(size, Ranks(size))
