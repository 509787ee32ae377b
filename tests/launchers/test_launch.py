"""`python -m launchers`: what it prints is what it runs, on this host and under Slurm and Kubernetes."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from launchers.__main__ import main
from launchers.ports import HCCL_PORTS, free_ports, taken
from launchers.usprun import UsageError
from launchers.vendors import VENDORS

ROOT = Path(__file__).parents[2]
RUN = ["--", "-m", "usp.run", "wan-t2v", "--prompt", "it's a $(red) circle"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

# Meets the other rank over the address that it was given, and tells what came of it.
PROGRAM = """
import json, os, sys
from runtime.device import Device
from runtime.process_group import connect
with connect(Device("cpu")) as world:
    total = world.broadcast_object(world.world_size * 10)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR")
told = {name: os.environ.get(name) for name in names}
with open(f"{sys.argv[1]}/rank-{os.environ['RANK']}", "w") as file:
    json.dump({**told, "argv": sys.argv[2:], "total": total}, file)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Tests start from an environment without a launcher's or a vendor's variables."""
    marks = ("MASTER_", "PET_", "TORCHELASTIC", "HCCL", "ASCEND", "RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_")
    for name in [n for n in os.environ if n.startswith(marks) or "VISIBLE" in n or n.endswith("ALLOC_CONF")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("USE_LIBUV", raising=False)


def printed(capsys, *words: str) -> str:
    """What the command line prints; it must succeed."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    told = capsys.readouterr()
    assert (caught.value.code, told.err) == (0, "")
    return told.out


def refused(capsys, *words: str) -> str:
    """The one sentence of a usage error."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    told = capsys.readouterr()
    assert (caught.value.code, told.out) == (2, "")
    assert told.err.count("\n") == 1
    return told.err.removeprefix("launchers: ").rstrip()


def test_the_npu_line_of_the_readme_prints_exports_with_reasons_and_the_command(capsys):
    """Every export has a reason; the last line is torchrun on the program's own words."""
    lines = printed(capsys, "npu", "--nproc", "8", *RUN).splitlines()
    assert lines[0] == "# 8 ranks on npu on this host: hccl, room for 3 communicators, timeout 600 s"
    names = [re.fullmatch(r"export (\w+)=\S+ +# \S.*", line)[1] for line in lines[1:-1]]
    assert names == [
        "OMP_NUM_THREADS",
        "PYTORCH_NPU_ALLOC_CONF",
        "ASCEND_RT_VISIBLE_DEVICES",
        "HCCL_CONNECT_TIMEOUT",
        "HCCL_EXEC_TIMEOUT",
        "HCCL_EVENT_TIMEOUT",
        "HCCL_BUFFSIZE",
        "HCCL_IF_BASE_PORT",
        "CPU_AFFINITY_CONF",
        "TASK_QUEUE_ENABLE",
    ]
    start = [*TORCHRUN, "--standalone", "--local-addr", "localhost", "--nproc-per-node", "8", "-m", "--"]
    assert shlex.split(lines[-1]) == [*start, *RUN[2:], "--device", "npu"]


@pytest.mark.parametrize("kind", ["npu", "musa", "cuda", "rocm", "xpu", "mps", "cpu"])
def test_what_is_printed_is_shell(capsys, kind):
    """bash takes each vendor's text, and its variables arrive as they were printed."""
    text = printed(capsys, kind, "--nproc", "1", *RUN)
    exports = "\n".join(line for line in text.splitlines() if not line.startswith(sys.executable))
    done = subprocess.run(
        ["bash", "-euc", f"{exports}\nenv"], capture_output=True, text=True, env={"PATH": os.environ["PATH"]}
    )
    assert done.stderr == ""
    for name, value in re.findall(r"^export (\w+)=(\S+)", text, re.MULTILINE):
        assert f"{name}={value}" in done.stdout.splitlines()


def test_several_hosts_get_a_command_each(capsys):
    """Same port and address, another --node-rank; without --master this host is where they meet."""
    text = printed(capsys, "cuda", "--nproc", "4", "--nodes", "2", "--master", "10.0.0.1:29600", *RUN)
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith(sys.executable)]
    for node, command in enumerate(commands):
        meeting = ["--node-rank", str(node), "--master-addr", "10.0.0.1", "--master-port", "29600"]
        options = ["--nnodes", "2", "--nproc-per-node", "4", "-m", "--"]
        assert command == [*TORCHRUN, *meeting, *options, *RUN[2:], "--device", "cuda"]
    assert len(commands) == 2
    assert f"--master-addr {socket.gethostname()} " in printed(
        capsys, "cpu", "--nproc", "1", "--nodes", "2", *RUN
    )


@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.parametrize("kind", ["npu", "musa", "cuda", "rocm", "xpu", "cpu"])
def test_linters_have_no_complaint(capsys, kind, nodes):
    """shellcheck on the exports and on Slurm's file; Kubernetes' own newest schemas, strictly."""
    words = ["--nproc", "2", "--nodes", nodes]
    for launch in ([kind], ["slurm", "--device", kind, "--partition", "p", "--gres", "g"]):
        shellcheck(printed(capsys, *launch, *words, *RUN))
    text = printed(capsys, "k8s", "--device", kind, "--image", "hub/usp:1", *words, *RUN)
    documents = list(yaml.safe_load_all(text))
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    for document in documents:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def shellcheck(text: str) -> None:
    """Fail with what the linter says. SC2016: words in single quotes are meant as they stand."""
    tool = Path(sys.executable).with_name("shellcheck")
    words = [str(tool), "--shell", "bash", "--exclude", "SC2016", "-"]
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linters_can_complain(capsys):
    """A word that is split, and a field that Kubernetes does not have."""
    text = printed(capsys, "slurm", "--device", "cpu", "--nproc", "1", *RUN)
    with pytest.raises(AssertionError, match="SC2086"):
        shellcheck(text.replace('"$SLURM_JOB_NODELIST"', "$SLURM_JOB_NODELIST"))
    service, _ = yaml.safe_load_all(
        printed(capsys, "k8s", "--image", "i", "--device", "cpu", "--nproc", "1", *RUN)
    )
    service["spec"]["clusterIp"] = "None"
    with pytest.raises(kubernetes_validate.ValidationError, match="clusterIp"):
        kubernetes_validate.validate(service, kubernetes_validate.latest_version(), strict=True)


def hccl_ports(text: str) -> set[int]:
    """The ports that a launch gives to HCCL."""
    base = int(re.search(r"^export HCCL_IF_BASE_PORT=(\d+) ", text, re.MULTILINE)[1])
    return set(range(base, base + HCCL_PORTS))


def test_hazard_9_two_launches_at_once_have_ports_of_their_own(capsys, monkeypatch):
    """By their devices, as neither sees the other's ports yet; on the same devices once those are held."""
    launch = ["npu", "--nproc", "4", *RUN]
    first = hccl_ports(printed(capsys, *launch[:3], "--devices", "0,1,2,3", *RUN))
    second = hccl_ports(printed(capsys, *launch[:3], "--devices", "4,5,6,7", *RUN))
    assert not first & second
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5,6,7")
    assert hccl_ports(printed(capsys, *launch)) == second
    with socket.socket() as holder:
        holder.bind(("", max(second)))
        holder.listen()
        assert not hccl_ports(printed(capsys, *launch)) & second


def test_hazard_9_hosts_that_are_not_seen_are_asked_for_free_ports(capsys):
    """Several hosts and schedulers: HCCL_HOST_SOCKET_PORT_RANGE=auto, and no number of this host's."""
    words = ["--nproc", "8", "--nodes", "2"]
    scheduled = ["--device", "npu", *words]
    for launch in (["npu", *words], ["slurm", *scheduled], ["k8s", "--image", "i", *scheduled]):
        text = printed(capsys, *launch, *RUN)
        assert re.search(r'HCCL_HOST_SOCKET_PORT_RANGE\W[^"]*"?auto', text)
        assert "HCCL_IF_BASE_PORT" not in text


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, vendor in VENDORS.items() for name in vendor.visible]
)
def test_devices_are_chosen_only_where_the_user_did_not(capsys, monkeypatch, kind, name):
    """One variable of the vendor's that is set is enough, an empty one too: it hides all, and is refused."""
    words = [kind, "--nproc", "2", "--", "x.py"]
    assert f"export {VENDORS[kind].visible[0]}=0,1 " in printed(capsys, *words)
    monkeypatch.setenv(name, "4,5")
    text = printed(capsys, *words)
    assert re.search(rf"^# {name}=4,5 +# set already, kept$", text, re.MULTILINE)
    assert "0,1" not in text
    monkeypatch.setenv(name, "")
    assert refused(capsys, *words) == f"{name}= hides every {kind} device; unset it"


def test_the_timeout_of_the_launch_reaches_the_program(capsys):
    """HCCL's timeouts follow --timeout, so torch's must too: our command line really has it."""
    text = printed(capsys, "npu", "--nproc", "2", "--timeout", "1800", *RUN)
    assert shlex.split(text.splitlines()[-1])[-4:] == ["--device", "npu", "--timeout", "1800"]
    assert "export HCCL_EXEC_TIMEOUT=1700 " in text


def test_what_is_set_already_is_shown_and_kept(capsys, monkeypatch):
    """A user's own value is a comment in the text, not an export."""
    monkeypatch.setenv("HCCL_BUFFSIZE", "64")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5")
    text = printed(capsys, "npu", "--nproc", "2", *RUN)
    assert re.search(r"^# HCCL_BUFFSIZE=64 +# set already, kept$", text, re.MULTILINE)
    assert re.search(r"^# ASCEND_RT_VISIBLE_DEVICES=4,5 +# set already, kept$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("npu", r"the following arguments are required: --nproc; see python -m launchers npu --help"),
        ("tpu --nproc 2", r"argument WHAT: invalid choice: 'tpu' .*"),
        ("cpu --nproc two", r"argument --nproc: invalid int value: 'two'; see .*"),
        ("cpu --nproc 0", r"--nproc 0 --nodes 1 makes no rank; give numbers of at least 1"),
        (
            "cuda --nproc 2 --devices 0,0",
            r'.*"0,0" is not a list of different numbers such as 0,1,4,5; see .*',
        ),
        (
            "cpu --nproc 1 --nodes 2 --exec",
            r"--exec on several hosts: each must know its number and where to meet; give --node-rank, and "
            r"--master HOST:PORT alike on all",
        ),
        (
            "cpu --nproc 1 --nodes 2 --exec --master a:1 --node-rank 2",
            r"--node-rank 2 with --nodes 2; use one below it",
        ),
        ("slurm --nproc 1 --time soon", r'--time "soon"; write minutes, HH:MM:SS or D-HH:MM:SS'),
        ("slurm --nproc 1 --partition a;b", r'--partition "a;b"; Slurm takes letters, digits and .* there'),
        ("k8s --nproc 2", r"the following arguments are required: --image; see .*"),
        (
            "k8s --image i --nproc 1 --name A_b",
            r'--name "A_b"; it becomes a host name: at most 52 lower-case letters, digits and -',
        ),
    ],
)
def test_usage_errors_are_one_sentence(capsys, words, sentence):
    """Exit code 2, one line on stderr, nothing on stdout."""
    assert re.fullmatch(sentence, refused(capsys, *words.split(), *RUN))


def test_no_program_is_a_usage_error(capsys):
    """Without -- and words behind it there is nothing to start."""
    expected = "no program was given; put it behind --, as in -- -m usp.run wan-t2v"
    assert refused(capsys, "npu", "--nproc", "2") == expected
    assert refused(capsys, "npu", "--nproc", "2", "--") == expected


def test_b23_ports_in_a_row_are_found_beside_taken_ones():
    """A block with one taken port is passed over; where none is left the message says so."""
    base = free_ports(42_000, 4)
    with socket.socket() as holder:
        holder.bind(("", base + 2))
        holder.listen()
        assert taken(range(base, base + 4)) == [base + 2]
        assert free_ports(base, 4) >= base + 4
    with pytest.raises(UsageError, match=r"^no 16 ports in a row from 65530 upwards are free on this host$"):
        free_ports(65_530, 16)


def in_folder(folder: Path) -> list[str]:
    """Words of a program that tells of itself in `folder`."""
    (folder / "program.py").write_text(PROGRAM)
    return [str(folder / "program.py"), str(folder)]


def told_by_ranks(folder: Path, size: int) -> list[dict]:
    return [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(size)]


def run(command: list[str], **environ: str) -> "subprocess.CompletedProcess[str]":
    """A command from the project's folder, with a minute and a half to end."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=90,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        check=False,
    )


def test_exec_really_runs_two_ranks_on_this_host(tmp_path):
    """--exec on cpu: both ranks meet, have the environment and the words, and their exit code comes back."""
    words = [sys.executable, "-m", "launchers", "cpu", "--nproc", "2", "--exec", "--", *in_folder(tmp_path)]
    done = run([*words, "0", "--flag", "a b"], OMP_NUM_THREADS="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for rank, told in enumerate(told_by_ranks(tmp_path, 2)):
        assert (told["RANK"], told["WORLD_SIZE"], told["total"]) == (str(rank), "2", 20)
        assert told["OMP_NUM_THREADS"] == "1"
        assert told["argv"] == ["0", "--flag", "a b"]


FAKE_SRUN = """#!/bin/bash
# One task for each host, as srun would start them, all on this machine.
while [[ $1 == --* ]]; do echo "$1" >> "$HERE/srun-options"; shift; done
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
wait $first; one=$?; wait $second; two=$?
exit $((one > two ? one : two))
"""


def tool(folder: Path, name: str, text: str) -> None:
    """Put an executable on a folder that a test has in front of its PATH."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def test_the_slurm_file_runs_two_hosts(capsys, tmp_path):
    """bash runs the file itself; srun and scontrol stand for two hosts at 127.0.0.1; the ranks meet."""
    words = ["slurm", "--device", "cpu", "--nproc", "1", "--nodes", "2", "--cpus", "3"]
    text = printed(capsys, *words, "--", *in_folder(tmp_path), "0", "it's a $(red) circle")
    head = text.split("\nset -euo pipefail\n")[0].splitlines()
    assert head[0] == "#!/bin/bash"
    assert [line for line in head if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=usp",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=3",
        "#SBATCH --time=01:00:00",
        "#SBATCH --output=%x-%j.out",
    ]
    (tmp_path / "job.sh").write_text(text)
    assert run(["bash", "-n", str(tmp_path / "job.sh")]).stderr == ""
    tool(tmp_path / "bin", "srun", FAKE_SRUN)
    tool(tmp_path / "bin", "scontrol", "#!/bin/bash\necho 127.0.0.1; echo other\n")
    done = run(
        ["bash", str(tmp_path / "job.sh")],
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        HERE=str(tmp_path),
        SLURM_JOB_ID=str(free_ports(29_510, 1) - 29_500),
        SLURM_JOB_NODELIST="host[0-1]",
        SLURM_CPUS_PER_TASK="3",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for rank, told in enumerate(told_by_ranks(tmp_path, 2)):
        assert (told["RANK"], told["LOCAL_RANK"], told["WORLD_SIZE"]) == (str(rank), "0", "2")
        assert (told["OMP_NUM_THREADS"], told["MASTER_ADDR"], told["total"]) == ("3", "127.0.0.1", 20)
        assert told["argv"] == ["0", "it's a $(red) circle"]
    options = (tmp_path / "srun-options").read_text().split()
    assert options == ["--kill-on-bad-exit=1", "--cpus-per-task=3", "--cpu-bind=none"]


@pytest.mark.parametrize(
    ("device", "gres"), [("cuda", "gpu:8"), ("npu", "npu:8"), ("musa", "gpu:8"), ("rocm", "gpu:8")]
)
def test_the_slurm_file_asks_for_the_vendors_devices(capsys, device, gres):
    """A --gres line with the vendor's usual name, or the site's own; the scheduler shows the devices."""
    words = ["slurm", "--device", device, "--nproc", "8", "--partition", "fast"]
    text = printed(capsys, *words, *RUN)
    assert f"#SBATCH --gres={gres}\n#SBATCH --partition=fast\n" in text
    assert "VISIBLE_DEVICES" not in text
    assert "#SBATCH --cpus-per-task=64\n" in text
    head = text.split("\nset -euo pipefail\n")[0].splitlines()
    assert all(line.startswith("#") for line in head), "Slurm stops reading options at a command"
    assert ("#SBATCH --exclusive" in head) == (device in ("npu", "musa")), "Slurm shows these no devices"
    assert "#SBATCH --gres=h200:8\n" in printed(capsys, *words, "--gres", "h200", *RUN)
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""


def test_the_kubernetes_manifest_is_an_indexed_job_and_its_service(capsys):
    """YAML with the fields that several hosts need: stable names, no restarts, devices, shared memory."""
    words = [
        "k8s",
        "--device",
        "npu",
        "--image",
        "hub/usp:1",
        "--nproc",
        "8",
        "--nodes",
        "2",
        "--name",
        "film",
    ]
    service, job = yaml.safe_load_all(printed(capsys, *words, *RUN))
    assert (service["apiVersion"], service["kind"], service["metadata"]) == (
        "v1",
        "Service",
        {"name": "film"},
    )
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": "film"},
        "ports": [{"name": "torchrun", "port": 29500}],
    }
    assert (job["apiVersion"], job["kind"], job["metadata"]) == ("batch/v1", "Job", {"name": "film"})
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert {k: v for k, v in spec.items() if k != "template"} == {
        "completionMode": "Indexed",
        "completions": 2,
        "parallelism": 2,
        "backoffLimit": 0,
    }
    assert (pod["subdomain"], pod["restartPolicy"], len(pod["containers"])) == ("film", "Never", 1)
    box = pod["containers"][0]
    assert box["image"] == "hub/usp:1"
    assert box["resources"] == {"requests": {"cpu": 64}, "limits": {"huawei.com/Ascend910": 8}}
    env = {variable["name"]: variable["value"] for variable in box["env"]}
    assert all(isinstance(value, str) for value in env.values()), "Kubernetes takes strings only"
    assert env["HCCL_BUFFSIZE"] == "170"
    assert not [name for name in env if "VISIBLE" in name]
    assert box["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert pod["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}]


def test_the_kubernetes_container_starts_torchrun_with_its_index(capsys, tmp_path):
    """The pod's command, run by a shell with a python that tells its words: each word arrives whole."""
    words = ["k8s", "--device", "cpu", "--image", "i", "--nproc", "2", "--nodes", "2"]
    _, job = yaml.safe_load_all(printed(capsys, *words, *RUN))
    box = job["spec"]["template"]["spec"]["containers"][0]
    assert "limits" not in box["resources"]
    arguments = [word.replace("$$(", "$(") for word in box["args"]]  # as the kubelet does
    tool(
        tmp_path,
        "python",
        f'#!/bin/sh\nexec {sys.executable} -c "import json, sys; print(sys.argv[1:])" "$@"\n',
    )
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}
    done = subprocess.run([*box["command"], *arguments], capture_output=True, text=True, env=environ)
    meeting = ["--node-rank", "1", "--master-addr", "usp-0.usp", "--master-port", "29500"]
    options = ["--nnodes", "2", "--nproc-per-node", "2", "-m", "--"]
    assert done.stderr == ""
    assert (
        done.stdout == f"{['-m', 'torch.distributed.run', *meeting, *options, *RUN[2:], '--device', 'cpu']}\n"
    )


@pytest.mark.parametrize(
    ("words", "scheduler", "given"),
    [(["slurm"], "sbatch", ""), (["k8s", "--image", "i"], "kubectl", "apply -f -")],
)
def test_exec_hands_the_file_to_the_scheduler(tmp_path, words, scheduler, given):
    """--exec gives the printed text to sbatch or kubectl on its stdin, and leaves with its exit code."""
    command = [sys.executable, "-m", "launchers", *words, "--device", "cpu", "--nproc", "2"]
    text = run([*command, *RUN]).stdout
    tool(tmp_path, scheduler, f'#!/bin/bash\necho "$@" > {tmp_path}/words\ncat > {tmp_path}/text\nexit 7\n')
    done = run([*command, "--exec", *RUN], PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    assert (tmp_path / "words").read_text().strip() == given
    assert (tmp_path / "text").read_text() == text
    absent = run([*command, "--exec", *RUN], PATH="/nowhere")
    assert absent.returncode == 2
    assert absent.stderr.startswith(f"launchers: --exec needs {scheduler}, which is not here; print the file")


def test_the_launchers_import_no_torch():
    """All of it needs the standard library only; torch, once installed, is looked at from outside."""
    code = "import sys, launchers.__main__, launchers.doctor; print({'torch', 'numpy'} & set(sys.modules))"
    done = run([sys.executable, "-c", code])
    assert (done.stdout, done.stderr) == ("set()\n", "")
