"""`usprun`: torchrun with the short option --nproc, a free port on one host, and all cores shared out.

Only works out a command line; torchrun then takes over this process, its signals and its exit code.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

HELP = """usage: usprun [--nproc N] [torchrun options] [-m] program [arguments of the program]

Start N ranks of a program on this host:

    usprun --nproc 2 -m usp.run wan-t2v --prompt "a red circle moving right"

What it adds to torchrun:
  --nproc N           short for --nproc-per-node N; a whole number, or cpu, gpu, xpu, auto
  a free port         two runs on one host do not meet, unless a rendezvous option, MASTER_ADDR,
                      MASTER_PORT or a PET_ variable of these says where to meet
  OMP_NUM_THREADS     set to cores / N if it is not set

All else goes to torchrun as it is. Its options: torchrun --help
"""

NPROC = "--nproc"
NPROC_WORDS = ("auto", "cpu", "gpu", "xpu")

# torchrun's options in the spelling with dashes; each also has one with underscores.
VALUE_OPTIONS = (
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--max-restarts",
    "--monitor-interval",
    "--start-method",
    "--event-log-handler",
    "--role",
    "--log-dir",
    "--redirects",
    "--tee",
    "--local-ranks-filter",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--logs-specs",
    "--numa-binding",
    "--signals-to-handle",
    "--shutdown-timeout",
)
FLAGS = ("--help", "--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank")
SHORT_VALUE_OPTIONS = {"r": "--redirects", "t": "--tee"}
SHORT_FLAGS = {"h": "--help", "m": "--module"}

# Whoever gives one of these says himself where the ranks meet.
MEETING_OPTIONS = (
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--standalone",
)


class Option(NamedTuple):
    """One option as found: its place among the arguments, its full name, its value if it takes one."""

    start: int
    end: int
    name: str
    value: str | None


class UsageError(ValueError):
    """The command line cannot be meant as it stands."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Become torchrun with the arguments worked out, or explain why not (exit code 2)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = read_options(arguments)
    if not arguments or (options and options[-1].name == "--help"):
        print(HELP, end="")
        raise SystemExit(0 if arguments else 2)
    try:
        command = torchrun_arguments(arguments, os.environ)
    except UsageError as error:
        print(f"usprun: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    environ = {**os.environ, **thread_environment(options, os.environ, available_cores())}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "torch.distributed.run", *command], environ)


def read_options(arguments: Sequence[str]) -> list[Option]:
    """Return the launcher's options in front of the program's name; the program's own are not looked at.

    Stops, too, at what torchrun will refuse (an unknown or ambiguous option) and at --help.
    """
    options: list[Option] = []
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] not in ("-", "--"):
        found = (
            _long_option(arguments, at) if arguments[at].startswith("--") else _short_options(arguments, at)
        )
        options += found
        if not found or found[-1].name == "--help":
            break
        at = found[-1].end
    return options


def torchrun_arguments(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return what torchrun is given: the same arguments in order, --nproc spelled out, a free port chosen.

    A "--" keeps torchrun from looking at the program's own options.
    Raises UsageError for a number of ranks that is none.
    """
    options = read_options(arguments)
    result = list(arguments)
    program = options[-1].end if options else 0
    if program < len(arguments) and not arguments[program].startswith("-"):
        # Else argparse stops at an option of the program that shortens several of torchrun's, such as --log.
        result.insert(program, "--")
    for option in reversed(options):
        if option.name == NPROC:
            result[option.start : option.end] = ["--nproc-per-node", _checked_nproc(option.value)]
    return [*meeting_arguments(options, environ), *result]


def meeting_arguments(options: Sequence[Option], environ: Mapping[str, str]) -> list[str]:
    """Return the options that make the ranks of this host meet at a free port, unless the user said where."""
    last = {option.name: option.value for option in options}
    nodes = last.get("--nnodes") or environ.get("PET_NNODES") or "1"
    said = [name for name in MEETING_OPTIONS if name in last or environ.get(_variable(name))]
    if said or nodes not in ("1", "1:1"):
        return []
    given = [name for name in ("--master-addr", "--master-port") if environ.get(_variable(name)[4:])]
    if given:  # torchrun itself does not read MASTER_ADDR and MASTER_PORT
        return [word for name in given for word in (name, environ[_variable(name)[4:]])]
    if environ.get("USE_LIBUV") == "0":  # the rendezvous of --standalone needs libuv
        return ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    here = [] if "--local-addr" in last or environ.get("PET_LOCAL_ADDR") else ["--local-addr", "localhost"]
    return ["--standalone", *here]  # localhost: a host's own name may not resolve


def thread_environment(options: Sequence[Option], environ: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return OMP_NUM_THREADS so that ranks share the cores, if it is unset and their number known."""
    numbers = [o.value for o in options if o.name in (NPROC, "--nproc-per-node")]
    nproc = (numbers[-1] if numbers else None) or environ.get("PET_NPROC_PER_NODE") or "1"
    if "OMP_NUM_THREADS" in environ or not (nproc.isdecimal() or nproc == "cpu"):
        return {}
    ranks = cores if nproc == "cpu" else max(1, int(nproc))
    return {"OMP_NUM_THREADS": str(max(1, cores // ranks))}


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_port() -> int:
    """Return a port of this host that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _long_option(arguments: Sequence[str], at: int) -> list[Option]:
    """Read --name, --name=value or --name value; names may be shortened as argparse allows."""
    typed, equals, value = arguments[at].partition("=")
    name = _full_name(typed)
    if name is None:
        return []
    if name in FLAGS:
        return [Option(at, at + 1, name, None)]
    if equals:
        return [Option(at, at + 1, name, value)]
    return [Option(at, at + 2, name, arguments[at + 1] if at + 1 < len(arguments) else None)]


def _full_name(typed: str) -> str | None:
    """Return the option that `typed` names or shortens; None if it is none, or more than one."""
    if typed == NPROC:
        return NPROC
    known = (*VALUE_OPTIONS, *FLAGS)
    if typed.replace("_", "-") in known and typed in (
        typed.replace("_", "-"),
        "--" + typed[2:].replace("-", "_"),
    ):
        return typed.replace("_", "-")
    spellings = {name: name for name in known} | {"--" + name[2:].replace("-", "_"): name for name in known}
    matches = [spelling for spelling in spellings if spelling.startswith(typed)]
    return spellings[matches[0]] if len(matches) == 1 else None


def _short_options(arguments: Sequence[str], at: int) -> list[Option]:
    """Read -m, -r 3, -r3 or several in one word, as in -mr3."""
    found: list[Option] = []
    word = arguments[at]
    for place, letter in enumerate(word[1:], start=1):
        if letter in SHORT_FLAGS:
            found.append(Option(at, at + 1, SHORT_FLAGS[letter], None))
            continue
        if letter not in SHORT_VALUE_OPTIONS:
            return []
        rest = word[place + 1 :].removeprefix("=")
        taken = at + 1 if rest else at + 2
        value = rest or (arguments[at + 1] if at + 1 < len(arguments) else None)
        return [*found, Option(at, taken, SHORT_VALUE_OPTIONS[letter], value)]
    return found


def _checked_nproc(value: str | None) -> str:
    if value in NPROC_WORDS or (value is not None and value.isdecimal() and int(value) > 0):
        return value
    got = "nothing" if value is None else f'"{value}"'
    raise UsageError(f"--nproc takes a whole number or {'/'.join(NPROC_WORDS[1:3])}/auto; got {got}")


def _variable(name: str) -> str:
    """The variable torchrun reads an option from: PET_MASTER_PORT for --master-port."""
    return "PET_" + name[2:].replace("-", "_").upper()
