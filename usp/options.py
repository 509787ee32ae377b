"""The options that commands share: one name, one option; `JobOptions` has those of every job."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

PICTURE, PARALLEL, MODEL, OUTPUT = "Picture", "Parallel", "Model", "Output"

Prompt = Annotated[str | None, typer.Option(help="What it shows.", rich_help_panel=PICTURE)]
NegativePrompt = Annotated[str | None, typer.Option(help="What it shall not show.", rich_help_panel=PICTURE)]
Images = Annotated[
    list[Path] | None,
    typer.Option("--image", help="An input image; repeat for several.", rich_help_panel=PICTURE),
]
Count = Annotated[int, typer.Option("--count", help="Images to make of one prompt.", rich_help_panel=PICTURE)]
Size = Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels.", rich_help_panel=PICTURE)]
Frames = Annotated[int | None, typer.Option(help="Number of frames.", rich_help_panel=PICTURE)]
Steps = Annotated[int | None, typer.Option(help="Denoising steps.", rich_help_panel=PICTURE)]
Guidance = Annotated[float | None, typer.Option(help="Guidance scale; 1 is off.", rich_help_panel=PICTURE)]
Seed = Annotated[int, typer.Option(help="Noise seed; -1 draws one.", rich_help_panel=PICTURE)]
Scheduler = Annotated[
    str | None,
    typer.Option(
        help="euler, heun, lcm, unipc, dpm++ ...; the task decides. (default: the model's)",
        rich_help_panel=PICTURE,
    ),
]
ParallelText = Annotated[
    str, typer.Option("--parallel", help="auto, or like 'ulysses2 ring2'.", rich_help_panel=PARALLEL)
]
AttentionName = Annotated[
    str | None,
    typer.Option(
        "--attention",
        help="All ranks on one axis: ulysses, gather-kv, ring; or an engine: yunchang, xfuser.",
        rich_help_panel=PARALLEL,
    ),
]
Kernel = Annotated[str, typer.Option(help="Local attention kernel, or auto.", rich_help_panel=PARALLEL)]
FusedMode = Annotated[
    str,
    typer.Option("--fused", help="Vendor's norms, RoPE, gates: auto, on, off.", rich_help_panel=PARALLEL),
]
Transport = Annotated[
    str,
    typer.Option(help="auto; all_to_all or p2p if the other is broken.", rich_help_panel=PARALLEL),
]
Cache = Annotated[
    float | None,
    typer.Option(
        "--cache", help="First-block cache: skip below this change, e.g. 0.12.", rich_help_panel=PARALLEL
    ),
]
Layouts = Annotated[
    bool,
    typer.Option("--layouts", help="Print all layouts; load nothing.", rich_help_panel=PARALLEL),
]
LinkName = Annotated[
    str | None,
    typer.Option("--link", help="For auto: a class or '25GB/s,20us'; measured.", rich_help_panel=PARALLEL),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Ranks without work are an error.", rich_help_panel=PARALLEL)
]
Timeout = Annotated[float, typer.Option(help="Limit of one collective, seconds.", rich_help_panel=PARALLEL)]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", help="Diffusers folder or hub name. (default: the bundled demo)", rich_help_panel=MODEL
    ),
]
Loras = Annotated[
    list[str] | None,
    typer.Option(
        "--lora", help="FILE[:SCALE]; repeat; transformer_2=FILE for one expert.", rich_help_panel=MODEL
    ),
]
Weights = Annotated[
    list[str] | None,
    typer.Option(
        "--weights", help="COMPONENT=FILE or glob instead of the folder's; repeat.", rich_help_panel=MODEL
    ),
]
Hub = Annotated[
    str | None,
    typer.Option(
        "--hub", help="huggingface or modelscope. (default: USP_HUB, huggingface)", rich_help_panel=MODEL
    ),
]
DtypeName = Annotated[str, typer.Option("--dtype", help="auto, fp32, bf16, fp16.", rich_help_panel=MODEL)]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device", help="cuda, npu, musa, xpu, mps or cpu. (default: the first found)", rich_help_panel=MODEL
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="The mp4 (a .png sheet beside it) or PNG. (default: the task's name)",
        rich_help_panel=OUTPUT,
    ),
]
ProfileFolder = Annotated[
    Path | None,
    typer.Option("--profile", help="Folder for a trace of each rank; use few steps.", rich_help_panel=OUTPUT),
]
Fps = Annotated[int | None, typer.Option(help="Frames per second of the mp4.", rich_help_panel=OUTPUT)]


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a user may ask of any job; each field is an option of the command line. Nothing is checked yet."""

    prompt: Prompt = None
    negative_prompt: NegativePrompt = None
    image: Images = None
    size: Size = None
    frames: Frames = None
    steps: Steps = None
    guidance: Guidance = None
    count: Count = 1
    seed: Seed = -1
    scheduler: Scheduler = None
    parallel: ParallelText = "auto"
    attention: AttentionName = None
    kernel: Kernel = "auto"
    fused: FusedMode = "auto"
    transport: Transport = "auto"
    link: LinkName = None
    strict: Strict = False
    cache: Cache = None
    timeout: Timeout = 600.0
    model: ModelName = None
    weights: Weights = None
    hub: Hub = None
    lora: Loras = None
    dtype: DtypeName = "auto"
    device: DeviceName = None
