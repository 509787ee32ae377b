"""The doctor on devices: plugged in, driver, libraries, health, links, and whether torch sees them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from launchers.doctor import ascend, nvidia
from launchers.doctor.machine import Finding, Machine
from launchers.doctor.python import Torch
from launchers.vendors import VENDORS

PCI = "/sys/bus/pci/devices"


def kinds_here(machine: Machine, torch: Torch) -> list[str]:
    """Return the kinds of device that leave a trace: a card, a device file, a package, or seen by torch."""
    return [
        kind
        for kind, vendor in VENDORS.items()
        if torch.devices(kind) > 0
        or _cards(machine, kind)
        or _files(machine, kind)
        or (vendor.package and vendor.package in torch.versions)
    ]


def check_devices(
    machine: Machine, torch: Torch, kinds: Sequence[str], *, asked: str | None = None
) -> Iterator[Finding]:
    """Yield what is to be said about each kind; the one that was asked for must be here."""
    if not kinds:
        yield Finding("ok", "devices", "no accelerator here; cpu works")
    for kind in kinds:
        if kind == "cpu":
            yield Finding("ok", "cpu", "usable")
            continue
        package = VENDORS[kind].package
        if kind != asked and package in torch.versions and not _files(machine, kind) + _cards(machine, kind):
            fact = f"none, but {package} is installed"
            yield Finding(
                "note", f"{kind} devices", fact, f"uninstall {package}, unless other machines use it"
            )
            continue
        yield from _check_files(machine, kind)
        if kind == "npu":
            torch_npu = torch.versions.get("torch_npu")
            yield from ascend.check(machine, torch_npu, with_devices=bool(_files(machine, kind)))
        if kind == "cuda":
            yield from nvidia.check(machine)
        if torch.facts:
            yield _check_seen(machine, torch, kind)


def _cards(machine: Machine, kind: str) -> list[str]:
    """PCI addresses of this vendor's cards."""
    pci = VENDORS[kind].pci
    if pci is None:
        return []
    number, group = pci
    return [
        address
        for address in machine.files(PCI, "*")
        if (machine.text(f"{PCI}/{address}/vendor") or "").strip() == number
        and (machine.text(f"{PCI}/{address}/class") or "").startswith(group)
    ]


def _files(machine: Machine, kind: str) -> list[str]:
    pattern = VENDORS[kind].device_files
    return machine.files("/dev", pattern) if pattern else []


def _check_files(machine: Machine, kind: str) -> Iterator[Finding]:
    """Device files, which the driver makes, and which a container must be given."""
    pattern = VENDORS[kind].device_files
    if pattern is None:
        return
    files, cards = _files(machine, kind), _cards(machine, kind)
    closed = [name for name in files if not os.access(machine.path(f"/dev/{name}"), os.R_OK | os.W_OK)]
    name = f"{kind} devices"
    if closed:
        remedy = "add this user to the files' group, or run as one who may"
        yield Finding("problem", name, f"/dev/{', /dev/'.join(closed)} may not be opened", remedy)
    elif files:
        yield Finding("ok", name, f"{len(files)} (/dev/{files[0]} ...)" if files[1:] else f"/dev/{files[0]}")
    elif cards:
        fact = f"{len(cards)} on the PCI bus, but no /dev/{pattern}"
        yield Finding("problem", name, fact, "install and load the driver; give the files to a container")
    else:
        remedy = "run where such a device is; in a container, give it the device files"
        yield Finding("problem", name, f"none: no card on the PCI bus and no /dev/{pattern}", remedy)


def _check_seen(machine: Machine, torch: Torch, kind: str) -> Finding:
    """Whether torch can use them, and all of them."""
    vendor, seen = VENDORS[kind], torch.devices(kind)
    version = torch.facts["version"]
    if seen == 0:
        needs = f"{vendor.package} is not installed" if _lacks(torch, kind) else f"torch {version} sees none"
        built = {"cuda": torch.facts.get("cuda"), "rocm": torch.facts.get("hip")}
        if kind in built and not built[kind]:
            needs = f"torch {version} is not built for {kind}"
        remedy = f"install a torch for {kind}, or the driver that it needs"
        if _lacks(torch, kind):
            line = ".".join(str(version).split("+")[0].split(".")[:2])
            on_pypi = f'pip install "torch_npu=={line}.*", which pairs with torch {line}'
            remedy = on_pypi if kind == "npu" else f"install the vendor's pair of torch and {vendor.package}"
        return Finding("problem", f"{kind} in torch", needs, remedy)
    if not torch.has_backend(vendor.backend):
        fact = f"{seen} seen, but this torch has no {vendor.backend}; several ranks would be slow or refused"
        return Finding("problem", f"{kind} in torch", fact, f"install a torch with {vendor.backend}")
    files = len(_files(machine, kind)) if kind != "rocm" else seen
    if seen < files:
        shown = [f" ({name}={machine.environ[name]})" for name in vendor.visible if machine.environ.get(name)]
        fact = f"{seen} of {files} seen" + "".join(shown)
        return Finding("note", f"{kind} in torch", fact, f"start at most {seen} ranks here")
    return Finding("ok", f"{kind} in torch", f"{seen} seen, {vendor.backend} built in")


def _lacks(torch: Torch, kind: str) -> bool:
    package = VENDORS[kind].package
    return package is not None and package not in torch.versions
