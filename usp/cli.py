"""What the command-line modules share: how a task becomes a command, and how a usage error ends all ranks."""

import contextlib
import inspect
import io
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn

import typer

from runtime.log import get_logger, setup_logging
from runtime.process_group import read_rank_env
from usp.options import JobOptions
from usp.tasks import Task

logger = get_logger(__name__)

USAGE_ERROR = 2
LATER_S = 8.0  # a rank other than 0 leaves later, else the launcher would end rank 0 before it has spoken


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


def task_command(app: typer.Typer, task: Task, body: Callable[..., int | None], **defaults: Any) -> None:
    """Have `app` run `body(task, options, ...)` under the task's name.

    The fields of JobOptions are its options, and so are the keyword arguments of `body`; `defaults` change
    the former's.
    """
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(field.name, field.default),
            annotation=field.type,
        )
        for field in fields(JobOptions)
    ]
    own = [p for p in inspect.signature(body).parameters.values() if p.kind is p.KEYWORD_ONLY]

    def command(**given: Any) -> int | None:
        options = JobOptions(**{parameter.name: given.pop(parameter.name) for parameter in shared})
        return body(task, options, **given)

    command.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    command.__doc__ = task.summary
    app.command(task.name)(command)


def _usage_error(name: str, sentence: str, rank: int) -> NoReturn:
    if rank == 0:
        print(f"{name}: error: {sentence}", file=sys.stderr, flush=True)
    else:
        time.sleep(LATER_S)  # if rank 0 has the same error, the launcher ends this rank meanwhile
        print(f"{name}: error on rank {rank}: {sentence}", file=sys.stderr, flush=True)
    sys.exit(USAGE_ERROR)
