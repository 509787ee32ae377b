"""Ports of this host: which nobody holds now."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from launchers.usprun import UsageError

# What HCCL takes on a host unless HCCL_IF_BASE_PORT says otherwise: 16 ports, from CANN 8.2 on 32.
HCCL_PORT, HCCL_PORTS = 60000, 32


def taken(ports: Iterable[int]) -> list[int]:
    """Return those of the ports that cannot be listened on."""
    found = []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else one just closed looks taken
            try:
                probe.bind(("", port))
            except OSError:
                found.append(port)
    return found


def free_ports(first: int, count: int) -> int:
    """Return the first of `count` ports in a row that are free, looking from `first` upwards.

    Raises UsageError if there are none below 65536.
    """
    for start in range(first, 65537 - count, count):
        if not taken(range(start, start + count)):
            return start
    raise UsageError(f"no {count} ports in a row from {first} upwards are free on this host")
