"""Ranks as real processes: forked without a launcher (0.3 s), or under torchrun; none outlives its test."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from runtime.world import poll

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0


class Ended(NamedTuple):
    """What is left of a run: exit code, what it wrote, and the seconds since it began or was struck."""

    code: int | None
    text: str
    seconds: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fork_ranks(
    size: int,
    function: Callable[..., None],
    folder: Path,
    *args: object,
    signals: dict[int, int] | None = None,
) -> list[Ended]:
    """Run `function(*args)` in `size` forked ranks with torchrun's variables but no torchrun.

    `signals` are sent to those ranks once all have called `mark`.
    """
    context = multiprocessing.get_context("fork")
    port = free_port()
    ranks = [
        context.Process(target=_forked, args=(rank, size, port, function, folder, args))
        for rank in range(size)
    ]
    begin = time.monotonic()
    for process in ranks:
        process.start()
    try:
        if signals:
            wait_for_marks(folder, size)
            begin = time.monotonic()
            for rank, number in signals.items():
                os.kill(ranks[rank].pid or 0, number)
        for process in ranks:
            process.join(max(0.1, begin + LIMIT_S - time.monotonic()))
        taken = time.monotonic() - begin
        return [Ended(p.exitcode, (folder / f"out-{r}").read_text(), taken) for r, p in enumerate(ranks)]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _forked(
    rank: int, size: int, port: int, function: Callable[..., None], folder: Path, args: tuple[object, ...]
) -> None:
    out = (folder / f"out-{rank}").open("w", buffering=1)
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    sys.stdout = sys.stderr = out
    torch.set_num_threads(1)
    for name in [n for n in os.environ if n.startswith(("TORCHELASTIC", "PET_"))]:
        del os.environ[name]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        function(*args)
    except SystemExit as error:
        out.flush()
        os._exit(error.code if isinstance(error.code, int) else int(error.code is not None))
    except BaseException:
        traceback.print_exc()
        out.flush()
        os._exit(1)
    out.flush()
    os._exit(0)


def mark(folder: Path, rank: int) -> None:
    """In a rank: say that it is where the test wants it, and under which process id."""
    (folder / f"mark-{rank}.new").write_text(str(os.getpid()))
    (folder / f"mark-{rank}.new").rename(folder / f"mark-{rank}")


def wait_for_marks(folder: Path, size: int) -> list[int]:
    """Process ids of all ranks, once all have called `mark`."""
    files = [folder / f"mark-{rank}" for rank in range(size)]
    here = poll(lambda: all(file.exists() for file in files), LIMIT_S)
    assert here, f"ranks did not start: {sorted(p.name for p in folder.iterdir())}"
    return [int(file.read_text()) for file in files]


@contextmanager
def torchrun(size: int, script: Path, folder: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A torchrun over `script` that is gone, with its ranks, at the end of the block."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    command += [f"--nproc-per-node={size}", str(script), str(folder), *args]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        start_new_session=True,
    )
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
        for file in folder.glob("mark-?"):
            if is_alive(pid := int(file.read_text())):
                os.kill(pid, signal.SIGKILL)
        launcher.communicate()


def ended(launcher: subprocess.Popen[str], since: float) -> Ended:
    """Wait for a torchrun and return what is left of it."""
    text, _ = launcher.communicate(timeout=LIMIT_S)
    return Ended(launcher.returncode, text, time.monotonic() - since)


def is_alive(pid: int) -> bool:
    """True if the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
