"""What the bench prints: where it ran, what was to be expected, what was measured, and all of it as JSON."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from runtime.process_group import World
from runtime.report import format_bytes, format_report
from usp.bench.ideal import Link
from usp.bench.rounds import Row

PACKAGES = ("diffusers", "yunchang", "xfuser")


def surroundings(world: World, *, threads: str) -> dict[str, Any]:
    """Hardware, link, versions and commit."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "device": str(world.device),
        "ranks": world.world_size,
        "threads": threads,
        "backend": world.backend or "none",
        "versions": {"torch": torch.__version__, "python": platform.python_version()}
        | {name: metadata.version(name) for name in PACKAGES if util.find_spec(name)},
        "commit": _commit(),
    }
'''
