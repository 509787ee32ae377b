"""Command lines under test: ranks forked from the test under torchrun's own agent, and real processes.

A forked rank starts in 0.3 s, for the test has paid for the imports; the agent is the one behind torchrun,
with its environment, store, signals and clean-up. Nothing outlives its test.
"""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from runtime.log import ROOTS
from tests.runtime.processes import ROOT, is_alive
from usp import cli

LIMIT_S = 180.0


class Rank(NamedTuple):
    """What one rank wrote, apart."""

    stdout: str
    stderr: str


class Run(NamedTuple):
    """What is left of a run: the launcher's exit code and words, each rank's, and its process ids."""

    code: int | None
    launcher: str
    ranks: list[Rank]
    pids: list[int]
    ended: float  # time.time()

    @property
    def text(self) -> str:
        """Everything that anybody wrote, for a failing test to show."""
        parts = [f"exit code {self.code}", self.launcher]
        parts += [f"[rank {r}] {part}" for r, rank in enumerate(self.ranks) for part in rank if part]
        return "\n".join(parts)


def forked(
    size: int, folder: Path, module: ModuleType, *words: str, before: Callable[[], Any] | None = None
) -> Run:
    """The run of `module`'s command line with `words` on forked ranks; `before` is called in each first."""
    with fork(size, folder, module, *words, before=before) as launcher:
        return wait_for(launcher, size, folder)


@contextmanager
def fork(
    size: int, folder: Path, module: ModuleType, *words: str, before: Callable[[], Any] | None = None
) -> Iterator[Any]:
    """The launcher of such a run, as a process that is gone, with its ranks, at the end of the block."""
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    launcher = context.Process(target=_launch, args=(size, folder, module, words, before))
    launcher.start()
    try:
        yield launcher
    finally:
        for pid in [launcher.pid, *_pids(size, folder)]:
            if pid and is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        launcher.join()


def wait_for(launcher: Any, size: int, folder: Path) -> Run:
    """What is left when the launcher has ended, within LIMIT_S."""
    launcher.join(LIMIT_S)
    ended = time.time()
    ranks = [Rank(*(_text(folder / f"{name}-{r}") for name in ("stdout", "stderr"))) for r in range(size)]
    run = Run(launcher.exitcode, _text(folder / "launcher"), ranks, _pids(size, folder), ended)
    assert run.code is not None, f"still running after {LIMIT_S:g} s\n{run.text}"
    return run


def _launch(
    size: int, folder: Path, module: ModuleType, words: tuple[str, ...], before: Callable[[], Any] | None
) -> None:
    _redirect(folder / "launcher", folder / "launcher")
    for name in [n for n in os.environ if n.startswith(("TORCHELASTIC", "PET_"))]:
        del os.environ[name]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
    )
    try:
        elastic_launch(config=config, entrypoint=_rank)(folder, module, words, before)
    except BaseException as error:
        print(error)
        os._exit(1)
    finally:
        sys.stdout.flush()
    os._exit(0)


def _rank(folder: Path, module: ModuleType, words: tuple[str, ...], before: Callable[[], Any] | None) -> None:
    rank = os.environ["RANK"]
    _redirect(folder / f"stdout-{rank}", folder / f"stderr-{rank}")
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    try:
        if before is not None:
            before()
        run_command_line(module, *words)
    except SystemExit as error:
        if error.code:
            _leave(error.code if isinstance(error.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        _leave(1)


def run_command_line(module: ModuleType, *words: str) -> None:
    """Do as `python -m module words`; leaves by SystemExit."""
    kept, sys.argv = sys.argv, [module.__name__, *words]
    try:
        cli.main(module.app, module.__name__)
    finally:
        sys.argv = kept


@contextmanager
def loggers_kept() -> Iterator[None]:
    """Give our loggers back as they were: a command line sets them up for its whole process."""
    loggers = [logging.getLogger(name) for name in ROOTS]
    before = [(log, log.handlers[:], log.level, log.propagate) for log in loggers]
    try:
        yield
    finally:
        for log, handlers, level, propagate in before:
            log.handlers[:], log.propagate = handlers, propagate
            log.setLevel(level)


def _redirect(stdout: Path, stderr: Path) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        with path.open("a") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _pids(size: int, folder: Path) -> list[int]:
    texts = [_text(folder / f"pid-{rank}") for rank in range(size)]
    return [int(text) for text in texts if text]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def torchrun(*words: str) -> list[str]:
    """The command that `torchrun words` is, in this Python."""
    return [sys.executable, "-m", "torch.distributed.run", *words]


@contextmanager
def process(command: list[str], folder: Path, **environ: str) -> Iterator["subprocess.Popen[str]"]:
    """A real process that runs in `folder`, its output in files there; ended with the block."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "PET_", "TORCHELASTIC"))}
    python = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        started = subprocess.Popen(
            command,
            stdout=out,
            stderr=err,
            text=True,
            cwd=folder,
            env={**clean, **python, **environ},
            start_new_session=True,
        )
        try:
            yield started
        finally:
            if started.poll() is None:
                started.terminate()  # torchrun then ends its ranks, which are sessions of their own
                try:
                    started.wait(40)
                except subprocess.TimeoutExpired:
                    os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def completed(command: list[str], folder: Path, *, log_ranks: int = 0, **environ: str) -> Run:
    """What is left of a real process; `log_ranks` ranks wrote apart, under `--log-dir folder/logs`."""
    with process(command, folder, **environ) as started:
        with suppress(subprocess.TimeoutExpired):
            started.wait(LIMIT_S)
        return finished(started, folder, log_ranks=log_ranks)


def finished(started: "subprocess.Popen[str]", folder: Path, *, log_ranks: int = 0) -> Run:
    """What a process has left by now; fails if it still runs."""
    ended = time.time()
    ranks = [
        Rank(*(_text(rank_log(folder, rank, name)) for name in ("stdout", "stderr")))
        for rank in range(log_ranks)
    ]
    run = Run(started.poll(), _text(folder / "stderr"), ranks, [], ended)
    if not log_ranks:
        run = run._replace(ranks=[Rank(_text(folder / "stdout"), "")])
    assert run.code is not None, f"still running after {LIMIT_S:g} s\n{run.text}"
    return run


def rank_log(folder: Path, rank: int, name: str) -> Path:
    """Where torchrun with `--log-dir folder/logs --redirects 3` keeps a rank's stdout or stderr."""
    found = list((folder / "logs").glob(f"*/attempt_0/{rank}/{name}.log"))
    return found[0] if found else folder / "none"
