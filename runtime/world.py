"""`World`: who this rank is, and how ranks agree, wait and part through the store, outside any collective."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from runtime.device import Device

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

T = TypeVar("T")


# Worlds in use of each group that `connect` made. A process has one default group, so whoever comes second
# shares it, and it goes with the last; groups of the caller's are not in here.
USERS: MutableMapping[Any, int] = weakref.WeakKeyDictionary()


class PeerError(RuntimeError):
    """Another rank failed or did not come; this rank is not the cause."""


@dataclass(eq=False)
class World:
    """All ranks of one run, as seen from this one. Made by `connect`; a context manager that closes itself.

    `group` and `store` are None when the rank is alone. `owned` is False if the caller made the group;
    `serves` is True on the rank whose process holds the store for all.
    """

    rank: int
    world_size: int
    local_rank: int
    device: Device
    group: ProcessGroup | None = None
    backend: str | None = None
    owned: bool = False
    serves: bool = False
    store: Store | None = None
    timeout_s: float = 600.0
    notes: tuple[str, ...] = ()
    _calls: Counter[str] = field(default_factory=Counter, repr=False)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which alone logs, shows progress and writes files."""
        return self.rank == 0

    def broadcast_object(self, obj: T) -> T:
        """Return rank 0's `obj` on every rank. It must pickle. Collective."""
        if self.world_size == 1:
            return obj
        box: list[T] = [obj]
        dist.broadcast_object_list(box, src=0, group=self.group, device=self.device.torch_device)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Return on every rank whether `flag` is true on any. Collective."""
        if self.world_size == 1:
            return flag
        flags = torch.tensor([int(flag)], device=self.device.torch_device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return bool(flags.item())

    def agree(self, value: object, what: str) -> None:
        """Raise ValueError on every rank, naming the values, unless all ranks hold the same `value`.

        Values are compared by `repr`: pass numbers, strings, tuples; no sets, no tensors. Goes through the
        store, so it needs no backend. Every rank must call it.
        """
        assert not isinstance(value, torch.Tensor), (
            "agree compares by repr, which shortens tensors; pass a tuple"
        )
        if self.store is None:
            return
        key = self.next_key("agree")
        texts = gather_text(self, key, repr(value), what, self.timeout_s)
        if len(set(texts)) > 1:
            held = ", ".join(f"rank {rank} has {text}" for rank, text in enumerate(texts))
            raise ValueError(f"{what} differs over ranks: {held}; give every rank the same value")

    def all_or_none(self, what: str, work: Callable[[], T]) -> T:
        """Return `work()` where it ends well on every rank; all must call it.

        If it fails on any rank, all raise: those their own error, the others PeerError with the first of
        these, and what they have done is theirs to undo.
        """
        key = self.next_key("outcome")

        def share(said: str) -> list[str]:
            return [] if self.store is None else gather_text(self, key, said, what, self.timeout_s)

        try:
            result = work()
        except Exception as error:
            share(f"{type(error).__name__}: {error}")
            raise
        for rank, text in enumerate(share("")):
            if text:
                raise PeerError(f"rank {rank} failed in {what}: {text}")
        return result

    def meet(self, what: str, timeout_s: float) -> None:
        """Wait, with no collective open, until every rank is here; for work that takes some ranks longer.

        Raises PeerError that names the ranks which did not come within `timeout_s` seconds.
        """
        if self.store is not None:
            gather_text(self, self.next_key(f"meet/{what}"), "", what, timeout_s)

    def wait_for_main(self, name: str, work: Callable[[], T], timeout_s: float) -> T | None:
        """Run `work` on rank 0 while the others wait on the store, with no collective open.

        Returns work's result on rank 0 and None elsewhere. Every rank must call it; a name may be used again.
        Raises on the other ranks: PeerError with rank 0's error, or after `timeout_s` seconds.
        """
        if self.store is None:
            return work()
        key = self.next_key(f"main/{name}")
        if not self.is_main:
            self._await_main(name, key, timeout_s)
            return None
        try:
            result = work()
        except BaseException as error:
            self.store.set(key, f"-{type(error).__name__}: {error}")
            raise
        self.store.set(key, "+")
        return result

    def _await_main(self, name: str, key: str, timeout_s: float) -> None:
        assert self.store is not None, "only a rank that is not alone waits"
        store = self.store
        if not poll(lambda: store.check([key]), timeout_s):
            raise PeerError(
                f"rank {self.rank} waited {timeout_s:g} s for rank 0 to finish {name}; it did not; "
                f"look at rank 0's output, or allow more time"
            )
        outcome = store.get(key).decode()
        if outcome != "+":
            raise PeerError(f"rank 0 failed in {name}: {outcome[1:]}")

    def next_key(self, name: str) -> str:
        """Return a fresh store key for this use of `name`, the same on all ranks if all call alike."""
        self._calls[name] += 1
        return f"{name}/{self._calls[name]}"

    def close(self) -> None:
        """Destroy the group if `connect` made it and this is its last user. Further calls do nothing."""
        ours = [self.group] if self.owned and self.group is not None else []
        self.group, self.owned = None, False
        if ours:
            USERS[ours[0]] -= 1
            if not USERS[ours[0]]:
                del USERS[ours[0]]
                end_groups(ours)

    def hold(self) -> None:
        """Count this World as a user of a group that `connect` made."""
        self.owned = True
        if self.group is None:
            return
        USERS[self.group] = USERS.get(self.group, 0) + 1

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def end_groups(groups: list[ProcessGroup]) -> None:
    """Destroy these process groups and empty the list, which should hold the last reference to each.

    Those that the caller has destroyed before are only let go of.

    torch 2.7 ends the threads of a gloo group with Python's lock held, for which one of them may be waiting:
    a hang (pytorch#154976, mended in 2.8). Not so if its backend goes after it, from Python.
    """
    if not groups:  # where torch is built without torch.distributed there are none
        return
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    known = dist.distributed_c10d._world.pg_map  # no public way to ask without an error
    while groups:
        if groups[-1] in known:
            dist.destroy_process_group(groups.pop())
        else:
            groups.pop()
    backends.clear()


def poll(ready: Callable[[], bool], timeout_s: float) -> bool:
    """Ask `ready` until it says True, ever less often; return False after `timeout_s` seconds.

    Sleeps in Python, so a signal ends the wait, which a blocking store call would not allow.
    """
    pause, end = 0.002, time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
    return True


def gather_text(world: World, key: str, value: str, what: str, timeout_s: float) -> list[str]:
    """Return every rank's `value` in rank order, through the store.

    Raises PeerError that names the ranks which did not come within `timeout_s` seconds.
    """
    store = world.store
    assert store is not None, "a rank that is alone has nobody to gather from"
    keys = [f"{key}/{rank}" for rank in range(world.world_size)]
    store.set(keys[world.rank], "+" + value)  # FileStore cannot tell an empty value from none
    if not poll(lambda: store.check(keys), timeout_s):
        missing = [str(rank) for rank, k in enumerate(keys) if not store.check([k])]
        raise PeerError(
            f"{what}: rank {', '.join(missing)} of {world.world_size} did not come within {timeout_s:g} s; "
            f"look at the output of rank {missing[0]}"
        )
    return [store.get(k).decode()[1:] for k in keys]


def seconds(timeout_s: float) -> timedelta:
    """Return `timeout_s` as torch wants it."""
    return timedelta(seconds=timeout_s)
