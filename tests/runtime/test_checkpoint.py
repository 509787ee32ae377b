"""Files and their keys: what is found, what is missing or too many, and that nothing is read or run early."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime import checkpoint
from runtime.checkpoint import FileTensor, open_checkpoint, resolve_files


def write(path: Path, **tensors: torch.Tensor) -> Path:
    """A checkpoint of these tensors, in the form that the name's suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path


def values(tensor: torch.Tensor) -> torch.Tensor:
    """What a file tensor holds, in memory of its own."""
    assert isinstance(tensor, FileTensor)
    return tensor.read().clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_gives_its_tensors(tmp_path, suffix, dtype):
    """Names, shapes, dtypes and bits as written; a scalar and an empty tensor too."""
    written = {"a.weight": torch.arange(6).reshape(2, 3).to(dtype), "scalar": torch.tensor(7).to(dtype)}
    written["empty"] = torch.empty(0, 4, dtype=dtype)
    found = open_checkpoint([write(tmp_path / f"model{suffix}", **written)])
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, dtype)
        assert torch.equal(values(found[name]), tensor)


def test_a_torch_file_from_before_zip_is_read(tmp_path):
    """It cannot be mapped, and is read all the same."""
    path = tmp_path / "old.pth"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(values(open_checkpoint([path])["a"]), torch.ones(3))


def test_what_a_converter_does_is_done_when_the_tensor_is_read(tmp_path):
    """Split, swapped, joined and cut: the shapes are known at once, the values are those of real tensors."""
    real = torch.randn(6, 4)
    lazy = open_checkpoint([write(tmp_path / "m.safetensors", w=real)])["w"]

    def convert(w: torch.Tensor) -> list[torch.Tensor]:
        a, b, c = w.chunk(3, dim=0)
        first, rest = torch.split(w, (1, 5), dim=0)
        return [torch.cat([b, a]), torch.cat([c]), w[:, 1], first.squeeze(0), rest.T, w.view(4, 6)[0]]

    for made, expected in zip(convert(lazy), convert(real), strict=True):
        assert made.shape == expected.shape
        assert made.device.type == "meta"
        assert torch.equal(values(made), expected)


def test_a_tensor_in_a_file_is_neither_changed_nor_asked(tmp_path):
    """An in-place change would be lost, and a value is not there yet: both are errors."""
    lazy = open_checkpoint([write(tmp_path / "m.safetensors", w=torch.ones(2))])["w"]
    with pytest.raises(AssertionError, match="add_ would change a tensor that is in a file"):
        lazy.add_(1)
    with pytest.raises(RuntimeError):
        lazy.sum().item()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_the_file_is_mapped_afresh_after_a_window(tmp_path, suffix, monkeypatch):
    """Pages of a mapping stay resident until it goes: no mapping reads much more than the window."""
    monkeypatch.setattr(checkpoint, "WINDOW_BYTES", 1000)
    monkeypatch.setattr(checkpoint, "WINDOWS", 1 << 20)
    path = write(tmp_path / f"m{suffix}", **{f"w{i}": torch.full((100,), float(i)) for i in range(9)})
    opened = []
    plain = checkpoint._File._open
    monkeypatch.setattr(checkpoint._File, "_open", lambda self: opened.append(self.path) or plain(self))
    found = open_checkpoint([path])
    assert [float(values(found[f"w{i}"])[0]) for i in range(9)] == list(range(9))
    assert len(opened) == 3  # 3 x 400 bytes, 3 x 400, 3 x 400


def test_the_file_is_opened_on_the_cpu(tmp_path, monkeypatch):
    """B59: safe_open is never told another device, which it might not know, or take for card 0."""
    devices = []
    plain = checkpoint.safe_open

    def spy(*args, device, **kwargs):
        devices.append(device)
        return plain(*args, device=device, **kwargs)

    monkeypatch.setattr(checkpoint, "safe_open", spy)
    values(open_checkpoint([write(tmp_path / "m.safetensors", w=torch.ones(2))])["w"])
    assert devices == ["cpu"]


class Bomb:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_not_run(tmp_path):
    """A .pth that holds more than tensors is refused by name, and what it would have done is not done."""
    path = tmp_path / "bad.pth"
    torch.save({"w": Bomb(tmp_path / "ran")}, path)
    with pytest.raises(ValueError, match=rf"^{path} holds more than tensors, and reading it might run code"):
        open_checkpoint([path])
    assert not (tmp_path / "ran").exists()


def fault(folder: Path, name: str) -> tuple[list[Path], str]:
    """A wrong file of that kind, and what shall be said of it."""
    path = folder / "m.safetensors"
    if name == "git-lfs pointer":
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
        return [path], f"^{path} is a git-lfs pointer, not the weights; run git lfs pull$"
    if name == "cut short":
        whole = write(path, w=torch.ones(100)).read_bytes()
        path.write_bytes(whole[:-50])
        return [path], rf"^{path} is not a whole safetensors file \(.*\); download it again$"
    if name == "torch file cut short":
        path = folder / "m.pth"
        whole = write(path, w=torch.ones(100)).read_bytes()
        path.write_bytes(whole[:-50])
        return [path], rf"^{path} is not a whole torch file \(.*\); download it again$"
    if name == "not tensors":
        path = folder / "m.pth"
        torch.save({"step": 3}, path)
        return [path], f"^{path}: key 'step' is a int, not a tensor; give a file of weights$"
    if name == "a list":
        path = folder / "m.pth"
        torch.save([torch.ones(1)], path)
        return [path], f"^{path} holds a list, not tensors by name; give a file of weights$"
    other = folder / "n.safetensors"
    write(other, w=torch.ones(1))
    return [
        write(path, w=torch.ones(1)),
        other,
    ], f"^{other} and {path} both hold the key 'w'; give one of them$"


@pytest.mark.parametrize(
    "name",
    ["git-lfs pointer", "cut short", "torch file cut short", "not tensors", "a list", "a key twice"],
)
def test_a_wrong_file_is_named(tmp_path, name):
    """One sentence with the file, and with the key where there is one."""
    files, message = fault(tmp_path, name)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(files)


def shards(folder: Path, *, total: int = 3, index: bool = True) -> list[Path]:
    """The files of a sharded checkpoint, with its index."""
    names = [f"model-{i:05}-of-{total:05}.safetensors" for i in range(1, total + 1)]
    files = [write(folder / name, **{f"w{i}": torch.ones(1)}) for i, name in enumerate(names)]
    if index:
        weight_map = {f"w{i}": name for i, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files


def test_files_are_found_by_path_folder_and_glob(tmp_path):
    """All shards in order, whichever way they are named; a .pth by its path."""
    files = shards(tmp_path)
    assert resolve_files(tmp_path) == files
    assert resolve_files(str(tmp_path / "model-*.safetensors")) == files
    assert resolve_files(files[1]) == [files[1]]
    pickled = write(tmp_path / "a.pth", w=torch.ones(1))
    assert resolve_files(pickled) == [pickled]


def test_a_file_that_the_index_does_not_list_is_named(tmp_path, caplog):
    """Left out of a folder with a warning; refused where the user's own glob includes it."""
    files = shards(tmp_path)
    extra = write(tmp_path / "model-old.safetensors", w=torch.ones(1))
    index = tmp_path / "model.safetensors.index.json"
    assert resolve_files(tmp_path) == files
    assert f"{index} does not list {extra.name}: not read" in caplog.text
    with pytest.raises(ValueError, match=f"^{re.escape(str(extra))} is not in {index}; leave it out$"):
        resolve_files(tmp_path / "model-*.safetensors")


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(tmp_path, index):
    """By the index where there is one, else by the numbers in the names."""
    shards(tmp_path, index=index)[1].unlink()
    lost = "model-00002-of-00003.safetensors"
    message = (
        f"index.json lists 3 files, 1 are missing, the first is {tmp_path / lost}; download them$"
        if index
        else f"has 2 of 3 files like model-00001-of-00003.safetensors; {lost} is missing$"
    )
    for where in (tmp_path, tmp_path / "*.safetensors"):
        with pytest.raises(ValueError, match=message):
            resolve_files(where)


def test_nothing_found_names_what_is_there(tmp_path):
    """A wrong path or glob lists the checkpoints beside it; a file of another kind is refused."""
    write(tmp_path / "real.safetensors", w=torch.ones(1))
    for where in ("wrong.safetensors", "wrong*.safetensors"):
        message = rf"{re.escape(where)} is no checkpoint file here; {tmp_path} has real.safetensors$"
        with pytest.raises(ValueError, match=message):
            resolve_files(tmp_path / where)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has none$"):
        resolve_files(tmp_path / "empty")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"notes.txt is not a checkpoint; give \*.safetensors, "):
        resolve_files(tmp_path / "notes.txt")
