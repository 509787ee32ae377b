"""python -m usp.plan show MODEL: a model's shard plan, and the modules of the model that each entry names."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from usp.adapter import matches, matching
from usp.plan import GatherOutput, ShardPlan, SharedAttention, SplitCount, SplitMask, SplitOutput
from usp.plans import PLANS, plan_for

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
Model = Annotated[str, typer.Argument(help="A class name, or a diffusers folder of a pipeline or a model.")]


@app.callback()
def main() -> None:
    """Shard plans: what is cut in a model, and where it is made whole again."""


@app.command()
def show(model: Model) -> None:
    """Print the plan of MODEL, and what each of its entries matches; no weights are read."""
    try:
        configs = _configs(model)
        for where, config in configs:
            _show(where, _build(config))
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def _configs(model: str) -> list[tuple[str, dict[str, Any]]]:
    """(where, config) of each model to show. Raises ValueError if there is none."""
    folder = Path(model)
    if not folder.exists():
        if model not in PLANS:
            known = ", ".join(sorted(PLANS))
            raise ValueError(
                f"{model!r} was asked for; it is no folder here, and no class with a plan; there are plans "
                f"for {known}; to add one write usp/plans/<family>.py and list it in usp/plans/__init__.py"
            )
        return [("its default config", {"_class_name": model})]
    files = [folder / "config.json", *sorted(folder.glob("*/config.json"))]
    configs = [(str(f.parent), json.loads(f.read_text(encoding="utf-8"))) for f in files if f.is_file()]
    found = [(where, config) for where, config in configs if config.get("_class_name") in PLANS]
    if not found:
        classes = ", ".join(sorted({str(c.get("_class_name", "no class")) for _, c in configs}))
        raise ValueError(
            f"{folder} was asked for; the config.json files in it and below name {classes or 'nothing'}, and "
            f"there are plans for {', '.join(sorted(PLANS))}"
        )
    return found


def _build(config: dict[str, Any]) -> Any:
    """The model, without weights."""
    import diffusers

    with torch.device("meta"):
        return getattr(diffusers, config["_class_name"]).from_config(config)


def _show(where: str, model: Any) -> None:
    plan = plan_for(model)
    table = Table("what", "where", "modules", title=f"{plan.model} ({where})", title_justify="left", box=None)
    found: dict[Any, list[str]] = {entry: [] for entry in (*plan.splits, *plan.gathers, *plan.attentions)}
    for entry, name, _ in matches(model, plan):
        found[entry].append(name)
    for entry, names in found.items():
        pattern = entry.modules if isinstance(entry, SharedAttention) else entry.module
        table.add_row(*_facts(entry), _names(names) or f"{pattern}: none in this model")
    for blocks in plan.blocks:
        names = _names([name for name, _ in matching(model, f"{blocks.modules}.*")])
        for held in blocks.held:
            axis = f"{held.argument}, {held.ndim} dims: axis {held.dim}"
            table.add_row(f"check {' + '.join(held.streams)}", axis, names)
        for whole in blocks.whole:
            table.add_row("leave whole", f"{whole.argument}, {whole.ndim} dims", names)
    for entry in plan.refused:
        table.add_row("refuse", entry.argument, entry.why)
    if table.rows:
        Console(width=max(110, Console().width)).print(table, markup=False, highlight=False)
    typer.echo(_summary(plan))


def _facts(entry: Any) -> tuple[str, str]:
    """What an entry does to which stream, and on which axis of which tensor."""
    match entry:
        case SharedAttention():
            return f"attend over {' + '.join(entry.streams)}", "scaled_dot_product_attention"
        case GatherOutput():
            return f"gather {entry.stream}", f"result: axis {entry.dim}"
        case SplitCount():
            return f"count {entry.stream}", entry.argument
        case SplitOutput():
            element = "" if entry.index is None else f" {entry.index}"
            return f"split {entry.stream}", f"result{element}, {entry.ndim} dims: axis {entry.dim}"
        case SplitMask():
            return f"split {entry.stream}, a key mask", f"{entry.argument}: axis {entry.dim}"
    return f"split {entry.stream}", f"{entry.argument}, {entry.ndim} dims: axis {entry.dim}"


def _names(names: list[str]) -> str:
    """Module names, a run of numbers as one: "blocks.0-29.attn1 (30 modules)"."""
    runs: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        key = tuple("#" if i == place else part for i, part in enumerate(parts))
        runs.setdefault(key, []).append("" if place is None else parts[place])
    shown = []
    for key, numbers in runs.items():
        run = numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        count = f" ({len(numbers)} modules)" if len(numbers) > 1 else ""
        shown.append((".".join(key).replace("#", run) or "the model") + count)
    return ", ".join(shown)


def _summary(plan: ShardPlan) -> str:
    if not plan.attentions:
        return f"{plan.model}: its batch is cut over cfg ranks; its sequence is not spread over ranks."
    guidance = "stacked in the batch" if plan.stacked else "one forward each, by name"
    cached = [blocks.modules for blocks in plan.blocks if blocks.cached]
    return f"{plan.model}: guidance branches {guidance}; a first-block cache works on {' and '.join(cached)}."


if __name__ == "__main__":
    app()
