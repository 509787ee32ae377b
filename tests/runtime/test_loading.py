"""A module from files: the same bits, on the asked device and dtype, in little memory, or a sentence."""

import ctypes
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from runtime.device import Device
from runtime.loading import LoadReport, load_module, open_checkpoint
from tests.runtime.processes import fork_ranks

CPU = Device("cpu")
MIB = 1 << 20
FILE_MIB = 64


class Small(nn.Module):
    """Parameters, a tied one, a buffer that files hold and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.tied = nn.Linear(4, 3, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))


def made() -> Small:
    module = Small()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    module.steps = torch.tensor([3, 5])
    return module


def empty() -> Small:
    with torch.device("meta"):
        return Small()


def written(folder: Path, **changes: torch.Tensor | None) -> Path:
    """A file of `made()`'s state, without the second name of the tied weight; None leaves a key out."""
    state = {k: v for k, v in made().state_dict().items() if k != "tied.weight"} | changes
    path = folder / "small.safetensors"
    save_file({k: v for k, v in state.items() if v is not None}, path)
    return path


@pytest.fixture
def seed():
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


@pytest.mark.usefixtures("seed")
def test_a_module_gets_the_files_bits(tmp_path):
    """Every parameter and buffer; tied ones are one tensor still; nothing stays in the file's mapping."""
    path = written(tmp_path)
    state, module = {name: tensor.clone() for name, tensor in load_file(path).items()}, empty()
    report = load_module(module, open_checkpoint([path]), device=CPU)
    with path.open("r+b") as file:  # a view of the mapped file would now change
        file.write(b"x" * path.stat().st_size)
    for name, tensor in state.items():
        assert torch.equal(module.state_dict()[name], tensor), name
    assert module.tied.weight is module.first.weight
    assert all(p.data_ptr() % 16 == 0 for p in module.parameters())  # the file's own offsets are not
    held = sum(t.nbytes for t in state.values())
    assert report == LoadReport(
        module="Small", device="cpu", tensors=5, bytes_in_files=held, bytes_held=held, cast=0
    )
    assert str(report) == f"Small on cpu: 5 tensors, {held} B in files, {held} B held"


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_floating_tensors_are_cast_and_some_stay_fp32(tmp_path, dtype):
    """As `.to(dtype)` casts them; whole numbers keep their dtype, and named parameters stay fp32."""
    path = written(tmp_path)
    module = empty()
    report = load_module(
        module, open_checkpoint([path]), device=CPU, dtype=dtype, stays_fp32=lambda name: "norm" in name
    )
    for name, tensor in load_file(path).items():
        wanted = torch.int64 if name == "steps" else torch.float32 if "norm" in name else dtype
        assert torch.equal(module.state_dict()[name], tensor.to(wanted)), name
        assert module.state_dict()[name].dtype == wanted
    assert report.cast == 2
    assert str(report).endswith(", 2 cast")


@pytest.mark.parametrize(("changes", "message"), [
    ({"norm.bias": None},
     r"^the tensors of FILE do not fit Small: 'norm.bias' is in none of them "
     r"\(1 of its 6 tensors are missing\); "
     r"give the files of this model, or the config that belongs to them$"),
    ({"norm.bia": torch.ones(3)},
     r"FILE do not fit Small: it has no place for 'norm.bia' \(FILE: key 'norm.bia'; 1 such\); give"),
    ({"norm.bias": None, "bias": torch.ones(3)},
     r"'norm.bias' is in none of them .*, and it has no place for 'bias'"),
    ({"norm.bias": torch.ones(4)},
     r"^FILE: key 'norm.bias' has the shape \(4,\); Small's norm.bias has \(3,\); give the config"),
    ({"norm.bias": torch.ones(3, dtype=torch.int32)},
     r"^FILE: key 'norm.bias' is int32; Small's norm.bias takes float16, bfloat16, float32 or float64; give"),
    ({"norm.bias": torch.ones(3).to(torch.float8_e4m3fn)}, r"^FILE: key 'norm.bias' is float8_e4m3fn; "),
    ({"steps": torch.ones(2)}, r"^FILE: key 'steps' is float32; Small's steps takes int64; "),
])  # fmt: skip
def test_a_wrong_name_shape_or_dtype_is_named_before_anything_is_read(
    tmp_path, changes, message, monkeypatch
):
    """One sentence with file and key; the module is still empty and no tensor was read."""
    path = written(tmp_path, **changes)
    tensors, module = open_checkpoint([path]), empty()
    monkeypatch.setattr("runtime.checkpoint._File.tensor", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ValueError, match=message.replace("FILE", re.escape(str(path)))):
        load_module(module, tensors, device=CPU)
    assert all(p.is_meta for p in module.parameters())


@pytest.mark.parametrize("kind", ["cuda", "npu", "musa", "xpu"])
def test_a_device_without_its_index_is_refused(tmp_path, kind):
    """B05: a bare kind would let every rank load to card 0."""
    with pytest.raises(
        ValueError, match=f"^device {kind} has no index, so every rank might load to card 0; use"
    ):
        load_module(empty(), open_checkpoint([written(tmp_path)]), device=Device(kind))


def big() -> nn.Module:
    """32 linear layers of 2 MiB in fp32, without weights: 64 MiB."""
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(1024, 512, bias=False) for _ in range(FILE_MIB // 2)])


def resident_mib(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def apart(fused: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`big()`'s weights from pairs that a file holds fused, cut out as diffusers' converters do."""
    halves = [half for tensor in fused.values() for half in tensor.chunk(2)]
    return {f"{i}.weight": torch.cat([half]) for i, half in enumerate(halves)}


def grow(folder: Path, how: str, dtype: torch.dtype) -> None:
    """In a rank: print by how many MiB its resident memory grew at its peak, shared pages included."""
    module = big()
    ctypes.CDLL(None).malloc_trim(0)  # free memory that could be taken without growing
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts afresh
    before = resident_mib("VmRSS")
    if how == "whole":
        module.load_state_dict(apart(load_file(folder / "fused.safetensors")), assign=True)
        module.to(dtype)
    else:
        tensors = open_checkpoint([folder / how])
        load_module(module, apart(tensors) if how.startswith("fused") else tensors, device=CPU, dtype=dtype)
    print(resident_mib("VmHWM") - before)


@pytest.fixture(scope="module")
def big_files(tmp_path_factory) -> Path:
    """A folder with `big()`'s weights in three forms, 64 MiB each."""
    folder = tmp_path_factory.mktemp("big")
    state = {name: torch.full(tensor.shape, 0.5) for name, tensor in big().state_dict().items()}
    save_file(state, folder / "big.safetensors")
    torch.save(state, folder / "big.pth")
    pairs = zip(*[iter(state.values())] * 2, strict=True)
    save_file({f"{i}.weight": torch.cat(pair) for i, pair in enumerate(pairs)}, folder / "fused.safetensors")
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak can be reset on Linux only")
@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 64), (torch.bfloat16, 32)], ids=str)
@pytest.mark.parametrize("how", ["big.safetensors", "big.pth", "fused.safetensors", "whole"])
def test_four_ranks_load_within_four_shares_and_one_file(tmp_path, big_files, how, dtype, share):
    """B22: the sum of the peaks, also with converted keys; reading and converting as a whole takes more."""
    ended = fork_ranks(4, partial(grow, big_files, how, dtype), tmp_path)
    assert [rank.code for rank in ended] == [0] * 4, [rank.text for rank in ended]
    grown = [float(rank.text) for rank in ended]
    limit = 4 * share + FILE_MIB
    if how == "whole":
        assert sum(grown) > limit, grown
    else:
        assert 4 * share <= sum(grown) <= limit, grown
        assert max(grown) < share + 16, grown  # a window of 4 MiB, and a tensor: no second copy
