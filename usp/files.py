"""Files that are written whole or not at all, and the question beforehand whether they can be."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path


def check_writable(path: Path, files: Sequence[Path]) -> None:
    """Raise ValueError unless `files`, of the output asked for as `path`, can be written; none is created."""
    for file in files:
        if os.path.isdir(file):
            raise ValueError(f"output {str(file)!r} is a folder; give the name of a file in it")
    # os.path answers False where Path raises, as in a folder that is closed to the user
    parent = next(p for p in path.absolute().parents if os.path.exists(p))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"output {str(path)!r}: {parent} is not a folder that can be written to; choose another"
        )


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Write to a temporary name in the same folder, which is made, then rename; on failure leave nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
