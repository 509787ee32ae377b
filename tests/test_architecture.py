"""The design's rules on the shape of the code, kept by looking at every file's syntax tree."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(p for top in ("usp", "runtime", "launchers") for p in (ROOT / top).rglob("*.py"))
LIBRARY = sys.stdlib_module_names
ALLOWED_OUTSIDE = {
    "launchers": set(),
    "runtime": {"torch", "safetensors"},
    # The demo trains and measures, the command line prints; the rest of usp is torch and diffusers.
    "usp": {
        "torch",
        "diffusers",
        "transformers",
        "accelerate",
        "safetensors",
        "numpy",
        "tokenizers",
        "matplotlib",
        "peft",
    }
    | {"typer", "rich", "av", "PIL", "skimage", "yunchang", "xfuser"},
}
# Inside usp, a file imports only files of lower or equal level; attention, plan and cache are siblings.
LEVELS = {
    "config": 0,
    "trees": 0,
    "layout": 1,
    "mesh": 2,
    "comm": 3,
    "plan": 4,
    "plan.__main__": 8,  # the command
    "plans": 5,
    "attention": 4,
    "branches": 5,
    "deferred": 4,
    "cfg_parallel": 6,
    "cache": 6,
    "redirect": 5,
    "refusing": 5,
    "adapter": 6,
    "assembly": 7,
    "fusing": 6.5,
    "rotations": 5,
    "agreement": 0,
    "joining": 6,
    "calls": 6,
    "randomness": 6,
    "report": 6,
    "planner": 6.5,  # auto and --layouts use it, it uses the adapter
    "planner.__main__": 11,
    "planner.fit": 10.5,  # runs what the bench runs
    "original_keys": 4,
    "parts": 4,
    "original_layouts": 5,
    "loading": 6,
    "pipeline": 8,
    "model_folder": 6,
    "schedulers": 6,
    "lora": 6,
    "lora_keys": 5,
    "files": 5,
    "video": 6,
    "images": 6,
    "processors": 5,
    "model_index": 4,
    "demo": 6,
    "demo.__main__": 10,
    "recipes": 0,
    "tasks": 7,
    "options": 7,
    "job": 9,
    "cli": 9,
    "run": 10,
    "verify": 10,
    "bench": 10,
}
VENDORS = {"cuda", "nccl", "npu", "hccl", "torch_npu", "musa", "mccl", "torch_musa", "xpu", "xccl", "rocm"}
VENDOR_FILES = {"runtime/device.py", "usp/attention/kernels.py", "runtime/fused.py"}
VENDOR_FILES |= {"usp/attention/npu_kernels.py"}
VENDOR_HELP = {"usp/options.py"}  # lists the devices for --help
INTEROP_FILES = {"usp/attention/interop.py"}  # names the wrong vendor paths that it refuses


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports, also inside functions."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_one_way(path):
    """launchers -> standard library; runtime -> torch; usp -> runtime; and inside usp upwards only."""
    top = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        first = name.split(".")[0]
        if first in ("usp", "runtime", "launchers"):
            assert first == top or (top == "usp" and first == "runtime"), f"{name_of(path)} imports {name}"
        elif first not in LIBRARY:
            assert first in ALLOWED_OUTSIDE[top], f"{name_of(path)} imports {name}"


def level(dotted: str) -> float | None:
    parts = dotted.split(".")[1:]
    return LEVELS.get(".".join(parts[:2]), LEVELS.get(parts[0] if parts else ""))


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p).startswith("usp/")], ids=name_of)
def test_usp_is_layered(path):
    """config <- layout <- mesh <- comm <- attention, plan <- adapter <- pipeline <- run, verify, bench."""
    own = name_of(path).removesuffix(".py").replace("/", ".")
    if own == "usp.__init__":
        return  # the public face, which imports pipeline on first use
    mine = level(own)
    assert mine is not None, f"{own} has no level: put it on the map"
    for name in imports(path):
        if name.startswith("usp."):
            other = level(name)
            assert other is not None, f"{name} has no level: put it on the map"
            same_part = name.split(".")[1] == own.split(".")[1]
            assert other < mine or same_part, f"{own} (level {mine}) imports {name} (level {other})"


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p).startswith("usp/plans/")], ids=name_of)
def test_plans_are_data(path):
    """A plan file imports usp.plan only, and defines no functions."""
    if path.name == "__init__.py":
        return
    assert {name.rsplit(".", 1)[0] for name in imports(path)} == {"usp.plan"}
    assert not [n for n in ast.walk(tree(path)) if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.If))]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_fit_the_page(path):
    """No file over 400 lines, no function over 60."""
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= 400, f"{name_of(path)} has {lines} lines"
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{name_of(path)}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_global_and_nothing_swallowed(path):
    """No `global`, no star import, no broad except without a raise; the environment is read in two places."""
    reads_environment = name_of(path) == "runtime/process_group.py" or name_of(path).startswith("launchers/")
    for node in ast.walk(tree(path)):
        assert not isinstance(node, ast.Global), f"{name_of(path)}:{node.lineno} global"
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name != "*" for alias in node.names), (
                f"{name_of(path)}:{node.lineno} star import"
            )
        if isinstance(node, ast.ExceptHandler) and is_broad(node):
            assert any(isinstance(n, ast.Raise) for n in ast.walk(node)), (
                f"{name_of(path)}:{node.lineno} swallows every exception"
            )
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            assert reads_environment, f"{name_of(path)}:{node.lineno} reads the environment"


def is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(c is None or getattr(c, "id", "") in ("Exception", "BaseException") for c in caught)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_vendors_are_named_in_few_places(path):
    """Only the device table, the kernels, fused operators and the launchers name a vendor in code."""
    if name_of(path) in VENDOR_FILES | VENDOR_HELP | INTEROP_FILES or name_of(path).startswith("launchers/"):
        return
    module = tree(path)
    docstrings = {
        node.body[0].value
        for node in ast.walk(module)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(module):
        words: list[str] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            words = [node.value]
        elif isinstance(node, ast.Attribute):
            words = [node.attr]
        for word in words:
            assert word.lower() not in VENDORS, f"{name_of(path)}:{node.lineno} names {word}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_public_names_have_docstrings(path):
    """Every module, public class and public function says what it is or what comes back."""
    module = tree(path)
    source = path.read_text(encoding="utf-8")
    assert not source.strip() or ast.get_docstring(module), f"{name_of(path)} does not say its purpose"
    for node in ast.walk(module):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            nested = any(
                isinstance(outer, ast.FunctionDef) and node is not outer and node in ast.walk(outer)
                for outer in ast.walk(module)
            )
            assert nested or ast.get_docstring(node), f"{name_of(path)}: {node.name} has no docstring"


def test_the_top_level_is_the_agreed_one():
    """Six names at the top, dotfiles and the constraints file apart."""
    ours = {"pyproject.toml", "usp", "runtime", "launchers", "tests", "README.md", "constraints.txt"}
    import subprocess

    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    tops = {line.split("/")[0] for line in tracked.splitlines()}
    assert {top for top in tops if not top.startswith(".")} <= ours


def named_tests(path: Path) -> set[str]:
    return {
        n.name for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")
    }


def test_every_trap_of_an_npu_is_a_test_that_exists_or_a_reason():
    """All 45 rows of the table in tests/npu/README.md, each once; a name may be cut short by dots."""
    table = (ROOT / "tests/npu/README.md").read_text(encoding="utf-8").split("\n## Traps\n")[1]
    rows = re.findall(r"^\| ([\d, ]+) \| .+? \| (.+) \|$", table, re.MULTILINE)
    assert sorted(int(number) for numbers, _ in rows for number in numbers.split(", ")) == list(range(1, 46))
    here = set().union(*(named_tests(path) for path in (ROOT / "tests/npu").glob("test_*.py")))
    for numbers, cell in rows:
        named = re.findall(r"`(test_\w+?)(\.\.\.)?`", cell)
        assert named or re.match("no test: |not simulated", cell), (
            f"trap {numbers} has neither test nor reason"
        )
        for part in cell.split(";"):
            place = re.search(r"tests/[\w/]+\.py", part)
            known = named_tests(ROOT / place[0]) if place else here
            for name, dots in re.findall(r"`(test_\w+?)(\.\.\.)?`", part):
                found = [test for test in known if test.startswith(name)] if dots else known & {name}
                assert found, f"trap {numbers}: no {name} in {place[0] if place else 'tests/npu'}"
