"""Ranks on simulated NPUs: one process imports torch_npu, and forks the ranks of all tests.

Importing costs seconds, forking does not. Nothing here imports torch_npu: that happens in `tests.npu.server`.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from tests.ranks import Ranks

START_S = 300.0


class Server:
    """The process that forks ranks; started when the first ones are wanted."""

    def __init__(self, environment: dict[str, str], module: str) -> None:
        self._environment, self._module = environment, module
        self._folder = tempfile.TemporaryDirectory(prefix="usp-npu-")
        self._process: subprocess.Popen[bytes] | None = None
        self._listener = Listener(str(Path(self._folder.name) / "ranks"), backlog=16)
        self._control: Any = None

    def fork(self, variables: list[dict[str, str]]) -> list[tuple["Forked", Connection]]:
        """One process for each set of variables, and a pipe to each, in that order."""
        if self._process is None:
            command = [sys.executable, "-m", self._module, str(self._listener.address)]
            self._process = subprocess.Popen(command, env=self._environment)
            self._control = self._accept()
        self._control.send(variables)
        found = {}
        for _ in variables:
            pipe = self._accept()
            place, pid = pipe.recv()
            found[place] = (Forked(pid), pipe)
        return [found[place] for place in range(len(variables))]

    def stop(self) -> None:
        """End the server; the ranks end when their pipes close."""
        if self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
        self._listener.close()
        self._folder.cleanup()

    def _accept(self) -> Any:
        assert self._process is not None, "the server was started"
        raw: Any = self._listener
        raw._listener._socket.settimeout(1.0)
        for _ in range(int(START_S)):
            assert self._process.poll() is None, f"{self._module} ended with {self._process.returncode}"
            try:
                return self._listener.accept()
            except TimeoutError:
                continue
        raise AssertionError(f"{self._module} did not answer in {START_S:.0f} s")


class Forked:
    """A forked rank, to be ended like a multiprocessing process; the server collects it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        """End it."""
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def join(self) -> None:
        """Nothing to wait for: the server collects it."""


class DeviceRanks(Ranks):
    """`size` ranks on simulated devices, joined by `connect`; `run` as for gloo ranks."""

    def __init__(self, server: Server, size: int, knobs: dict[str, str]) -> None:
        super().__init__(size)
        self._server, self._knobs = server, knobs

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **self._knobs}
        sizes = {"WORLD_SIZE": str(self.size), "LOCAL_WORLD_SIZE": str(self.size)}
        own = [{**shared, **sizes, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(self.size)]
        self._workers = list(self._server.fork(own))


def serve(prepare: Any, begin: Any) -> None:
    """The server's main: `prepare()` once, then a fork for each set of variables, and `begin()` in it."""
    control = Client(sys.argv[1])
    prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        try:
            variables = control.recv()
        except (EOFError, OSError):
            return
        for place, own in enumerate(variables):
            if os.fork() == 0:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.environ.update(own)
                pipe = Client(sys.argv[1])
                pipe.send((place, os.getpid()))
                begin(pipe)
                os._exit(0)
