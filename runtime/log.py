"""Rank-aware logging: rank 0 tells what was chosen, other ranks only warn, with their rank in front."""

from __future__ import annotations

import logging
import sys

ROOTS = ("runtime", "usp")


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; call as `get_logger(__name__)`."""
    return logging.getLogger(name)


def setup_logging(rank: int, world_size: int, level: int | str = logging.INFO) -> None:
    """Send this package's records to stderr: all from `level` on rank 0, warnings and above elsewhere.

    Calling it again replaces the earlier set-up. Other packages' loggers and the root logger are left alone.
    """
    for root in ROOTS:
        logger = logging.getLogger(root)
        for handler in [h for h in logger.handlers if isinstance(h, RankHandler)]:
            logger.removeHandler(handler)
            handler.close()
        logger.addHandler(RankHandler(rank, world_size))
        logger.setLevel(level)
        logger.propagate = False


class RankHandler(logging.StreamHandler):
    """Writes to the stderr of the moment, so that a progress bar or a test that replaces it is respected."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(sys.stderr)
        self.rank = rank
        if rank != 0:
            self.setLevel(logging.WARNING)
        self.setFormatter(_RankFormatter(f"[rank {rank}] " if rank != 0 and world_size > 1 else ""))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record to the stderr of the moment."""
        self.stream = sys.stderr
        super().emit(record)


class _RankFormatter(logging.Formatter):
    """Plain text for INFO, the level in words from WARNING on, the rank in front of every line."""

    def __init__(self, prefix: str) -> None:
        super().__init__("%(message)s")
        self.prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        """The record's text as it is shown."""
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        return "\n".join(self.prefix + line for line in text.split("\n"))


def warn_once(logger: logging.Logger, key: str, message: str) -> bool:
    """Warn on the first call with this `key` on this logger; return True if it was that call."""
    said: set[str] = logger.__dict__.setdefault("_said_once", set())
    if key in said:
        return False
    said.add(key)
    logger.warning(message)
    return True
