"""ParallelConfig -> the process groups of this rank. Nothing else in the package makes a group."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.report import format_bytes
from runtime.world import end_groups
from usp.config import AXES, ParallelConfig, Transport


@dataclass(eq=False)
class Group:
    """The ranks of one axis that this process belongs to, with what its exchanges keep between calls.

    `rank` is this process's place in `ranks` (global ranks). `handle` is None for a group of one, which needs
    no communicator. `sent` counts the bytes that this rank handed to *other* ranks, by exchange.
    """

    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None = None
    transport: Transport = "auto"
    sent: Counter[str] = field(default_factory=Counter)
    _buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = field(
        default_factory=dict, repr=False
    )

    @property
    def size(self) -> int:
        """Ranks in this group."""
        return len(self.ranks)

    def buffer(self, tag: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D buffer of `numel` elements that is kept, so the next call with this tag overwrites it.

        Fresh receive buffers cost 2-3 times the transfer at 64 MiB on gloo (page faults).
        """
        key = (tag, dtype, device)
        kept = self._buffers.get(key)
        if kept is None or kept.numel() < numel:
            with torch.inference_mode(
                False
            ):  # an inference tensor could not be received into outside that mode
                kept = self._buffers[key] = torch.empty(numel, dtype=dtype, device=device)
        return kept[:numel]

    @property
    def buffer_bytes(self) -> int:
        """Bytes that the kept buffers hold."""
        return sum(b.numel() * b.element_size() for b in self._buffers.values())

    def release(self) -> None:
        """Free the kept buffers."""
        self._buffers.clear()


@dataclass(frozen=True)
class Groups:
    """The groups of this rank, one per axis, and `sp`: all ranks that share its sequence."""

    cfg: Group
    ring: Group
    gather_kv: Group
    ulysses: Group
    sp: Group

    @property
    def all(self) -> tuple[Group, ...]:
        """Every distinct group object."""
        return tuple(
            {id(g): g for g in (self.cfg, self.ring, self.gather_kv, self.ulysses, self.sp)}.values()
        )

    @property
    def sent(self) -> Counter[str]:
        """Bytes handed to other ranks since the start, by exchange, over all groups."""
        return sum((g.sent for g in self.all), Counter())

    def rows(self, bytes_each: int = 0) -> list[tuple[str, str]]:
        """Rows of a memory report: the communicators of this rank, and the receive buffers that are kept.

        `bytes_each` is what the backend holds for every communicator, or 0 if that is not known.
        """
        world_size = self.cfg.size * self.sp.size
        if world_size == 1:
            return []
        named = [f"all {world_size} ranks"]
        for group in self.all:
            if 1 < group.size < world_size:
                axes = "+".join(axis for axis in (*AXES, "sp") if getattr(self, axis) is group)
                named.append(f"{axes} ({', '.join(map(str, group.ranks))})")
        cost = f"; {format_bytes(bytes_each)} of buffers each" if bytes_each else ""
        rows = [("communicators", f"{len(named)}: {', '.join(named)}{cost}")]
        kept = sum(group.buffer_bytes for group in self.all)
        return [*rows, ("receive buffers", f"{format_bytes(kept)} kept")] if kept else rows

    def close(self) -> None:
        """Free the kept buffers and destroy the communicators that `make_groups` made. May be called
        again."""
        made = []
        for group in self.all:
            group.release()
            if group.handle is not None and group.handle is not dist.group.WORLD:
                made.append(group.handle)
            group.handle = None
        end_groups(made)


def axis_ranks(config: ParallelConfig) -> dict[str, list[tuple[int, ...]]]:
    """For each axis (and "sp"), the groups of global ranks, in the order in which all ranks must create them.

    CFG is outermost, then ring or gather-KV; Ulysses, which talks most, is innermost where links are fastest.
    """
    ranks = torch.arange(config.world_size).reshape([config.degree(axis) for axis in AXES])
    found = {}
    for dim, axis in enumerate(AXES):
        found[axis] = [tuple(row) for row in ranks.movedim(dim, -1).flatten(0, -2).tolist()]
    found["sp"] = [tuple(row) for row in ranks.flatten(1).tolist()]
    return found


def make_groups(config: ParallelConfig, *, rank: int, timeout_s: float = 600.0) -> Groups:
    """The groups of `rank`; makes one communicator for each distinct set of ranks, the whole world's
    excepted.

    Collective over the default group: every rank calls it with an equal config. A rank may close them at
    once: every link is up on both its ends by then.
    """
    made: dict[tuple[int, ...], Group] = {}
    mine: dict[str, Group] = {}
    for axis, groups in axis_ranks(config).items():
        for ranks in groups:
            if ranks not in made:
                made[ranks] = _make_group(ranks, config, rank, timeout_s)
            if rank in ranks:
                mine[axis] = made[ranks]
    return Groups(**mine)


def _make_group(ranks: tuple[int, ...], config: ParallelConfig, rank: int, timeout_s: float) -> Group:
    place = ranks.index(rank) if rank in ranks else -1
    if len(ranks) == 1:
        return Group(ranks, place, None, config.transport)
    if len(ranks) == config.world_size:
        return Group(ranks, place, dist.group.WORLD, config.transport)
    handle = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
    if not isinstance(handle, dist.ProcessGroup):
        return Group(ranks, place, None, config.transport)
    if torch.device("cpu") in handle._device_types:
        # gloo dials its peers here, and to one that is still dialling, a peer that closes has crashed
        dist.all_reduce(torch.zeros(1), group=handle)
    return Group(ranks, place, handle, config.transport)
