"""`usp.verify` passes what is the same, and fails what is not."""

import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline  # noqa: F401 (forked ranks then find it imported)

import usp.verify
from tests.processes import Run, forked
from usp.attention import SequenceAttention
from usp.config import spellings
from usp.verify import Comparison

STEPS = 2
WORDS = ("wan-t2v", "--device", "cpu", "--steps", str(STEPS), "--size", "48x32", "--frames", "5")  # 12 tokens
SEQUENCE_LAYOUTS = {"ulysses4", "gather_kv4", "ring4", "ring2 ulysses2", "gather_kv2 ulysses2"}


def refuse_constant(name: str) -> None:
    pytest.fail(f"{name} is not JSON")


def verified(
    size: int, folder: Path, *words: str, before: Callable[[], Any] | None = None
) -> tuple[Run, Any]:
    """The run and the JSON of its last line; rank 0 alone has spoken."""
    run = forked(size, folder / "run", usp.verify, *WORDS, *words, before=before)
    assert [rank.stdout for rank in run.ranks[1:]] == [""] * (size - 1)
    assert run.ranks[0].stdout, run.text
    return run, json.loads(run.ranks[0].stdout.splitlines()[-1], parse_constant=refuse_constant)


def test_two_ranks_pass_with_a_table_and_json(tmp_path):
    """Point 7: latents per step, frames and SSIM, in words and as JSON; exit code 0 on both ranks."""
    run, found = verified(2, tmp_path, "--seed", "5")
    assert run.code == 0, run.text
    [row] = found.pop("runs")
    assert found == {"ranks": 2, "seed": 5, "tolerance": 1e-4, "passed": True}
    assert row["parallel"] == "cfg2"
    assert len(row["latents"]) == STEPS
    assert all(0 <= error <= 1e-4 for error in row["latents"])
    assert row["frames"] <= 1e-3
    assert row["ssim"] == pytest.approx(1, abs=1e-5)
    *table, steps, _ = run.ranks[0].stdout.splitlines()
    assert "2 ranks against one process, seed 5, torch.float32, tolerance 0.0001" in table
    for word in ("parallel", "latents, worst step", "frames (0..1)", "SSIM", "cfg2", "ok"):
        assert any(word in line for line in table), f"{word} is not in\n{run.ranks[0].stdout}"
    assert steps.startswith("latents, max abs error after each step: ")
    assert len(steps.split(": ")[1].split()) == STEPS
    for sign in ("warning", "Traceback", "destroy_process_group"):
        assert sign not in run.text


def test_all_sweeps_every_layout_of_four_ranks(tmp_path):
    """Point 7, "Shown by": --all runs every layout that four ranks allow, one row each, all in bound."""
    run, found = verified(4, tmp_path, "--all")
    assert run.code == 0, run.text
    names = [row["parallel"] for row in found["runs"]]
    assert set(names) >= SEQUENCE_LAYOUTS
    assert len(set(names)) == len(names) == len(spellings(4))
    assert all(error <= 1e-4 for row in found["runs"] for error in row["latents"])
    lines = run.ranks[0].stdout.splitlines()
    for name in names:
        assert any(f" {name} " in line and " ok " in line for line in lines), f"no row for {name}"


def perturb(rank: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have one rank's attention give something else."""
    attend = SequenceAttention.__call__

    def perturbed(self: SequenceAttention, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = attend(self, *args, **kwargs)
        return change(out) if os.environ["RANK"] == str(rank) else out

    SequenceAttention.__call__ = perturbed  # type: ignore[method-assign]


def test_a_fault_on_one_rank_is_too_far(tmp_path):
    """Rank 1's attention is off by 1 %: exit code 1, TOO FAR, and the errors say by how much."""
    run, found = verified(
        2, tmp_path, "--attention", "gather-kv", before=partial(perturb, 1, lambda out: out * 1.01)
    )
    assert run.code != 0
    assert "exitcode  : 1 " in run.launcher
    assert "TOO FAR" in run.ranks[0].stdout
    assert " ok " not in run.ranks[0].stdout
    assert found["passed"] is False
    assert all(error > 1e-4 for error in found["runs"][0]["latents"])


def test_nan_on_one_rank_is_too_far(tmp_path):
    """A NaN is larger than any tolerance, though it compares as false; the last line is still JSON."""
    run, found = verified(
        2, tmp_path, "--attention", "gather-kv", before=partial(perturb, 1, lambda out: out * math.nan)
    )
    assert "exitcode  : 1 " in run.launcher, run.text
    assert "TOO FAR" in run.ranks[0].stdout
    assert found["passed"] is False


def test_a_tolerance_of_0_fails_a_ring(tmp_path):
    """A ring merges in another order than one softmax: not bit-equal over a whole run, so 0 must fail it."""
    run, found = verified(2, tmp_path, "--attention", "ring", "--tolerance", "0")
    assert "exitcode  : 1 " in run.launcher, run.text
    assert "TOO FAR" in run.ranks[0].stdout
    assert (found["tolerance"], found["passed"]) == (0, False)
    assert found["runs"][0]["parallel"] == "ring2"
    assert 0 < max(found["runs"][0]["latents"]) <= 1e-4


@pytest.mark.parametrize(("latents", "passes"), [
    ([0.0, 1e-4], True),
    ([2e-4, 0.0], False),
    ([0.0, math.nan], False),
    ([math.inf], False),
])  # fmt: skip
def test_every_step_must_be_in_bound(latents, passes):
    """Not the last one only: an error that a later step hides is an error."""
    assert Comparison("ring2", latents, 0.0, 1.0).passes(1e-4) is passes
