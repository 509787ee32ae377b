"""`ending_together`: when one rank fails, all ranks end soon, and say which rank failed first and where."""

from __future__ import annotations

import _thread
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TypedDict

from runtime.world import PeerError, World, poll

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

GRACE_S = 3.0  # for `finally` blocks, once a rank knows that it must stop
LOOK_S = 1.5  # for the first error to show up in the store, once contact is lost
WATCH_S = 0.2
AFTER_FIRST_S = 0.5  # so that a launcher, too, sees the first rank go first

# What backends and the store say when a peer has gone or does not come.
LOST_CONTACT = (
    "connection closed",
    "connection reset",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "socket closed",
    "timed out waiting",
    "wait timeout",
    "failed to recv",
    "remote process exited",
    "communicator was aborted",
)


class _Told(BaseException):
    """Raised in the main thread when SIGTERM, or the failure of another rank, tells this rank to stop."""

    code = 1


class _Terminated(_Told):
    code = 128 + signal.SIGTERM


class _First(TypedDict):
    """The error that ends the run, as the store holds it."""

    rank: int
    how: str  # "failed", "was interrupted" or "lost contact"
    at: str
    why: str


@contextmanager
def ending_together(world: World, where: Callable[[], str] | None = None) -> Iterator[None]:
    """Run the body so that all ranks leave it together: all at its end, or none.

    An error on one rank (also Ctrl-C, or a non-zero SystemExit) is published in the store with `where()`, as
    in "step 3"; the rank prints it and its process ends non-zero, waiting for no collective. The others stop
    within seconds and name that first error; their `finally` blocks run unless stuck in foreign code.
    Takes over SIGINT and SIGTERM meanwhile. Every rank must enter it, in its main thread.
    A rank that is alone prints its error and where it happened, and leaves by SystemExit.
    """
    if world.store is None:
        with _alone(where):
            yield
        return
    ending = _Ending(world, world.store, where)
    ending.start()
    try:
        yield
        ending.leave()
    except BaseException as error:
        if not (isinstance(error, SystemExit) and not error.code):
            ending.fail(error)
        ending.leave()
        raise
    finally:
        ending.stop()


@contextmanager
def _alone(where: Callable[[], str] | None) -> Iterator[None]:
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        how = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        _say(f"{_trace(error)}{how}{_at(where)}: {_sentence(error)}\n")
        raise SystemExit(_exit_code(error)) from error


class _Ending:
    """One use of `ending_together` on one rank of several: its signals, its watcher, its last words."""

    def __init__(self, world: World, store: Store, where: Callable[[], str] | None) -> None:
        assert threading.current_thread() is threading.main_thread(), (
            "ending_together takes over signals: main thread"
        )
        self.world, self.store, self.where = world, store, where
        self.name = f"rank {world.rank}"
        self.key = world.next_key("ending")
        self.deadline = math.inf  # the watcher ends the process then, whatever the main thread does
        self.told = False  # the main thread has been told to stop, or is stopping
        self.interrupted = False  # Ctrl-C has arrived, whether or not the main thread could take it
        self.woken = False  # it was told by the watcher, not by a signal from outside
        self.heard: _First | None = None  # kept, for the store may go with the rank that serves it
        self.leaving = threading.Event()
        self.speaking = threading.Lock()  # taken by the thread that ends the process, never given back
        self.wake, self.wake_up = socket.socketpair()
        self.watcher = threading.Thread(target=self._watch, name="ending-together", daemon=True)

    def start(self) -> None:
        """Take the signals over and start to watch the store."""
        for end in (self.wake, self.wake_up):
            end.setblocking(False)
        self.handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        self.old_fd = signal.set_wakeup_fd(self.wake_up.fileno(), warn_on_full_buffer=False)
        self.watcher.start()

    def leave(self) -> None:
        """Wait until every rank is here, so that none is gone while another may still fail."""
        done, left, size = f"{self.key}/done", f"{self.key}/left", self.world.world_size
        self.store.add(done, 1)
        if not poll(lambda: self.store.add(done, 0) >= size, self.world.timeout_s):
            raise PeerError(f"{self.name} is done; another rank is not after {self.world.timeout_s:g} s more")
        self._stop_watching()
        self.store.add(left, 1)
        if self.world.serves:
            poll(lambda: self.store.add(left, 0) >= size, GRACE_S)

    def fail(self, error: BaseException) -> NoReturn:
        """Publish `error`, or find the one that came first; say so and end the process."""
        self.told = True
        self.deadline = time.monotonic() + LOOK_S + GRACE_S
        lost = _lost_contact(error)
        first = (self._look(LOOK_S) if lost else None) or self._publish(error, lost)
        if first and first["rank"] != self.world.rank and first["how"] != "lost contact":
            self._end_after(first, _exit_code(error))
        if isinstance(error, _Told):
            self._end(f"{self.name} stops{_at(self.where)}: {error}", _exit_code(error))
        if lost:
            reason = f"lost contact with another rank ({_sentence(error)})"
            self._end(f"{self.name} stops{_at(self.where)}: {reason}", _exit_code(error))
        how = "was interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self._end(f"{_trace(error)}{self.name} {how}{_at(self.where)}: {_sentence(error)}", _exit_code(error))

    def stop(self) -> None:
        """Give the signals back."""
        self._stop_watching()
        signal.set_wakeup_fd(self.old_fd)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.wake.close()
        self.wake_up.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.told:
            return
        self.told = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.woken:
            raise _Told("lost contact with another rank (its error or the store that all share is gone)")
        raise _Terminated(
            "told to stop (SIGTERM), which a launcher does when it lost contact with another rank"
        )

    def _watch(self) -> None:
        """In a thread: notice signals and other ranks' errors while the main thread sits in a collective."""
        while not self.leaving.is_set():
            numbers = self.wake.recv(64) if select.select([self.wake], [], [], WATCH_S)[0] else b""
            if any(numbers):
                self.interrupted = self.interrupted or signal.SIGINT in numbers
                self.deadline = min(self.deadline, time.monotonic() + GRACE_S)
            if not self.told and not self.woken and self._others_failed():
                self.woken = True
                self.deadline = min(self.deadline, time.monotonic() + GRACE_S)
                _interrupt_main()
            if time.monotonic() > self.deadline:
                self._end_for_main()

    def _end_for_main(self) -> NoReturn:
        first = self._publish(KeyboardInterrupt(), lost=False) if self.interrupted else self._look(0.0)
        if first and first["rank"] != self.world.rank and first["how"] != "lost contact":
            self._end_after(first, 1)
        did = "was interrupted" if self.interrupted else "stops"
        stuck = "told to stop while its main thread is stuck, in a collective or in foreign code"
        self._end(
            f"{self.name} {did}{_at(self.where)}: {stuck}", 128 + signal.SIGINT if self.interrupted else 1
        )

    def _stop_watching(self) -> None:
        self.leaving.set()
        if self.watcher.is_alive():
            self.wake_up.send(b"\0")
            self.watcher.join()

    def _others_failed(self) -> bool:
        try:
            if not self.store.check([f"{self.key}/first"]):
                return False
            self.heard = json.loads(self.store.get(f"{self.key}/first"))
        except RuntimeError:
            return not self.leaving.is_set()  # whoever served the store is gone
        return True

    def _look(self, limit_s: float) -> _First | None:
        """Return the first error if the store has one within `limit_s` seconds."""
        key = f"{self.key}/first"
        try:
            if self.heard is None and poll(lambda: self.store.check([key]), limit_s):
                self.heard = json.loads(self.store.get(key))
            return self.heard
        except RuntimeError:
            return None

    def _publish(self, error: BaseException, lost: bool) -> _First | None:
        """Put `error` into the store unless another is there; return what is there then."""
        how = "was interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        mine = _First(
            rank=self.world.rank,
            how="lost contact" if lost else how,
            at=_at(self.where),
            why=_sentence(error),
        )
        try:
            return json.loads(self.store.compare_set(f"{self.key}/first", "", json.dumps(mine)))
        except RuntimeError:
            return None

    def _end_after(self, first: _First, code: int) -> NoReturn:
        text = f"{self.name} stops: rank {first['rank']} {first['how']} first{first['at']}: {first['why']}"
        self._end(text, code, pause_s=AFTER_FIRST_S)

    def _end(self, text: str, code: int, *, pause_s: float = 0.0) -> NoReturn:
        """Print `text` and end the process: no destructor, no atexit, nothing that waits for a peer."""
        self.speaking.acquire()
        if threading.current_thread() is self.watcher:
            os.write(
                2, f"{text}\n".encode()
            )  # the main thread may be stuck with a stream's lock in its hands
        else:
            _say(f"{text}\n")
        time.sleep(pause_s)
        self._part()
        os._exit(code)

    def _part(self) -> None:
        """Say that this rank has heard; the one that serves the store goes when all have."""
        heard = f"{self.key}/heard"
        try:
            self.store.add(heard, 1)
            if self.world.serves:
                poll(lambda: self.store.add(heard, 0) >= self.world.world_size, GRACE_S + 1.0)
        except RuntimeError:
            return  # the store is gone: nobody is left to hear


def _interrupt_main() -> None:
    """Send SIGTERM to the main thread, so that it leaves a sleep too."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    else:
        _thread.interrupt_main(signal.SIGTERM)


def _lost_contact(error: BaseException) -> bool:
    """True if `error`, or one it came from, says that a peer is gone: the first error is elsewhere."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (PeerError, _Told)):
            return True
        if isinstance(cause, RuntimeError) and any(sign in str(cause).lower() for sign in LOST_CONTACT):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _at(where: Callable[[], str] | None) -> str:
    place = where() if where is not None else ""
    return f" at {place}" if place else ""


def _sentence(error: BaseException) -> str:
    """The error on one line, as Python's last traceback line says it."""
    if isinstance(error, KeyboardInterrupt):
        return "Ctrl-C"
    if isinstance(error, SystemExit):
        return f"exit code {error.code}" if isinstance(error.code, int) else str(error.code)
    return "; ".join(line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip())[:600]


def _trace(error: BaseException) -> str:
    """The traceback; nothing for an exit that was asked for."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return ""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, _Told):
        return error.code
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1


def _say(text: str) -> None:
    """Write one block to stderr in one piece, after everything printed before it."""
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
