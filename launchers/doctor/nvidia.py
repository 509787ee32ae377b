"""The doctor on NVIDIA: what nvidia-smi says of the driver and of the links between cards."""

from __future__ import annotations

import re
from collections.abc import Iterator

from launchers.doctor.machine import Finding, Machine, last_words

QUERY = ("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def check(machine: Machine) -> Iterator[Finding]:
    """Yield the driver's line, and with several cards how they are linked."""
    told = machine.run("nvidia-smi", *QUERY)
    if told.code != 0:
        fact = last_words(told.stdout + told.stderr)
        yield Finding(
            "problem", "cuda driver", fact, "install or reload the driver; restart the host after that"
        )
        return
    cards = [line.split(", ") for line in told.stdout.splitlines() if line.count(", ") == 2]
    if cards:
        name, driver, memory = cards[0]
        yield Finding("ok", "cuda driver", f"{driver}, {len(cards)} x {name} with {memory}")
    if len(cards) > 1:
        yield from _check_links(machine)


def _check_links(machine: Machine) -> Iterator[Finding]:
    told = machine.run("nvidia-smi", "topo", "-m")
    pairs = read_links(told.stdout)
    if not pairs:
        return
    slow = sorted({kind for kind in pairs if not kind.startswith("NV")})
    if not slow:
        yield Finding("ok", "cuda links", f"NVLink between all cards ({', '.join(sorted(set(pairs)))})")
    else:
        fact = f"some cards meet over {', '.join(slow)}, not NVLink"
        yield Finding("note", "cuda links", fact, "put Ulysses inside the linked ones, ring or cfg across")


def read_links(text: str) -> list[str]:
    """Return how each pair of GPUs is linked, from the matrix of `nvidia-smi topo -m`: NV18, PIX, SYS, ..."""
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row]  # the heading names GPUs too, but no "X"
    return [row[1 + column] for at, row in enumerate(rows) for column in range(at) if len(row) > 1 + column]
