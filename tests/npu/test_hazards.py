"""The traps of the device and of its communication, met on simulated NPUs.

Names start with the number of the trap in the README of this folder.
"""

import subprocess
import sys

import pytest
import torch

from tests.npu import bodies, hazards
from usp.attention.npu_kernels import log_sum_exp

OLDER_CANN, NEWEST_CHIP = {"SIMULATED_CANN": "8.5.0"}, {"SIMULATED_NPU_SOC": "Ascend950PR_9599"}
OLDEST_CHIP = {"SIMULATED_NPU_SOC": "Ascend910A"}  # it saturates; newer ones do if they are made to
SATURATION = {"INF_NAN_MODE_ENABLE": "0", "INF_NAN_MODE_FORCE_DISABLE": "1"}
LARGEST = torch.finfo(torch.float32).max
DETECT = """
import torch
from runtime.device import detect_device, device_count
for choice in (None, "npu"):
    try:
        print(detect_device(choice, local_rank=0, world_size=1))
    except (ValueError, RuntimeError) as error:
        print(type(error).__name__, error)
print(device_count("npu"), hasattr(torch, "npu"))
"""


def detected(environment, **changes):
    """What a fresh process says about its devices."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DETECT],
        env={**environment, **changes},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "ASCEND_HOME_PATH" not in line]


def test_h01_h02_the_package_without_its_libraries(npu_environment):
    """Without CANN detection says cpu, and says why when an NPU is asked for; torch.npu is never presumed."""
    auto, asked, counts = detected(npu_environment, LD_LIBRARY_PATH="")
    assert auto == "cpu"
    assert asked.startswith("ValueError device=npu; torch_npu does not load (ImportError: libhccl.so")
    assert "use device=cpu" in asked
    assert counts == "0 False"


def test_h01_the_command_line_says_what_is_installed_and_does_not_load(npu_environment):
    """diffusers imports the package by itself, also for cpu: one sentence on the way out, no traceback."""
    command = [sys.executable, "-W", "ignore", "-m", "usp.run", "wan-t2v", "--device", "cpu"]
    environment = {**npu_environment, "LD_LIBRARY_PATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    told = [line for line in done.stderr.splitlines() if line.startswith("usp.run: error: ")]
    assert told == done.stderr.splitlines()[-1:]
    assert "does not import (ImportError: libhccl.so" in told[0]
    assert "python -m launchers doctor" in told[0]
    assert "Traceback" not in done.stderr


def test_h03_the_package_without_a_device(npu_environment):
    """Libraries but no card: cpu, and a sentence when an NPU is asked for."""
    auto, asked, counts = detected(npu_environment, SIMULATED_NPU_COUNT="0")
    assert auto == "cpu"
    assert asked == "ValueError device=npu; no npu device is usable here; available: cpu"
    assert counts == "0 True"


def test_h05_survives_transfer_to_npu(npu):
    """torch.cuda says it is available; we see an NPU, and take its kernels."""
    assert npu(1, USER="transfers").run(hazards.after_transfer_to_npu) == [("npu:0", True, "npu-infer")]


def test_h06_all_ranks_on_one_card_is_refused_or_named(npu):
    """An index with several ranks is refused; ranks that went there by themselves are named by HCCL."""
    (refused,) = set(npu(2).run(hazards.refused_index))
    assert "that would put every rank on card 0" in refused
    errors = npu(2, TRAP="one card").run(hazards.one_card_for_two)
    assert all(
        "rank 0 and rank 1 both use npu:0" in e or "rank 1 and rank 0 both use npu:0" in e for e in errors
    )


def test_b59_weights_are_read_to_the_host_and_moved_to_the_ranks_card(npu):
    """B05, B59: safetensors is told cpu, on every rank; the module lies on the card of its own rank."""
    found = npu(2).run(hazards.loaded_module)
    assert found == [({f"npu:{rank}"}, {"cpu"}, True) for rank in range(2)]


def test_h10_ranks_that_diverge_are_named(npu):
    """Another collective than the other rank's, and one that never comes: an error in bounded time."""
    for error in npu(2, TRAP="diverge").run(hazards.divergent):
        assert "ranks disagree" in error
        assert "AllReduce" in error
        assert "AllGather" in error
    late, _ = npu(2, HCCL_EXEC_TIMEOUT="3").run(hazards.absent)
    assert "rank 0 waited HCCL_EXEC_TIMEOUT for rank 1 in AllReduce" in late


def test_h11_work_that_is_not_waited_for_is_not_there(npu):
    """The simulator shows a missing wait, and our strategies have none."""
    ranks = npu(2, SIMULATED_HCCL_DELAY_MS="100")
    assert ranks.run(hazards.unwaited, False) == [1.0, 1.0]
    assert ranks.run(hazards.unwaited, True) == [2.0, 2.0]
    for layout in ("ulysses2", "gather_kv2", "ring2"):
        assert all(error <= 1e-5 for error, _ in ranks.run(hazards.ring_path, layout))


@pytest.mark.parametrize(
    ("knobs", "path"),
    [({}, "HcclGroup"), (OLDER_CANN, "HcclBatchSendRecv"), (NEWEST_CHIP, "HcclBatchSendRecv")],
)
def test_h12_h14_h15_ring_on_both_point_to_point_paths(npu, knobs, path):
    """One packed, contiguous message per peer: right on CANN 9, on CANN 8.5 and on Ascend 950."""
    for error, calls in npu(2, **knobs).run(hazards.ring_path, "ring2"):
        assert error <= 1e-5
        assert [name for name, times in calls.items() if times] == [path]


def test_h12_h14_the_older_path_has_its_traps(npu):
    """Two messages to one peer are refused there, and a transposed tensor arrives as something else.

    Without torch_npu's task queue, whose thread empties the queue before it notes an error: who waits for the
    queue in between sees none until the next call.
    """
    assert not all(npu(2, **OLDER_CANN).run(hazards.transposed_send))
    at_once = {**OLDER_CANN, "TASK_QUEUE_ENABLE": "0"}
    for error in npu(2, TRAP="apart", **at_once).run(hazards.keys_and_values_apart):
        assert "two sends to rank" in error
    assert npu(2).run(hazards.keys_and_values_apart) == ["", ""]


@pytest.mark.parametrize("knobs", [{}, NEWEST_CHIP])
@pytest.mark.parametrize("transport", ["all_to_all", "p2p"])
def test_fp8_travels_as_bytes(npu, knobs, transport):
    """The same bits arrive, and HCCL is given uint8 alone, also on the one chip that has FP8."""
    for wrong, messages in npu(2, **knobs).run(hazards.fp8_exchanges, transport):
        assert wrong == []
        assert list(messages) == ["uint8"]


def test_h17_few_communicators(npu):
    """Each costs 2 x 200 MB: one per distinct set of ranks of a layout, and the whole world's is shared."""
    for made, megabytes in npu(4).run(hazards.communicators, "cfg2 ring2"):
        assert made == 2
        assert megabytes == 400 * made


def test_h18_h28_kernels_are_chosen_by_shape_and_dtype_and_say_why(npu):
    """Fused inference attention, else fusion attention, else plain fp32; each call with its reason."""
    (found,) = npu(1).run(hazards.chosen_kernels)
    first = "npu-infer (auto: the first with a log-sum-exp that fits)"
    one_mask = "npu-infer takes one mask for all heads"
    dims = "npu-infer takes head dims to 512 in steps of 16, not 40"
    assert found == {
        "bfloat16 D64 S5 H2 no mask": first,
        "bfloat16 D64 S5 H2 bool": first,
        "bfloat16 D64 S5 H2 per head": f"npu-fusion (auto: {one_mask})",
        "bfloat16 D64 S5 H2 additive": "plain (auto: npu-infer takes no additive mask; "
        "npu-fusion takes no additive mask)",
        "bfloat16 D40 S5 H2 no mask": f"npu-fusion (auto: {dims})",
        "bfloat16 D64 S1 H2 no mask": "npu-fusion (auto: npu-infer has another path for a single query)",
        "bfloat16 D64 S5 H300 no mask": "plain (auto: npu-infer takes 256 heads at most, not 300; "
        "npu-fusion takes 256 heads at most, not 300)",
        "float32 D64 S5 H2 no mask": "npu-fusion (auto: npu-infer does not take float32)",
    }


def test_h20_h21_h24_h25_h29_each_kernel_matches_plain_attention(npu):
    """Out and natural log-sum-exp; masks of every shape, a row without keys, grouped heads, a scale."""
    ((errors, unminded),) = npu(1).run(hazards.kernel_errors)
    assert unminded == 0
    assert {name.split()[0] for name in errors} == {"npu-infer", "npu-fusion", "plain"}
    for name, error in errors.items():
        assert error <= (1e-5 if "float32" in name else 2e-2), name


def test_h21_no_mask_is_as_large_as_all_scores(npu):
    """Hidden keys are left out, and other masks cut by queries: 64 bytes at most, or three queries."""
    (found,) = npu(1).run(hazards.masks_in_parts)
    assert {name: (largest, calls) for name, (_, largest, calls) in found.items()} == {
        "npu-fusion keys": (0, 2),
        "npu-fusion shown keys": (0, 1),
        "npu-fusion square": (2 * 4 * 8, 4),
        "npu-fusion heads": (2 * 2 * 3 * 8, 5),
        "npu-infer keys": (0, 2),
        "npu-infer shown keys": (0, 1),
        "npu-infer square": (2 * 4 * 8, 4),
    }
    for name, (error, _, _) in found.items():
        assert error <= (2e-2 if "infer" in name else 1e-5), name


def test_h25_the_log_sum_exp_is_right_in_every_layout(npu):
    """From (B, N, S, 8) of each dense layout, 1e-5 to float64; what TND gives is refused, not misread."""
    (errors,) = npu(1).run(hazards.log_sum_exps)
    assert len(errors) == 2 * len(hazards.ARRANGED)
    assert all(error <= 1e-5 for error in errors.values()), errors
    with pytest.raises(AssertionError, match=r"statistics of shape \(10, 6, 8\) are those of TND"):
        log_sum_exp(torch.zeros(10, 6, 8), torch.ones(10, 6, 8))


def test_h19_an_additive_mask_makes_no_matrix_of_all_scores(npu):
    """A float mask goes to the plain kernel, by rows, not to torch_npu's attention."""
    ((error, calls),) = npu(1).run(hazards.an_additive_mask)
    assert error <= 1e-5
    assert not any(name.startswith("sdpa") for name in calls)


@pytest.mark.parametrize("size", [2, 4])
def test_h26_a_ring_attends_beyond_its_own_block(npu, size):
    """What a released ring for NPUs gave, and its tests passed: as far off here as values are."""
    for error, distance in npu(size).run(hazards.ring_and_own_blocks, f"ring{size}"):
        assert error <= 1e-5
        assert distance > 0.1


def test_h27_h33_sums_that_ranks_branch_on_are_alike(npu):
    """Decisions over HCCL, in fp32: the same numbers on every rank."""
    first, second = npu(2).run(hazards.sums_of, torch.float32)
    assert first == second
    assert first[0] == 3.0


def test_h36_h37_h38_h40_the_device_as_the_runtime_sees_it(npu):
    """Memory, plain weight formats, no capability, no fp64; a CPU generator is refused; OOM is torch's."""
    (facts,) = npu(1, SIMULATED_NPU_MB="64").run(hazards.runtime_facts)
    assert facts["total"] == 64 << 20
    assert facts["peak"]
    assert facts["format"] in (-1, 0, 2, 30)  # undefined, NCHW, ND, NCDHW: no private layout
    assert facts["capability"] is None
    assert facts["fp64"] is False
    assert "generator" in facts["cpu generator"]
    (error,) = npu(1, SIMULATED_NPU_MB="64").run(hazards.too_much)
    assert error.startswith("OutOfMemoryError")


def test_h40_an_error_of_queued_work_is_raised_in_its_step(npu):
    """A step ends when its device has done it, so that the error is not told of a later one."""
    for error in npu(2, TRAP="late").run(hazards.late_error):
        assert "ranks disagree" in error


@pytest.mark.parametrize(
    ("knobs", "kernel", "path"),
    [(OLDEST_CHIP, "plain", "HcclBatchSendRecv"), (SATURATION, "npu-fusion", "HcclGroup")],
)
def test_h43_masks_are_right_on_chips_without_infinities(npu, knobs, kernel, path):
    """-inf is the most negative number and NaN is 0: each kind of mask, as on the CPU; 1e-5.

    The first generation has none of the fused attentions, and talks through HcclBatchSendRecv.
    """
    ranks = npu(2, **knobs)
    for numbers, chosen in ranks.run(hazards.without_infinities):
        assert numbers == [LARGEST, -LARGEST, 0.0]
        assert chosen.split()[0] == kernel
    for layout in ("ring2", "ulysses2"):
        for errors in ranks.run(bodies.run_body, "attention", "check_masks", layout):
            assert all(error <= 1e-5 for error in errors.values()), errors  # NaN fails too
    for _, calls in ranks.run(hazards.ring_path, "ring2"):
        assert [name for name, times in calls.items() if times] == [path]


def test_h44_no_gather_of_torch_is_called():
    """HCCL makes an all_gather of it: the ranks that do not want the result would hold it, too."""
    called = {
        name for name, attribute in hazards.calls_of("dist") if attribute in ("gather", "gather_object")
    }
    assert called == set()


def test_h45_a_group_made_anew_does_not_meet_the_old_one(npu):
    """Four generations over one store: each has a prefix of its own, so no root info is stale."""
    assert npu(2, TRAP="generations").run(hazards.generations, 4) == [[2.0] * 4] * 2


def test_our_calls_fit_the_schemas_of_the_wheel(npu):
    """Each torch_npu operator we call exists, takes what we give, and gets its scale and heads."""
    assert npu(1).run(hazards.our_calls) == [[]]
