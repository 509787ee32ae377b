"""python -m usp.demo tiny NAME DIR: write a small model folder to try commands on, or to test with."""

from pathlib import Path
from typing import Annotated

import typer

from usp import cli

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Name = Annotated[str, typer.Argument(help="The model family; a wrong name lists them.")]
Dir = Annotated[Path, typer.Argument(help="The folder to make.")]
Seed = Annotated[int, typer.Option(help="Of the random weights.")]


@app.callback()
def about() -> None:
    """Make models to try the commands on."""


@app.command()
def tiny(name: Name, dir: Dir, seed: Seed = 0) -> None:
    """Write a diffusers folder: real classes, few and random weights; its pictures are noise."""
    from usp.demo import tiny as models  # here, so that --help imports neither torch nor diffusers

    size = models.save(name, dir, seed)
    print(f"{name}: {size / 1e6:.1f} MB in {dir}")


if __name__ == "__main__":
    cli.main(app, "usp.demo")
