"""`profile`: a trace of each rank, for Perfetto or chrome://tracing, and a summary of where its time went."""

from __future__ import annotations

import gzip
import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.device import BACKENDS, COLLECTIVE_KERNELS, Device
from runtime.log import get_logger
from runtime.report import format_report, format_seconds

logger = get_logger(__name__)

Span = tuple[float, float]  # begin and end, microseconds

DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
DEVICE_BUSY = "Computing"  # the row in which a trace without kernels by category shows them
ANNOTATION = re.compile(rf"(?:{'|'.join(sorted(set(BACKENDS.values())))}):(\w+)")
KERNEL = re.compile(
    rf"(?:{'|'.join(COLLECTIVE_KERNELS.values())})(?!:)(?:(?:Dev)?Kernel_)?([A-Za-z]+)", re.IGNORECASE
)


@dataclass(frozen=True)
class Summary:
    """Where the time of one trace went, in seconds.

    `total` is from the first event to the last. `compute` is the time in which any operator ran, on the
    device where the trace shows its kernels, else on the host; `communication` that in which any collective
    ran, waiting for slower ranks included; `exposed` the part of it in which nothing was computed.
    `collectives` has the calls and seconds of each kind, the longest first.
    """

    total: float
    compute: float
    communication: float
    exposed: float
    collectives: dict[str, tuple[int, float]]

    def rows(self) -> list[tuple[str, str]]:
        """Rows of a report; each collective with its share of all collectives' seconds."""
        whole = max(self.total, 1e-9)
        alone = f", of it {format_seconds(self.exposed)} with nothing computed" if self.communication else ""
        summed = sum(seconds for _, seconds in self.collectives.values()) or 1.0
        return [
            ("total", format_seconds(self.total)),
            ("compute", f"{format_seconds(self.compute)} ({self.compute / whole:.0%})"),
            (
                "communication",
                f"{format_seconds(self.communication)} ({self.communication / whole:.0%}){alone}",
            ),
            *(
                (name, f"{calls} x, {format_seconds(seconds)}, {seconds / summed:.0%} of all collectives")
                for name, (calls, seconds) in self.collectives.items()
            ),
        ]


def trace_path(directory: Path, rank: int) -> Path:
    """Return where the trace of `rank` is kept."""
    return directory / f"trace-rank{rank}.json.gz"


@contextmanager
def profile(directory: Path, device: Device, rank: int = 0) -> Iterator[None]:
    """Record the body on this rank; leave a trace in `directory`, and on rank 0 log its summary.

    Each rank that is to be seen enters it, in any order: there is no collective in it. The trace is
    `trace-rank<rank>.json.gz`, written once the body is over; a body that raises leaves none. Recording
    slows the host down, and holds every event in memory: profile a few steps.
    Raises RuntimeError if the profiler of this device leaves no trace.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with device.profiler.profile() as recorded:
        yield
        device.synchronize()
    events = _keep(recorded, trace_path(directory, rank), device)
    if rank == 0:
        rows = [*summarise(events).rows(), ("trace", f"{trace_path(directory, rank)}, one for each rank")]
        logger.info(format_report("profile of rank 0", rows))


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace that `profile` left."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return _events_of(json.load(file))


def summarise(events: Iterable[dict[str, Any]]) -> Summary:
    """Return where the time of a Chrome trace's events went. Device work counts where there is any."""
    timed = [event for event in events if event.get("ph") == "X" and event.get("cat") != "Trace"]
    on_device = any(event.get("cat") in DEVICE_WORK or event.get("name") == DEVICE_BUSY for event in timed)
    collectives: dict[str, list[Span]] = defaultdict(list)
    computed: list[Span] = []
    for event in timed:
        if name := _collective(event, kernels=on_device):
            collectives[name].append(_span(event))
        elif _is_compute(event, on_device):
            computed.append(_span(event))
    if on_device and not collectives:  # a backend without kernels of its own in the trace
        for event in timed:
            if name := _collective(event, kernels=False):
                collectives[name].append(_span(event))
    communicated = [span for spans in collectives.values() for span in spans]
    compute, communication = union(computed), union(communicated)
    seconds = {name: sum(end - begin for begin, end in spans) / 1e6 for name, spans in collectives.items()}
    order = sorted(collectives, key=lambda name: -seconds[name])
    every = [_span(event) for event in timed]
    total = max((end for _, end in every), default=0.0) - min((begin for begin, _ in every), default=0.0)
    return Summary(
        total=total / 1e6,
        compute=_length(compute),
        communication=_length(communication),
        exposed=min(_length(union(compute + communication)) - _length(compute), _length(communication)),
        collectives={name: (len(collectives[name]), seconds[name]) for name in order},
    )


def union(spans: Sequence[Span]) -> list[Span]:
    """Return the same time as spans that neither meet nor overlap, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _length(spans: Sequence[Span]) -> float:
    """Seconds that disjoint spans cover."""
    return sum(end - begin for begin, end in spans) / 1e6


def _span(event: dict[str, Any]) -> Span:
    begin = float(event["ts"])  # some vendors write numbers as strings
    return begin, begin + float(event.get("dur", 0))


def _collective(event: dict[str, Any], *, kernels: bool) -> str | None:
    """The collective that an event is, by its kernel or by what the host noted of it; None if it is none."""
    if not kernels:
        noted = ANNOTATION.fullmatch(event["name"])
        return noted[1] if noted else None
    found = KERNEL.match(event["name"]) if event.get("cat") in (*DEVICE_WORK, None) else None
    return event.get("args", {}).get("Collective name") or found[1] if found else None


def _is_compute(event: dict[str, Any], on_device: bool) -> bool:
    if on_device:
        return event.get("cat") in DEVICE_WORK or event["name"] == DEVICE_BUSY
    return event.get("cat") == "cpu_op" and event["name"].startswith("aten::")


def _events_of(trace: Any) -> list[dict[str, Any]]:
    return trace if isinstance(trace, list) else trace["traceEvents"]


def _keep(recorded: Any, path: Path, device: Device) -> list[dict[str, Any]]:
    """Write the trace, compressed, under its name once it is whole; return its events."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}") as folder:
        plain = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(plain))
        if not plain.exists():
            raise RuntimeError(
                f"a trace of {device} was asked for; its profiler wrote none; look at its messages above, or "
                f"run without profiling"
            )
        text = plain.read_bytes()
        packed = Path(folder) / path.name
        with gzip.open(packed, "wb", compresslevel=3) as file:
            file.write(text)
        os.replace(packed, path)
    return _events_of(json.loads(text))
