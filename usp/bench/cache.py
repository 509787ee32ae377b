"""What the first-block cache gains and costs: speed-up and likeness to the uncached run, by threshold."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from runtime.process_group import World
from usp.bench import sheet
from usp.config import CacheConfig, ParallelConfig
from usp.files import write_whole
from usp.job import Job

THRESHOLDS = (0.02, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24)
PROMPTS = (  # of the bundled model: each shape, background and direction once
    "a red circle moving right on a blue background",
    "a yellow square moving up on a grey background",
    "a green triangle moving left on a black background",
)
PLOT_LIMIT_S = 300.0


@dataclass
class CacheRow:
    """What one threshold did; times in seconds by round, the rest by prompt. Frames are in 0..1."""

    threshold: float | None  # None: no cache
    seconds: list[float] = field(default_factory=list)  # of all prompts' denoising
    skipped: list[float] = field(default_factory=list)  # share of the forwards
    ssim: list[float] = field(default_factory=list)
    psnr: list[float] = field(default_factory=list)  # dB; infinite where the frames are the same

    def speedup(self, without: "CacheRow") -> list[float]:
        """Round by round, over the run without a cache."""
        return [plain / own for plain, own in zip(without.seconds, self.seconds, strict=True)]


def compare_thresholds(
    plain: Any, job: Job, world: World, *, thresholds: Sequence[float], prompts: Sequence[str], rounds: int
) -> list[CacheRow]:
    """Run every prompt without a cache and with each threshold, in interleaved rounds; the first row has
    none.

    Quality is that of the first round, on rank 0 alone: a call repeats to the bit. Collective.
    """
    rows = [CacheRow(None), *map(CacheRow, thresholds)]
    films: list[np.ndarray | None] = []
    for lap in range(-1, rounds):  # the first lap warms up
        for row in rows:
            seconds, found, skipped = _run(plain, job, world, row.threshold, prompts, decode=lap == 0)
            if lap >= 0:
                row.seconds.append(seconds)
            if lap != 0:
                continue
            films = films or found
            row.skipped = skipped
            for film, reference in zip(found, films, strict=True):
                if film is not None and reference is not None:
                    _judge(row, film, reference)
    return rows


def _run(
    plain: Any, job: Job, world: World, threshold: float | None, prompts: Sequence[str], *, decode: bool
) -> tuple[float, list[np.ndarray | None], list[float]]:
    """Seconds of denoising, the films where decoded, and the share of forwards skipped, by prompt."""
    cache = None if threshold is None else CacheConfig(threshold=threshold)
    job = replace(job, cache=cache)
    seconds, films, skipped = 0.0, [], []
    arguments = job.request.call_arguments()
    with job.parallel(plain, job.asked or ParallelConfig(), world) as pipeline:
        for seed, prompt in enumerate(prompts):
            shown = decode and world.is_main
            call = arguments | {"prompt": prompt, "output_type": "np" if shown else "latent"}
            result = pipeline(**call, seed=seed)
            assert pipeline.report is not None, "the call is over, so there is a report"
            seconds += pipeline.report.stages["denoise"]
            films.append(result.frames[0] if shown else None)
            branches = [branch["skipped"] for branch in pipeline.report.cache.values()]
            forwards = sum(map(len, branches))
            skipped.append(sum(map(sum, branches)) / forwards if forwards else 0.0)
    return seconds, films, skipped


def _judge(row: CacheRow, film: np.ndarray, reference: np.ndarray) -> None:
    pairs = list(zip(film, reference, strict=True))
    likeness = [structural_similarity(a, b, channel_axis=-1, data_range=1.0) for a, b in pairs]
    row.ssim.append(float(np.mean(likeness)))
    same = np.array_equal(film, reference)
    row.psnr.append(math.inf if same else float(peak_signal_noise_ratio(reference, film, data_range=1.0)))


def print_rows(rows: Sequence[CacheRow], steps: int) -> None:
    """The table for people."""
    without, *cached = rows
    title = f"{steps} steps, {len(without.ssim)} prompts, {len(without.seconds)} rounds, median [min - max]"
    columns = ("threshold", "denoising", "speed-up", "skipped", "SSIM (worst)", "PSNR dB (worst)")
    table = sheet.new_table(title, *columns)
    table.add_row("off", f"{median(without.seconds):.2f} s", "1", "", "", "")
    for row in cached:
        times, ratios = f"{median(row.seconds):.2f} s", sheet.spread(row.speedup(without), 2)
        likeness = f"{mean(row.ssim):.4f} ({min(row.ssim):.4f})"
        noise = f"{_mean_psnr(row):.1f} ({min(row.psnr):.1f})"
        table.add_row(f"{row.threshold:g}", times, ratios, f"{mean(row.skipped):.0%}", likeness, noise)
    sheet.show(table)


def rows_json(rows: Sequence[CacheRow]) -> list[dict[str, Any]]:
    """The rows as plain values; an infinite PSNR is None."""
    without = rows[0]
    return [
        {
            "threshold": row.threshold,
            "denoise_s": sheet.numbers(row.seconds),
            "speedup": sheet.numbers(row.speedup(without)),
            "skipped": [round(share, 4) for share in row.skipped],
            "ssim": [round(value, 6) for value in row.ssim],
            "psnr_db": [round(value, 3) if math.isfinite(value) else None for value in row.psnr],
        }
        for row in rows
    ]


def check_plot(path: Path | None) -> None:
    """Raise ValueError unless a plot can be drawn to `path`, if one is asked for."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise ValueError(f"plot {path} was asked for; plots are PNG images; use a name that ends in .png")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "a plot was asked for; matplotlib is not installed; pip install 'usp[plot]'"
        ) from error


def draw_plot(world: World, rows: Sequence[CacheRow], path: Path, title: str) -> None:
    """A PNG of speed-up and SSIM over the threshold, written by rank 0. Collective."""
    world.wait_for_main("drawing", partial(_draw, rows, path, title), PLOT_LIMIT_S)


def _draw(rows: Sequence[CacheRow], path: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    without, *cached = rows
    thresholds = [row.threshold or 0.0 for row in cached]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    right = left.twinx()
    speed = [median(row.speedup(without)) for row in cached]
    (fast,) = left.plot(thresholds, speed, "o-", color="tab:blue", label="speed-up of denoising")
    (like,) = right.plot(
        thresholds, [mean(r.ssim) for r in cached], "s-", color="tab:red", label="SSIM, mean"
    )
    worst = [min(row.ssim) for row in cached]
    (least,) = right.plot(thresholds, worst, "v--", color="tab:red", alpha=0.5, label="SSIM, worst prompt")
    left.set(xlabel="threshold of the first-block cache", ylabel="speed-up", title=title)
    left.set_ylim(bottom=1)
    right.set_ylabel("SSIM against the uncached run")
    left.grid(alpha=0.3)
    figure.legend(handles=[fast, like, least], loc="outside lower center", ncols=3)
    write_whole(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))


def _mean_psnr(row: CacheRow) -> float:
    return mean(row.psnr) if all(map(math.isfinite, row.psnr)) else math.inf
