"""python -m launchers: print, or run, the command and environment that start ranks; or check the machine."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

from launchers.doctor import examine
from launchers.environment import Host, Setting, environment
from launchers.k8s import KubernetesJob, manifest
from launchers.ports import HCCL_PORT, HCCL_PORTS, free_ports
from launchers.program import Launch, describe, torchrun_command, torchrun_words
from launchers.shell import script
from launchers.slurm import SlurmJob, batch_file
from launchers.usprun import UsageError, available_cores, free_port
from launchers.vendors import VENDORS

EXAMPLE = """\
  python -m launchers npu --nproc 8 -- -m usp.run wan-t2v --prompt "a red circle moving right"
  python -m launchers slurm --device cuda --nproc 8 --nodes 2 --exec -- -m usp.run wan-t2v
  python -m launchers doctor

torchrun's own options go first behind --, as in -- --numa-binding node -m usp.run wan-t2v
"""
CORES_PER_RANK = 8  # asked of a scheduler unless --cpus says otherwise
USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Do what the command line says, and exit: 0, 1 if the doctor finds a problem, 2 for a usage error."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:at])
    if options.what == "doctor":
        sys.exit(examine(options.kind, options.timeout))
    try:
        _launch(options, words[at + 1 :])
    except UsageError as error:
        print(f"launchers: {error}", file=sys.stderr)
        raise SystemExit(USAGE_ERROR) from error
    sys.exit(0)


def _launch(options: argparse.Namespace, program: Sequence[str]) -> None:
    scheduled = options.what in ("slurm", "k8s")
    launch = describe(
        options.device if scheduled else options.what,
        program,
        nproc=options.nproc,
        nodes=options.nodes,
        timeout_s=options.timeout,
        groups=options.groups,
    )
    if not scheduled:
        _on_this_host(launch, options)
        return
    cores = options.cpus or CORES_PER_RANK * launch.nproc
    settings = environment(launch, Host(cores=cores), {})
    if options.what == "slurm":
        job = SlurmJob(
            name=options.name, cores=cores, time=options.time, gres=options.gres, partition=options.partition
        )
        _hand_over(batch_file(launch, settings, job), ["sbatch"], options.exec)
    else:
        pods = KubernetesJob(name=options.name, image=options.image, cores=cores, resource=options.resource)
        _hand_over(manifest(launch, settings, pods), ["kubectl", "apply", "-f", "-"], options.exec)


def _on_this_host(launch: Launch, options: argparse.Namespace) -> None:
    """Print the commands of all hosts, or become torchrun on this one."""
    visible = launch.vendor.visible
    devices = options.devices
    if devices is None and visible and not any(name in os.environ for name in visible):
        devices = tuple(range(launch.nproc))
    port = _hccl_port(launch, devices)
    host = Host(cores=available_cores(), devices=devices, hccl_port=port)
    settings = environment(launch, host, os.environ)
    if launch.nodes == 1:
        commands = [torchrun_command(torchrun_words(launch, os.environ))]
    else:
        master, _, chosen = (options.master or socket.gethostname()).partition(":")
        meeting = ["--master-addr", master, "--master-port", chosen or str(free_port())]
        commands = [
            torchrun_command(torchrun_words(launch, {}, meeting=["--node-rank", str(node), *meeting]))
            for node in range(launch.nodes)
        ]
    if options.exec:
        _become(commands[_this_node(launch, options)], settings)
    print(script(launch, settings, commands), end="")


def _hccl_port(launch: Launch, devices: Sequence[int] | None) -> int | None:
    """Where HCCL's free ports begin. Looks from a place that is the first device's own, as two launches at
    once see the same ports free but use other devices."""
    if launch.kind != "npu" or launch.nodes > 1:
        return None
    shown = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",")
    first = min(devices or [int(word) for word in shown if word.strip().isdecimal()], default=0)
    return free_ports(HCCL_PORT + HCCL_PORTS * (first % 64), HCCL_PORTS)


def _this_node(launch: Launch, options: argparse.Namespace) -> int:
    if launch.nodes == 1:
        return 0
    if options.node_rank is None or not options.master or ":" not in options.master:
        raise UsageError(
            "--exec on several hosts: each must know its number and where to meet; give --node-rank, and "
            "--master HOST:PORT alike on all"
        )
    if not 0 <= options.node_rank < launch.nodes:
        raise UsageError(f"--node-rank {options.node_rank} with --nodes {launch.nodes}; use one below it")
    return options.node_rank


def _become(command: Sequence[str], settings: Sequence[Setting]) -> NoReturn:
    sys.stdout.flush()
    os.execve(command[0], list(command), {**os.environ, **{s.name: s.value for s in settings}})


def _hand_over(text: str, command: Sequence[str], run: bool) -> None:
    """Print the file, or give it to the scheduler's own command."""
    if not run:
        print(text, end="")
        return
    if shutil.which(command[0]) is None:
        raise UsageError(f"--exec needs {command[0]}, which is not here; print the file and take it there")
    sys.exit(subprocess.run(command, input=text, text=True, check=False).returncode)


def _device_list(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers) or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f'"{text}" is not a list of different numbers such as 0,1,4,5')
    return tuple(map(int, numbers))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence instead of the usage, as every usage error here."""
        print(f"launchers: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m launchers",
        description="Print the environment and command that start a program's ranks; --exec runs it.",
        epilog=f"examples:\n{EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    every = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for kind, vendor in VENDORS.items():
        local = every.add_parser(kind, help=f"ranks on {kind} ({vendor.backend})", allow_abbrev=False)
        _add_common(local)
        local.add_argument("--devices", type=_device_list, help="numbers of the devices, as in 0,1,4,5")
        local.add_argument("--master", help="HOST[:PORT] where several hosts meet (this host)")
        local.add_argument("--node-rank", type=int, help="this host's number, with --exec on several")
    _add_schedulers(every)
    doctor = every.add_parser("doctor", help="check this machine", allow_abbrev=False)
    doctor.add_argument("kind", nargs="?", choices=tuple(VENDORS), help="device that must be usable here")
    doctor.add_argument("--timeout", type=float, default=600.0, help="torch's limit of a collective, seconds")
    return parser


def _add_schedulers(every: argparse._SubParsersAction[_Parser]) -> None:
    slurm = every.add_parser("slurm", help="a batch file for sbatch", allow_abbrev=False)
    k8s = every.add_parser("k8s", help="a manifest for kubectl", allow_abbrev=False)
    for parser in (slurm, k8s):
        _add_common(parser)
        parser.add_argument("--device", choices=tuple(VENDORS), default="cuda", help="kind of device (cuda)")
        parser.add_argument("--cpus", type=int, help=f"cores per host ({CORES_PER_RANK} per rank)")
        parser.add_argument("--name", default="usp", help="of the job (usp)")
    slurm.add_argument("--gres", help="the site's name of the device")
    slurm.add_argument("--partition", help="queue to use")
    slurm.add_argument("--time", default="01:00:00", help="limit, as HH:MM:SS (01:00:00)")
    k8s.add_argument("--image", required=True, help="container image with Python, torch and this package")
    k8s.add_argument("--resource", help="the cluster's name of the device")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=int, required=True, help="ranks per host")
    parser.add_argument("--nodes", type=int, default=1, help="hosts (1)")
    parser.add_argument(
        "--timeout", type=float, help="torch's limit of a collective, told to usp (the program's, or 600)"
    )
    parser.add_argument("--groups", type=int, help="communicators per rank (from the program's --parallel)")
    parser.add_argument("--exec", action="store_true", help="run it instead of printing it")


if __name__ == "__main__":
    main()
