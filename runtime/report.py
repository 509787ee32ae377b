"""Start-up and end reports as aligned text."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch

from runtime.world import World


def format_report(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return `title` and below it one line per row, values aligned; further lines of a value are indented."""
    width = max((len(name) for name, _ in rows), default=0)
    indent = "\n" + " " * (width + 4)
    return "\n".join(
        [title, *(f"  {name:<{width}}  {value}".replace("\n", indent).rstrip() for name, value in rows)]
    )


def format_bytes(count: float) -> str:
    """Return `count` bytes with three digits and a binary unit: 0 B, 1.50 KiB, 12.0 GiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1023.5:
            return f"{size:.0f} B" if unit == "B" else f"{_three_digits(size)} {unit}"
        size /= 1024
    return f"{_three_digits(size)} TiB"


def format_seconds(duration_s: float) -> str:
    """Return seconds as 850 ms, 12.3 s, 2 min 05 s or 1 h 02 min."""
    if duration_s < 0.9995:
        return f"{duration_s * 1000:.0f} ms"
    if duration_s < 59.95:
        return f"{duration_s:.1f} s"
    whole = round(duration_s)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(duration_s / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def start_rows(world: World) -> list[tuple[str, str]]:
    """Return the rows of the start-up report that the runtime knows."""
    device = world.device
    ranks = "1, no process group" if world.group is None else f"{world.world_size}, this is rank {world.rank}"
    rows = [
        ("device", f"{device} ({format_bytes(device.memory_total())})"),
        ("ranks", ranks),
        ("backend", world.backend or "none needed"),
    ]
    if world.group is not None:
        rows.append(("timeout", f"{format_seconds(world.timeout_s)} per collective"))
    rows += [("note", note) for note in world.notes]
    return [*rows, ("torch", f"{torch.__version__}, Python {platform.python_version()}")]


def _three_digits(size: float) -> str:
    return f"{size:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"
