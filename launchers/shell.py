"""A launch as shell text: what to export, why, and the command of each host."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from launchers.environment import Setting
from launchers.program import Launch

REASON_AT = 58  # column of the reasons


def heading(launch: Launch) -> str:
    """Return one comment line that says what is started."""
    hosts = "this host" if launch.nodes == 1 else f"each of {launch.nodes} hosts"
    groups = f"{launch.groups} communicator{'s' * (launch.groups != 1)}"
    backend = f"{launch.vendor.backend}, room for {groups}" if launch.world_size > 1 else "no communication"
    ranks = f"{launch.nproc} rank{'s' * (launch.nproc != 1)} on {launch.kind} on {hosts}"
    return f"# {ranks}: {backend}, timeout {launch.timeout_s:g} s"


def exports(settings: Iterable[Setting]) -> list[str]:
    """Return a line of shell for each setting, with its reason; what was set already is a comment."""
    lines = []
    for setting in settings:
        assignment = f"{setting.name}={shlex.quote(setting.value)}"
        line = f"# {assignment}" if setting.kept else f"export {assignment}"
        lines.append(f"{line:<{REASON_AT}}  # {setting.reason}" if setting.reason else line)
    return lines


def command_line(words: Sequence[str]) -> str:
    """Return the words as one line that a shell reads back as the same words."""
    return shlex.join(words)


def script(launch: Launch, settings: Iterable[Setting], commands: Sequence[Sequence[str]]) -> str:
    """Return what to type: the exports, then the command; with several hosts, the command of each."""
    lines = [heading(launch), *exports(settings)]
    for node, command in enumerate(commands):
        if len(commands) > 1:
            lines += ["", f"# on host {node}, with the same exports"]
        lines.append(command_line(command))
    return "\n".join(lines) + "\n"
