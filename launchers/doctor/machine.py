"""How the doctor looks at a machine: files, tools and other Pythons, each of which may be missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

TOOL_LIMIT_S = 60.0
LAST_WORDS = 300  # characters of an error that are shown


class Finding(NamedTuple):
    """One line of the doctor. `state` note: works, but may surprise. `remedy` says what to do."""

    state: Literal["ok", "note", "problem"]
    name: str
    fact: str
    remedy: str = ""


class Ran(NamedTuple):
    """What a tool left: its exit code, and what it wrote. Code None: it is not here, or did not end."""

    code: int | None
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Machine:
    """A machine as seen below `root`, with the variables of one shell. `python` is the one that will run."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = sys.executable

    def path(self, name: str) -> Path:
        """Return where an absolute path is found."""
        return self.root / name.lstrip("/")

    def files(self, folder: str, pattern: str) -> list[str]:
        """Return the names in a folder that match, sorted; none if it is not there."""
        found = self.path(folder)
        return sorted(file.name for file in found.glob(pattern)) if found.is_dir() else []

    def text(self, name: str) -> str | None:
        """Return what a file says; None if it is not there or may not be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def has_tool(self, name: str) -> bool:
        """Say whether the shell would find this command."""
        return shutil.which(name, path=self.environ.get("PATH", "")) is not None

    def run(self, tool: str, *words: str, limit_s: float = TOOL_LIMIT_S, **environ: str) -> Ran:
        """Return what a command says, with more variables if given; it has `limit_s` seconds."""
        found = shutil.which(tool, path=self.environ.get("PATH", ""))
        if found is None:
            return Ran(None, "", f"{tool} is not here")
        try:
            done = subprocess.run(
                [found, *words],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
                env={**self.environ, **environ},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Ran(None, "", f"{tool} did not answer within {limit_s:g} s")
        except OSError as error:
            return Ran(None, "", f"{tool} cannot be run ({error.strerror})")
        return Ran(done.returncode, done.stdout, done.stderr)


def last_words(text: str) -> str:
    """Return the cause at the end of an error text: the earliest exception named in its traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception")) and ":" in line]
    chosen = named[0] if named else (lines[-1] if lines else "no message")
    return chosen[:LAST_WORDS]
