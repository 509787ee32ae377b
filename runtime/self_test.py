"""One collective of each kind, with known numbers, right after init: finds a backend that returns zeros."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from runtime.world import World, gather_text, seconds

if TYPE_CHECKING:
    from torch.distributed import Work

LIMIT_S = 120.0  # vendors build communicators at the first collective, which takes up to a minute

# A case is (name, tensor that receives, expected numbers, what starts the work).
Case = tuple[str, torch.Tensor, list[float], Callable[[], Iterable["Work | None"]]]


def check_collectives(world: World, *, limit_s: float = LIMIT_S) -> None:
    """Raise RuntimeError on every rank if any collective fails, hangs or gives wrong numbers on any rank.

    The verdicts travel through the store, so ranks agree on the outcome even if no collective works.
    """
    limit_s = min(limit_s, world.timeout_s)
    fault = _first_fault(world, limit_s)
    key = world.next_key("self-test")
    verdicts = gather_text(world, key, fault, "self-test", 5 * limit_s)
    faults = [f"{v} on rank {rank}" for rank, v in enumerate(verdicts) if v]
    if faults:
        more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise RuntimeError(
            f"self-test: {faults[0]}{more}; "
            f"{world.backend} on {world.device.kind} with torch {torch.__version__} cannot be trusted here; "
            f"use another version of torch or of the vendor's libraries, or another backend"
        )


def _first_fault(world: World, limit_s: float) -> str:
    """Run all cases, also after a bad one, as the other ranks do; say what the first bad one did, or ""."""
    faults = [fault for case in _cases(world) if (fault := _fault(world, case, limit_s))]
    return faults[0] if faults else ""


def _fault(world: World, case: Case, limit_s: float) -> str:
    name, received, expected, start = case
    try:
        for work in start():
            _finish(work, limit_s, in_host=world.backend == "gloo")
        got = received.tolist()
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"{name} over {world.backend} failed ({reason})"
    if got != expected:
        return f"{name} over {world.backend} gave wrong numbers: expected {expected}, got {got}"
    return ""


def _finish(work: Work | None, limit_s: float, *, in_host: bool) -> None:
    """Wait for `work` at most `limit_s` seconds. On device backends wait() only queues: ask them instead."""
    if work is None:
        return
    if in_host:
        work.wait(seconds(limit_s))
        return
    end = time.monotonic() + limit_s
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError(f"no answer within {limit_s:g} s")
        time.sleep(0.001)
    work.wait()


def _cases(world: World) -> list[Case]:
    """Every kind of collective that we issue; uneven and empty shares are the normal case."""
    rank, size, group = world.rank, world.world_size, world.group
    device = world.device.torch_device

    def tensor(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    def share(source: int, target: int) -> list[float]:
        return [100.0 * source + 10.0 * target + 1.0 + i for i in range((source + 2 * target) % 3)]

    summed = tensor([rank + 1.0, 1.0])
    shared = tensor([3.0, 1.0, 4.0] if rank == 0 else [0.0] * 3)
    sent = [share(rank, peer) for peer in range(size)]
    due = [share(peer, rank) for peer in range(size)]
    swapped = tensor([0.0] * sum(map(len, due)))
    following, previous = ((rank + step) % size for step in (1, -1))
    if group is not None:
        following, previous = (dist.get_global_rank(group, peer) for peer in (following, previous))
    from_previous = tensor([0.0] * 2)

    def all_to_all() -> list[Work | None]:
        flat = tensor([x for part in sent for x in part])
        sizes = [len(part) for part in due], [len(part) for part in sent]
        return [dist.all_to_all_single(swapped, flat, *sizes, group=group, async_op=True)]

    def ring() -> Iterable[Work]:
        give = dist.P2POp(dist.isend, tensor([rank + 1.0, 7.0]), following, group)
        take = dist.P2POp(dist.irecv, from_previous, previous, group)
        return dist.batch_isend_irecv([give, take])

    total = [size * (size + 1) / 2, float(size)]
    return [
        ("all_reduce", summed, total, lambda: [dist.all_reduce(summed, group=group, async_op=True)]),
        (
            "broadcast",
            shared,
            [3.0, 1.0, 4.0],
            lambda: [dist.broadcast(shared, 0, group=group, async_op=True)],
        ),
        ("all_to_all_single", swapped, [x for part in due for x in part], all_to_all),
        ("batch_isend_irecv", from_previous, [(rank - 1) % size + 1.0, 7.0], ring),
    ]
