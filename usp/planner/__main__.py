"""python -m usp.planner: project a model onto more ranks, or hold predictions against measurements."""

import json
from dataclasses import replace
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from runtime.device import detect_device
from runtime.process_group import connect, ending_together, read_rank_env
from runtime.report import format_bytes, format_seconds
from usp import cli, options
from usp.bench.ideal import BlockStack
from usp.bench.rounds import pin
from usp.config import ParallelConfig
from usp.model_folder import read_model_folder
from usp.planner.choose import candidate_cells, candidate_json, plan
from usp.planner.cost import Workload, predict
from usp.planner.fit import fit
from usp.planner.machine import LINKS, Machine, parse_link
from usp.planner.models import workload_of_config, workload_of_folder
from usp.tasks import WAN_T2V, model_path, settle

RANKS = (8, 16, 32, 64)
SHOWN = 3  # layouts of each number of ranks
ITEMSIZES = {"fp32": 4, "bf16": 2, "fp16": 2}

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

SHAPE, MACHINE, TIMING = "Workload", "Machine", "Timing"

Tokens = Annotated[int, typer.Option(help="Tokens of the whole sequence.", rich_help_panel=SHAPE, min=1)]
Counts = Annotated[
    list[int] | None, typer.Option("--tokens", help="Repeat; 1024, 2048.", rich_help_panel=SHAPE, min=1)
]
Heads = Annotated[int, typer.Option(help="Attention heads.", rich_help_panel=SHAPE, min=1)]
HeadDim = Annotated[int, typer.Option(help="Size of a head.", rich_help_panel=SHAPE, min=1)]
Layers = Annotated[int, typer.Option(help="Transformer blocks.", rich_help_panel=SHAPE, min=1)]
Ffn = Annotated[int, typer.Option(help="Width of the feed-forward layer.", rich_help_panel=SHAPE, min=1)]
Text = Annotated[int, typer.Option(help="Text tokens.", rich_help_panel=SHAPE, min=0)]
Branches = Annotated[int, typer.Option(help="Guidance branches.", rich_help_panel=SHAPE, min=1)]
Dtype = Annotated[str, typer.Option(help="fp32, bf16 or fp16.", rich_help_panel=SHAPE)]
Folder = Annotated[
    str | None, typer.Option("--model", help="A Wan folder, for all of these.", rich_help_panel=SHAPE)
]
LinkName = Annotated[
    str, typer.Option("--link", help="A class, or '25GB/s,20us'; see links.", rich_help_panel=MACHINE)
]
Between = Annotated[str, typer.Option(help="The link between hosts.", rich_help_panel=MACHINE)]
PerHost = Annotated[int, typer.Option(help="Ranks of one host.", rich_help_panel=MACHINE, min=1)]
Tflops = Annotated[float, typer.Option(help="Of matrix products.", rich_help_panel=MACHINE, min=0.001)]
AttentionTflops = Annotated[float, typer.Option(help="Of attention.", rich_help_panel=MACHINE, min=0.001)]
Bandwidth = Annotated[float, typer.Option(help="Of memory, GB/s.", rich_help_panel=MACHINE, min=0.001)]
Memory = Annotated[float, typer.Option(help="GiB of each rank.", rich_help_panel=MACHINE, min=0.001)]
Ranks = Annotated[
    list[int] | None, typer.Option(help="Repeat; 8, 16, 32, 64.", rich_help_panel=MACHINE, min=1)
]
Rounds = Annotated[int, typer.Option(help="Timed, interleaved.", rich_help_panel=TIMING, min=1)]


@app.callback()
def about() -> None:
    """Predict the time, bytes and memory of every layout."""


@app.command()
def links() -> None:
    """The link classes, and where their figures are from."""
    table = _table("nominal figures; messages reach 80 % of the bandwidth")
    for column in ("class", "all-to-all", "ring", "per message", "source"):
        table.add_column(column)
    for name, link in LINKS.items():
        mesh, ring = link.all_to_all, link.ring
        one = min(ring.bytes_per_s, link.wire or ring.bytes_per_s)
        rates = [f"{rate / 1e9:.3g} GB/s" for rate in (mesh.bytes_per_s, one)]
        table.add_row(name, *rates, f"{mesh.latency_s * 1e6:.0f} us", link.source)
    _print(table)


@app.command()
def simulate(
    tokens: Tokens = 32760,
    heads: Heads = 40,
    head_dim: HeadDim = 128,
    layers: Layers = 40,
    ffn: Ffn = 13824,
    text: Text = 512,
    branches: Branches = 2,
    dtype: Dtype = "bf16",
    model: Folder = None,
    size: options.Size = None,
    frames: options.Frames = None,
    guidance: options.Guidance = None,
    link: LinkName = "nvlink",
    between: Between = "roce",
    per_host: PerHost = 8,
    tflops: Tflops = 400,
    attention_tflops: AttentionTflops = 300,
    bandwidth: Bandwidth = 2500,
    memory: Memory = 80,
    ranks: Ranks = None,
) -> None:
    """Project a model onto ranks that are not here; the defaults are Wan 2.1 14B, 832x480, 81 frames."""
    itemsize = _itemsize(dtype)
    if model is None:
        if size is not None or frames is not None or guidance is not None:
            raise ValueError(
                "--size, --frames and --guidance belong to --model; give --tokens and --branches"
            )
        config = {"num_attention_heads": heads, "attention_head_dim": head_dim, "num_layers": layers}
        config |= {"ffn_dim": ffn, "out_channels": 16, "patch_size": (1, 2, 2)}
        workload = workload_of_config(
            config, tokens=tokens, itemsize=itemsize, branches=branches, parameter_bytes=0, text_tokens=text
        )
        workload = replace(workload, parameter_bytes=workload.block_parameters * itemsize)
    else:
        workload = _of_model(model, size, frames, guidance, itemsize)
    machine = Machine(
        matmul_flops=tflops * 1e12,
        attention_flops=attention_tflops * 1e12,
        memory_bytes_per_s=bandwidth * 1e9,
        memory_bytes=round(memory * 2**30),
        operator_s=3e-6,
        link=parse_link(link),
        far_link=parse_link(between),
        domain=per_host,
        overlap=1.0,
        source=f"{parse_link(link).source}; between hosts {parse_link(between).source}",
    )
    _project(workload, machine, sorted(set(ranks or RANKS)), names=(link, between))


@app.command(name="fit")
def fit_command(
    tokens: Counts = None,
    layers: Layers = 4,
    heads: Heads = 12,
    head_dim: HeadDim = 64,
    ffn: Ffn = 3072,
    text: Text = 128,
    branches: Branches = 2,
    rounds: Rounds = 5,
    device: options.DeviceName = None,
) -> int:
    """Predict and run every layout of the ranks that torchrun started, on Wan blocks in fp32."""
    env = read_rank_env()
    if env.world_size == 1:
        raise ValueError("one rank has one layout; start with torchrun --nproc-per-node 2 -m usp.planner fit")
    if text == 0:
        raise ValueError("--text 0 was given; Wan blocks attend to a text; use 1 or more")
    here = detect_device(device, local_rank=env.local_rank, world_size=env.world_size)
    pin(env.local_rank, env.local_world_size)
    stack = BlockStack(layers=layers, heads=heads, head_dim=head_dim, ffn=ffn, text=text)
    with connect(here, env=env) as world, ending_together(world, lambda: "the fit"):
        return fit(world, stack, tokens or (1024, 2048), branches=branches, rounds=rounds)


def _project(workload: Workload, machine: Machine, ranks: list[int], *, names: tuple[str, str]) -> None:
    """Print the best layouts of each number of ranks, and the same as JSON."""
    alone = replace(machine, domain=None)
    single = predict(workload, alone, ParallelConfig()).seconds
    print("PROJECTION from a cost model and nominal figures; none of these layouts was run.")
    print(
        f"  workload: {workload.tokens} tokens, {workload.layers} layers of {workload.heads} heads x "
        f"{workload.head_dim}, {workload.branches} branches, weights {format_bytes(workload.parameter_bytes)}"
    )
    print(
        f"  machine: {machine.matmul_flops / 1e12:.3g} TFLOP/s in matrix products, "
        f"{machine.attention_flops / 1e12:.3g} in attention; {machine.domain} ranks per host\n"
        f"  link {names[0]}: {machine.link.source}\n"
        f"  between hosts {names[1]}: {machine.far_link.source if machine.far_link else ''}"
    )
    table = _table(f"projected; one rank {format_seconds(single)} per step")
    for column in ("ranks", "layout", "per step", "speed-up", "of ideal", "exchange", "sent", "memory", ""):
        table.add_column(column, justify="left" if column == "layout" else "right")
    found = []
    for count in ranks:
        local = replace(machine, domain=None) if count <= (machine.domain or count) else machine
        candidates = plan(workload, local, count)
        usable = [c for c in candidates if c.refusal is None]
        for candidate in (usable or candidates)[:SHOWN]:
            cells = candidate_cells(candidate, single)
            ideal = f"{single / candidate.prediction.seconds / count:.0%}"
            table.add_row(str(count), *cells[:3], ideal, *cells[3:], candidate.refusal or "")
        layouts = [candidate_json(c, single) for c in candidates]
        found.append({"ranks": count, "layouts": layouts})
    _print(table)
    print(json.dumps({"command": "simulate", "projection": True, "one_rank_s": single, "runs": found}))


def _of_model(
    model: str, size: str | None, frames: int | None, guidance: float | None, itemsize: int
) -> Workload:
    folder = model_path(model)
    if folder is None:
        raise ValueError(f"model {model!r} is a hub name; download it and give the folder")
    facts = read_model_folder(folder, pipeline=WAN_T2V.pipeline, weights=False)
    given = {"prompt": "", "num_frames": frames, "guidance_scale": guidance}
    request = settle(WAN_T2V, bundled=False, size=size, **given)
    sizes = {"width": request.width, "height": request.height, "num_frames": request.num_frames}
    facts.check_size(**sizes)
    workload = workload_of_folder(facts, request.call_arguments(), itemsize=itemsize)
    assert workload is not None, "Wan's sequence can be spread"
    return workload


def _itemsize(dtype: str) -> int:
    if dtype not in ITEMSIZES:
        raise ValueError(f"dtype {dtype!r} is not known; use one of {', '.join(ITEMSIZES)}")
    return ITEMSIZES[dtype]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE)


def _print(table: Table) -> None:
    Console(width=140, markup=False, highlight=False).print(table)


if __name__ == "__main__":
    cli.main(app, "usp.planner")
