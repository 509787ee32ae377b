"""What the command-line modules share: options, and how a usage error ends all ranks with one sentence."""

import contextlib
import io
import math
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from runtime.log import get_logger, setup_logging
from runtime.process_group import RankEnv, read_rank_env
from usp.tasks import Request

logger = get_logger(__name__)

USAGE_ERROR = 2
LATER_S = 8.0  # a rank other than 0 leaves later, else the launcher would end rank 0 before it has spoken

VIDEO, PARALLEL, MODEL, OUTPUT = "Video", "Parallel", "Model", "Output"

Prompt = Annotated[str | None, typer.Option(help="What the video shows.", rich_help_panel=VIDEO)]
NegativePrompt = Annotated[str | None, typer.Option(help="What it shall not show.", rich_help_panel=VIDEO)]
Size = Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels.", rich_help_panel=VIDEO)]
Frames = Annotated[int | None, typer.Option(help="Number of frames.", rich_help_panel=VIDEO)]
Steps = Annotated[int | None, typer.Option(help="Denoising steps.", rich_help_panel=VIDEO)]
Guidance = Annotated[float | None, typer.Option(help="Guidance scale; 1 is off.", rich_help_panel=VIDEO)]
Seed = Annotated[int, typer.Option(help="Noise seed; -1 draws one.", rich_help_panel=VIDEO)]
Scheduler = Annotated[
    str | None,
    typer.Option(help="euler, heun, unipc or dpm++. [default: the model's]", rich_help_panel=VIDEO),
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
Transport = Annotated[
    str,
    typer.Option(help="auto; all_to_all or p2p if the other is broken.", rich_help_panel=PARALLEL),
]
Cache = Annotated[
    float | None,
    typer.Option(
        "--cache", help="First-block cache: skip below this change, e.g. 0.08.", rich_help_panel=PARALLEL
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
Timeout = Annotated[float, typer.Option(help="Limit of one collective, seconds.", rich_help_panel=PARALLEL)]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", help="Diffusers folder or hub name. [default: the bundled demo]", rich_help_panel=MODEL
    ),
]
DtypeName = Annotated[str, typer.Option("--dtype", help="auto, fp32, bf16, fp16.", rich_help_panel=MODEL)]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device", help="cuda, npu, musa, xpu, mps or cpu. [default: the first found]", rich_help_panel=MODEL
    ),
]
Out = Annotated[Path, typer.Option("--out", help="The mp4; a .png sheet beside it.", rich_help_panel=OUTPUT)]
Fps = Annotated[int | None, typer.Option(help="Frames per second of the mp4.", rich_help_panel=OUTPUT)]


def main(app: typer.Typer, name: str) -> NoReturn:
    """Run a command-line app on this rank and exit.

    A usage error (also a ValueError raised before the ranks have met) is one sentence on rank 0's stderr and
    exit code 2 on every rank. Rank 0 alone writes to stdout.
    """
    rank = 0
    try:
        env = read_rank_env()
        rank = env.rank
        setup_logging(env.rank, env.world_size)
        with contextlib.nullcontext() if rank == 0 else contextlib.redirect_stdout(io.StringIO()):
            code = app(standalone_mode=False, prog_name=f"python -m {name}")
    except typer.TyperException as error:
        _usage_error(name, error.format_message() or "no task was given; name one of the above", rank)
    except ValueError as error:
        _usage_error(name, str(error), rank)
    sys.exit(code if isinstance(code, int) else 0)


def check_timeout(timeout_s: float) -> None:
    """Raise ValueError unless a collective can be given so many seconds."""
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout {timeout_s:g} was given; use a number of seconds above 0")


def warn_of_no_effect(request: Request, env: RankEnv, **parallel: str | None) -> None:
    """One warning line on rank 0 for each option that changes nothing in this run; `parallel` by name."""
    if env.rank != 0:
        return
    if env.world_size == 1:
        for name, value in parallel.items():
            if value not in (None, "auto"):
                logger.warning("%s=%r has no effect: one rank holds the whole sequence", name, value)
    if request.negative_prompt and request.guidance_scale <= 1:
        logger.warning("the negative prompt has no effect: guidance is off at %g", request.guidance_scale)


def _usage_error(name: str, sentence: str, rank: int) -> NoReturn:
    if rank == 0:
        print(f"{name}: error: {sentence}", file=sys.stderr, flush=True)
    else:
        time.sleep(LATER_S)  # if rank 0 has the same error, the launcher ends this rank meanwhile
        print(f"{name}: error on rank {rank}: {sentence}", file=sys.stderr, flush=True)
    sys.exit(USAGE_ERROR)
