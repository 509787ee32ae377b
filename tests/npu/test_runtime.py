"""The simulated NPU is there, and the runtime finds it."""

from tests.npu import bodies


def test_a_rank_finds_its_npu(npu):
    """Each rank has its local rank's device and talks hccl; the self-test of all collectives has passed."""
    assert npu(2).run(bodies.place) == [("npu:0", 8, "hccl"), ("npu:1", 8, "hccl")]
