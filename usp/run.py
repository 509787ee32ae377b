"""python -m usp.run wan-t2v: make a video with all ranks that torchrun started, or with one."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from runtime.process_group import World, connect, ending_together
from runtime.profiling import profile
from runtime.report import format_report
from usp import cli
from usp.job import Job, find, load, prepare
from usp.options import Fps, JobOptions, Layouts, Out, ProfileFolder
from usp.pipeline import ParallelPipeline
from usp.planner import choice_json, layouts_table
from usp.tasks import WAN_T2V, Task
from usp.video import check_output, to_bytes, write_contact_sheet, write_video

WRITE_LIMIT_S = 3600.0

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """Run a diffusion pipeline on one device, or under torchrun (or usprun) on several."""


def run(
    task: Task,
    options: JobOptions,
    *,
    layouts: Layouts = False,
    out: Out = None,
    fps: Fps = None,
    profile: ProfileFolder = None,
) -> None:
    """Make one video, or show the layouts that could."""
    path = out or Path(f"{task.name}.mp4")
    check_output(path)
    job = prepare(task, options, fps=fps)
    with connect(job.device, env=job.env, timeout_s=options.timeout) as world:
        if layouts:
            return show_layouts(job, world)
        make_video(job, world, path, traces=profile)


def make_video(job: Job, world: World, out: Path, *, traces: Path | None = None) -> None:
    """Load, run and write; rank 0 reports on stdout, the last line as JSON."""
    place: list[Callable[[], str]] = [lambda: "loading"]
    with ending_together(world, lambda: place[0]()):
        plain, config = load(job, world)
        with job.parallel(plain, config, world) as pipeline:
            place[0] = lambda: pipeline.place
            pipeline.set_progress_bar_config(desc="denoise", disable=not world.is_main)
            # Only rank 0 decodes: the others would make the same frames and throw them away.
            call = job.request.call_arguments() | {"output_type": "np" if world.is_main else "latent"}
            with profile(traces, world.device, world.rank) if traces else nullcontext():
                result = pipeline(**call, seed=job.options.seed)
            place[0] = lambda: "writing"
            write = partial(write_result, job, pipeline, result.frames, out)
            world.wait_for_main("writing", write, WRITE_LIMIT_S)


def show_layouts(job: Job, world: World) -> None:
    """Print every layout and what is predicted of it, the last line as JSON; reads no weights."""
    with ending_together(world, lambda: "the layouts"):
        choice = job.choose(world, find(job, world))
        Console(width=140, markup=False, highlight=False).print(layouts_table(choice))
        print(json.dumps(choice_json(choice)), flush=True)


def write_result(job: Job, pipeline: ParallelPipeline, frames: Any, out: Path) -> None:
    """Write the video and its contact sheet, and print the end report."""
    video = to_bytes(frames[0])
    sheet = out.with_suffix(".png")
    write_video(video, out, fps=job.request.fps)
    write_contact_sheet(video, sheet, caption=job.request.prompt)
    report = pipeline.report
    assert report is not None, "the call is over, so there is a report"
    if not any(report.tokens):  # every rank holds the whole sequence
        report = replace(report, tokens=[job.tokens] * job.env.world_size)
    rows = [
        ("video", f"{out} ({len(video)} frames of {video.shape[2]}x{video.shape[1]}, {job.request.fps} fps)")
    ]
    print(format_report("done", [*rows, ("contact sheet", str(sheet)), *report.rows()]))
    made = {"task": job.task.name, "out": str(out), "contact_sheet": str(sheet), "frames": len(video)}
    size = {"width": video.shape[2], "height": video.shape[1], "fps": job.request.fps}
    print(json.dumps(made | size | {"device": str(job.device)} | report.as_json()), flush=True)


cli.task_command(app, WAN_T2V, run)

if __name__ == "__main__":
    cli.main(app, "usp.run")
