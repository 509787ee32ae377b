"""The torch_npu wheel and the stand-in for CANN below it: fetched and built once, into a cache folder.

Standard library only. The wheel is never installed: without CANN its entry point would break `import torch`.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

VERSION = "2.13.0"  # the one whose load-time symbols cann/ has
SOURCES = Path(__file__).parent / "cann"
LIBRARIES: dict[str, tuple[list[str], list[str]]] = {  # library -> (sources, libraries to link)
    "ascendcl": (["simulator.cpp", "device.cpp", "operators.cpp"], []),
    "hccl": (["hccl.cpp", "hccl_comm.cpp"], ["ascendcl"]),
    "acl_op_compiler": (["compiler.cpp"], ["ascendcl"]),
    # Wanted by the wheel, with nothing in them that it uses here.
    "hcomm": ([], ["hccl"]),
    "ge_runner": ([], []),
    "graph": ([], []),
    "acl_tdt_channel": ([], []),
}


class Unavailable(RuntimeError):
    """The wheel or a compiler cannot be had here; the message says why."""


def cache_folder() -> Path:
    """Where wheels and builds are kept: USP_TEST_CACHE, or a folder in the user's cache."""
    chosen = os.environ.get("USP_TEST_CACHE")
    folder = Path(chosen) if chosen else Path.home() / ".cache" / "usp-tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def environment() -> dict[str, str]:
    """The variables of a process that shall see simulated NPUs. Fetches and builds what is missing.

    Raises Unavailable.
    """
    wheel = fetch()
    return {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCH_NPU_FALLBACK_CPU_DISABLE": "1",
        "LD_LIBRARY_PATH": str(build(wheel)),
        "PYTHONPATH": os.pathsep.join([str(wheel), str(Path(__file__).parents[2])]),
    }


def fetch() -> Path:
    """The folder with the unpacked wheel. Raises Unavailable."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    folder = cache_folder() / f"torch_npu-{VERSION}-{tag}"
    with made_once(folder) as unfinished:
        if unfinished is not None:
            asked = [
                f"torch_npu=={VERSION}",
                "--no-deps",
                "--only-binary",
                ":all:",
                "--dest",
                str(unfinished),
            ]
            run([sys.executable, "-m", "pip", "download", "-q", *asked], "pip found no wheel")
            (wheel,) = unfinished.glob("*.whl")
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(unfinished)
            wheel.unlink()
    return folder


def build(wheel: Path) -> Path:
    """The folder with the stand-in libraries, built against the wheel's own headers. Raises Unavailable."""
    texts = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    digest = hashlib.sha256(b"".join([*texts, repr(LIBRARIES).encode()])).hexdigest()[:12]
    folder = cache_folder() / f"cann-{VERSION}-{digest}"
    include = wheel / "torch_npu" / "include"
    flags = [
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-shared",
        "-pthread",
        f"-I{include}",
        f"-I{include}/third_party/acl/inc",
    ]
    with made_once(folder) as unfinished:
        for name, (sources, linked) in LIBRARIES.items() if unfinished is not None else ():
            files = [str(SOURCES / source) for source in sources] or ["-x", "c++", "/dev/null"]
            link = [
                "-Wl,--no-as-needed,-rpath,$ORIGIN",
                f"-L{unfinished}",
                *(f"-l{other}" for other in linked),
            ]
            target = ["-o", f"{unfinished}/lib{name}.so"]
            run(["g++", *flags, *target, *files, *link], f"lib{name}.so does not build")
    return folder


@contextlib.contextmanager
def made_once(folder: Path) -> Iterator[Path | None]:
    """Gives a new folder to fill, which then becomes `folder`; None if that is there already.

    Others that want the same wait; who is killed while filling it leaves no lock and no half-filled `folder`.
    """
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            yield None
            return
        unfinished = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
        try:
            yield unfinished
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def run(command: list[str], otherwise: str) -> None:
    """Run a command; Unavailable with the end of its output if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{otherwise}: {error}") from error
    if done.returncode:
        raise Unavailable(f"{otherwise}: {done.stderr.strip()[-1500:]}")
