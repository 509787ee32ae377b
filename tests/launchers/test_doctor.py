"""The doctor: one line for each thing, what to do about a problem, and an exit code; on any machine."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import launchers.doctor.host as host_module
from launchers.doctor import as_text, examine, findings_of
from launchers.doctor.ascend import CANN_OF, cann_version, read_health
from launchers.doctor.devices import kinds_here
from launchers.doctor.machine import Finding, Machine, last_words
from launchers.doctor.nvidia import read_links
from launchers.doctor.python import Torch, look_at_torch
from launchers.ports import free_ports
from launchers.vendors import VENDORS

ROOT = Path(__file__).parents[2]

NPU_SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0                   Version: 24.1.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 70.0        34                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           1197 / 13553      1365 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | {health:<13} | 66.9        34                0    / 0             |
| 0                         | 0000:81:00.0  | 0           2411 / 15665      4    / 65536         |
+===========================+===============+====================================================+
"""

NPU_SMI_310P = """\
| NPU     Name                  | Health          | Power(W)     Temp(C)       Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                    |
| 6       310P3                 | OK              | NA           50            0     / 0             |
| 0       0                     | 0000:84:00.0    | 0            1839 / 21525                        |
| 7       Ascend910             | Critical        | NA           50            0     / 0             |
"""

TOPO = """\
\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tSYS\t0-47\t0
GPU1\tNV18\t X \t{last}\t0-47\t0
GPU2\tSYS\t{last}\t X \t48-95\t1
"""

PATH = os.environ["PATH"]
QUIET = {"PATH": PATH, "HOME": os.environ.get("HOME", "/")}


def put(root: Path, name: str, text: str = "") -> Path:
    """A file of a machine below `root`."""
    file = root / name.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def tool(root: Path, name: str, text: str) -> None:
    """A command on the machine's PATH."""
    put(root, f"/bin/{name}", f"#!/bin/sh\n{text}\n").chmod(0o755)


def machine(root: Path, **environ: str) -> Machine:
    """A machine whose files and tools are below `root`, with this Python."""
    return Machine(root, {**QUIET, "PATH": f"{root}/bin:{PATH}", **environ})


def pci(root: Path, number: str, kind: str) -> None:
    """A card on the bus: vendor number and class."""
    put(root, "/sys/bus/pci/devices/0000:c1:00.0/vendor", f"{number}\n")
    put(root, "/sys/bus/pci/devices/0000:c1:00.0/class", f"{kind}\n")


@pytest.fixture
def ascend(tmp_path):
    """A host with two NPUs, driver, CANN 8.5.0 and a network; tests break one part."""
    put(tmp_path, "/dev/shm/x")
    pci(tmp_path, "0x19e5", "0x120000")
    for name in ("davinci0", "davinci1", "davinci_manager", "devmm_svm", "hisi_hdc"):
        put(tmp_path, f"/dev/{name}")
    put(tmp_path, "/usr/local/Ascend/driver/version.info", "Version=24.1.rc2\nother=1\n")
    home = "/usr/local/Ascend/ascend-toolkit/latest"
    put(tmp_path, "/usr/local/Ascend/ascend-toolkit/set_env.sh")
    put(tmp_path, f"{home}/x86_64-linux/ascend_toolkit_install.info", "package_name=t\nversion=8.5.0\n")
    for name in ("runtime", "compiler", "opp"):
        put(tmp_path, f"{home}/{name}/x")
    tool(tmp_path, "npu-smi", f"cat <<'END'\n{NPU_SMI.format(health='OK')}END")
    tool(tmp_path, "hccn_tool", "echo 'link status: UP'")
    return machine(tmp_path, ASCEND_HOME_PATH=home, ASCEND_OPP_PATH=f"{home}/opp")


def lines(where: Machine, torch: Torch, kind: str | None = None) -> dict[str, Finding]:
    """Findings on devices by name; a name with several findings keeps the first."""
    from launchers.doctor.devices import check_devices

    found: dict[str, Finding] = {}
    kinds = [kind] if kind else kinds_here(where, torch)
    for finding in check_devices(where, torch, kinds, asked=kind):
        found.setdefault(finding.name, finding)
    return found


def seen(kind: str, count: int, backend: str, **facts: object) -> Torch:
    """A torch that sees `count` devices."""
    told = {"version": "2.9.0", "distributed": True, "backends": ["gloo", backend], "devices": {kind: count}}
    versions = {"torch": "2.9.0", **({"torch_npu": "2.9.0"} if kind == "npu" else {})}
    return Torch((3, 11, 7), versions, [], {**told, **facts})


NPU_TORCH = seen("npu", 2, "hccl")


def test_the_doctor_runs_on_this_machine(capsys):
    """A real run, torch looked at from outside: a line for each thing, and 0 exactly if none is a problem."""
    code = examine()
    *checks, total = capsys.readouterr().out.splitlines()
    states = [line[:8].strip() for line in checks if not line.startswith(" ")]
    assert set(states) <= {"OK", "note", "problem"}
    assert (
        total
        == f"{len(states)} checks, {states.count('problem')} problem{'s' * (states.count('problem') != 1)}"
    )
    assert code == int("problem" in states)
    text = "\n".join(checks)
    assert f"OK       python        {'.'.join(map(str, sys.version_info[:3]))}" in text
    assert "OK       loopback      127.0.0.1 takes connections" in text
    import torch

    assert f"OK       torch         {torch.__version__}" in text


def test_it_runs_where_torch_is_absent(tmp_path, capsys):
    """A Python without torch: the doctor says so, looks at the rest, and leaves with 1."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S -E -I "$@"\n')
    bare.chmod(0o755)
    put(tmp_path, "/dev/shm/x")
    assert examine(machine=Machine(tmp_path, QUIET, str(bare))) == 1
    text = capsys.readouterr().out
    assert "problem  torch         not installed for this Python" in text
    assert "OK       devices       no accelerator here; cpu works" in text


def site(folder: Path, package: str, version: str, text: str, *, entry: bool = False) -> str:
    """A folder for PYTHONPATH with an installed package; `entry`: torch loads it by itself."""
    put(folder, f"{package}/__init__.py", text)
    info = f"{package}-{version}.dist-info"
    put(folder, f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    if entry:
        put(folder, f"{info}/entry_points.txt", f"[torch.backends]\n{package} = {package}:_autoload\n")
    return str(folder)


TORCH_LINE = ".".join(__import__("torch").__version__.split(".")[:2])
NO_CANN = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')"


def test_hazard_1_the_autoload_trap_is_told_with_its_way_out(tmp_path):
    """torch autoloads a torch_npu that lacks CANN: `import torch` fails, and the doctor says why."""
    path = site(tmp_path / "site", "torch_npu", f"{TORCH_LINE}.0", NO_CANN, entry=True)
    put(tmp_path, "/dev/shm/x")
    where = machine(tmp_path, PYTHONPATH=path)
    found = {f.name: f for f in findings_of(where, None, 600.0)}
    assert found["torch"].state == "ok"
    trap = found["autoload"]
    assert trap.state == "problem"
    assert trap.fact == (
        "`import torch` fails since it loads torch_npu by itself (ImportError: libhccl.so: cannot open "
        "shared object file: No such file or directory)"
    )
    for way_out in ("set_env.sh", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", "uninstall torch_npu"):
        assert way_out in trap.remedy
    assert found["npu devices"].state == "note"


def test_hazard_2_autoload_off_is_a_note(tmp_path):
    """With AUTOLOAD=0 torch loads; torch.npu is missing until the import; a broken package is a problem."""
    path = site(tmp_path / "site", "torch_npu", f"{TORCH_LINE}.0", NO_CANN, entry=True)
    put(tmp_path, "/dev/shm/x")
    where = machine(tmp_path, PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    found = {f.name: f for f in findings_of(where, None, 600.0)}
    assert found["autoload"].state == "note"
    assert "torch.npu and the like exist only after importing torch_npu" in found["autoload"].fact
    assert found["pairing"].state == "problem"
    assert "does not load (ImportError: libhccl.so" in found["pairing"].fact


def test_hazard_4_a_wrong_pair_is_told_in_words(tmp_path):
    """torch_npu for another torch: both versions, and what to install."""
    path = site(tmp_path / "site", "torch_npu", "2.6.0.post5", "")
    found = {f.name: f for f in findings_of(machine(tmp_path, PYTHONPATH=path), None, 600.0)}
    assert found["pairing"].state == "problem"
    assert found["pairing"].fact.startswith("torch_npu 2.6.0.post5 is made for torch 2.6; torch ")
    assert found["pairing"].remedy == f"install torch 2.6, or the torch_npu for torch {TORCH_LINE}"


def test_a_torch_that_does_not_load_is_a_problem(tmp_path):
    """Broken without any vendor's package: its own error, and no word on autoloading."""
    path = site(tmp_path / "site", "torch", "2.9.0", "raise OSError('libtorch_cpu.so: invalid ELF header')")
    torch = look_at_torch(machine(tmp_path, PYTHONPATH=path))
    assert torch.error == "OSError: libtorch_cpu.so: invalid ELF header"
    found = {f.name: f for f in findings_of(machine(tmp_path, PYTHONPATH=path), None, 600.0)}
    assert found["torch"].state == "problem"
    assert found["torch"].fact == "2.9.0 does not load (OSError: libtorch_cpu.so: invalid ELF header)"
    assert "autoload" not in found


def test_a_sound_ascend_host_has_no_problem(ascend):
    """Two NPUs: files, driver, health, CANN, links and torch are each one OK line."""
    found = lines(ascend, NPU_TORCH)
    assert {f.state for f in found.values()} == {"ok"}
    assert {name: f.fact for name, f in found.items()} == {
        "npu devices": "2 (/dev/davinci0 ...)",
        "npu driver": "24.1.rc2, 2 NPUs in good health",
        "CANN": "8.5.0 at /usr/local/Ascend/ascend-toolkit/latest",
        "npu links": "network up on 2 NPUs",
        "npu in torch": "2 seen, hccl built in",
    }


def remove(where: Machine, name: str) -> Machine:
    where.path(name).unlink()
    return where


def variables(where: Machine, **environ: str) -> Machine:
    kept = {k: v for k, v in where.environ.items() if environ.get(k) != "-"}
    return Machine(where.root, {**kept, **{k: v for k, v in environ.items() if v != "-"}}, where.python)


def broken_tool(where: Machine, name: str, text: str) -> Machine:
    tool(where.root, name, text)
    return where


def without(where: Machine, folder: str) -> Machine:
    shutil.rmtree(where.path(folder))
    return where


HOME = "/usr/local/Ascend/ascend-toolkit/latest"


@pytest.mark.parametrize(
    ("change", "name", "state", "fact", "remedy"),
    [
        (
            lambda m: broken_tool(m, "npu-smi", f"cat <<'END'\n{NPU_SMI.format(health='Alarm')}END"),
            *("npu driver", "problem", "24.1.rc2; NPU 1 is Alarm", "leave it out with --devices"),
        ),
        (
            lambda m: broken_tool(
                m, "npu-smi", "echo 'dcmi module initialize failed. ret is -8005' >&2; exit 1"
            ),
            *(
                "npu driver",
                "problem",
                "24.1.rc2; dcmi module initialize failed. ret is -8005",
                "reload the driver",
            ),
        ),
        (
            lambda m: remove(m, "/dev/devmm_svm"),
            *(
                "npu driver",
                "problem",
                "/dev/devmm_svm missing; a device alone cannot be opened",
                "container",
            ),
        ),
        (
            lambda m: variables(m, ASCEND_HOME_PATH="-"),
            "CANN",
            "problem",
            "installed, but not set up for this shell (no ASCEND_HOME_PATH)",
            "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
        ),
        (
            lambda m: variables(remove(m, f"{HOME}/../set_env.sh"), ASCEND_HOME_PATH="-"),
            *(
                "CANN",
                "problem",
                "no ASCEND_HOME_PATH, and no set_env.sh under /usr/local/Ascend",
                "install CANN",
            ),
        ),
        (
            lambda m: variables(m, ASCEND_OPP_PATH="-"),
            *(
                "CANN",
                "problem",
                "torch_npu will not load: missing ASCEND_OPP_PATH (not set)",
                "source set_env.sh",
            ),
        ),
        (
            lambda m: without(m, f"{HOME}/compiler"),
            "CANN",
            "problem",
            f"torch_npu will not load: missing its compiler folder ({HOME}/compiler)",
            "source set_env.sh of a whole",
        ),
        (
            lambda m: broken_tool(
                m, "hccn_tool", '[ "$2" = 1 ] && echo "link status: DOWN" || echo "link status: UP"'
            ),
            *(
                "npu links",
                "note",
                "network of NPU 1 is down; ranks of one host do not need it",
                "/etc/hccn.conf",
            ),
        ),
        (
            lambda m: remove(m, "/bin/hccn_tool"),
            *("npu links", "note", "the cards' network was not looked at: no hccn_tool", "several hosts"),
        ),
    ],
)
def test_each_fault_of_an_ascend_host_is_told(ascend, change, name, state, fact, remedy):
    """One part is broken: that line names it and says what to do; the lines of other parts stay OK."""
    found = lines(change(ascend), NPU_TORCH)
    assert (found[name].state, found[name].fact) == (state, fact)
    assert remedy in found[name].remedy
    assert {f.state for n, f in found.items() if n != name} == {"ok"}


def test_cann_and_torch_npu_are_a_pair_that_the_vendor_lists(ascend):
    """CANN 8.5 with the torch_npu for 9.1 is a note that names both; versions not listed are left alone."""
    pair = Torch((3, 11), {"torch": "2.12.0", "torch_npu": "2.12.0"}, [], NPU_TORCH.facts)
    told = lines(ascend, pair)["CANN"]
    assert told.state == "note"
    assert "the vendor lists CANN 9.1.0 for torch_npu 2.12.0" in told.fact
    assert cann_version(ascend, HOME) == "8.5.0" == CANN_OF["2.9.0"]


def test_health_is_read_from_both_generations_of_the_table():
    """910 cards and 310P cards print unlike columns; the heading and chip rows are no cards."""
    assert read_health(NPU_SMI.format(health="Warning")) == {"0": "OK", "1": "Warning"}
    assert read_health(NPU_SMI_310P) == {"6": "OK", "7": "Critical"}


def test_a_card_without_a_driver_is_found_on_the_bus(tmp_path):
    """PCI shows a card of each vendor; without device files its driver, or the container, lacks something."""
    for kind, number, group in (("npu", "0x19e5", "0x120000"), ("musa", "0x1ed5", "0x030000")):
        pci(tmp_path, number, group)
        assert kinds_here(machine(tmp_path), Torch()) == [kind]
        told = lines(machine(tmp_path), Torch())[f"{kind} devices"]
        assert told.state == "problem"
        assert told.fact.startswith("1 on the PCI bus, but no /dev/")
    pci(tmp_path, "0x19e5", "0x030000")  # the same vendor's display chip on its server boards
    assert kinds_here(machine(tmp_path), Torch()) == []


def test_hazard_3_a_device_that_was_asked_for_and_is_not_here_is_a_problem(tmp_path):
    """`doctor npu` on a machine without: no card, and torch sees none."""
    found = lines(machine(tmp_path), seen("npu", 0, "hccl"), "npu")
    assert found["npu devices"].fact == "none: no card on the PCI bus and no /dev/davinci[0-9]*"
    assert found["npu in torch"].fact == "torch 2.9.0 sees none"
    bare = replace(seen("npu", 0, "hccl"), versions={"torch": "2.9.0"})
    npu = lines(machine(tmp_path), bare, "npu")["npu in torch"]
    assert (npu.state, npu.fact) == ("problem", "torch_npu is not installed")
    assert npu.remedy == 'pip install "torch_npu==2.9.*", which pairs with torch 2.9'
    musa = lines(machine(tmp_path), seen("musa", 0, "mccl"), "musa")["musa in torch"]
    assert musa.remedy == "install the vendor's pair of torch and torch_musa"
    assert lines(machine(tmp_path), seen("cuda", 0, "nccl"), "cpu")["cpu"].state == "ok"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open every file")
def test_device_files_that_may_not_be_opened_are_a_problem(ascend):
    """A user outside the driver's group sees the files and cannot use them."""
    ascend.path("/dev/davinci1").chmod(0)
    assert lines(ascend, NPU_TORCH)["npu devices"].fact == "/dev/davinci1 may not be opened"


@pytest.fixture
def nvidia(tmp_path):
    """A host with three linked NVIDIA cards."""
    pci(tmp_path, "0x10de", "0x030200")
    for number in range(3):
        put(tmp_path, f"/dev/nvidia{number}")
    put(tmp_path, "/dev/nvidiactl")
    rows = "NVIDIA H200, 570.86.15, 143771 MiB\n" * 3
    text = f'[ "$1" = topo ] && cat <<"END" || cat <<"CARDS"\n{TOPO.format(last="NV18")}END\n{rows}CARDS'
    tool(tmp_path, "nvidia-smi", text)
    return machine(tmp_path)


def test_cuda_driver_links_and_a_torch_without_cuda(nvidia):
    """Driver and cards in one line; links of unlike kinds are a note; a CPU build of torch is a problem."""
    found = lines(nvidia, seen("cuda", 3, "nccl", cuda="12.8"))
    assert found["cuda driver"].fact == "570.86.15, 3 x NVIDIA H200 with 143771 MiB"
    assert found["cuda links"].state == "note"
    assert found["cuda links"].fact == "some cards meet over SYS, not NVLink"
    assert found["cuda in torch"].fact == "3 seen, nccl built in"
    plain = lines(nvidia, seen("cuda", 0, "nccl", version="2.9.0+cpu", cuda=None))["cuda in torch"]
    assert (plain.state, plain.fact) == ("problem", "torch 2.9.0+cpu is not built for cuda")
    without_nccl = lines(nvidia, seen("cuda", 3, "gloo", cuda="12.8"))["cuda in torch"]
    assert without_nccl.fact.startswith("3 seen, but this torch has no nccl")
    hidden = variables(nvidia, CUDA_VISIBLE_DEVICES="1")
    fewer = lines(hidden, seen("cuda", 1, "nccl", cuda="12.8"))["cuda in torch"]
    assert (fewer.state, fewer.fact) == ("note", "1 of 3 seen (CUDA_VISIBLE_DEVICES=1)")
    failing = broken_tool(
        nvidia, "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library mismatch'; exit 18"
    )
    told = lines(failing, seen("cuda", 0, "nccl", cuda="12.8"))["cuda driver"]
    assert (told.state, told.fact) == ("problem", "Failed to initialize NVML: Driver/library mismatch")


def test_links_are_read_from_the_matrix():
    """Each pair once; the heading row, and columns behind the cards, are no links."""
    assert read_links(TOPO.format(last="PIX")) == ["NV18", "SYS", "PIX"]
    assert read_links("") == []


def test_rocm_and_cuda_are_told_apart():
    """The same torch.cuda: with HIP the devices are rocm's, without it cuda's."""
    hip = seen("cuda", 4, "nccl", hip="6.4")
    assert (hip.devices("rocm"), hip.devices("cuda")) == (4, 0)
    cuda = seen("cuda", 4, "nccl", hip=None)
    assert (cuda.devices("rocm"), cuda.devices("cuda")) == (0, 4)


@pytest.mark.parametrize(
    ("environ", "state", "fact"),
    [
        ({}, "ok", "nothing in the environment contradicts itself"),
        (
            {"RANK": "1"},
            "problem",
            "RANK set in this shell; a program started here takes itself for such a rank",
        ),
        (
            {"PYTORCH_NPU_ALLOC_CONF": "a", "PYTORCH_ALLOC_CONF": "b"},
            "problem",
            "PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF are both set; on npu they mean the same",
        ),
        ({"HCCL_EXEC_TIMEOUT": "1836"}, "problem", "HCCL_EXEC_TIMEOUT=1836 with a timeout of 600 s"),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"}, "problem", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=60 with a"),
        ({"ASCEND_RT_VISIBLE_DEVICES": ""}, "problem", "ASCEND_RT_VISIBLE_DEVICES= hides every npu device"),
        ({"ASCEND_LAUNCH_BLOCKING": "1"}, "note", "ASCEND_LAUNCH_BLOCKING=1: each operator is waited for"),
    ],
)
def test_variables_that_contradict_are_told(tmp_path, environ, state, fact):
    """Each is one line with what to unset; an environment in order is one OK line."""
    found = list(host_module.check_environment(Machine(tmp_path, environ), ["npu"], 600.0))
    assert len(found) == 1
    assert found[0].state == state
    assert found[0].fact.startswith(fact)
    assert (found[0].remedy != "") == (state != "ok")


@pytest.mark.parametrize("name", VENDORS["rocm"].visible)
def test_each_variable_that_hides_devices_is_told(tmp_path, name):
    """ROCm has three, and each alone can hide every device."""
    (found,) = host_module.check_environment(Machine(tmp_path, {name: "-1"}), ["rocm"], 600.0)
    assert (found.state, found.fact) == ("problem", f"{name}=-1 hides every rocm device")
    assert found.remedy == f"unset {name}"


def test_hazard_9_hccl_ports_taken_or_given_away_are_told(tmp_path):
    """A taken port is a problem that names it; ports within the system's own range are a note."""
    base = free_ports(42_000, 32)
    where = machine(tmp_path, HCCL_IF_BASE_PORT=str(base))
    check = host_module._check_hccl_ports
    assert [f.state for f in check(where)] == ["ok"]
    put(tmp_path, "/proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
    for reserved in ("\n", f"{base}-{base + 15}\n"):
        put(tmp_path, "/proc/sys/net/ipv4/ip_local_reserved_ports", reserved)
        (told,) = check(where)
        remedy = f"sysctl -w net.ipv4.ip_local_reserved_ports={base}-{base + 31}"
        assert (told.state, told.remedy) == ("note", remedy)
    put(
        tmp_path,
        "/proc/sys/net/ipv4/ip_local_reserved_ports",
        f"8080,{base - 9}-{base + 15},{base + 16}-65535\n",
    )
    assert [f.state for f in check(where)] == ["ok"]
    with socket.socket() as holder:
        holder.bind(("", base + 31))
        holder.listen()
        (told,) = check(where)
    assert (told.state, told.fact) == ("problem", f"HCCL's ports {base}-{base + 31}: {base + 31} taken")
    assert "HCCL_HOST_SOCKET_PORT_RANGE=auto" in told.remedy
    assert list(check(variables(where, HCCL_HOST_SOCKET_PORT_RANGE="auto"))) == []


@pytest.mark.parametrize(("free_gib", "state"), [(0.0625, "problem"), (8.0, "ok")])
def test_little_shared_memory_is_a_problem(tmp_path, monkeypatch, free_gib, state):
    """64 MiB, a container's default, is too little; the remedy names docker's and Kubernetes' options."""
    put(tmp_path, "/dev/shm/x")
    blocks = int(free_gib * 2**30 / 4096)
    fields = [4096, 4096, blocks, blocks, blocks, 0, 0, 0, 0, 255]
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    told = host_module._check_shared_memory(machine(tmp_path))
    assert told.state == state
    assert f"{free_gib:.2f} of {free_gib:.2f} GiB free" in told.fact
    assert ("--shm-size" in told.remedy) == (state == "problem")
    gone = host_module._check_shared_memory(machine(tmp_path / "none"))
    assert (gone.state, gone.fact) == ("problem", "/dev/shm is not there")


def test_lines_are_aligned_and_wrapped():
    """State, name and fact in columns; the remedy below; nothing wider than 110."""
    finding = Finding("problem", "autoload", "word " * 60, "do this " * 30)
    text = as_text(finding).splitlines()
    assert text[0].startswith("problem  autoload      word")
    assert max(map(len, text)) <= 110
    assert all(line.startswith(" " * 23) for line in text[1:])
    assert sum("->" in line for line in text) == 1
    assert as_text(Finding("ok", "cpu", "usable")) == "OK       cpu           usable"


def test_the_cause_is_taken_from_an_error_text():
    """The first exception named in a chained traceback; else the last line."""
    chained = "Traceback:\n  x\nImportError: libhccl.so: no\n\nThe above ...\nRuntimeError: Failed to load\n"
    assert last_words(chained) == "ImportError: libhccl.so: no"
    assert last_words("a\nb\n\n") == "b"
    assert last_words("") == "no message"


def test_a_tool_that_hangs_or_cannot_run_is_not_waited_for(tmp_path):
    """A limit in seconds, a file that is no program, and a name that is not there each give words."""
    tool(tmp_path, "slow", "exec sleep 30")
    put(tmp_path, "/bin/text", "no program").chmod(0o755)
    where = machine(tmp_path)
    assert where.run("slow", limit_s=0.2) == (None, "", "slow did not answer within 0.2 s")
    assert where.run("text") == (None, "", "text cannot be run (Exec format error)")
    assert where.run("none") == (None, "", "none is not here")


def test_the_command_line_gives_the_exit_code(tmp_path):
    """`python -m launchers doctor npu` here, where there is none: 1, and the lines say why."""
    if Machine().files("/dev", "davinci[0-9]*"):
        pytest.skip("this machine has an NPU")
    command = [sys.executable, "-m", "launchers", "doctor", "npu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(r"^problem  npu devices   none", done.stdout, re.MULTILINE)
    assert json.dumps(done.stdout).isascii(), "any terminal can show it"
