"""A pool of forked gloo ranks that many tests share.

Forking costs 0.3 s where a fresh interpreter pays seconds of imports. A rank runs one function at a time and
sends back its result or its traceback; a rank that does not answer in time ends the whole pool, and the next
test gets a new one.
"""

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120.0


class RankError(AssertionError):
    """A rank raised; the message has each failing rank's traceback."""


class Ranks:
    """`size` processes in one gloo group; `run(function, *args)` calls it on each and returns results by
    rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Results of `function(*args)` by rank; `function` is module-level. Raises RankError if any rank
        does."""
        if not self._workers:
            self._start()
        for _, pipe in self._workers:
            pipe.send((function, args, warnings.filters))  # a test's own filters hold in its ranks too
        answers: dict[int, tuple[bool, Any]] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        while len(answers) < self.size:
            ready = wait([p for p, rank in pipes.items() if rank not in answers], timeout=timeout_s)
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    answers[pipes[pipe]] = pipe.recv()
                except EOFError:
                    answers[pipes[pipe]] = (False, "the process died")
                if not answers[pipes[pipe]][0]:
                    timeout_s = min(timeout_s, 5.0)  # the others may be stuck in a collective
        failed = {r: answers.get(r, (False, f"no answer in {timeout_s:.0f} s")) for r in range(self.size)}
        failed = {r: answer[1] for r, answer in failed.items() if not answer[0]}
        if failed:
            self.stop()
            raise RankError("\n".join(f"[rank {r}] {text}" for r, text in failed.items()))
        return [answers[r][1] for r in range(self.size)]

    def stop(self) -> None:
        """End the processes; the next `run` starts new ones."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        store = tempfile.mktemp(prefix="ranks-store-")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1000 + rank)  # ranks differ unless something makes them agree
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    while True:
        try:
            function, args, filters = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            with warnings.catch_warnings():
                warnings.filters[:] = filters
                pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
