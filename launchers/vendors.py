"""What differs by vendor, as data: the variables that its torch, its collectives and its schedulers read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Vendor:
    """One kind of device as launchers see it.

    `allocators` are the variables that configure torch's memory allocator; they mean the same thing, so at
    most one may be set. `expandable` is True where expandable segments are known to work. Each of `visible`
    restricts and renumbers the devices of a process; launchers set the first. `gres` and `resource` are what
    Slurm and Kubernetes usually call such a device; `slurm_shows` is True where Slurm itself sets one of
    `visible` to the devices of the job. `package` is the vendor's package beside torch; `device_files` a
    pattern under /dev; `pci` its vendor number and the start of its class in /sys/bus/pci (a vendor also
    makes other cards).
    """

    backend: str
    visible: tuple[str, ...] = ()
    allocators: tuple[str, ...] = ()
    expandable: bool = False
    gres: str | None = None
    slurm_shows: bool = False
    resource: str | None = None
    package: str | None = None
    device_files: str | None = None
    pci: tuple[str, str] | None = None
    one_device: bool = False


VENDORS = {
    "npu": Vendor(
        backend="hccl",
        visible=("ASCEND_RT_VISIBLE_DEVICES",),
        allocators=("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        expandable=True,
        gres="npu",
        resource="huawei.com/Ascend910",
        package="torch_npu",
        device_files="davinci[0-9]*",
        pci=("0x19e5", "0x12"),
    ),
    "musa": Vendor(
        backend="mccl",
        visible=("MUSA_VISIBLE_DEVICES",),
        allocators=("PYTORCH_MUSA_ALLOC_CONF",),
        expandable=True,
        gres="gpu",
        resource="mthreads.com/gpu",
        package="torch_musa",
        device_files="mtgpu*",
        pci=("0x1ed5", "0x03"),
    ),
    "cuda": Vendor(
        backend="nccl",
        visible=("CUDA_VISIBLE_DEVICES",),
        allocators=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        expandable=True,
        gres="gpu",
        slurm_shows=True,
        resource="nvidia.com/gpu",
        device_files="nvidia[0-9]*",
        pci=("0x10de", "0x03"),
    ),
    "rocm": Vendor(
        backend="nccl",
        visible=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        allocators=("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        gres="gpu",
        slurm_shows=True,
        resource="amd.com/gpu",
        device_files="kfd",
        pci=("0x1002", "0x03"),
    ),
    "xpu": Vendor(
        backend="xccl",
        visible=("ZE_AFFINITY_MASK",),
        allocators=("PYTORCH_ALLOC_CONF",),
        gres="gpu",
        slurm_shows=True,
        resource="gpu.intel.com/xe",
    ),
    "mps": Vendor(backend="gloo", one_device=True),
    "cpu": Vendor(backend="gloo"),
}
