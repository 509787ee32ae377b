"""The doctor on the host and the shell: loopback, shared memory, ports, limits, variables that contradict."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence

from launchers.doctor.machine import Finding, Machine
from launchers.environment import check_order
from launchers.ports import HCCL_PORT, HCCL_PORTS, taken
from launchers.usprun import UsageError
from launchers.vendors import VENDORS

GIB = 2**30
LEAST_SHM = GIB
LEAST_FILES = 1024
TORCHRUN_PORT = 29500
RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
BLOCKING = ("ASCEND_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING", "MUSA_LAUNCH_BLOCKING")


def check_host(machine: Machine, kinds: Sequence[str]) -> Iterator[Finding]:
    """Yield what is to be said about the host's network, shared memory, ports and limits."""
    yield _check_loopback()
    yield _check_name()
    if sys.platform == "linux":
        yield _check_shared_memory(machine)
    yield _check_torchrun_port()
    if "npu" in kinds:
        yield from _check_hccl_ports(machine)
    if os.name == "posix":
        yield _check_open_files()


def check_environment(machine: Machine, kinds: Sequence[str], timeout_s: float) -> Iterator[Finding]:
    """Yield what is to be said about variables that contradict each other; one OK line if none does."""
    found = [
        *_rank_variables(machine),
        *_allocators(machine),
        *_timeouts(machine, timeout_s),
        *_hidden_devices(machine, kinds),
        *_blocking(machine),
    ]
    yield from found or [Finding("ok", "variables", "nothing in the environment contradicts itself")]


def _check_loopback() -> Finding:
    """Ranks of one host meet over 127.0.0.1."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            with socket.create_connection(server.getsockname(), timeout=5):
                return Finding("ok", "loopback", "127.0.0.1 takes connections")
    except OSError as error:
        fact = f"127.0.0.1 takes no connection ({error})"
        return Finding("problem", "loopback", fact, "bring up the lo interface; look at the firewall")


def _check_name() -> Finding:
    name = socket.gethostname()
    try:
        return Finding("ok", "host name", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        fact = f"{name} cannot be looked up ({error}); ranks of one host do not need it, those of several do"
        return Finding("note", "host name", fact, f"add {name} to /etc/hosts, or give --master an address")


def _check_shared_memory(machine: Machine) -> Finding:
    folder = machine.path("/dev/shm")
    if not folder.is_dir():
        return Finding("problem", "shared memory", "/dev/shm is not there", "mount a tmpfs on it")
    left = os.statvfs(folder)
    size, free = (left.f_frsize * blocks / GIB for blocks in (left.f_blocks, left.f_bavail))
    fact = f"/dev/shm: {free:.2f} of {size:.2f} GiB free"
    if free * GIB >= LEAST_SHM:
        return Finding("ok", "shared memory", fact)
    remedy = (
        "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir of medium Memory; or empty it"
    )
    return Finding("problem", "shared memory", f"{fact}; collectives between processes need more", remedy)


def _check_torchrun_port() -> Finding:
    if taken([TORCHRUN_PORT]):
        fact = f"torchrun's port {TORCHRUN_PORT} is taken on this host"
        return Finding("note", "port", fact, "usprun and python -m launchers pick a free one")
    return Finding("ok", "port", f"torchrun's port {TORCHRUN_PORT} is free")


def _check_hccl_ports(machine: Machine) -> Iterator[Finding]:
    """HCCL's ports on the host, and whether the system may give them to someone else."""
    base = machine.environ.get("HCCL_IF_BASE_PORT", str(HCCL_PORT))
    if machine.environ.get("HCCL_HOST_SOCKET_PORT_RANGE") or not base.isdecimal():
        return
    ports = range(int(base), int(base) + HCCL_PORTS)
    shown = f"{ports[0]}-{ports[-1]}"
    if held := taken(ports):
        fact = f"HCCL's ports {shown}: {', '.join(map(str, held))} taken"
        remedy = (
            "python -m launchers npu picks free ones; or export HCCL_HOST_SOCKET_PORT_RANGE=auto, or "
            f"HCCL_IF_BASE_PORT with {HCCL_PORTS} free ones from there"
        )
        yield Finding("problem", "HCCL ports", fact, remedy)
        return
    lowest, highest = (machine.text("/proc/sys/net/ipv4/ip_local_port_range") or "0 0").split()[:2]
    reserved = _ports_in(machine.text("/proc/sys/net/ipv4/ip_local_reserved_ports") or "")
    if any(int(lowest) <= port <= int(highest) and port not in reserved for port in ports):
        fact = f"HCCL's ports {shown} are free, but within {lowest}-{highest}, which any connection may take"
        remedy = f"sysctl -w net.ipv4.ip_local_reserved_ports={shown}"
        yield Finding("note", "HCCL ports", fact, remedy)
    else:
        yield Finding("ok", "HCCL ports", f"{shown} are free")


def _ports_in(text: str) -> set[int]:
    """The ports of a list such as 8080,60000-60031."""
    ends = [[int(end) for end in part.split("-")] for part in text.strip().split(",") if part]
    return {port for part in ends for port in range(part[0], part[-1] + 1)}


def _check_open_files() -> Finding:
    import resource

    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY or allowed >= LEAST_FILES:
        return Finding("ok", "open files", "no limit" if allowed == resource.RLIM_INFINITY else f"{allowed}")
    fact = (
        f"{allowed} per process (up to {most}); ranks hold a socket for each peer and a file for each shard"
    )
    return Finding("problem", "open files", fact, f"ulimit -n {LEAST_FILES * 4}")


def _rank_variables(machine: Machine) -> Iterator[Finding]:
    found = [name for name in RANK_NAMES if machine.environ.get(name)]
    if found:
        fact = f"{', '.join(found)} set in this shell; a program started here takes itself for such a rank"
        state = "note" if len(found) == len(RANK_NAMES) else "problem"
        yield Finding(state, "variables", fact, f"unset {' '.join(found)}, unless a launcher set them")


def _allocators(machine: Machine) -> Iterator[Finding]:
    for kind, vendor in VENDORS.items():
        found = [name for name in vendor.allocators if machine.environ.get(name)]
        if len(found) > 1:
            fact = f"{' and '.join(found)} are both set; on {kind} they mean the same, and torch may abort"
            yield Finding("problem", "variables", fact, f"unset {' '.join(found[1:])}")
            return


def _timeouts(machine: Machine, timeout_s: float) -> Iterator[Finding]:
    backends = tuple({f"{vendor.backend.upper()}_" for vendor in VENDORS.values()})
    known = ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "HCCL_EVENT_TIMEOUT")
    values = {
        name: value
        for name, value in machine.environ.items()
        if name in known
        or (name.endswith("HEARTBEAT_TIMEOUT_SEC") and name.startswith(tuple(f"TORCH_{b}" for b in backends)))
    }
    try:
        check_order(timeout_s, values)
    except UsageError as error:
        fact, _, remedy = str(error).rpartition("; ")
        yield Finding("problem", "variables", fact, remedy)


def _hidden_devices(machine: Machine, kinds: Sequence[str]) -> Iterator[Finding]:
    for kind in kinds:
        for name in VENDORS[kind].visible:
            if machine.environ.get(name) in ("", "-1"):
                fact = f"{name}={machine.environ[name]} hides every {kind} device"
                yield Finding("problem", "variables", fact, f"unset {name}")


def _blocking(machine: Machine) -> Iterator[Finding]:
    for name in BLOCKING:
        if machine.environ.get(name) == "1":
            fact = f"{name}=1: each operator is waited for; right for finding an error, slow otherwise"
            yield Finding("note", "variables", fact, f"unset {name}")
