"""What an installed torch offers, as text: names, and parameters where Python tells them.

`torch_2.7.1.txt` beside this file was written in an environment with torch 2.7.1, the oldest supported:

    python tests/torch_names.py > tests/torch_2.7.1.txt

Standard library only, so that it runs there without the test tools. Run it again only to add to MODULES.
"""

import importlib
import inspect
import textwrap
from collections.abc import Iterator

# What a runtime for transformers could use. Vendors' modules (torch.cuda, ...) are asked for at run time.
MODULES = [
    *("torch", "torch.accelerator", "torch.backends", "torch.backends.mps", "torch.compiler"),
    *("torch.distributed", "torch.distributed.device_mesh", "torch.distributed.distributed_c10d"),
    *(
        "torch.library",
        "torch.linalg",
        "torch.mps",
        "torch.nn",
        "torch.nn.attention",
        "torch.nn.functional",
        "torch.nn.init",
    ),
    *("torch.nn.Module", "torch.nn.utils", "torch.ops", "torch.ops.aten", "torch.optim", "torch.overrides"),
    *("torch.profiler", "torch.random", "torch.special", "torch.Tensor", "torch.utils"),
    *("torch.utils._python_dispatch", "torch.version", "torch._C"),
]

Names = dict[str, dict[str, tuple[str, ...] | None]]  # by module: parameters of each name, None if not told


def offered(module: str) -> dict[str, tuple[str, ...] | None]:
    """The names in a module or class of this torch, each with its parameters where it has a signature."""
    import torch

    if module == "torch.ops":  # fills itself on first use
        return {"aten": None}
    if module == "torch.ops.aten":
        full = torch._C._dispatch_get_all_op_names()
        names = {name.removeprefix("aten::").split(".")[0] for name in full if name.startswith("aten::")}
        return dict.fromkeys(sorted(name for name in names if not name.endswith(("_", "backward"))))
    found, hidden = resolve(module), "_" if module == "torch._C" else "__"
    return {name: _parameters(found, name) for name in sorted(dir(found)) if not name.startswith(hidden)}


def resolve(dotted: str) -> object:
    """What a dotted name stands for in this torch. Raises ImportError if it is not there."""
    found, at = importlib.import_module("torch"), "torch"
    for part in dotted.split(".")[1:]:
        at = f"{at}.{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(at)
    return found


def _parameters(owner: object, name: str) -> tuple[str, ...] | None:
    try:
        parameters = inspect.signature(getattr(owner, name)).parameters.values()
    except (AttributeError, TypeError, ValueError):  # no Python function
        return None
    return tuple(
        "**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters if p.kind is not p.VAR_POSITIONAL
    )


def as_text(names: Names) -> Iterator[str]:
    """Lines of the file: a module, then its names, indented."""
    for module, members in names.items():
        words = [name if p is None else f"{name}({','.join(p)})" for name, p in members.items()]
        yield f"{module}:"
        yield textwrap.fill(
            " ".join(words), 110, initial_indent=" ", subsequent_indent=" ", break_long_words=False
        )


def from_text(text: str) -> Names:
    """The names that `as_text` wrote."""
    names: Names = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            module = names.setdefault(line.removesuffix(":"), {})
            continue
        for word in line.split():
            name, bracket, parameters = word.removesuffix(")").partition("(")
            module[name] = tuple(parameters.split(",")) if bracket and parameters else () if bracket else None
    return names


if __name__ == "__main__":
    print(*as_text({module: offered(module) for module in MODULES}), sep="\n")
