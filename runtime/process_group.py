"""From torchrun's environment to a `World`. The only reader of RANK, LOCAL_RANK, WORLD_SIZE and the like."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from runtime.device import COMMUNICATOR_BUFFERS, Device, backend_for
from runtime.ending import ending_together
from runtime.log import get_logger
from runtime.self_test import check_collectives
from runtime.world import USERS, PeerError, World, gather_text, seconds

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "PeerError",
    "RankEnv",
    "World",
    "communicator_bytes",
    "connect",
    "ending_together",
    "read_hub",
    "read_rank_env",
]

logger = get_logger(__name__)

RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class RankEnv:
    """What the launcher told this process: its place among all ranks and among those of its host."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    def __post_init__(self) -> None:
        for name, value, size_name, size in (
            ("RANK", self.rank, "WORLD_SIZE", self.world_size),
            ("LOCAL_RANK", self.local_rank, "LOCAL_WORLD_SIZE", self.local_world_size),
            ("LOCAL_WORLD_SIZE", self.local_world_size - 1, "WORLD_SIZE", self.world_size),
        ):
            if not 0 <= value < size:
                shown = value + 1 if name == "LOCAL_WORLD_SIZE" else value
                raise ValueError(
                    f"{name}={shown} does not fit {size_name}={size}; start the ranks with torchrun"
                )


def read_rank_env(environ: Mapping[str, str] | None = None) -> RankEnv:
    """Return this process's place from torchrun's variables; without any of them, rank 0 of 1.

    Raises ValueError if only some are set, or one is not a whole number or out of range.
    """
    environ = os.environ if environ is None else environ
    found = {name: environ[name] for name in (*RANK_NAMES, "LOCAL_WORLD_SIZE") if environ.get(name)}
    if not any(name in found for name in RANK_NAMES):
        return RankEnv()
    missing = [name for name in RANK_NAMES if name not in found]
    if missing:
        present = ", ".join(f"{name}={value}" for name, value in found.items())
        raise ValueError(
            f"{present} but no {', '.join(missing)} in the environment; "
            f"start with torchrun, which sets all of them, or unset these"
        )
    for name, value in found.items():
        if not value.isdecimal():
            raise ValueError(
                f'{name}="{value}" in the environment is not a whole number; start with torchrun'
            )
    numbers = {name.lower(): int(value) for name, value in found.items()}
    numbers.setdefault("local_world_size", numbers["world_size"])  # launchers that do not tell use one host
    return RankEnv(**numbers)


def read_hub(environ: Mapping[str, str] | None = None) -> str:
    """Return the hub that USP_HUB names, for `runtime.hub`; "huggingface" without it."""
    return (os.environ if environ is None else environ).get("USP_HUB") or "huggingface"


def connect(
    device: Device,
    *,
    env: RankEnv | None = None,
    backend: str | None = None,
    timeout_s: float = 600.0,
    self_test: bool = True,
) -> World:
    """Make `device` current, join the other ranks, and return the World they form.

    Alone and without a group of the caller's, no process group is made: torch.distributed is not needed. A
    default group that exists already is used and never destroyed. `timeout_s` (seconds) bounds the joining
    and each collective. Every rank must call it.
    Raises RuntimeError, on all ranks alike, if the ranks do not meet or a self-test collective gives wrong
    numbers; ValueError for a backend that cannot work, or two variables that configure one allocator.
    """
    env = env or read_rank_env()
    _check_allocator(device)
    device.make_current()
    if dist.is_available() and dist.is_initialized():
        world = _adopt(device, env, backend, timeout_s)
    elif env.world_size == 1:
        return World(0, 1, env.local_rank, device, timeout_s=timeout_s)
    else:
        world = _join(device, env, backend, timeout_s)
    try:
        if self_test and world.world_size > 1:
            check_collectives(world)
        elif world.owned:
            # gloo dials its peers while a group is made; one that leaves too early would pass for crashed
            world.meet("joining the other ranks", timeout_s)
    except BaseException:
        world.close()
        raise
    return world


def communicator_bytes(backend: str | None, environ: Mapping[str, str] | None = None) -> int:
    """Return the bytes of buffers that a communicator of `backend` holds on a rank; 0 if it tells of none."""
    if backend not in COMMUNICATOR_BUFFERS:
        return 0
    variable, megabytes, count = COMMUNICATOR_BUFFERS[backend]
    value = (os.environ if environ is None else environ).get(variable, "")
    return count * 2**20 * (int(value) if value.isdecimal() else megabytes)


def _check_allocator(device: Device) -> None:
    """Two of these variables make one vendor's torch abort the process; other vendors' ignore one."""
    found = [name for name in device.allocator_variables if os.environ.get(name)]
    if len(found) > 1:
        raise ValueError(
            f"{' and '.join(found)} are both set; on {device.kind} both configure the one allocator; "
            f"unset {' '.join(found[1:])}"
        )


def _join(device: Device, env: RankEnv, backend: str | None, timeout_s: float) -> World:
    """Meet the other ranks at the launcher's address and make the default group."""
    if not dist.is_available():
        raise RuntimeError(
            f"WORLD_SIZE={env.world_size}; this torch is built without torch.distributed; "
            f"install a build that has it, or start one process"
        )
    name, note = backend_for(device.kind, choice=backend)
    if note and env.rank == 0:
        logger.warning(note)
    store, group_store = _stores(env, timeout_s)
    world = World(
        env.rank,
        env.world_size,
        env.local_rank,
        device,
        backend=name,
        serves=_serves_store(env),
        store=store,
        timeout_s=timeout_s,
        notes=(note,) if note else (),
    )
    gather_text(world, "arrived", "", "joining the other ranks", timeout_s)
    dist.init_process_group(
        name,
        store=group_store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=seconds(timeout_s),
        device_id=device.torch_device if name == device.backend and device.takes_device_id else None,
    )
    world.group, world.backend = dist.group.WORLD, _backend_of(device)
    world.hold()
    return world


def _adopt(device: Device, env: RankEnv, backend: str | None, timeout_s: float) -> World:
    """Use the default group that the caller made."""
    actual = _backend_of(device)
    if backend is not None and backend not in (actual, dist.get_backend()):
        raise ValueError(
            f"backend={backend}; the default group that exists already talks {actual}; leave the backend out"
        )
    world = World(
        dist.get_rank(),
        dist.get_world_size(),
        env.local_rank if env.world_size > 1 else device.index or 0,
        device,
        group=dist.group.WORLD,
        backend=actual,
        timeout_s=timeout_s,
        notes=("the process group was made by the caller",),
    )
    if world.group in USERS:  # `connect` made it, for another World that is still open
        world.hold()
        world.notes = ("the process group is shared with another of ours",)
    if world.world_size > 1:
        world.store = _callers_store(world.rank)
    return world


def _backend_of(device: Device) -> str:
    """The backend that serves this device: of a composite group the one for its kind."""
    parts = dict(part.split(":", 1) for part in str(dist.get_backend_config()).split(",") if ":" in part)
    return parts.get(device.kind, dist.get_backend())


def _callers_store(rank: int) -> Store:
    """A place of our own in the store of the caller's group, on a connection of our own where torch can."""
    store = dist.distributed_c10d._get_default_store()
    clone = getattr(store, "clone", None)  # not in every torch, nor for every store
    store = clone() if clone else store
    return _under(_fresh_prefix(store, "runtime", rank), store)


def _stores(env: RankEnv, timeout_s: float) -> tuple[Store, Store]:
    """Connect to the launcher's store twice: for us, and for the group, which may block its connection.

    The server is torchrun's agent where it offers one, else this process on rank 0. Keys are kept apart by
    restart and by use: some backends hang on the keys of an earlier group.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={env.world_size} but no {', '.join(missing)} in the environment; start with torchrun"
        )
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    serve = _serves_store(env)
    libuv = os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"

    def open_store(is_master: bool) -> Store:
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host,
            int(port),
            None,
            is_master,
            timeout=seconds(timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=libuv,
        )

    try:
        ours, groups = open_store(serve), open_store(False)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {env.rank} could not {'serve' if serve else 'reach'} the store at {host}:{port} "
            f"({str(error).splitlines()[0]}); check it, or start with usprun, which picks a free port"
        ) from error
    prefix = _fresh_prefix(ours, f"runtime/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", env.rank)
    return _under(prefix, ours), _under(f"{prefix}/group", groups)


def _serves_store(env: RankEnv) -> bool:
    return env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _fresh_prefix(store: Store, name: str, rank: int) -> str:
    """A prefix that no earlier `connect` over this store used; all ranks count alike, so it is the same."""
    return f"{name}/{store.add(f'{name}/turn/{rank}', 1)}"


def _under(prefix: str, store: Store) -> Store:
    return dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]
