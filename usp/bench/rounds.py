"""Interleaved rounds: one process runs alone, then every contender once, so that drift hits all alike."""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from runtime.process_group import World
from runtime.world import gather_text
from usp.bench.ideal import Traffic

ALONE_LIMIT_S = 3600.0
# What a peer's failure looks like; anything else, and any failure of ours, ends the run.
PEER_FAULTS = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    AttributeError,
    ImportError,
    ArithmeticError,
)

Compute = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Running:
    """A contender that is set up: what is timed, this rank's count of bytes sent so far, how to end it."""

    compute: Compute
    sent: Callable[[], int] | None = None
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Contender:
    """One way to compute on all ranks together what one process computes.

    `build` is collective. `least` is the traffic that this layout cannot avoid, `work` the share of the one
    process's operations that the busiest rank still has. `pick` takes from the one process's result what
    `compute` must return on this rank. `notes` are for the reader.
    """

    name: str
    build: Callable[[], Running]
    least: Traffic
    work: float
    peer: str | None = None
    pick: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole
    notes: tuple[str, ...] = ()


@dataclass
class Row:
    """What was measured of one contender, alike on all ranks."""

    contender: Contender
    error: float = 0.0  # largest absolute one against one process, over all ranks
    sent: list[int] | None = None  # bytes to other ranks in one run, by rank
    fault: str | None = None  # the first line of its error; it then takes no part
    seconds: list[float] = field(default_factory=list)  # of the slowest rank, by round
    single: list[float] = field(default_factory=list)  # of one process, in the same rounds
    running: Running | None = None

    @property
    def ratios(self) -> list[float]:
        """Speed-up over one process, round by round."""
        return [single / ours for single, ours in zip(self.single, self.seconds, strict=True)]

    @property
    def sends_the_least(self) -> bool | None:
        """Whether every rank sent exactly what it must; None where bytes are not counted."""
        return None if self.sent is None else tuple(self.sent) == self.contender.least.sent


def pin(local_rank: int, local_world_size: int) -> str:
    """Give this rank one thread, and one core if there is one for each; says what was done."""
    torch.set_num_threads(1)
    if not hasattr(os, "sched_setaffinity"):
        return "1 per rank, not pinned: this system cannot"
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < local_world_size:
        return f"1 per rank, not pinned: {local_world_size} ranks on {len(cores)} cores"
    os.sched_setaffinity(0, {cores[local_rank]})
    return "1 per rank, each pinned to a core of its own"


def warm_up(
    world: World, alone: Compute, contenders: Sequence[Contender], times: int
) -> tuple[float, list[Row]]:
    """Seconds of one process, and a row per contender with its error, bytes or fault. Collective.

    A peer that fails is left out from here on; ours may not fail.
    """
    single, whole = 0.0, None
    for _ in range(max(1, times)):
        single, whole = _run_alone(world, alone)
    whole = _from_main(world, whole)
    return single, [_try(world, contender, whole, times) for contender in contenders]


def run_rounds(world: World, alone: Compute, rows: Sequence[Row], rounds: int) -> list[float]:
    """Fill in the rows' seconds, and return one process's, round by round. Collective.

    The order turns by one each round, so that none always follows the idle wait.
    """
    fit = [row for row in rows if row.running is not None]
    singles = []
    for lap in range(rounds):
        single, _ = _run_alone(world, alone)
        singles.append(single)
        first = lap % max(1, len(fit))
        for row in (*fit[first:], *fit[:first]):
            assert row.running is not None, "only those that run were kept"
            elapsed = _run_together(world, row.running.compute)
            row.seconds.append(elapsed)
            row.single.append(single)
    return singles


def share(world: World, value: Any) -> list[Any]:
    """Every rank's plain value in rank order, through the store: no backend is needed. Collective."""
    if world.store is None:
        return [value]
    key = world.next_key("bench")
    return [
        json.loads(text) for text in gather_text(world, key, json.dumps(value), "a result", world.timeout_s)
    ]


def _try(world: World, contender: Contender, whole: torch.Tensor, times: int) -> Row:
    """Set it up and run it; ranks tell each other once, whatever happened, so that they stay in step."""
    row, fault, error, sent = Row(contender), "", 0.0, None
    try:
        row.running = contender.build()
        for _ in range(max(1, times)):
            error, sent = _run_once(row.running, contender.pick(whole))
    except PEER_FAULTS as raised:
        if contender.peer is None:
            raise
        fault = f"{type(raised).__name__}: {(str(raised).splitlines() or [''])[0]}"
    faults, errors, counts = zip(*share(world, [fault, error, sent]), strict=True)
    row.error = max(errors)
    row.sent = None if sent is None else list(counts)
    if any(faults):
        row.fault, row.sent = next(filter(None, faults)), None
        end([row])
    return row


def _run_once(running: Running, want: torch.Tensor) -> tuple[float, int | None]:
    """The largest error on this rank, and the bytes that it sent."""
    before = running.sent() if running.sent else 0
    out = running.compute()
    sent = running.sent() - before if running.sent else None
    assert out.shape == want.shape, f"the result has shape {tuple(out.shape)}, not {tuple(want.shape)}"
    error = (out.float() - want.float()).abs().max().item() if out.numel() else 0.0
    return math.inf if math.isnan(error) else error, sent


def end(rows: Sequence[Row]) -> None:
    """Free what the contenders hold. Collective."""
    for row in rows:
        if row.running is not None:
            row.running.close()
        row.running = None


def _run_alone(world: World, alone: Compute) -> tuple[float, torch.Tensor | None]:
    """One process's seconds, on every rank, and its result on rank 0; the others sleep meanwhile."""

    def timed() -> tuple[float, torch.Tensor]:
        start = time.perf_counter()
        out = alone()
        world.device.synchronize()
        return time.perf_counter() - start, out

    found = world.wait_for_main("the run of one process", timed, ALONE_LIMIT_S)
    seconds = share(world, found[0] if found else None)[0]
    return seconds, found[1] if found else None


def _run_together(world: World, compute: Compute) -> float:
    """Start at the same time on all ranks; seconds until the last is done."""
    world.any(False)  # all are here
    start = time.perf_counter()
    compute()
    world.device.synchronize()
    return max(share(world, time.perf_counter() - start))


def _from_main(world: World, tensor: torch.Tensor | None) -> torch.Tensor:
    """Rank 0's tensor on every rank. Collective."""
    if world.world_size == 1:
        assert tensor is not None, "the only rank has it"
        return tensor
    like: Any = world.broadcast_object(None if tensor is None else (tuple(tensor.shape), tensor.dtype))
    if tensor is None:
        tensor = torch.empty(like[0], dtype=like[1], device=world.device.torch_device)
    tensor = tensor.contiguous()
    dist.broadcast(tensor, 0)
    return tensor
