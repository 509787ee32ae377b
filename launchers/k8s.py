"""A launch as a manifest for Kubernetes: an Indexed Job, one pod per host, and a service that names them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from launchers.environment import Setting
from launchers.program import Launch, torchrun_words
from launchers.shell import heading
from launchers.usprun import UsageError

PORT = 29500  # a pod has an address of its own
MEETING = ("--node-rank", "$JOB_COMPLETION_INDEX", "--master-addr", "{master}", "--master-port", str(PORT))

FILE = """\
{heading}
apiVersion: v1
kind: Service  # gives each pod a name that the others can look up
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true  # pods look each other up before any is ready
  selector:
    job-name: {name}  # which every pod of the job has
  ports:
    - name: torchrun
      port: {port}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed  # pod i is host i
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: 0  # one pod cannot come back alone: its ranks have lost their group
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      containers:
        - name: ranks
          image: {image}
          command:
            - /bin/sh
            - -c
            - {command}
            - torchrun
          args:
{words}
          env:
{env}
          resources:
            requests:
              cpu: {cores}
{limits}          volumeMounts:
            - name: shm
              mountPath: /dev/shm
      volumes:
        - name: shm  # the usual 64 MiB are too few for collectives between processes
          emptyDir:
            medium: Memory
            sizeLimit: 8Gi
"""


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """What Kubernetes must know beyond the launch. `resource` names the device as the cluster's plugin does;
    `cores` per host."""

    name: str
    image: str
    cores: int
    resource: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", self.name):
            raise UsageError(
                f'--name "{self.name}"; it becomes a host name: at most 52 lower-case letters, digits and -'
            )


def manifest(launch: Launch, settings: Iterable[Setting], job: KubernetesJob) -> str:
    """Return the manifest for `kubectl apply -f`; scalars are JSON, which YAML reads."""
    words = torchrun_words(launch, {}, meeting=MEETING)[len(MEETING) :]
    meeting = " ".join(MEETING).format(master=f"{job.name}-0.{job.name}")
    inside = meeting.replace("$JOB_COMPLETION_INDEX", '"$JOB_COMPLETION_INDEX"')
    resource = job.resource or launch.vendor.resource
    limits = (
        f"            limits:\n              {json.dumps(resource)}: {launch.nproc}\n" if resource else ""
    )
    return FILE.format(
        heading=heading(launch),
        name=job.name,
        port=PORT,
        nodes=launch.nodes,
        image=json.dumps(job.image),
        command=json.dumps(f'exec python -m torch.distributed.run {inside} "$@"'),
        words="\n".join(f"            - {json.dumps(_plain(word))}" for word in words),
        env="\n".join(_variable(setting) for setting in settings),
        cores=job.cores,
        limits=limits,
    )


def _variable(setting: Setting) -> str:
    indent = " " * 12
    value = json.dumps(_plain(setting.value))
    return f"{indent}- name: {setting.name}  # {setting.reason}\n{indent}  value: {value}"


def _plain(text: str) -> str:
    """Kubernetes replaces $(NAME) in arguments and values; $$( is a plain $(."""
    return text.replace("$(", "$$(")
