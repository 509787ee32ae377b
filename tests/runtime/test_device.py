"""The device is resolved once per rank, from what is there; no vendor is touched that nobody asked for."""

import ast
import inspect
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import runtime.device as device_module
from launchers.vendors import VENDORS
from runtime.device import (
    ALIASES,
    BACKENDS,
    VISIBLE_VARIABLES,
    Device,
    backend_for,
    detect_device,
    device_count,
    resolve_device,
)
from runtime.process_group import read_rank_env
from tests.runtime.processes import ROOT

PACKAGES = sorted(p for top in ("usp", "runtime", "launchers") for p in (ROOT / top).rglob("*.py"))


@pytest.mark.parametrize("kind", ["cuda", "npu", "musa", "xpu"])
@pytest.mark.parametrize("local_rank", [0, 1, 2, 3])
def test_b05_each_local_rank_gets_its_own_card(kind, local_rank):
    """With four cards, LOCAL_RANK 0..3 give index 0..3 for every kind that has an index."""
    device = resolve_device(kind, local_rank=local_rank, count=4, world_size=4)
    assert (device.kind, device.index, str(device)) == (kind, local_rank, f"{kind}:{local_rank}")


def test_b05_cpu_and_mps_have_no_index():
    """All ranks of a host share the cpu; mps is one device without a number."""
    assert resolve_device("cpu", local_rank=3, count=1, world_size=4) == Device("cpu")
    assert resolve_device("mps", local_rank=0, count=1) == Device("mps")


def test_b05_an_index_is_refused_with_several_ranks():
    """A fixed index would put every rank on one card; alone it is taken."""
    with pytest.raises(
        ValueError, match=r"^device=cuda:2 on 2 ranks; that would put every rank on card 2; use cu"
    ):
        resolve_device("cuda", local_rank=0, count=4, index=2, world_size=2)
    assert resolve_device("cuda", local_rank=0, count=4, index=2) == Device("cuda", 2)


@pytest.mark.parametrize("choice", ["cpu:0", "mps:0"])
def test_an_index_on_a_kind_without_one_is_refused(choice):
    """The message says which form to use."""
    kind = choice[:3]
    with pytest.raises(ValueError, match=f"^device={choice}: {kind} has no index; use {kind}$"):
        Device(kind, 0)
    if kind == "cpu":
        with pytest.raises(ValueError, match="cpu has no index"):
            detect_device(choice, local_rank=0, world_size=1)


def test_b65_local_rank_beyond_device_count_states_both_numbers():
    """Four processes on two cards: an error with both numbers, unless sharing is asked for."""
    with pytest.raises(
        ValueError, match=r"^LOCAL_RANK=3 needs cuda device 3; this host has 2 cuda devices; start"
    ):
        resolve_device("cuda", local_rank=3, count=2, world_size=4)
    with pytest.raises(
        ValueError, match=r"^LOCAL_RANK=1 needs mps device 1; this host has 1 mps device; start"
    ):
        resolve_device("mps", local_rank=1, count=1, world_size=2)
    with pytest.raises(
        ValueError, match=r"^device=npu:2 needs npu device 2; this host has 2 npu devices; use"
    ):
        resolve_device("npu", local_rank=0, count=2, index=2)
    assert resolve_device("cuda", local_rank=3, count=2, world_size=4, share=True) == Device("cuda", 1)


def test_b65_the_global_rank_plays_no_part():
    """RANK=5 with LOCAL_RANK=1 is card 1: the second host starts at its own card 0."""
    env = read_rank_env({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    device = resolve_device("musa", local_rank=env.local_rank, count=4, world_size=env.world_size)
    assert (env.rank, device) == (5, Device("musa", 1))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("cuda", r"^device=cuda; no cuda device is usable here; available: cpu$"),
        ("xpu:0", r"^device=xpu:0; no xpu device is usable here; available: cpu$"),
        ("npu", r"^device=npu; torch_npu is not installed; available: cpu$"),
        ("musa", r"^device=musa; torch_musa is not installed; available: cpu$"),
        (
            "tpu",
            r'^device="tpu" is not a device; use one of npu, musa, cuda, xpu, mps, cpu, or an index as',
        ),
        ("cuda:x", r'^device="cuda:x" is not a device'),
    ],
)
def test_a_choice_that_is_not_here_names_what_is(monkeypatch, choice, message):
    """An explicit device is never replaced by another one in silence."""
    monkeypatch.setattr(device_module, "_seen", lambda kind: kind == "cpu")
    monkeypatch.setattr(device_module, "device_count", lambda kind: int(kind == "cpu"))
    with pytest.raises(ValueError, match=message):
        detect_device(choice, local_rank=0, world_size=1)


def test_detection_prefers_npu_over_cuda_and_a_choice_over_both(monkeypatch):
    """Order npu, musa, cuda, xpu, mps, cpu: a vendor's shim can make cuda look available. A choice wins."""
    here = {"cpu"}
    monkeypatch.setattr(device_module, "_seen", lambda kind: kind in here)
    monkeypatch.setattr(device_module, "device_count", lambda kind: 2)
    seen = []
    for kind in ("mps", "xpu", "cuda", "musa", "npu"):
        here.add(kind)
        seen.append(detect_device(None, local_rank=1, world_size=2).kind)
    assert seen == ["mps", "xpu", "cuda", "musa", "npu"]
    assert str(detect_device("cuda", local_rank=1, world_size=2)) == "cuda:1"
    assert str(detect_device("rocm", local_rank=1, world_size=2)) == "cuda:1"
    assert str(detect_device("cpu", local_rank=1, world_size=2)) == "cpu"


@pytest.mark.parametrize(("kind", "backend"), sorted(BACKENDS.items()))
def test_backends_come_from_one_table(kind, backend):
    """cuda nccl, npu hccl, musa mccl, xpu xccl, mps and cpu gloo; only nccl is given a device id."""
    device = Device(kind, None if kind in ("cpu", "mps") else 0)
    assert (device.backend, device.takes_device_id) == (backend, backend == "nccl")
    assert backend_for(kind, available=lambda name: True) == (backend, None)


def test_the_tables_of_variables_are_those_of_the_launchers(monkeypatch):
    """Backend, visible devices and allocator of every kind: what a launcher sets is what torch reads here."""
    for kind, vendor in VENDORS.items():
        monkeypatch.setattr(torch.version, "hip", "6.4" if kind == "rocm" else None)
        name = ALIASES.get(kind, kind)
        device = Device(name, None if name in ("cpu", "mps") else 0)
        assert device.backend == vendor.backend
        assert device.allocator_variables == vendor.allocators
        assert VISIBLE_VARIABLES.get(kind) == next(iter(vendor.visible), None)
    assert {ALIASES.get(kind, kind) for kind in VENDORS} == set(BACKENDS)


@pytest.mark.parametrize(
    ("kind", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")]
)
def test_b65_too_few_devices_names_the_variable_that_hides_them(kind, variable):
    """The devices may be there, but not shown: the message says where to look."""
    with pytest.raises(ValueError, match=rf"start at most 1 per host, or show more in {variable}$"):
        resolve_device(kind, local_rank=1, count=1, world_size=2)
    with pytest.raises(ValueError, match=r"start at most 1 per host$"):
        resolve_device("mps", local_rank=1, count=1, world_size=2)


def test_b68_cuda_without_nccl_uses_gloo_with_a_note(monkeypatch):
    """As on Windows: is_nccl_available() is False, so gloo is chosen, and said so."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    backend, note = backend_for("cuda")
    assert backend == "gloo"
    assert note == "nccl is not built into this torch: using gloo, which copies through host memory"


def test_b68_an_explicit_backend_wins_or_is_refused():
    """A choice that is built in and carries the device is taken; others are refused with a remedy."""
    both = {"gloo", "nccl"}.__contains__
    assert backend_for("cuda", choice="gloo", available=both)[0] == "gloo"
    assert backend_for("cuda", choice="cpu:gloo,cuda:nccl", available=both)[0] == "cpu:gloo,cuda:nccl"
    assert backend_for("cpu", choice="gloo", available=both) == ("gloo", None)
    with pytest.raises(ValueError, match=r"^backend=mpi; this torch has no mpi, only gloo, nccl; leave the"):
        backend_for("cuda", choice="mpi", available=both)
    with pytest.raises(ValueError, match=r"^backend=nccl on cpu; it cannot carry cpu tensors; use gloo$"):
        backend_for("cpu", choice="nccl", available=both)
    with pytest.raises(ValueError, match=r"^backend=gloo on npu; it cannot carry npu tensors; use hccl$"):
        backend_for("npu", choice="gloo", available=both)
    with pytest.raises(
        ValueError, match=r"^backend=cpu:gloo on cuda; it cannot carry cuda tensors; use nccl$"
    ):
        backend_for("cuda", choice="cpu:gloo", available=both)


def test_b68_no_backend_at_all_is_refused():
    """npu without hccl cannot fall back: nothing else carries its tensors."""
    with pytest.raises(
        RuntimeError, match=r"^several ranks on npu talk hccl; this torch has no hccl; install"
    ):
        backend_for("npu", available=lambda name: name == "gloo")


def test_the_policy_forbids_float64_and_complex_where_they_do_not_exist():
    """Requirement 19: npu and mps make neither; cuda and cpu both."""
    policy = {kind: (d.supports_float64, d.supports_complex) for kind in BACKENDS for d in [Device(kind)]}
    assert policy == {
        "cuda": (True, True),
        "npu": (False, False),
        "musa": (True, False),
        "xpu": (False, True),
        "mps": (False, False),
        "cpu": (True, True),
    }


def test_rope_angles_are_float64_only_where_it_exists():
    """fp32 on npu, mps and xpu; the dtype is one that the device's policy allows."""
    wide = {kind for kind in BACKENDS if Device(kind).rope_dtype == torch.float64}
    assert wide == {"cuda", "musa", "cpu"}
    assert wide == {kind for kind in BACKENDS if Device(kind).supports_float64}


def test_each_device_is_profiled_by_the_profiler_that_sees_it(monkeypatch):
    """torch.profiler records every kind but npu, which has its own of the same shape."""
    own = types.ModuleType("torch_npu.profiler")
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setitem(sys.modules, "torch_npu.profiler", own)
    found = {kind: Device(kind).profiler for kind in BACKENDS}
    assert found.pop("npu") is own
    assert set(found.values()) == {torch.profiler}


def test_cpu_memory_is_measured_in_bytes():
    """A block of 200 MB raises the peak by about as much; no call needs a card."""
    device = Device("cpu")
    device.make_current()
    device.synchronize()
    device.empty_cache()
    device.reset_memory_peak()
    with open("/proc/self/status") as file:
        now = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))
    needed = device.memory_peak() - now + 200_000_000
    before = device.memory_peak()
    block = bytearray(needed)
    block[::4096] = b"x" * len(block[::4096])
    assert 150_000_000 < device.memory_peak() - before < 300_000_000
    assert device.memory_total() > device.memory_peak()


class FakeModule(types.ModuleType):
    """Stands for torch.cuda or torch.npu: two devices, and a record of what was called on it."""

    def __init__(self) -> None:
        super().__init__("fake")
        self.calls: list[tuple[object, ...]] = []
        self.config = types.SimpleNamespace(allow_internal_format=True)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, index: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(total_memory=1000 + index)

    def max_memory_allocated(self, index: int) -> int:
        return 100 + index

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))


@pytest.mark.parametrize("kind", ["cuda", "musa", "xpu"])
def test_b05_every_call_on_a_card_carries_its_index(monkeypatch, kind):
    """set_device, synchronize, memory: all with index 1; none falls back to card 0."""
    fake = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda asked: fake if asked == kind else None)
    device = Device(kind, 1)
    device.make_current()
    device.synchronize()
    device.reset_memory_peak()
    assert (device.memory_total(), device.memory_peak()) == (1001, 101)
    assert fake.calls == [("set_device", 1), ("synchronize", 1), ("reset_peak_memory_stats", 1)]


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_calls_exist_in_this_torch(kind):
    """What is called on a card is there, and takes a device first: checked on torch's own module."""
    module = torch.get_device_module(kind)
    calls = ("set_device", "synchronize", "get_device_properties", "max_memory_allocated")
    for name in (*calls, "reset_peak_memory_stats"):
        assert next(iter(inspect.signature(getattr(module, name)).parameters)) == "device"
    assert callable(module.empty_cache)


def test_mps_has_calls_of_its_own(monkeypatch):
    """No index and no peak: the driver's figure, and the size that the system recommends."""
    called = []
    for name, value in (("recommended_max_memory", 1000), ("driver_allocated_memory", 100)):
        assert callable(getattr(torch.mps, name)), "in every torch, also where mps is not"
        monkeypatch.setattr(torch.mps, name, lambda value=value: value)
    for name in ("synchronize", "empty_cache"):
        assert callable(getattr(torch.mps, name))
        monkeypatch.setattr(torch.mps, name, lambda name=name: called.append(name))
    device = Device("mps")
    device.make_current()
    device.synchronize()
    device.empty_cache()
    device.reset_memory_peak()
    assert (device.memory_total(), device.memory_peak(), called) == (
        1000,
        100,
        ["synchronize", "empty_cache"],
    )


@pytest.fixture
def fake_npu(monkeypatch, tmp_path):
    """A torch_npu on the path that notes its imports and attributes, and a torch.npu with two devices."""
    fake = FakeModule()
    usual = torch.get_device_module
    monkeypatch.setattr(torch, "get_device_module", lambda kind: fake if kind == "npu" else usual(kind))
    version = torch.__version__.split("+")[0]
    (tmp_path / "torch_npu.py").write_text(
        f"__version__ = '{version}.post1'\nasked = []\ndef __getattr__(name): asked.append(name)\n"
        f"with open(__file__ + '.imports', 'a') as file: file.write('x')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    fake.imports = tmp_path / "torch_npu.py.imports"
    yield fake
    sys.modules.pop("torch_npu", None)


def test_b70_npu_is_imported_once_without_the_transfer_shim(fake_npu):
    """Asked for npu: one import, no transfer shim; private formats and just-in-time compiling are off."""
    for _ in range(2):
        device = detect_device("npu", local_rank=1, world_size=2)
    device.make_current()
    assert str(device) == "npu:1"
    assert fake_npu.imports.read_text() == "x"
    assert not [name for name in sys.modules["torch_npu"].asked if "transfer" in name]
    assert not [name for name in sys.modules if name.startswith("torch_npu.")]
    assert fake_npu.config.allow_internal_format is False
    assert fake_npu.calls == [("set_device", 1), ("set_compile_mode", False)]


def test_b70_an_installed_torch_npu_alone_is_not_imported(fake_npu, monkeypatch):
    """No choice, no device file: cpu, and torch_npu stays out. With a device file it is imported and wins."""
    files = []
    monkeypatch.setattr(device_module, "glob", lambda pattern: files if "davinci" in pattern else [])
    assert detect_device(None, local_rank=0, world_size=1).kind != "npu"
    assert not fake_npu.imports.exists()
    files.append("/dev/davinci0")
    assert str(detect_device(None, local_rank=0, world_size=1)) == "npu:0"


def test_hazard_5_a_shim_that_the_user_loaded_does_not_mislead(fake_npu, monkeypatch):
    """transfer_to_npu makes torch.cuda answer for the npu, and nccl look built in: still npu and hccl."""
    sys.modules["torch_npu"] = types.ModuleType("torch_npu")  # as after the user's own import
    for name in ("is_available", "device_count", "current_device", "set_device"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake_npu, name))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    device = detect_device(None, local_rank=1, world_size=2)
    device.make_current()
    assert (str(device), device.backend, device.takes_device_id) == ("npu:1", "hccl", False)
    assert fake_npu.calls[0] == ("set_device", 1)


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_b70_no_file_rewrites_torch(path):
    """No assignment to, deletion or setattr of a name below torch in any of our packages."""
    rewritten = []
    for node in ast.walk(ast.parse(path.read_text())):
        targets: list[ast.AST] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = list(node.targets)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], "x")]
        rewritten += [t for t in targets if isinstance(t, ast.Attribute) and root_of(t) == "torch"]
    assert [ast.unparse(target) for target in rewritten] == []


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_b05_no_file_calls_a_barrier(path):
    """torch's picks a device by itself, as card 0; a collective of ours has a tensor on the rank's own."""
    named = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not named & {"barrier", "monitored_barrier"}


def root_of(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_a_torch_npu_that_does_not_load_is_an_error_in_words(tmp_path, monkeypatch):
    """Asked for: a usage error. Only seen by its device file: no silent run on cpu either."""
    (tmp_path / "torch_npu.py").write_text("raise OSError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"^device=npu; torch_npu does not load \(OSError: libhccl\.so: "):
        detect_device("npu", local_rank=0, world_size=1)
    monkeypatch.setattr(device_module, "glob", lambda pattern: ["/dev/davinci0"] * ("davinci" in pattern))
    with pytest.raises(RuntimeError, match=r"^/dev/davinci0 shows a npu device; torch_npu does not load"):
        detect_device(None, local_rank=0, world_size=1)


def test_a_torch_npu_for_another_torch_is_refused(tmp_path, monkeypatch):
    """Releases pair exactly; the message names both."""
    (tmp_path / "torch_npu.py").write_text("__version__ = '1.11.0.post3'")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    ours = ".".join(torch.__version__.split(".")[:2])
    with pytest.raises(ValueError, match=rf"torch_npu 1\.11 is loaded into torch {ours}; install the"):
        detect_device("npu", local_rank=0, world_size=1)
    sys.modules.pop("torch_npu", None)


def test_an_absent_kind_counts_zero(monkeypatch):
    """Whatever a missing vendor raises, the count is 0."""
    for error in (AttributeError, AssertionError, RuntimeError, ImportError):

        def raising(kind, error=error):
            raise error("not here")

        monkeypatch.setattr(torch, "get_device_module", raising)
        assert device_count("cuda") == 0


BARE = """
import sys
import torch
import torch.distributed

class Raises:
    def __getattr__(self, name):
        raise AssertionError(f"torch.cuda.{name} was touched")

torch.cuda = sys.modules["torch.cuda"] = Raises()
torch.distributed.is_available = lambda: False

import runtime.device, runtime.log, runtime.process_group, runtime.report
from runtime.process_group import RankEnv, connect, ending_together

device = runtime.device.detect_device(None, local_rank=0, world_size=1)
assert device == runtime.device.detect_device("cpu", local_rank=0, world_size=1)
with connect(device) as world, ending_together(world):
    assert (world.rank, world.world_size, world.group, world.store, world.is_main) == (0, 1, None, None, True)
    world.agree(3, "steps")
    world.meet("load", 1.0)
    assert world.broadcast_object({"a": 1}) == {"a": 1}
    assert world.wait_for_main("save", lambda: 5, 1.0) == 5
    print(runtime.report.format_report("start", runtime.report.start_rows(world)))
world.close()
try:
    connect(device, env=RankEnv(0, 0, 2, 2))
except RuntimeError as error:
    print(error)
foreign = ("torch_npu", "torch_musa", "usp", "diffusers", "flash_attn", "xformers", "yunchang")
print("foreign:", [name for name in foreign if name in sys.modules])
"""


def test_b08_b70_runs_with_torch_cuda_made_to_raise_and_without_distributed(tmp_path: Path):
    """Requirement 18: world 1 on cpu needs no torch.cuda, no torch.distributed, and imports no vendor."""
    (tmp_path / "torch_npu.py").write_text("raise RuntimeError('a vendor package was imported')")
    (tmp_path / "torch_musa.py").write_text("raise RuntimeError('a vendor package was imported')")
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BARE], capture_output=True, text=True, env=environ, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "device   cpu" in done.stdout
    assert "ranks    1, no process group" in done.stdout
    assert "WORLD_SIZE=2; this torch is built without torch.distributed; install a build" in done.stdout
    assert "foreign: []" in done.stdout
