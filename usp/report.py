"""What a call did: time per stage, tokens, bytes and memory of every rank."""

import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from runtime.device import Device
from runtime.process_group import World
from runtime.report import format_bytes, format_seconds
from runtime.world import gather_text

DECODE_LIMIT_S = 3600.0  # rank 0 may decode alone, while the others wait for its figures


@dataclass
class Stopwatch:
    """Marks of one call on this rank, in seconds. A mark waits for the device, so that a stage's work is in
    it."""

    device: Device
    started: float = field(default_factory=time.perf_counter)
    encoded: float | None = None
    steps: list[float] = field(default_factory=list)
    finished: float | None = None

    def mark_first_forward(self) -> None:
        """The transformer is about to run: encoding is over. Later calls do nothing."""
        if self.encoded is None:
            self.encoded = self._now()

    def mark_step(self) -> None:
        """A denoising step is over."""
        self.steps.append(self._now())

    def mark_end(self) -> None:
        """The call is over."""
        self.finished = self._now()

    def _now(self) -> float:
        self.device.synchronize()
        return time.perf_counter()

    def stages(self) -> dict[str, float]:
        """Seconds per stage: encode, denoise, decode, total."""
        assert self.finished is not None, "the call is not over"
        encoded = self.encoded if self.encoded is not None else self.started
        denoised = self.steps[-1] if self.steps else encoded
        return {
            "encode": encoded - self.started,
            "denoise": denoised - encoded,
            "decode": self.finished - denoised,
            "total": self.finished - self.started,
        }

    def step_seconds(self) -> list[float]:
        """Seconds of each step."""
        edges = [self.encoded if self.encoded is not None else self.started, *self.steps]
        return [late - early for early, late in pairwise(edges)]


@dataclass(frozen=True)
class CallReport:
    """The report of one call, alike on all ranks; lists are by rank. Times are rank 0's, in seconds."""

    seed: int | None
    parallel: str
    stages: dict[str, float]
    step_seconds: list[float]
    tokens: list[int]
    sent_bytes: list[int]
    peak_memory_bytes: list[int]
    cache: dict[str, dict[str, Any]] = field(default_factory=dict)
    cache_seconds_saved: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        return {
            "seed": self.seed,
            "parallel": self.parallel,
            "seconds": {name: round(value, 4) for name, value in self.stages.items()},
            "seconds_per_step": round(sum(self.step_seconds) / max(1, len(self.step_seconds)), 4),
            "steps": len(self.step_seconds),
            "tokens_per_rank": self.tokens,
            "bytes_sent_per_rank": self.sent_bytes,
            "peak_memory_bytes_per_rank": self.peak_memory_bytes,
            "cache": {name: {k: v for k, v in b.items() if k != "text"} for name, b in self.cache.items()},
            "cache_seconds_saved": round(self.cache_seconds_saved, 4),
        }

    def rows(self) -> list[tuple[str, str]]:
        """Rows for a report table."""
        mean = sum(self.step_seconds) / max(1, len(self.step_seconds))
        return [
            *((name, format_seconds(value)) for name, value in self.stages.items()),
            ("steps", f"{len(self.step_seconds)}, {format_seconds(mean)} each"),
            ("tokens per rank", " ".join(map(str, self.tokens))),
            ("sent per rank", " ".join(f"{format_bytes(count)}," for count in self.sent_bytes).rstrip(",")),
            (
                "peak memory per rank",
                " ".join(f"{format_bytes(n)}," for n in self.peak_memory_bytes).rstrip(","),
            ),
            *((f"cache {name}", branch["text"]) for name, branch in self.cache.items()),
            *(
                [("cache saved", f"about {format_seconds(self.cache_seconds_saved)}")]
                if self.cache_seconds_saved
                else []
            ),
            ("seed", str(self.seed) if self.seed is not None else "the caller's generator"),
        ]


def collect_report(
    world: World,
    watch: Stopwatch,
    *,
    seed: int | None,
    parallel: str,
    tokens: int,
    sent_bytes: int,
    cache: dict[str, dict[str, Any]],
    cache_seconds_saved: float,
) -> CallReport:
    """The report over all ranks from each rank's figures. Collective."""
    peak = world.device.memory_peak()
    mine = (watch.stages(), watch.step_seconds(), tokens, sent_bytes, peak, cache, cache_seconds_saved)
    stages, steps, all_tokens, sent, peaks, caches, saved = zip(*_gather(world, mine), strict=True)
    return CallReport(
        seed=seed,
        parallel=parallel,
        stages=stages[0],
        step_seconds=steps[0],
        tokens=list(all_tokens),
        sent_bytes=list(sent),
        peak_memory_bytes=list(peaks),
        cache={name: branch for found in reversed(caches) for name, branch in found.items()},
        cache_seconds_saved=saved[0],
    )


def _gather(world: World, mine: Any) -> list[Any]:
    """Every rank's plain value, through the store: no collective is open while rank 0 is still decoding."""
    if world.store is None:
        return [mine]
    key, value = world.next_key("report"), json.dumps(mine)
    limit = max(world.timeout_s, DECODE_LIMIT_S)
    return [json.loads(text) for text in gather_text(world, key, value, "the end report", limit)]
