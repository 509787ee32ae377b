"""Checkpoint files as dictionaries of tensors that stay in their files until they are read, one by one.

safetensors and torch's zip files are memory-mapped. What a key converter does to such a tensor (split, join,
rename) is recorded, and done when it is read: names, shapes and dtypes are checked before any weight is read.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from runtime.log import get_logger

# Pages of a mapped file count as resident until it is unmapped, so it is mapped afresh after so many bytes
# or, if that is more, a 32nd of the file: mapping takes up to 0.1 s, to read torch's pickled index again.
WINDOW_BYTES, WINDOWS = 4 << 20, 32
SAFE, PICKLED = (".safetensors",), (".pth", ".pt", ".bin")
SHARD = re.compile(r"(?P<head>.+)-(?P<number>\d+)-of-(?P<total>\d+)(?P<tail>\.\w+)")
LFS_POINTER = b"version https://git-lfs"

logger = get_logger(__name__)


class FileTensor(torch.Tensor):
    """A tensor whose values are still in its file: shape and dtype are known, `read()` gives the values.

    Operations on it give further such tensors. One that needs values (`item`, a branch) raises; an in-place
    one is refused.
    """

    read: Callable[[], torch.Tensor]  # on the CPU; may be a view of the mapped file, so copy it
    origin: str  # file and key, for messages

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do `func` on shapes alone, and remember it."""
        kwargs = kwargs or {}
        if (
            func is torch.cat and len(args[0]) == 1
        ):  # how converters copy a part that they cut out: not needed
            return args[0][0]
        name = getattr(func, "__name__", "")
        assert name.endswith("__") or not name.endswith("_"), (
            f"{name} would change a tensor that is in a file"
        )
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        return _recorded(out, func, args, kwargs)


def _recorded(out: Any, func: Any, args: Any, kwargs: Any) -> Any:
    def redo() -> Any:
        return func(*_values(args), **_values(kwargs))

    origin = " and ".join(dict.fromkeys(tensor.origin for tensor in _leaves([args, kwargs])))
    if isinstance(out, torch.Tensor):
        return _in_file(out, redo, origin)
    if isinstance(out, tuple | list) and any(isinstance(part, torch.Tensor) for part in out):
        return [_in_file(part, lambda i=i: redo()[i], origin) for i, part in enumerate(out)]
    return out


def _in_file(meta: torch.Tensor, read: Callable[[], torch.Tensor], origin: str) -> FileTensor:
    tensor = meta.to("meta").as_subclass(FileTensor)
    tensor.read, tensor.origin = read, origin
    return tensor


def _values(nested: Any) -> Any:
    """`nested` with the values of its file tensors in their places."""
    if isinstance(nested, FileTensor):
        return nested.read()
    if isinstance(nested, dict):
        return {key: _values(value) for key, value in nested.items()}
    return type(nested)(map(_values, nested)) if type(nested) in (tuple, list) else nested


def _leaves(nested: Any) -> Iterable[FileTensor]:
    if isinstance(nested, FileTensor):
        yield nested
    elif isinstance(nested, dict | tuple | list):
        for part in nested.values() if isinstance(nested, dict) else nested:
            yield from _leaves(part)


def open_checkpoint(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Every tensor of `files` by its key, none of them read yet: only headers are.

    Raises ValueError, naming the file, for one that is not whole, holds more than tensors, or shares a key
    with another. A pickled file is never run: only torch.load with weights_only opens it.
    """
    found: dict[str, torch.Tensor] = {}
    where: dict[str, Path] = {}
    for path in files:
        file = _File(path)
        for key, meta in file.header().items():
            if key in found:
                raise ValueError(f"{path} and {where[key]} both hold the key {key!r}; give one of them")
            found[key] = _in_file(meta, lambda file=file, key=key: file.tensor(key), f"{path}: key {key!r}")
            where[key] = path
    return found


class _File:
    """One checkpoint file, mapped while it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: Any = None
        self._read = 0
        self._window = max(WINDOW_BYTES, path.stat().st_size // WINDOWS)

    def header(self) -> dict[str, torch.Tensor]:
        """Shape and dtype of each tensor, as meta tensors."""
        mapped = self._map()
        if not isinstance(mapped, Mapping):
            return {key: mapped.get_tensor(key).to("meta") for key in mapped.keys()}  # noqa: SIM118
        for key, value in mapped.items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(
                    f"{self.path}: key {key!r} is a {type(value).__name__}, not a tensor; "
                    f"give a file of weights"
                )
        return {key: value.detach().to("meta") for key, value in mapped.items()}

    def tensor(self, key: str) -> torch.Tensor:
        """The tensor in the mapped file."""
        mapped = self._map()
        value = mapped[key] if isinstance(mapped, Mapping) else mapped.get_tensor(key)
        self._read += value.nbytes
        return value.detach()

    def _map(self) -> Any:
        if self._mapped is None or self._read > self._window:
            self._mapped, self._read = None, 0  # let go of the old mapping first
            self._mapped = self._open()
        return self._mapped

    def _open(self) -> Any:
        """The file, always mapped on the CPU: other device names are not understood, or mean card 0."""
        with self.path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ValueError(f"{self.path} is a git-lfs pointer, not the weights; run git lfs pull")
        if self.path.suffix in SAFE:
            try:
                return safe_open(self.path, framework="pt", device="cpu").__enter__()
            except SafetensorError as error:
                raise ValueError(
                    f"{self.path} is not a whole safetensors file ({error}); download it again"
                ) from error
        return _unpickle(self.path)


def _unpickle(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        # Files from before torch 1.6 are no zip files and cannot be mapped.
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors, and reading it might run code; give a .safetensors file"
        ) from error
    except (EOFError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a whole torch file ({reason}); download it again") from error
    if not isinstance(found, Mapping):
        raise ValueError(
            f"{path} holds a {type(found).__name__}, not tensors by name; give a file of weights"
        )
    return found


def resolve_files(where: str | Path) -> list[Path]:
    """The checkpoint files that a path, a folder or a glob means, in order.

    A folder means its safetensors: those its index lists, or all. Raises ValueError that names what is
    missing (a file, a shard that the index or the numbering calls for) or too many (a file that the index
    does not list; in a folder it is only left out, with a warning).
    """
    path = Path(where).expanduser()
    if path.is_dir():
        pattern, named = path / "*.safetensors", False
    elif has_magic(str(path)):
        pattern, named = path, True
    else:
        pattern, named = None, True
    files = [path] if pattern is None else sorted(Path(name) for name in glob(str(pattern)))
    if not files or not files[0].is_file():
        nearby = path if path.is_dir() else path.parent
        others = sorted(p.name for p in nearby.glob("*") if p.suffix in SAFE + PICKLED)
        raise ValueError(
            f"{pattern or path} is no checkpoint file here; {nearby} has {', '.join(others[:5]) or 'none'}"
        )
    for file in files:
        if file.suffix not in SAFE + PICKLED:
            raise ValueError(f"{file} is not a checkpoint; give {', '.join('*' + s for s in SAFE + PICKLED)}")
    if len(files) > 1 or pattern is not None:
        files = _as_indexed(files, refuse_extra=named)
        _check_numbering(files)
    return files


def _as_indexed(files: list[Path], *, refuse_extra: bool) -> list[Path]:
    """`files` as far as the index beside them lists them, if there is one."""
    for index in sorted(files[0].parent.glob("*.safetensors.index.json")):
        try:
            listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
            raise ValueError(f"{index} is not an index of shards ({error!r}); download it again") from error
        missing = sorted(listed - {file.name for file in files})
        if missing:
            raise ValueError(
                f"{index} lists {len(listed)} files, {len(missing)} are missing, the first is "
                f"{index.parent / missing[0]}; download them"
            )
        extra = [file for file in files if file.name not in listed]
        if extra and refuse_extra:
            raise ValueError(f"{extra[0]} is not in {index}; leave it out")
        if extra:
            logger.warning("%s does not list %s: not read", index, ", ".join(file.name for file in extra))
        return [file for file in files if file.name in listed]
    return files


def _check_numbering(files: list[Path]) -> None:
    for match in filter(None, (SHARD.fullmatch(file.name) for file in files)):
        width, total = len(match["number"]), int(match["total"])
        names = [
            f"{match['head']}-{i:0{width}}-of-{match['total']}{match['tail']}" for i in range(1, total + 1)
        ]
        missing = [name for name in names if name not in {file.name for file in files}]
        if missing:
            raise ValueError(
                f"{files[0].parent} has {total - len(missing)} of {total} files like {match[0]}; "
                f"{', '.join(missing[:3])} {'is' if len(missing) == 1 else 'are'} missing"
            )
