"""torch 2.7, the oldest that is supported: what MUSA's vendor ships, so nobody there can take a newer one.

Everywhere: every name of torch in our code is one of torch 2.7.1's. With USP_TORCH27_PYTHON naming a Python
that has torch 2.7 and our other dependencies: every module is imported there, and two ranks make a film.
"""

import ast
import inspect
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_architecture import FILES, ROOT, name_of, tree
from tests.torch_names import MODULES, Names, as_text, from_text, offered, resolve

OLDEST = from_text((ROOT / "tests/torch_2.7.1.txt").read_text())
VENDORS_OPERATORS = "torch.ops.npu"  # held against the vendor's schemas in tests/npu
PYTHON = os.environ.get("USP_TORCH27_PYTHON")
needs_python = pytest.mark.skipif(
    not PYTHON,
    reason="NOT RUN ON TORCH 2.7: USP_TORCH27_PYTHON names no Python with torch 2.7 and our dependencies",
)


def used(module: ast.Module) -> Iterator[tuple[str, ast.AST, list[str]]]:
    """Each dotted name of torch in a file, where it stands, and the keywords it is called with."""
    nodes = list(_read_at_run_time(module))
    known: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                known |= {alias.asname: alias.name} if alias.asname else {first: first}
                yield alias.name, node, []
        elif isinstance(node, ast.ImportFrom):
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            yield from ((f"{node.module}.{alias.name}", node, []) for alias in node.names)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = _dotted(node.value, known)  # as in aten = torch.ops.aten
            known |= {node.targets[0].id: name} if name and node in module.body else {}
    keywords = {id(n.func): [k.arg for k in n.keywords if k.arg] for n in nodes if isinstance(n, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Name) and (name := _dotted(node, known)):
            yield name, node, keywords.get(id(node), [])


def _read_at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    yield node
    if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
        for child in ast.iter_child_nodes(node):
            yield from _read_at_run_time(child)


def _dotted(node: ast.AST, known: dict[str, str]) -> str | None:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in known:
        return None
    return ".".join((known[node.id], *reversed(parts)))


def complaint(name: str, keywords: list[str], names: Names) -> str | None:
    """What is wrong with a name of torch, called with these keywords, where only `names` exist."""
    if not f"{name}.".startswith("torch.") or name.startswith(VENDORS_OPERATORS):
        return None
    owner, parameters = "torch", None
    for part in name.split(".")[1:]:
        if owner not in names:
            if inspect.ismodule(resolve(owner)):
                return (
                    f"{owner} is not in MODULES of tests/torch_names.py; add it, and run that with torch 2.7"
                )
            return None  # an attribute of a class or of an object
        if part not in names[owner] and f"{owner}.{part}" not in names and not part.startswith("__"):
            return f"{owner} has no {part} in torch 2.7"
        parameters, owner = names[owner].get(part), f"{owner}.{part}"
    new = sorted(set(keywords) - set(parameters)) if parameters and "**" not in parameters else []
    return f"{name} does not take {', '.join(new)} in torch 2.7" if new else None


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_name_of_torch_is_one_of_torch_2_7(path):
    """Modules, functions, classes; keywords where Python tells a signature. Newer ones are got by getattr."""
    found = [(complaint(name, keywords, OLDEST), node) for name, node, keywords in used(tree(path))]
    assert [f"{name_of(path)}:{node.lineno}: {text}" for text, node in found if text] == []


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import torch\ntorch.optim.Muon([])", "torch.optim has no Muon in torch 2.7"),
        ("from torch.nn.functional import scaled_mm", "torch.nn.functional has no scaled_mm in torch 2.7"),
        (
            "import torch.distributed as d\nd.irecv(t, group_src=0, fast=1)",
            "torch.distributed.irecv does not take fast",
        ),
        ("from torch import nn\nnn.functional.grouped_mm", "torch.nn.functional has no grouped_mm"),
        ("import torch\naten = torch.ops.aten\naten.no_such_op(1)", "torch.ops.aten has no no_such_op"),
        ("from torch.utils import data\ndata.Sampler", "torch.utils.data is not in MODULES"),
        ("import torch.numa", "torch has no numa in torch 2.7"),
    ],
)
def test_a_newer_name_is_seen(code, text):
    """However it is imported, and whichever alias it has."""
    told = [complaint(name, keywords, OLDEST) for name, _, keywords in used(ast.parse(code))]
    assert any(line and line.startswith(text) for line in told), told


def test_the_file_of_names_is_read_as_it_is_written():
    """What the script says of the installed torch comes back, and holds what older code uses."""
    here = {module: offered(module) for module in MODULES if module != "torch.ops.aten"}
    assert from_text("\n".join(as_text(here))) == here
    assert list(OLDEST) == MODULES
    assert OLDEST["torch.distributed"]["irecv"] == ("tensor", "src", "group", "tag", "group_src")
    assert complaint("torch.distributed.irecv", ["group_src"], here) is None


IMPORTS = """
import importlib, pkgutil, warnings
import torch
assert torch.__version__.startswith("2.7."), f"USP_TORCH27_PYTHON has torch {torch.__version__}"
warnings.simplefilter("error")
for top in ("launchers", "runtime", "usp"):
    for module in pkgutil.walk_packages(importlib.import_module(top).__path__, f"{top}."):
        importlib.import_module(module.name)
        print(module.name)
"""


ENDING = """
import torch.distributed as dist
from runtime.device import Device
from runtime.process_group import connect
from usp.config import parse_parallel
from usp.mesh import make_groups
for _ in range(5):
    with connect(Device("cpu")) as world:
        groups = make_groups(parse_parallel("cfg2 ulysses2"), rank=world.rank)
        dist.broadcast_object_list([1], src=groups.ulysses.ranks[0], group=groups.ulysses.handle)
        groups.close()
        world.broadcast_object(2)
print("ended")
"""


def run_there(*words: str, timeout_s: float) -> str:
    """What a command of the other Python prints; it must succeed."""
    assert PYTHON, "only with USP_TORCH27_PYTHON"
    done = subprocess.run(
        [PYTHON, *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_python
def test_every_module_is_imported_with_torch_2_7():
    """Without a warning."""
    told = run_there("-c", IMPORTS, timeout_s=300).split()
    modules = {
        name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in FILES
    }
    assert set(told) == modules - {"usp", "runtime", "launchers"}


@needs_python
def test_two_ranks_make_a_film_with_torch_2_7(tmp_path: Path):
    """The launcher, the exchanges of a ring, and the command line."""
    out = tmp_path / "film.mp4"
    words = ["-m", "launchers", "cpu", "--nproc", "2", "--exec", "--", "-m", "usp.run", "wan-t2v"]
    told = run_there(*words, "--steps", "1", "--parallel", "ring2", "--out", str(out), timeout_s=600)
    assert json.loads(told.splitlines()[-1])["parallel"] == "ring2"
    assert out.stat().st_size > 0


@needs_python
def test_groups_end_right_after_a_collective_with_torch_2_7(tmp_path: Path):
    """Where torch holds Python's lock while a thread of gloo waits for it: five generations, no hang."""
    (tmp_path / "program.py").write_text(ENDING)
    launch = ["-m", "launchers", "cpu", "--nproc", "4", "--exec", "--", str(tmp_path / "program.py")]
    assert run_there(*launch, timeout_s=120).split() == ["ended"] * 4
