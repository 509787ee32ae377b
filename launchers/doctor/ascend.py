"""The doctor on Ascend: driver, CANN, health and network links. Formats are those of driver 24 and 25."""

from __future__ import annotations

import re
from collections.abc import Iterator

from launchers.doctor.machine import Finding, Machine, last_words

ASCEND = "/usr/local/Ascend"
SET_ENV = (f"{ASCEND}/ascend-toolkit/set_env.sh", f"{ASCEND}/cann/set_env.sh", f"{ASCEND}/latest/set_env.sh")
SHARED_FILES = ("davinci_manager", "devmm_svm", "hisi_hdc")  # beside davinci0, ... under /dev
HCCN_TOOL = f"{ASCEND}/driver/tools"
# Pairs that the vendor lists (COMPATIBILITY.en.md of Ascend/pytorch, August 2026).
CANN_OF = {
    "2.12.0": "9.1.0",
    "2.11.0": "9.1.0",
    "2.10.0.post4": "9.1.0",
    "2.9.0.post6": "9.1.0",
    "2.7.1.post8": "9.1.0",
    "2.9.0.post2": "9.0.0",
    "2.8.0.post4": "9.0.0",
    "2.7.1.post4": "9.0.0",
    "2.9.0": "8.5.0",
    "2.8.0.post2": "8.5.0",
    "2.7.1.post2": "8.5.0",
}


def check(machine: Machine, torch_npu: str | None, *, with_devices: bool) -> Iterator[Finding]:
    """Yield driver and health, CANN and its pair, and the links of the cards; without devices CANN only.

    `torch_npu` is the version of that package, or None.
    """
    if with_devices:
        yield from _check_driver(machine)
    yield _check_cann(machine, torch_npu)
    if with_devices:
        yield from _check_links(machine)


def read_health(text: str) -> dict[str, str]:
    """Return the health of each NPU by number, from the table of `npu-smi info`."""
    found = re.findall(r"^\|\s*(\d+)\s+(?:Ascend)?\d{3}\S*\s*\|\s*(\w+)\s*\|", text, re.MULTILINE)
    return dict(found)


def _check_driver(machine: Machine) -> Iterator[Finding]:
    missing = [name for name in SHARED_FILES if not machine.path(f"/dev/{name}").exists()]
    if missing:
        fact = f"/dev/{', /dev/'.join(missing)} missing; a device alone cannot be opened"
        yield Finding("problem", "npu driver", fact, "load the driver; give a container these files too")
    version = re.search(r"^Version=(\S+)", machine.text(f"{ASCEND}/driver/version.info") or "", re.MULTILINE)
    told = machine.run("npu-smi", "info")
    if told.code is None and version is None:
        fact = f"no {ASCEND}/driver/version.info, and {told.stderr}"
        yield Finding("problem", "npu driver", fact, "install the driver; mount it into a container")
        return
    named = version[1] if version else "version not known"
    if told.code != 0:
        fact = f"{named}; {last_words(told.stderr + told.stdout)}"
        yield Finding("problem", "npu driver", fact, "reload the driver; put npu-smi on the PATH")
        return
    health = read_health(told.stdout)
    ill = [f"{number} is {state}" for number, state in health.items() if state != "OK"]
    if ill:
        remedy = "npu-smi info -t health -i NUMBER; reset the card, or leave it out with --devices"
        yield Finding("problem", "npu driver", f"{named}; NPU {', '.join(ill)}", remedy)
    else:
        yield Finding("ok", "npu driver", f"{named}, {len(health)} NPUs in good health")


def _check_cann(machine: Machine, torch_npu: str | None) -> Finding:
    """What torch_npu checks when it loads, and the libraries' version."""
    home = machine.environ.get("ASCEND_HOME_PATH")
    if not home:
        scripts = [name for name in SET_ENV if machine.path(name).is_file()]
        if scripts:
            fact = "installed, but not set up for this shell (no ASCEND_HOME_PATH)"
            return Finding("problem", "CANN", fact, f"source {scripts[0]}")
        fact = f"no ASCEND_HOME_PATH, and no set_env.sh under {ASCEND}"
        return Finding("problem", "CANN", fact, "install CANN (toolkit and kernels); it is not a pip package")
    opp = machine.environ.get("ASCEND_OPP_PATH")
    needed = {"ASCEND_OPP_PATH": opp, "ASCEND_HOME_PATH": home}
    needed |= {f"its {name} folder": f"{home}/{name}" for name in ("runtime", "compiler")}
    missing = [
        f"{name} ({path or 'not set'})"
        for name, path in needed.items()
        if not path or not machine.path(path).exists()
    ]
    if missing:
        fact = f"torch_npu will not load: missing {', '.join(missing)}"
        return Finding("problem", "CANN", fact, "source set_env.sh of a whole CANN installation")
    version = cann_version(machine, home)
    listed = CANN_OF.get(torch_npu or "")
    if version and listed and version.split(".")[:2] != listed.split(".")[:2]:
        fact = f"{version} at {home}; the vendor lists CANN {listed} for torch_npu {torch_npu}"
        return Finding("note", "CANN", fact, f"use CANN {listed}, or the torch_npu listed for {version}")
    return Finding("ok", "CANN", f"{version or 'version not known'} at {home}")


def cann_version(machine: Machine, home: str) -> str | None:
    """Return the version that the installation notes below `home` name, as torch_npu reads it."""
    for note in sorted(machine.path(home).rglob("ascend_*_install.info")):
        found = re.search(r"^version=(\S+)", note.read_text(errors="replace"), re.MULTILINE)
        if found:
            return found[1]
    return None


def _check_links(machine: Machine) -> Iterator[Finding]:
    """The cards' own network, which only ranks on several hosts need."""
    tool = "hccn_tool" if machine.has_tool("hccn_tool") else str(machine.path(f"{HCCN_TOOL}/hccn_tool"))
    down = []
    numbers = [name.removeprefix("davinci") for name in machine.files("/dev", "davinci[0-9]*")]
    for number in numbers:
        told = machine.run(tool, "-i", number, "-link", "-g")
        if told.code is None:
            fact = "the cards' network was not looked at: no hccn_tool"
            yield Finding("note", "npu links", fact, "needed only for ranks on several hosts")
            return
        if "UP" not in told.stdout:
            down.append(number)
    if down:
        fact = f"network of NPU {', '.join(down)} is down; ranks of one host do not need it"
        yield Finding("note", "npu links", fact, "for several hosts: cable, switch and /etc/hccn.conf")
    else:
        yield Finding("ok", "npu links", f"network up on {len(numbers)} NPUs")
