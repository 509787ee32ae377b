"""Every family's own pipeline on simulated NPUs: the CPU's latents, with no operator on the host."""

import numpy as np
import pytest

from tests.npu import bodies
from tests.usp.families import LABELS, Cell, alone
from usp.demo import tiny

TOLERANCE = 1e-4  # fp32, as for the families on the CPU
SEQUENCE = ("ulysses2", "gather_kv2", "ring2")
ONE_BRANCH = ("flux2",)  # its guidance is a number that the model takes
NO_SEQUENCE = GATED = ("sd15",)
# Their rope is complex: it is copied and joined, as CANN's operators do, but never computed with.
COMPLEX = ("qwen-image", "qwen-image-edit", "qwen-image-edit-plus", "z-image")
MOVES = {"cat", "clone"}
# Attention that torch_npu computes with all scores at once: for a float mask, as T5 has in two layers for
# each of two prompts, and LTX across to its text in two layers of four steps; and, in fp32, for a head dim
# that 4 does not divide, as this tiny UNet has.
T5 = 4
ALL_SCORES = {"flux": T5, "sd3": T5, "cogvideox": T5, "ltx-video": T5 + 2 * 4, "sd15": 30}
ALL_SCORES |= {family: T5 for family in LABELS if family.startswith("wan")}


def runs() -> list[tuple[str, int, str]]:
    """Each family over two ranks, and over four where it has guidance branches; the layouts take turns."""
    found = []
    for place, family in enumerate(LABELS):
        found.append((family, 2, "cfg2" if family in NO_SEQUENCE else SEQUENCE[place % 3]))
        if family not in (*ONE_BRANCH, *NO_SEQUENCE):
            found.append((family, 4, f"cfg2 {SEQUENCE[(place + 1) % 3]}"))
    return found


@pytest.mark.parametrize(("family", "size", "layout"), runs())
def test_a_family_makes_the_cpus_latents_without_the_host(npu, family, size, layout):
    """Encoders, transformer and scheduler; attention, norms, rotations and gates are the vendor's.

    TORCH_NPU_FALLBACK_CPU_DISABLE=1 makes an operator without an NPU kernel an error that names it.
    """
    cell = Cell(size=size, layout=layout)
    want = alone(family, cell)
    for found in npu(size).run(bodies.family, family, cell):
        calls = found["calls"]
        assert found["error"] == ""
        assert np.abs(found["latents"] - want).max() <= TOLERANCE
        assert set(found["wide"]) <= (MOVES if family in COMPLEX else set())
        assert calls["npu_fusion_attention"] > 0
        assert calls.get("sdpa with all scores", 0) == ALL_SCORES.get(family, 0)
        assert bool(calls.get("npu_geglu")) == (family in GATED)


def test_every_scheduler_steps_without_the_host(npu):
    """Each one that `--scheduler` offers, in fp32, also UniPC with its equations."""
    (found,) = npu(1).run(bodies.scheduler_errors)
    assert {"flow unipc", "epsilon unipc"} < set(found)
    for name, (error, wide) in found.items():
        assert error <= 1e-5, name
        assert wide == {}, name


@pytest.mark.parametrize(("task", "layout"), [("sd15", "cfg2"), ("z-image", "ulysses2")])
def test_verify_finds_families_alike_of_which_diffusers_has_another_form(npu, tmp_path, task, layout):
    """From a folder to the table: the one-process run has the plain forms, too."""
    tiny.save(task, tmp_path / task)
    assert npu(2).run(bodies.verified, task, str(tmp_path / task), layout) == [0, 0]
