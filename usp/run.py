"""python -m usp.run TASK: make a video or images with all ranks that torchrun started, or with one."""

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
from usp.images import check_image_output, write_images
from usp.job import Job, find, load, prepare
from usp.options import Fps, JobOptions, Layouts, Out, ProfileFolder
from usp.pipeline import ParallelPipeline
from usp.planner import choice_json, layouts_table
from usp.tasks import TASKS, Task
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
    """Make one video, or images of one prompt; or show the layouts that could."""
    path = out or Path(f"{task.name}{task.suffix}")
    if task.kind == "video":
        check_output(path)
    else:
        check_image_output(path, options.count)
    job = prepare(task, options, fps=fps, loads=not layouts)
    with connect(job.device, env=job.env, timeout_s=options.timeout) as world:
        if layouts:
            return show_layouts(job, world)
        make(job, world, path, traces=profile)


def make(job: Job, world: World, out: Path, *, traces: Path | None = None) -> None:
    """Load, run and write; rank 0 reports on stdout, the last line as JSON."""
    place: list[Callable[[], str]] = [lambda: "loading"]
    with ending_together(world, lambda: place[0]()):
        job = find(job, world)
        plain, config = load(job, world)
        with job.parallel(plain, config, world) as pipeline:
            place[0] = lambda: pipeline.place
            pipeline.set_progress_bar_config(desc="denoise", disable=not world.is_main)
            # Only rank 0 decodes: the others would make the same picture and throw it away.
            call = job.request.call_arguments() | {"output_type": "np" if world.is_main else "latent"}
            with profile(traces, world.device, world.rank) if traces else nullcontext():
                result = pipeline(**call, seed=job.options.seed)
            place[0] = lambda: "writing"
            write = partial(write_result, job, pipeline, result, out)
            world.wait_for_main("writing", write, WRITE_LIMIT_S)


def show_layouts(job: Job, world: World) -> None:
    """Print every layout and what is predicted of it, the last line as JSON; reads no weights."""
    with ending_together(world, lambda: "the layouts"):
        choice = find(job, world).choose(world)
        table = layouts_table(choice) if choice.candidates else choice.reason
        Console(width=140, markup=False, highlight=False).print(table)
        print(json.dumps(choice_json(choice)), flush=True)


def write_result(job: Job, pipeline: ParallelPipeline, result: Any, out: Path) -> None:
    """Write the video and its contact sheet, or the images, and print the end report."""
    write = _write_film if job.task.kind == "video" else _write_images
    rows, made = write(job, result, out)
    report = pipeline.report
    assert report is not None, "the call is over, so there is a report"
    if not any(report.tokens):  # every rank holds the whole sequence
        report = replace(report, tokens=[job.tokens] * job.env.world_size)
    print(format_report("done", [*rows, *report.rows()]))
    found = {"task": job.task.name, "out": str(out)} | made | {"device": str(job.device)}
    print(json.dumps(found | report.as_json()), flush=True)


def _write_film(job: Job, result: Any, out: Path) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    film, fps = to_bytes(result.frames[0]), job.request.fps
    sheet = out.with_suffix(".png")
    write_video(film, out, fps=fps)
    write_contact_sheet(film, sheet, caption=job.request.prompt)
    size = {"width": film.shape[2], "height": film.shape[1], "fps": fps}
    what = f"{out} ({len(film)} frames of {size['width']}x{size['height']}, {fps} fps)"
    made = {"contact_sheet": str(sheet), "frames": len(film)} | size
    return [("video", what), ("contact sheet", str(sheet))], made


def _write_images(job: Job, result: Any, out: Path) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    pixels = to_bytes(result.images)
    files = [str(file) for file in write_images(pixels, out)]
    size = {"width": pixels.shape[2], "height": pixels.shape[1]}
    rows = [("image", f"{file} ({size['width']}x{size['height']})") for file in files]
    return rows, {"images": files} | size


for task in TASKS.values():
    cli.task_command(app, task, run)

if __name__ == "__main__":
    cli.main(app, "usp.run")
