"""A launch as a batch file for Slurm: one torchrun per host, which starts that host's ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from launchers.environment import Setting
from launchers.program import Launch, torchrun_command, torchrun_words
from launchers.shell import command_line, exports, heading
from launchers.usprun import UsageError

MEETING = ("--node-rank", "$SLURM_NODEID", "--master-addr", "$MASTER_ADDR", "--master-port", "$MASTER_PORT")

NOT_SHOWN = (
    "# Slurm does not tell a job which {kind} devices are its own: two jobs on a host would use the same."
)

FILE = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cores}
{options}#SBATCH --time={time}
#SBATCH --output=%x-%j.out
{heading}
set -euo pipefail

{exports}

# Jobs that share a host differ in their number, so in their port.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=$((29500 + SLURM_JOB_ID % 2000))
export MASTER_ADDR MASTER_PORT

# One task per host, on all its cores; a host that fails ends the job. srun does not take
# --cpus-per-task from above by itself.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=none \\
    bash -c '{command} "$@"' torchrun \\
    {words}
"""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What Slurm must know beyond the launch. `gres` names the device as the site does; `cores` per host."""

    name: str
    cores: int
    time: str
    gres: str | None = None
    partition: str | None = None

    def __post_init__(self) -> None:
        for option, value in (("name", self.name), ("gres", self.gres), ("partition", self.partition)):
            if value is not None and not re.fullmatch(r"[\w.:,/-]+", value):
                raise UsageError(f'--{option} "{value}"; Slurm takes letters, digits and -_.:,/ there')
        if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", self.time):
            raise UsageError(f'--time "{self.time}"; write minutes, HH:MM:SS or D-HH:MM:SS')


def batch_file(launch: Launch, settings: Iterable[Setting], job: SlurmJob) -> str:
    """Return the file for `sbatch`. The variables are the same on every host."""
    words = torchrun_words(launch, {}, meeting=MEETING)
    inside = " ".join(word if word.startswith("--") else f'"{word}"' for word in MEETING)
    gres = job.gres or launch.vendor.gres
    options = [f"#SBATCH --gres={gres}:{launch.nproc}"] if gres else []
    options += [f"#SBATCH --partition={job.partition}"] if job.partition else []
    if launch.vendor.visible and not launch.vendor.slurm_shows:
        options += [NOT_SHOWN.format(kind=launch.kind), "#SBATCH --exclusive"]
    return FILE.format(
        name=job.name,
        nodes=launch.nodes,
        cores=job.cores,
        time=job.time,
        options="".join(f"{option}\n" for option in options),
        heading=heading(launch),
        exports="\n".join(exports(settings)),
        command=f"exec {command_line(torchrun_command([]))} {inside}",
        words=command_line(words[len(MEETING) :]),
    )
