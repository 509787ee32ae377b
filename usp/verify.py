"""python -m usp.verify wan-t2v: run N ranks and one on the same seed, and print how far they are apart."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from skimage.metrics import structural_similarity

from runtime import fused
from runtime.log import get_logger
from runtime.process_group import World, connect, ending_together
from usp import cli
from usp.config import ParallelConfig, parse_parallel, spellings
from usp.job import Job, find, load, prepare
from usp.options import OUTPUT, PARALLEL, JobOptions
from usp.planner import plan_of_folder
from usp.tasks import TASKS, Task

TOLERANCES = {
    torch.float32: 1e-4,
    torch.bfloat16: 0.1,
    torch.float16: 0.02,
}  # at the latents, whose scale is 1
REFERENCE_LIMIT_S = 24 * 3600.0

logger = get_logger(__name__)
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Everything = Annotated[
    bool, typer.Option("--all", help="Sweep all strategies and degrees.", rich_help_panel=PARALLEL)
]
Tolerance = Annotated[
    float | None,
    typer.Option(help="Largest error of the latents; 1e-4 for fp32.", rich_help_panel=OUTPUT),
]


@app.callback()
def about() -> None:
    """Compare a run on all ranks with a run on one, step by step; exit code 1 if they differ too much."""


def compare(
    task: Task, options: JobOptions, *, everything: Everything = False, tolerance: Tolerance = None
) -> int:
    """Run on one rank and on all, and compare."""
    if everything and (options.attention is not None or options.parallel != "auto"):
        raise ValueError(
            "--all sweeps every strategy, and --parallel or --attention names one; leave one of them out"
        )
    job = prepare(task, options)
    limit = tolerance if tolerance is not None else TOLERANCES[job.dtype]
    with connect(job.device, env=job.env, timeout_s=options.timeout) as world:
        return verify(job, world, everything=everything, limit=limit)


@dataclass(frozen=True)
class Trace:
    """The latents after each step, on the CPU, and the frames (T, H, W, 3) in 0..1 where decoded."""

    latents: list[torch.Tensor]
    frames: np.ndarray | None


@dataclass(frozen=True)
class Comparison:
    """One layout against one process: max abs errors (worst rank), SSIM of the frames, mean over frames."""

    parallel: str
    latents: list[float]  # per step
    frames: float
    ssim: float

    def passes(self, limit: float) -> bool:
        """Whether every step's latents are within `limit`; NaN is not."""
        return all(error <= limit for error in self.latents)


def verify(job: Job, world: World, *, everything: bool, limit: float) -> int:
    """Run the reference on rank 0, then each layout on all ranks; print the table. Returns the exit code."""
    running = ["loading"]
    with ending_together(world, lambda: running[0]):
        job = find(job, world)
        plain, config = load(job, world)
        plain.set_progress_bar_config(desc="verify", disable=not world.is_main)
        seed = job.options.seed
        seed = world.broadcast_object(seed if seed >= 0 else torch.seed() % 2**31)
        running[0] = "the one-process run"
        alone = partial(_alone, plain, job, world, seed)
        reference = _share(world, world.wait_for_main("the one-process run", alone, REFERENCE_LIMIT_S))
        layouts = _every_layout(job, world.world_size) if everything else [config]
        found = []
        for layout in layouts:
            running[0] = f"the run on {layout}"
            with job.parallel(plain, layout, world) as pipeline:
                trace = _traced(pipeline, job, decode=world.is_main, seed=seed)
            found.append(_compare(world, str(layout), trace, reference))
        if world.is_main:
            _print(found, job, seed=seed, ranks=world.world_size, limit=limit)
        return 0 if all(c.passes(limit) for c in found) else 1


def _every_layout(job: Job, world_size: int) -> list[ParallelConfig]:
    """Every layout of that many ranks that the model can take; cfg3 only where there are three branches."""
    if not plan_of_folder(job.model).attentions:
        return [ParallelConfig(cfg_degree=world_size)]
    found = [parse_parallel(text.strip("'")) for text in spellings(world_size)]
    most = max(2, job.branches)
    return [config for config in found if config.cfg_degree <= most]


def _alone(plain: Any, job: Job, world: World, seed: int) -> Trace:
    """The run of one process: diffusers' own pipeline.

    With a cache it is one under our wrapper, since decisions are to be the same; also on a device that has
    fused operators, since diffusers calls some by itself that give another picture, or an error, and on one
    without complex numbers.
    """
    as_it_is = world.device.kind not in fused.KINDS and world.device.supports_complex
    if job.cache is None and as_it_is:
        return _traced(plain, job, decode=True, generator=torch.Generator("cpu").manual_seed(seed))
    lone = World(0, 1, world.local_rank, world.device)
    with job.parallel(plain, ParallelConfig(), lone) as pipeline:
        return _traced(pipeline, job, decode=True, seed=seed)


def _traced(pipeline: Callable[..., Any], job: Job, *, decode: bool, **call: Any) -> Trace:
    """Call a pipeline and keep its latents after each step."""
    latents = []

    def keep(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        latents.append(tensors["latents"].detach().float().cpu().clone())
        return tensors

    output = "np" if decode else "latent"
    result = pipeline(**job.request.call_arguments(), **call, output_type=output, callback_on_step_end=keep)
    picture = result.frames[0] if job.task.kind == "video" else result.images
    return Trace(latents, picture if decode else None)


def _share(world: World, trace: Trace | None) -> Trace:
    """Rank 0's latents on every rank, one step at a time; its frames stay there."""
    if world.world_size == 1:
        assert trace is not None, "the only rank ran it"
        return trace
    shapes = world.broadcast_object([tuple(x.shape) for x in trace.latents] if trace else None)
    latents = []
    for step, shape in enumerate(shapes or ()):
        latent = trace.latents[step] if trace else torch.empty(shape)
        on_device = latent.to(world.device.torch_device)
        dist.broadcast(on_device, 0)
        latents.append(on_device.cpu())
    return Trace(latents, trace.frames if trace else None)


def _compare(world: World, parallel: str, trace: Trace, reference: Trace) -> Comparison:
    """The comparison, alike on all ranks: each rank checks its own latents and the worst counts."""
    errors = torch.tensor(
        [(a - b).abs().max().item() for a, b in zip(trace.latents, reference.latents, strict=True)]
    )
    if world.world_size > 1:
        errors = errors.nan_to_num(nan=torch.inf).to(world.device.torch_device)
        dist.all_reduce(errors, dist.ReduceOp.MAX)
    frames, ssim = 0.0, 1.0
    if trace.frames is not None and reference.frames is not None:
        frames = float(np.abs(trace.frames - reference.frames).max())
        pairs = zip(trace.frames, reference.frames, strict=True)
        ssim = float(
            np.mean([structural_similarity(a, b, channel_axis=-1, data_range=1.0) for a, b in pairs])
        )
    return Comparison(parallel, errors.cpu().tolist(), frames, ssim)


def _print(found: list[Comparison], job: Job, *, seed: int, ranks: int, limit: float) -> None:
    print(f"{ranks} ranks against one process, seed {seed}, {job.dtype}, tolerance {limit:g}")
    table = Table()
    for column in ("parallel", "latents, worst step", "frames (0..1)", "SSIM", ""):
        table.add_column(column, justify="left" if column == "parallel" else "right")
    for c in found:
        verdict = "ok" if c.passes(limit) else "TOO FAR"
        table.add_row(c.parallel, f"{max(c.latents):.2e}", f"{c.frames:.2e}", f"{c.ssim:.6f}", verdict)
    Console(width=100).print(table)
    if len(found) == 1:
        print("latents, max abs error after each step: " + " ".join(f"{e:.1e}" for e in found[0].latents))
    rows = [{"parallel": c.parallel, "latents": c.latents, "frames": c.frames, "ssim": c.ssim} for c in found]
    passed = all(c.passes(limit) for c in found)
    for row in rows:  # JSON has no infinity
        row["latents"] = [error if math.isfinite(error) else None for error in row["latents"]]
        row |= {name: row[name] if math.isfinite(row[name]) else None for name in ("frames", "ssim")}
    print(json.dumps({"ranks": ranks, "seed": seed, "tolerance": limit, "passed": passed, "runs": rows}))


for task in TASKS.values():
    cli.task_command(app, task, compare, seed=0)

if __name__ == "__main__":
    cli.main(app, "usp.verify")
