"""What the bench prints: where it ran, what was to be expected, what was measured, and all of it as JSON."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from runtime.process_group import World
from runtime.report import format_bytes, format_report
from usp.bench.ideal import Link, ideal_ratio
from usp.bench.rounds import Row

PACKAGES = ("diffusers", "yunchang", "xfuser")


def surroundings(world: World, threads: str) -> dict[str, Any]:
    """Hardware, backend, versions and commit."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "device": str(world.device),
        "ranks": world.world_size,
        "threads": threads,
        "backend": world.backend,
        "versions": versions | {name: metadata.version(name) for name in PACKAGES if util.find_spec(name)},
        "commit": _commit(),
    }


def print_header(command: str, info: dict[str, Any], link: Link | None, shape: dict[str, Any]) -> None:
    """Where and what, before anything is timed."""
    wire = "none" if link is None else f"{info['backend']}, {_link_text(link)}"
    rows = [
        ("hardware", f"{info['cpu']}, {info['cores']} cores, load {info['load']}; {info['device']}"),
        ("ranks", f"{info['ranks']}; threads: {info['threads']}"),
        ("link", wire),
        ("versions", ", ".join(f"{name} {number}" for name, number in info["versions"].items())),
        ("commit", info["commit"] or "not in git"),
        ("shape", ", ".join(f"{name} {value}" for name, value in shape.items())),
    ]
    print(format_report(f"usp.bench {command}", rows), flush=True)


def print_expected(tokens: int, rows: Sequence[Row], single_s: float, link: Link | None) -> None:
    """The ideal, before the rounds: one process's time is that of the warm-up."""
    title = f"{tokens} tokens: the ideal, from one process's {1000 * single_s:.1f} ms in the warm-up"
    table = new_table(title, "contender", "work left", "least sent per rank", "exchanges", "ideal speed-up")
    for row in rows:
        name, work, least = row.contender.name, row.contender.work, row.contender.least
        best = f"{ideal_ratio(single_s, work, least, link):.2f}"
        table.add_row(name, f"{work:.1%}", format_bytes(max(least.sent)), str(least.exchanges), best)
    show(table)


def print_measured(tokens: int, rows: Sequence[Row], singles: list[float], link: Link | None) -> None:
    """Median and spread of each contender, its speed-up round by round, its bytes and its error."""
    table = new_table(
        f"{tokens} tokens: measured in {len(singles)} rounds, median [min - max]",
        *("contender", "ms", "speed-up", "% of ideal", "sent / least", "max abs error"),
    )
    table.add_row("one process", spread(singles, 1, 1000), "1", "", "", "")
    for row in rows:
        if row.fault is not None:
            continue
        best = ideal_ratio(median(singles), row.contender.work, row.contender.least, link)
        times, ratios = spread(row.seconds, 1, 1000), spread(row.ratios, 2)
        of_ideal = f"{median(row.ratios) / best:.0%}"
        table.add_row(row.contender.name, times, ratios, of_ideal, _bytes_text(row), f"{row.error:.1e}")
    show(table)
    ahead = lead(rows)
    if ahead is not None:
        ours, peer, ratios = ahead
        print(
            f"  best of ours {ours} against best peer {peer}, round by round: {spread(ratios, 3)} x as fast"
        )
    for row in rows:
        if row.fault is not None:
            print(f"  {row.contender.name} failed: {row.fault}")
    ran = [row for row in rows if row.fault is None]
    for note in dict.fromkeys(note for row in ran for note in row.contender.notes):
        print(f"  {note}")


def lead(rows: Sequence[Row]) -> tuple[str, str, list[float]] | None:
    """The names of our fastest and of the fastest peer, and how much faster ours was in each round.

    Fastest by median. None if there is no peer that ran.
    """
    ours = [row for row in rows if row.contender.peer is None and row.seconds]
    peers = [row for row in rows if row.contender.peer is not None and row.seconds]
    if not ours or not peers:
        return None
    one, other = (min(group, key=lambda row: median(row.seconds)) for group in (ours, peers))
    ratios = [theirs / mine for mine, theirs in zip(one.seconds, other.seconds, strict=True)]
    return one.contender.name, other.contender.name, ratios


def as_json(tokens: int, rows: Sequence[Row], singles: list[float], link: Link | None) -> dict[str, Any]:
    """One token count's results as plain values; times in seconds."""
    ahead = lead(rows)
    return {
        "tokens": tokens,
        "one_process_s": numbers(singles),
        "contenders": [_row_json(row, median(singles), link) for row in rows],
        "lead": ahead and {"ours": ahead[0], "peer": ahead[1], "ratio": numbers(ahead[2])},
    }


def link_json(link: Link | None) -> dict[str, float] | None:
    """The link as plain values."""
    if link is None:
        return None
    return {"latency_s": round(link.latency_s, 7), "bytes_per_s": round(link.bytes_per_s)}


def _row_json(row: Row, single_s: float, link: Link | None) -> dict[str, Any]:
    contender = row.contender
    found: dict[str, Any] = {"name": contender.name, "peer": contender.peer, "notes": list(contender.notes)}
    if row.fault is not None:
        return found | {"failed": row.fault}
    return found | {
        "seconds": numbers(row.seconds),
        "speedup": numbers(row.ratios),
        "ideal_speedup": round(ideal_ratio(single_s, contender.work, contender.least, link), 4),
        "sent_bytes_per_rank": row.sent,
        "least_bytes_per_rank": list(contender.least.sent),
        "max_abs_error": row.error,
    }


def numbers(values: list[float]) -> dict[str, float]:
    """Median, least and most, to five digits."""
    found = {"median": median(values), "min": min(values), "max": max(values)}
    return {name: float(f"{value:.5g}") for name, value in found.items()}


def spread(values: list[float], digits: int, scale: float = 1.0) -> str:
    """ "median [least - most]"."""
    middle, low, high = (f"{scale * f(values):.{digits}f}" for f in (median, min, max))
    return f"{middle} [{low} - {high}]"


def _bytes_text(row: Row) -> str:
    if row.sent is None:
        return "not counted"
    return f"{format_bytes(max(row.sent))} {'=' if row.sends_the_least else '!='} least"


def _link_text(link: Link) -> str:
    return f"{link.bytes_per_s / 2**30:.2f} GiB/s each way, {link.latency_s * 1e6:.0f} us per exchange"


def new_table(title: str, *columns: str) -> Table:
    """An empty table; the columns are right-aligned, names to the left."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in columns:
        table.add_column(column, justify="left" if column == "contender" else "right")
    return table


def show(table: Table) -> None:
    """Print a table, 120 wide also where the output is no terminal."""
    Console(width=120, markup=False, highlight=False).print(table)


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model", "hardware")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit that this file belongs to, marked if the code differs; None where there is none."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    if not git("ls-files", Path(__file__).name):  # installed, perhaps inside another repository
        return None
    changes = git("status", "--porcelain", "--", ":/usp", ":/runtime")
    return f"{git('rev-parse', '--short', 'HEAD')}{' and changes' if changes else ''}"
