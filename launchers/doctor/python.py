"""The doctor on Python and torch: is torch there, does it load, do the vendor's packages pair with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from launchers.doctor.machine import Finding, Machine, last_words
from launchers.vendors import VENDORS

IMPORT_LIMIT_S = 180.0  # a first import from a network disk is slow
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 7)

# Looks at packages without importing any of them.
PACKAGES = """
import importlib.metadata as metadata, json, sys
versions = {}
for name in ("torch", "torch_npu", "torch_musa"):
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
loads = [entry.name for entry in metadata.entry_points(group="torch.backends")]
print(json.dumps({"python": list(sys.version_info[:3]), "versions": versions, "loads": loads}))
"""

# Imports torch, and then the packages named on the command line.
TORCH = """
import importlib, json, sys
import torch
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None)}
for name in sys.argv[1:]:
    importlib.import_module(name)
import torch.distributed as dist
facts["distributed"] = dist.is_available()
names = ("gloo", "nccl", "xccl", "hccl", "mccl")
facts["backends"] = [n for n in names if dist.is_available() and dist.is_backend_available(n)]
facts["devices"] = {}
for kind in ("npu", "musa", "cuda", "xpu"):
    module = getattr(torch, kind, None)
    if module is not None:
        facts["devices"][kind] = module.device_count() if module.is_available() else 0
facts["devices"]["mps"] = int(torch.backends.mps.is_available())
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class Torch:
    """What other Python processes told: `facts` after `import torch`, empty if it fails; `error` says why.

    `unloaded` are the facts with autoloading off, where only that makes torch load; `broken` names packages
    of vendors that do not load, each with its error.
    """

    python: tuple[int, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)
    error: str = ""
    unloaded: dict[str, object] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)

    def devices(self, kind: str) -> int:
        """Return how many devices of this kind torch sees."""
        counts = self.facts.get("devices")
        hip = bool(self.facts.get("hip"))
        if kind in ("rocm", "cuda") and hip != (kind == "rocm"):
            return 0
        name = "cuda" if kind == "rocm" else kind
        return int(counts.get(name, 0)) if isinstance(counts, dict) else 0

    def has_backend(self, name: str) -> bool:
        """Say whether torch has this communication backend."""
        backends = self.facts.get("backends")
        return isinstance(backends, list) and name in backends


def look_at_torch(machine: Machine) -> Torch:
    """Return what Pythons of their own say about torch here; none of it is imported in this process."""
    told = machine.run(machine.python, "-c", PACKAGES)
    if told.code != 0:
        return Torch(error=last_words(told.stderr))
    packages = json.loads(told.stdout.splitlines()[-1])
    versions = packages["versions"]
    seen = {"python": tuple(packages["python"]), "versions": versions, "loads": packages["loads"]}
    if "torch" not in versions:
        return Torch(**seen, error="torch is not installed")
    facts, error = _import(machine)
    if not facts:
        return Torch(**seen, error=error, unloaded=_import(machine, off=True)[0])
    broken = {}
    vendors = [name for name in versions if name != "torch"]
    for name in vendors:
        with_vendor, why = _import(machine, name)
        if with_vendor:
            facts = {**facts, **with_vendor}
        else:
            broken[name] = why
    return Torch(**seen, facts=facts, broken=broken)


def check_python(machine: Machine, torch: Torch) -> Iterator[Finding]:
    """Yield what is to be said about Python, torch, autoloading, pairs and backends."""
    if not torch.python:
        yield Finding("problem", "python", f"{machine.python} does not run ({torch.error})", "reinstall it")
        return
    yield _at_least("python", torch.python, LEAST_PYTHON)
    yield from _check_torch(torch)
    yield from _check_autoload(machine, torch)
    for package in [name for name in torch.versions if name != "torch"]:
        yield _check_pair(torch, package)
    if torch.facts:
        yield _check_distributed(torch)


def _import(machine: Machine, *packages: str, off: bool = False) -> tuple[dict[str, object], str]:
    """Facts after importing torch and the packages, or none and the reason."""
    more = {AUTOLOAD: "0"} if off else {}
    told = machine.run(machine.python, "-c", TORCH, *packages, limit_s=IMPORT_LIMIT_S, **more)
    if told.code == 0:
        return json.loads(told.stdout.splitlines()[-1]), ""
    return {}, last_words(told.stderr)


def _at_least(name: str, version: tuple[int, ...], least: tuple[int, ...]) -> Finding:
    text = ".".join(map(str, version))
    if version[: len(least)] >= least:
        return Finding("ok", name, text)
    needed = ".".join(map(str, least))
    return Finding("problem", name, f"{text}; {needed} or newer is needed", f"install {name} {needed}")


def _check_torch(torch: Torch) -> Iterator[Finding]:
    if torch.facts:
        version = str(torch.facts["version"])
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
        yield _at_least("torch", numbers, LEAST_TORCH)._replace(fact=version)
    elif "torch" not in torch.versions:
        yield Finding(
            "problem", "torch", "not installed for this Python", "pip install torch, for your device"
        )
    elif not torch.unloaded:
        remedy = "reinstall it for this Python and machine"
        yield Finding("problem", "torch", f"{torch.versions['torch']} does not load ({torch.error})", remedy)
    else:
        yield Finding("ok", "torch", f"{torch.versions['torch']}, but see the next line")


def _check_autoload(machine: Machine, torch: Torch) -> Iterator[Finding]:
    """The trap: a vendor's package that is merely installed is loaded by `import torch`, and can break it."""
    packages = ", ".join(torch.loads)
    if torch.unloaded:
        yield Finding(
            "problem",
            "autoload",
            f"`import torch` fails since it loads {packages} by itself ({torch.error})",
            f"set up the vendor's libraries for this shell (Ascend: source set_env.sh of CANN); or uninstall "
            f"{packages} on a machine without such a device; {AUTOLOAD}=0 helps torch alone, as diffusers "
            "loads it too",
        )
    elif torch.loads and machine.environ.get(AUTOLOAD) == "0":
        fact = f"off ({AUTOLOAD}=0); torch.npu and the like exist only after importing {packages}"
        yield Finding(
            "note", "autoload", fact, "nothing for usp, which imports it; a script of yours must too"
        )
    elif torch.loads and torch.facts:
        yield Finding("ok", "autoload", f"`import torch` loads {packages}")


def _check_pair(torch: Torch, package: str) -> Finding:
    """A vendor's package is built for one release of torch."""
    ours, theirs = torch.versions.get("torch", ""), torch.versions[package]
    short, wanted = (".".join(version.split("+")[0].split(".")[:2]) for version in (ours, theirs))
    if short != wanted:
        fact = f"{package} {theirs} is made for torch {wanted}; torch {ours or 'is not'} installed"
        return Finding(
            "problem", "pairing", fact, f"install torch {wanted}, or the {package} for torch {short}"
        )
    if package in torch.broken:
        fact = f"{package} {theirs} does not load ({torch.broken[package]})"
        remedy = f"set up the vendor's libraries for this shell, or uninstall {package} if no device is here"
        return Finding("problem", "pairing", fact, remedy)
    return Finding("ok", "pairing", f"{package} {theirs} with torch {ours}")


def _check_distributed(torch: Torch) -> Finding:
    if not torch.facts.get("distributed"):
        fact = "this torch is built without torch.distributed; only one rank can run"
        return Finding("problem", "distributed", fact, "install a build that has it")
    backends = [v.backend for v in VENDORS.values() if torch.has_backend(v.backend)]
    return Finding("ok", "distributed", f"backends: {', '.join(dict.fromkeys(backends)) or 'none'}")
