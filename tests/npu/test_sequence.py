"""The bodies of the CPU tests of exchanges and attention, on simulated NPUs: equal to the CPU's."""

import pytest

from tests.npu import bodies

LAYOUTS = [
    *((2, layout) for layout in ("ulysses2", "gather_kv2", "ring2")),
    *((4, layout) for layout in ("ulysses4", "ring4", "ulysses2 ring2", "ulysses2 gather_kv2")),
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("check", ["gathers", "exchanges"])
def test_every_dtype_and_share_travels_unharmed(npu, size, check):
    """Uneven and empty shares, bool to FP8, strided, on both transports, over HCCL: the same bits."""
    assert npu(size).run(bodies.run_body, "comm", check) == [[]] * size


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_every_length_and_head_count_matches_the_cpu(npu, size, layout):
    """5 lengths x 3 head counts, also fewer than ranks, through the vendor's attention; 1e-5 in fp32."""
    for worst, _ in npu(size).run(bodies.run_body, "attention", "check_shapes", layout):
        assert worst <= 1e-5


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_grouped_heads_batches_half_precision_and_masks_match_the_cpu(npu, size, layout):
    """Grouped-query heads, B = 2, bf16 and fp16 within one rounding, every kind of mask."""
    for body in ("check_options", "check_masks"):
        for errors in npu(size).run(bodies.run_body, "attention", body, layout):
            assert all(error <= 1e-5 for error in errors.values()), errors  # NaN fails too
