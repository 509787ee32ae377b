"""The program that is to run, as far as a launcher must understand it: its timeout, its groups, its words."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launchers.usprun import UsageError, read_options, torchrun_arguments
from launchers.vendors import VENDORS, Vendor

TIMEOUT_S = 600.0  # what `usp` gives a collective if nothing else is said
AXES = ("cfg", "ring", "gather_kv", "ulysses")
OURS = ("usp.run", "usp.verify", "usp.bench")  # take --device; without it the first device found
TIMED = ("usp.run", "usp.verify")  # take --timeout; the bench keeps TIMEOUT_S


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is to be started: `program` on `nproc` ranks of each of `nodes` hosts with `kind` of device.

    `timeout_s` is the limit of one collective that the program uses, in seconds; `groups` how many
    communicators each rank will hold.
    """

    kind: str
    nproc: int
    nodes: int
    program: tuple[str, ...]
    timeout_s: float
    groups: int

    @property
    def vendor(self) -> Vendor:
        """What the vendor's parts are called."""
        return VENDORS[self.kind]

    @property
    def world_size(self) -> int:
        """Ranks on all hosts."""
        return self.nproc * self.nodes


def describe(
    kind: str,
    program: Sequence[str],
    *,
    nproc: int,
    nodes: int = 1,
    timeout_s: float | None = None,
    groups: int | None = None,
) -> Launch:
    """Return the launch; timeout and groups are read from the words of a command of ours unless given.

    Such a command is told its device, which it would choose by itself, and the timeout that is given. The
    words of any other program are its own. Raises UsageError for what cannot be started: no program, no
    ranks, more ranks than such a host can have, or a device or timeout other than the program's.
    """
    if not program:
        raise UsageError("no program was given; put it behind --, as in -- -m usp.run wan-t2v")
    if nproc < 1 or nodes < 1:
        raise UsageError(f"--nproc {nproc} --nodes {nodes} makes no rank; give numbers of at least 1")
    if VENDORS[kind].one_device and nproc > 1:
        raise UsageError(f"--nproc {nproc} on {kind}; such a host has one device; use --nproc 1")
    name, words = _command_of_ours(program)
    limit_s = _limit_s(name, words, timeout_s)
    added = _device_words(words, kind) if name else ()
    if name in TIMED and timeout_s is not None and option_value(words, "--timeout") is None:
        added += ("--timeout", str(timeout_s).removesuffix(".0"))
    return Launch(
        kind=kind,
        nproc=nproc,
        nodes=nodes,
        program=(*program, *added),
        timeout_s=limit_s,
        groups=groups or count_groups(words, nproc * nodes),
    )


def _command_of_ours(program: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Return the module and its words; None and no words for a program that is not one of ours."""
    options = read_options(program)
    at = options[-1].end if options else 0
    at += list(program[at : at + 1]) == ["--"]
    return (program[at], program[at + 1 :]) if at < len(program) and program[at] in OURS else (None, ())


def _limit_s(name: str | None, words: Sequence[str], timeout_s: float | None) -> float:
    said = option_value(words, "--timeout")
    if said is not None and not re.fullmatch(r"\d+(\.\d+)?", said):
        raise UsageError(f"the program's --timeout {said} is not a number of seconds")
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise UsageError(f"--timeout {timeout_s:g} is no limit; give a number of seconds above 0")
    if said is not None and timeout_s is not None and float(said) != timeout_s:
        raise UsageError(f"--timeout {timeout_s:g} differs from the program's own --timeout {said}; give one")
    limit_s = timeout_s or float(said or TIMEOUT_S)
    if name and name not in TIMED and limit_s != TIMEOUT_S:
        raise UsageError(
            f"--timeout {limit_s:g} for {name}, whose limit is always {TIMEOUT_S:g} s; leave it out"
        )
    return limit_s


def _device_words(words: Sequence[str], kind: str) -> tuple[str, ...]:
    said = option_value(words, "--device")
    if said is None:
        return ("--device", kind)
    if said.partition(":")[0] != kind and (said.partition(":")[0], kind) != ("cuda", "rocm"):
        raise UsageError(
            f"the program's --device {said} in a launch on {kind}; leave it out, or launch on that"
        )
    return ()


def option_value(words: Sequence[str], name: str) -> str | None:
    """Return the value of the last `name VALUE` or `name=VALUE` among the words; None if there is none."""
    value = None
    for at, word in enumerate(words):
        if word.startswith(f"{name}="):
            value = word.partition("=")[2]
        elif word == name and at + 1 < len(words):
            value = words[at + 1]
    return value


def count_groups(program: Sequence[str], world_size: int) -> int:
    """Return how many communicators each rank will hold, from the program's --parallel or --attention.

    The world is one; each axis that is smaller adds one, and so does the sequence group when two axes share
    it. Words that leave the choice to the program are taken as cfg by one sequence axis.
    """
    if world_size == 1:
        return 0
    degrees = read_degrees(option_value(program, "--parallel") or "auto")
    if not degrees:
        one_axis = option_value(program, "--attention") not in (None, "auto", "usp")
        return 1 if one_axis or world_size < 4 else 3
    inner = [degrees.get(axis, 1) for axis in AXES[1:]]
    sequence = world_size // max(1, degrees.get("cfg", 1))
    axes = [d for d in (degrees.get("cfg", 1), *inner) if 1 < d < world_size]
    shared = 1 < sequence < world_size and sum(d > 1 for d in inner) > 1
    return 1 + len(axes) + shared


def read_degrees(text: str) -> dict[str, int]:
    """Return the degree of each axis in a spelling such as "cfg2 ulysses4"; what is none is left out."""
    found = re.findall(rf"({'|'.join(AXES)})[_=]?(\d+)", text.lower().replace("gather-kv", "gather_kv"))
    return {axis: int(degree) for axis, degree in found}


def torchrun_words(launch: Launch, environ: Mapping[str, str], *, meeting: Sequence[str] = ()) -> list[str]:
    """Return what torchrun is given on one host; without `meeting` it picks a free port on this one."""
    options = ["--nproc-per-node", str(launch.nproc)]
    if launch.nodes > 1:
        options = ["--nnodes", str(launch.nodes), *options]
    return torchrun_arguments([*meeting, *options, *launch.program], environ)


def torchrun_command(words: Sequence[str]) -> list[str]:
    """Return the command that starts torchrun with this Python."""
    return [sys.executable, "-m", "torch.distributed.run", *words]
