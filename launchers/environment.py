"""Which environment variables a launch sets, and why: a pure function from a launch to settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from launchers.ports import HCCL_PORTS
from launchers.program import Launch
from launchers.usprun import UsageError

# Each HCCL communicator holds two buffers of HCCL_BUFFSIZE (MB); all of them together shall stay within this.
BUFFERS_MB = 1024
HCCL_BUFFSIZE_MB = 200  # the vendor's default
LEAST_BUFFSIZE_MB = 32  # smaller ones cut every message into many
CONNECT_S = (120, 600)  # HCCL takes no less; 600 lets communicators that start late still meet
EXEC_STEP_S, EXEC_MOST_S = 68, 17340  # the first generation rounds down to a multiple, and takes no more
EVENT_AFTER_S = 32  # the vendor's own distance between the two
HEARTBEAT_S = 480  # torch's default
WATCHDOG_S = 60


class Setting(NamedTuple):
    """One variable, its value and the reason. `kept`: it was set already, and stays as it is."""

    name: str
    value: str
    reason: str
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class Host:
    """What is known of the hosts that will run. `cores` is shared by the ranks of one host.

    `devices` are the numbers of those that may be used, in the order of local ranks; None leaves that to a
    scheduler. `hccl_port` is the first of HCCL's ports in a row that are free; None if that is not known.
    """

    cores: int
    devices: tuple[int, ...] | None = None
    hccl_port: int | None = None


def environment(launch: Launch, host: Host, given: Mapping[str, str]) -> list[Setting]:
    """Return every variable that matters to this launch, with its reason. Pure.

    What `given` (the environment at hand) sets already is kept. Raises UsageError where what is kept cannot
    work: two allocator variables, timeouts in the wrong order, no visible device of its own for each rank.
    """
    wanted = [
        *_threads(launch, host),
        *_allocator(launch, given),
        *_devices(launch, host, given),
        *_timeouts(launch),
        *(_ascend(launch, host, given) if launch.kind == "npu" else ()),
    ]
    settings = [
        Setting(s.name, given[s.name], "set already, kept", kept=True) if given.get(s.name) else s
        for s in wanted
    ]
    check_order(launch.timeout_s, {s.name: s.value for s in settings})
    return settings


def check_order(timeout_s: float, values: Mapping[str, str]) -> None:
    """Raise UsageError unless timeouts are in order: a vendor's below torch's, a heartbeat's above.

    The vendor's message names the card and the link; torch's names the collective and the ranks; the
    heartbeat's only says that a thread is stuck. `values` are the variables that are set.
    """
    seconds = {name: _seconds(name, value) for name, value in values.items() if "TIMEOUT" in name}
    event, execution = seconds.get("HCCL_EVENT_TIMEOUT"), seconds.get("HCCL_EXEC_TIMEOUT")
    if event is not None and execution is not None and not 0 < execution < event:
        raise UsageError(
            f"HCCL_EXEC_TIMEOUT={execution:g}, HCCL_EVENT_TIMEOUT={event:g}; the second must be above the "
            "first, and 0 waits for ever; unset both"
        )
    for name, value in seconds.items():
        heartbeat = name.endswith("HEARTBEAT_TIMEOUT_SEC")
        if (value <= timeout_s) if heartbeat else (value >= timeout_s):
            raise UsageError(
                f"{name}={value:g} with a timeout of {timeout_s:g} s for torch's collectives; it must be "
                f"{'above' if heartbeat else 'below'} that, so that the message which says most comes first; "
                f"unset {name}, or give the program another --timeout"
            )


def buffer_mb(groups: int) -> int:
    """Return HCCL_BUFFSIZE in MB that keeps a rank's communicators, two buffers each, within the budget."""
    return max(LEAST_BUFFSIZE_MB, min(HCCL_BUFFSIZE_MB, BUFFERS_MB // (2 * max(1, groups))))


def _threads(launch: Launch, host: Host) -> Iterator[Setting]:
    threads = max(1, host.cores // launch.nproc)
    ranks = f"{launch.nproc} rank{'s' * (launch.nproc != 1)}"
    yield Setting("OMP_NUM_THREADS", str(threads), f"{host.cores} cores, {ranks} on a host")


def _allocator(launch: Launch, given: Mapping[str, str]) -> Iterator[Setting]:
    """Expandable segments, through one variable; a second one would abort torch, or be ignored."""
    names = launch.vendor.allocators
    found = [name for name in names if given.get(name)]
    if len(found) > 1:
        raise UsageError(f"{' and '.join(found)} are both set; they mean the same; unset all but one")
    if found:
        yield Setting(found[0], given[found[0]], "")
    elif launch.vendor.expandable:
        yield Setting(names[0], "expandable_segments:True", "less fragmentation when videos change size")


def _devices(launch: Launch, host: Host, given: Mapping[str, str]) -> Iterator[Setting]:
    names = launch.vendor.visible
    if not names:
        if host.devices is not None:
            raise UsageError(f"--devices on {launch.kind}, whose devices have no numbers; leave it out")
        return
    asked = "" if host.devices is None else ",".join(map(str, host.devices))
    shown = {name: given[name] for name in names if name in given}
    for name, value in shown.items():
        if asked and value != asked:
            raise UsageError(f"--devices {asked} but {name}={value} is set; unset one of the two")
    if asked and not shown:
        shown = {names[0]: asked}
    for name, value in shown.items():
        _check_devices(launch, name, value)
        yield Setting(name, value, "rank r of a host takes the r-th of these")


def _check_devices(launch: Launch, name: str, value: str) -> None:
    """Raise UsageError unless the list has a device for each rank of a host."""
    listed = [word.strip() for word in value.split(",") if word.strip()]
    if listed in ([], ["-1"]):
        raise UsageError(f"{name}={value} hides every {launch.kind} device; unset it")
    if any(re.fullmatch(r"\d+-\d+", word) for word in listed):
        raise UsageError(f"{name}={value}; ranges are not read there; list each number, as in 4,5,6,7")
    if len(set(listed)) < len(listed):
        raise UsageError(f"{name}={value} lists a device twice; ranks cannot share one; list each once")
    if len(listed) < launch.nproc:
        raise UsageError(
            f"{name}={value} shows {len(listed)} devices; --nproc {launch.nproc} needs one for each rank; "
            f"use --nproc {len(listed)}, or show more"
        )


def _timeouts(launch: Launch) -> Iterator[Setting]:
    limit = launch.timeout_s
    if launch.kind in ("cuda", "rocm", "musa") and limit + WATCHDOG_S > HEARTBEAT_S:
        name = f"TORCH_{launch.vendor.backend.upper()}_HEARTBEAT_TIMEOUT_SEC"
        yield Setting(
            name, f"{limit + WATCHDOG_S:.0f}", f"above torch's {limit:g} s, whose message says more"
        )
    if launch.kind != "npu":
        return
    execution = min(EXEC_MOST_S, int(limit - EVENT_AFTER_S - 1) // EXEC_STEP_S * EXEC_STEP_S)
    least, most = CONNECT_S
    if execution < least:
        need = -(-least // EXEC_STEP_S) * EXEC_STEP_S + EVENT_AFTER_S + 1
        raise UsageError(
            f"a timeout of {limit:g} s for torch's collectives; HCCL waits at least {least} s for a peer, "
            f"and its timeouts must be below torch's; give the program --timeout {need} or more"
        )
    yield Setting(
        "HCCL_CONNECT_TIMEOUT", str(min(most, execution)), "seconds for a communicator's ranks to meet"
    )
    yield Setting("HCCL_EXEC_TIMEOUT", str(execution), f"seconds for one collective, below torch's {limit:g}")
    yield Setting(
        "HCCL_EVENT_TIMEOUT", str(execution + EVENT_AFTER_S), "above HCCL_EXEC_TIMEOUT, below torch's"
    )


def _ascend(launch: Launch, host: Host, given: Mapping[str, str]) -> Iterator[Setting]:
    size = buffer_mb(launch.groups)
    cost = f"{launch.groups} communicators of 2 x {size} MB on each rank"
    if launch.world_size > 1:
        yield Setting("HCCL_BUFFSIZE", str(size), cost)
        yield _hccl_ports(host, given)
    yield Setting("CPU_AFFINITY_CONF", "1", "each rank on its share of the cores")
    if given.get("ASCEND_LAUNCH_BLOCKING") == "1":
        yield Setting("ASCEND_LAUNCH_BLOCKING", "1", "")
    else:
        yield Setting("TASK_QUEUE_ENABLE", "1", "operators are queued; 2 needs more memory at the peak")


def _hccl_ports(host: Host, given: Mapping[str, str]) -> Setting:
    """Free ports for HCCL: known ones on this host; on others the system finds them, when it is asked."""
    for name in ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_IF_BASE_PORT"):  # the first has the last word
        if given.get(name):
            return Setting(name, given[name], "")
    if host.hccl_port is None:
        return Setting(
            "HCCL_HOST_SOCKET_PORT_RANGE", "auto", "free ports on each host, for jobs that share one"
        )
    ports = f"{host.hccl_port}-{host.hccl_port + HCCL_PORTS - 1}"
    return Setting("HCCL_IF_BASE_PORT", str(host.hccl_port), f"ports {ports} are free on this host")


def _seconds(name: str, value: str) -> float:
    if not value.isdecimal():
        raise UsageError(f"{name}={value} is not a whole number of seconds; unset it")
    return float(value)
