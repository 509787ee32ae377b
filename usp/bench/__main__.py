"""The command line of the bench: `attention`, `transformer` and `cache`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from runtime.device import detect_device
from runtime.log import setup_logging
from runtime.process_group import World, connect, ending_together, read_rank_env
from usp import cli, options
from usp.bench import cache as cache_bench
from usp.bench import contenders, sheet
from usp.bench.ideal import BlockStack, Link, measure_link
from usp.bench.peers import check_peers, peer_contenders
from usp.bench.rounds import Compute, Contender, Row, end, pin, run_rounds, warm_up
from usp.config import CacheConfig, ParallelConfig
from usp.job import find, load, prepare
from usp.mesh import make_groups
from usp.tasks import WAN_T2V

TOKENS = (512, 1024, 4096)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCES = {"fp32": 1e-4, "bf16": 0.1, "fp16": 0.02}  # of our results; they are of the order of 1

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

SHAPE, TIMING, COMPARED = "Shape", "Timing", "Compared"
Tokens = Annotated[
    list[int] | None,
    typer.Option(help="Repeat for several; 512, 1024 and 4096.", rich_help_panel=SHAPE, min=1),
]
Heads = Annotated[int, typer.Option(help="Attention heads.", rich_help_panel=SHAPE, min=1)]
HeadDim = Annotated[int, typer.Option(help="Size of a head.", rich_help_panel=SHAPE, min=1)]
Dtype = Annotated[str, typer.Option(help="fp32, bf16 or fp16.", rich_help_panel=SHAPE)]
Layers = Annotated[int, typer.Option(help="Transformer blocks.", rich_help_panel=SHAPE, min=1)]
Ffn = Annotated[int, typer.Option(help="Width of the feed-forward layer.", rich_help_panel=SHAPE, min=1)]
Text = Annotated[int, typer.Option(help="Text tokens.", rich_help_panel=SHAPE, min=1)]
Rounds = Annotated[int, typer.Option(help="In each, all run once.", rich_help_panel=TIMING, min=1)]
Warmup = Annotated[int, typer.Option(help="Untimed runs of each.", rich_help_panel=TIMING, min=1)]
Strategies = Annotated[
    list[str] | None,
    typer.Option("--strategy", help="Like 'ulysses2'; repeat for several; all.", rich_help_panel=COMPARED),
]
Peers = Annotated[
    list[str] | None,
    typer.Option("--peer", help="diffusers, yunchang or xfuser; repeat.", rich_help_panel=COMPARED),
]
Thresholds = Annotated[
    list[float] | None,
    typer.Option("--threshold", help="Repeat; 0.02 to 0.24.", rich_help_panel=COMPARED),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", help="Repeat; three of the demo's.", rich_help_panel=SHAPE),
]
Plot = Annotated[
    Path | None, typer.Option("--plot", help="Also draw this PNG.", rich_help_panel=options.OUTPUT)
]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a command measures; `cases` gives one process's run, and those to compare, for a token count."""

    command: str
    tokens: Sequence[int]
    dtype: str
    rounds: int
    warmup: int
    device: str | None
    shape: dict[str, Any]
    cases: Callable[[World, int], tuple[Compute, list[Contender]]]


@app.callback()
def about() -> None:
    """Time strategies and peers against one process on one thread; under torchrun, over its ranks."""


@app.command()
def attention(
    tokens: Tokens = None,
    heads: Heads = 12,
    head_dim: HeadDim = 64,
    dtype: Dtype = "fp32",
    rounds: Rounds = 5,
    warmup: Warmup = 2,
    strategy: Strategies = None,
    transport: options.Transport = "auto",
    device: options.DeviceName = None,
) -> int:
    """One attention call: each rank's share in, each rank's share out."""
    torch_dtype, configs = _dtype(dtype), _configs(strategy, transport)

    def cases(world: World, count: int) -> tuple[Compute, list[Contender]]:
        whole = contenders.qkv(count, heads, head_dim, torch_dtype, world)
        ours = [contenders.attention_contender(world, config, whole) for config in configs]
        return contenders.attention_alone(whole), ours

    shape = {"heads": heads, "head_dim": head_dim, "dtype": dtype, "warm-up": warmup, "rounds": rounds}
    plan = {"command": "attention", "tokens": tokens or TOKENS, "dtype": dtype, "device": device}
    return measure(Plan(**plan, rounds=rounds, warmup=warmup, shape=shape, cases=cases))


@app.command()
def transformer(
    tokens: Tokens = None,
    layers: Layers = 4,
    heads: Heads = 12,
    head_dim: HeadDim = 64,
    ffn: Ffn = 3072,
    text: Text = 128,
    dtype: Dtype = "fp32",
    rounds: Rounds = 5,
    warmup: Warmup = 2,
    strategy: Strategies = None,
    peer: Peers = None,
    transport: options.Transport = "auto",
    device: options.DeviceName = None,
) -> int:
    """A forward of Wan blocks with random weights, whole in and whole out; peers run the same weights."""
    torch_dtype, configs = _dtype(dtype), _configs(strategy, transport)
    check_peers(peer or [], read_rank_env().world_size)
    stack = BlockStack(layers=layers, heads=heads, head_dim=head_dim, ffn=ffn, text=text)

    def cases(world: World, count: int) -> tuple[Compute, list[Contender]]:
        model = contenders.wan(stack, count, torch_dtype, world)
        inputs = contenders.wan_inputs(stack, count, torch_dtype, world)
        each = [contenders.transformer_contender(world, config, model, inputs, stack) for config in configs]
        for name in peer or []:
            each += peer_contenders(name, world, model, inputs, stack)
        return contenders.forward(model, inputs), each

    shape = {"layers": layers, "heads": heads, "head_dim": head_dim, "ffn": ffn, "text": text, "dtype": dtype}
    shape |= {"steps": 1, "warm-up": warmup, "rounds": rounds}
    plan = {"command": "transformer", "tokens": tokens or TOKENS, "dtype": dtype, "device": device}
    return measure(Plan(**plan, rounds=rounds, warmup=warmup, shape=shape, cases=cases))


@app.command()
def cache(
    threshold: Thresholds = None,
    prompt: Prompts = None,
    steps: Annotated[int, typer.Option(help="Denoising steps.", rich_help_panel=SHAPE, min=1)] = 30,
    size: options.Size = None,
    frames: options.Frames = None,
    guidance: options.Guidance = None,
    rounds: Rounds = 3,
    parallel: options.ParallelText = "auto",
    model: options.ModelName = None,
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = None,
    plot: Plot = None,
) -> int:
    """The first-block cache on a Wan pipeline: what each threshold gains, and how like the film stays."""
    cache_bench.check_plot(plot)
    thresholds = threshold or cache_bench.THRESHOLDS
    for value in thresholds:
        CacheConfig(threshold=value)
    if prompt is None and model is not None:
        raise ValueError("--model was given without a prompt; say what it shall show with --prompt")
    prompts = prompt or cache_bench.PROMPTS
    shape = {"size": size, "frames": frames, "steps": steps, "guidance": guidance}
    where = {"parallel": parallel, "model": model, "dtype": dtype, "device": device}
    job = prepare(WAN_T2V, options.JobOptions(prompt=prompts[0], **shape, **where))
    request = job.request
    threads = pin(job.env.local_rank, job.env.local_world_size)
    with connect(job.device, env=job.env) as world, ending_together(world, lambda: "the cache bench"):
        info = sheet.surroundings(world, threads)
        job = find(job, world)
        plain, config = load(job, world)
        plain.set_progress_bar_config(disable=True)
        job = replace(job, asked=config)
        shape = {"size": f"{request.width}x{request.height}", "frames": request.num_frames}
        shape |= {"steps": steps, "guidance": request.guidance_scale, "prompts": len(prompts)}
        shape |= {"parallel": str(config), "rounds": rounds}
        setup_logging(world.rank, world.world_size, "WARNING")  # else a report for each of many calls
        sheet.print_header("cache", info, None, shape)
        rows = cache_bench.compare_thresholds(
            plain, job, world, thresholds=thresholds, prompts=prompts, rounds=rounds
        )
        if plot is not None:
            cache_bench.draw_plot(world, rows, plot, f"{steps} steps, {config}")
        if world.is_main:
            cache_bench.print_rows(rows, steps)
            found = {"command": "cache", "shape": shape, "runs": cache_bench.rows_json(rows)}
            print(json.dumps(info | found), flush=True)
    return 0


@torch.no_grad()
def measure(plan: Plan) -> int:
    """Time and print everything, the last line as JSON. Returns 1 if our bytes or results are not right."""
    env = read_rank_env()
    device = detect_device(plan.device, local_rank=env.local_rank, world_size=env.world_size)
    threads = pin(env.local_rank, env.local_world_size)
    done: list[dict[str, Any]] = []
    sound = True
    with (
        connect(device, env=env) as world,
        ending_together(world, lambda: f"token count {len(done) + 1} of {len(plan.tokens)}"),
    ):
        link, info = _link(world), sheet.surroundings(world, threads)
        sheet.print_header(plan.command, info, link, plan.shape)
        for count in plan.tokens:
            alone, compared = plan.cases(world, count)
            single_s, rows = warm_up(world, alone, compared, plan.warmup)
            sheet.print_expected(count, rows, single_s, link)
            singles = run_rounds(world, alone, rows, plan.rounds)
            sheet.print_measured(count, rows, singles, link)
            done.append(sheet.as_json(count, rows, singles, link))
            sound = sound and all(is_sound(row, TOLERANCES[plan.dtype]) for row in rows)
            end(rows)
        found = {"command": plan.command, "sound": sound, "shape": plan.shape, "runs": done}
        print(json.dumps(info | {"link": sheet.link_json(link)} | found), flush=True)
    return 0 if sound else 1


def is_sound(row: Row, tolerance: float) -> bool:
    """Whether a row of ours has the right result and sent exactly what it must; peers are only reported."""
    return row.contender.peer is not None or (row.error <= tolerance and row.sends_the_least is True)


def _link(world: World) -> Link | None:
    if world.world_size == 1:
        return None
    groups = make_groups(ParallelConfig(ring_degree=world.world_size), rank=world.rank)
    link = world.broadcast_object(measure_link(groups.sp, world.device))
    groups.close()
    return link


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is not known; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _configs(strategy: list[str] | None, transport: str) -> list[ParallelConfig]:
    ranks = read_rank_env().world_size
    return [replace(config, transport=transport) for config in contenders.layouts(ranks, strategy or ())]


if __name__ == "__main__":
    cli.main(app, "usp.bench")
