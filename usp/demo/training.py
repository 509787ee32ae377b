"""What both training stages share: schedule, optimizers, moving average, checkpoints, progress, pictures."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """How one stage is run: where it keeps its files, how long it lasts, how often it reports."""

    work: Path
    name: str
    steps: int
    seed: int = 0
    log_every: int = 50
    save_every: int = 500

    @property
    def checkpoint(self) -> Path:
        """The file that the stage resumes from."""
        return self.work / f"{self.name}.pt"


def learning_rate_factor(step: int, steps: int, *, warmup: float = 0.03, decay: float = 0.5) -> float:
    """The share of the peak learning rate at `step`: linear rise, plateau, linear fall to zero at `steps`."""
    done = (step + 1) / steps
    return min(1.0, done / warmup, (1.0 - step / steps) / decay)


class MatrixAndOtherOptimizers:
    """Muon for `matrices`, AdamW for the other parameters of `module`, stepped as one.

    A convolution's weight counts as the matrix (out channels, everything else). Muon sees it through a view,
    so its channels must lie last in memory.
    """

    def __init__(
        self, matrices: list[torch.nn.Parameter], module: torch.nn.Module, *, muon_lr: float, adamw_lr: float
    ) -> None:
        taken = {id(p) for p in matrices}
        self.parameters = list(module.parameters())
        self.matrices = matrices
        self.views = [torch.nn.Parameter(_as_matrix(p.detach())) for p in matrices]
        assert all(v.data_ptr() == p.data_ptr() for v, p in zip(self.views, matrices, strict=True)), (
            "not a view"
        )
        others = [p for p in self.parameters if id(p) not in taken]
        muon = _muon()(self.views, lr=muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(others, lr=adamw_lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.optimizers = ((muon, muon_lr), (adamw, adamw_lr))

    def step(self, factor: float) -> None:
        """Clip the gradients to norm 1, step at `factor` times the peak rates, and drop the gradients."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for view, matrix in zip(self.views, self.matrices, strict=True):
            view.grad = _as_matrix(matrix.grad)
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
        for parameter in self.parameters + self.views:
            parameter.grad = None

    def state_dict(self) -> list[dict[str, Any]]:
        """The two optimizers' states, for a checkpoint."""
        return [optimizer.state_dict() for optimizer, _ in self.optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Take up the states that `state_dict` gave."""
        for (optimizer, _), state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def _muon() -> Callable[..., torch.optim.Optimizer]:
    found = getattr(torch.optim, "Muon", None)
    if found is None:
        raise RuntimeError(
            f"training needs torch.optim.Muon, which torch {torch.__version__} has not; use torch 2.9 or "
            f"newer to train; the bundled model is trained already"
        )
    return found


def _as_matrix(weight: torch.Tensor | None) -> torch.Tensor:
    assert weight is not None, "every matrix has a gradient"
    return weight if weight.ndim == 2 else weight.movedim(1, -1).flatten(1)


def ema_copy(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A detached copy of the parameters and buffers of `module`, to be moved by `ema_update_`."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@torch.no_grad()
def ema_update_(ema: dict[str, torch.Tensor], module: torch.nn.Module, step: int, decay: float) -> None:
    """Move `ema` towards `module`; the first steps count more, so that the random start is soon forgotten."""
    weight = 1.0 - min(decay, (1 + step) / (10 + step))
    state = module.state_dict()
    torch._foreach_lerp_([ema[name] for name in ema], [state[name] for name in ema], weight)


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write `state` beside `path`, then rename: `path` is never half-written."""
    temporary = path.with_name(path.name + ".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The state last saved at `path`, or None where there is none yet."""
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def steps_with_progress(run: StageRun, start: int, losses: dict[str, float]) -> Iterator[int]:
    """Yield the steps from `start`, seeding torch for each: a resumed run draws what an unbroken one draws.

    Every `log_every` steps it prints the moving averages of `losses`, which the caller fills, and the ETA.
    """
    began, means = time.monotonic(), {}
    for step in range(start, run.steps):
        torch.manual_seed(run.seed * 1_000_003 + step)
        yield step
        for name, value in losses.items():
            means[name] = value if name not in means else 0.98 * means[name] + 0.02 * value
        if (step + 1) % run.log_every == 0 or step + 1 == run.steps:
            per_step = (time.monotonic() - began) / (step + 1 - start)
            shown = "  ".join(f"{name} {value:.5f}" for name, value in means.items())
            left = per_step * (run.steps - step - 1) / 60.0
            print(
                f"{run.name} {step + 1}/{run.steps}  {shown}  {per_step:.3f} s/step  ETA {left:.1f} min",
                flush=True,
            )


def contact_sheet(clips: Iterable[np.ndarray], path: Path, *, every: int = 4) -> None:
    """Write a PNG: a row per clip (frames, height, width, 3) in 0..1, a column per `every`-th frame."""
    rows = [np.concatenate(list(clip[::every]), axis=1) for clip in clips]
    pixels = (np.concatenate(rows, axis=0).clip(0.0, 1.0) * 255.0).round().astype(np.uint8)
    temporary = path.with_name("tmp-" + path.name)
    Image.fromarray(pixels).save(temporary)
    os.replace(temporary, path)
