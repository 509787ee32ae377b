"""`python -m launchers doctor`: each line says what is so on this machine, and what to do about a problem."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from launchers.doctor.devices import check_devices, kinds_here
from launchers.doctor.host import check_environment, check_host
from launchers.doctor.machine import Finding, Machine
from launchers.doctor.python import check_python, look_at_torch

WIDTH = 110


def examine(kind: str | None = None, timeout_s: float = 600.0, machine: Machine | None = None) -> int:
    """Print every finding on this machine; return 1 if any is a problem, else 0.

    `kind` of device must be usable; without it, those that leave a trace here are checked. `timeout_s`
    is torch's limit of a collective, which the vendor's timeouts are held against. Imports no torch in this
    process, so that a torch that does not load can be told about.
    """
    findings = []
    for finding in findings_of(machine or Machine(), kind, timeout_s):
        print(as_text(finding), flush=True)
        findings.append(finding)
    problems = sum(finding.state == "problem" for finding in findings)
    print(f"{len(findings)} checks, {problems} problem{'s' * (problems != 1)}")
    return int(problems > 0)


def findings_of(machine: Machine, kind: str | None, timeout_s: float) -> Iterator[Finding]:
    """Yield the findings, one by one as they are made."""
    torch = look_at_torch(machine)
    kinds = [kind] if kind else kinds_here(machine, torch)
    yield from check_python(machine, torch)
    yield from check_devices(machine, torch, kinds, asked=kind)
    yield from check_host(machine, kinds)
    yield from check_environment(machine, kinds, timeout_s)


def as_text(finding: Finding) -> str:
    """Return the finding as one line, and what to do about it below."""
    state = "OK" if finding.state == "ok" else finding.state
    indent = " " * 23
    lines = textwrap.wrap(
        f"{state:<8} {finding.name:<13} {finding.fact}",
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if finding.remedy:
        lines += textwrap.wrap(
            f"-> {finding.remedy}",
            WIDTH,
            initial_indent=indent,
            subsequent_indent=indent + "   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)
