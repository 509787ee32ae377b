"""A trace of each rank, and a summary that names its collectives and adds up."""

import json
import logging
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from runtime.device import Device
from runtime.profiling import Summary, profile, read_trace, summarise, trace_path, union
from usp.attention.kernels import attention, lse_attention
from usp.attention.ring import ring
from usp.attention.ulysses import ulysses
from usp.config import parse_parallel
from usp.mesh import make_groups

CPU = Device("cpu")
CALLS = 3


class Heard(logging.Handler):
    """Keeps what the profiler's logger says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def attend(layout: str) -> None:
    """A small attention over all ranks, and a sum."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = make_groups(parse_parallel(layout), rank=rank)
    split = [8] * size
    q, k, v = (torch.randn(1, 8, size, 16) for _ in range(3))
    for _ in range(CALLS):
        if groups.ring.size > 1:
            ring(q, k, v, mask=None, split=split, group=groups.ring, attention_lse=lse_attention)
        else:
            ulysses(q, k, v, mask=None, split=split, group=groups.ulysses, attention=attention)
    dist.all_reduce(torch.ones(1))
    groups.close()


def profiled(folder: Path, layout: str) -> tuple[list[str], Summary]:
    """What this rank says, and its summary, when `attend` is profiled."""
    heard, logger, rank = Heard(), logging.getLogger("runtime.profiling"), dist.get_rank()
    level = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        with profile(folder, CPU, rank):
            attend(layout)
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
    return heard.texts, summarise(read_trace(trace_path(folder, rank)))


@pytest.mark.parametrize(
    ("layout", "calls"),
    [
        ("ulysses2", {"all_to_all": 2 * CALLS, "all_reduce": 1}),
        ("ring2", {"send": CALLS, "recv": CALLS, "all_reduce": 1}),
    ],
)
def test_each_rank_leaves_a_trace_and_rank_0_names_the_collectives(ranks, tmp_path, layout, calls):
    """Two gloo ranks: two traces in Chrome's form; every collective is counted by its kind."""
    results = ranks(2).run(profiled, tmp_path, layout)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "trace-rank0.json.gz",
        "trace-rank1.json.gz",
    ], "no part of a trace is left beside them"
    for rank, (texts, summary) in enumerate(results):
        assert {name: count for name, (count, _) in summary.collectives.items()} == calls
        assert all(seconds > 0 for _, seconds in summary.collectives.values())
        assert 0 < summary.compute <= summary.total
        assert -1e-9 < summary.exposed <= summary.communication <= summary.total
        assert len(texts) == int(rank == 0)
        events = read_trace(trace_path(tmp_path, rank))
        named = {event["name"] for event in events if event["ph"] == "X"}
        assert "aten::bmm" in named or any("scaled_dot_product" in name for name in named)
        assert all({"ts", "pid", "tid"} <= set(event) for event in events)
    (told,), _ = results[0]
    assert told.startswith("profile of rank 0\n  total ")
    for name, count in calls.items():
        assert f"\n  {name} " in told
        assert f" {count} x, " in told
    assert str(trace_path(tmp_path, 0)) in told


def test_a_lone_rank_has_compute_and_no_communication(tmp_path):
    """One process: the summary has no collectives; the folder is made."""
    with profile(tmp_path / "new" / "folder", CPU):
        torch.randn(64, 64) @ torch.randn(64, 64)
    summary = summarise(read_trace(trace_path(tmp_path / "new" / "folder", 0)))
    assert summary.compute > 0
    assert (summary.communication, summary.exposed, summary.collectives) == (0, 0, {})
    assert [name for name, _ in summary.rows()] == ["total", "compute", "communication"]


def test_a_body_that_fails_leaves_its_error_and_no_trace(tmp_path):
    """The first error is what the user sees, at once; no file with half a run."""
    with pytest.raises(ZeroDivisionError), profile(tmp_path, CPU):
        (torch.ones(2) + 1 // 0).sum()
    assert list(tmp_path.iterdir()) == []


def event(name: str, begin: float, length: float, cat: str | None = None, **args: str) -> dict[str, object]:
    made = {"ph": "X", "name": name, "ts": begin, "dur": length, "pid": 0, "tid": 0, "args": args}
    return made if cat is None else {**made, "cat": cat}


def test_the_host_summary_by_hand():
    """Nested operators count once; communication under compute is not exposed; shares are of all calls."""
    summary = summarise(
        [
            event("aten::linear", 0, 4e6, "cpu_op"),
            event("aten::addmm", 1e6, 2e6, "cpu_op"),
            event("c10d::alltoall_base_", 3e6, 1e6, "cpu_op"),
            event("gloo:all_to_all", 3e6, 3e6, "user_annotation"),
            event("gloo:all_to_all", 8e6, 1e6, "user_annotation"),
            event("gloo:all_reduce", 8e6, 1e6, "user_annotation"),
            event("my step: gloo", 0, 9e6, "user_annotation"),
            event("PyTorch Profiler (0)", 0, 99e6, "Trace"),
            {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        ]
    )
    assert summary == Summary(
        total=9.0,
        compute=4.0,
        communication=4.0,
        exposed=3.0,
        collectives={"all_to_all": (2, 4.0), "all_reduce": (1, 1.0)},
    )
    assert dict(summary.rows()) == {
        "total": "9.0 s",
        "compute": "4.0 s (44%)",
        "communication": "4.0 s (44%), of it 3.0 s with nothing computed",
        "all_to_all": "2 x, 4.0 s, 80% of all collectives",
        "all_reduce": "1 x, 1.0 s, 20% of all collectives",
    }


def test_device_kernels_count_where_there_are_any():
    """A cuda trace: kernels and copies, not the host's operators; collectives by their own kernels' names."""
    summary = summarise(
        [
            event("aten::mm", 0, 50e6, "cpu_op"),
            event("nccl:_all_to_all_base", 1e6, 1e6, "user_annotation"),
            event("nccl:_all_to_all_base", 3e6, 2e6, "gpu_user_annotation"),
            event("gemm_kernel", 2e6, 2e6, "kernel"),
            event("Memcpy DtoD", 4e6, 1e6, "gpu_memcpy"),
            event("ncclDevKernel_SendRecv(args)", 3e6, 2e6, "kernel", **{"Collective name": "all_to_allv"}),
            event("ncclKernel_AllReduce_RING_LL_Sum_float", 9e6, 1e6, "kernel"),
        ]
    )
    assert (summary.compute, summary.communication, summary.exposed) == (3.0, 3.0, 1.0)
    assert summary.collectives == {"all_to_allv": (1, 2.0), "AllReduce": (1, 1.0)}


def test_the_trace_of_an_npu_is_read():
    """Numbers as strings, kernels without category, a row of its own for compute: the vendor's layout."""
    summary = summarise(
        [
            event("aten::mm", 0, 10e6, "cpu_op"),
            {**event("Computing", 0, 0), "ts": "2000000.5", "dur": "3000000"},
            event("hcom_alltoallv__123_0_1", 4e6, 2e6),
            event("hcom_send__123_1_1", 7e6, 1e6),
        ]
    )
    assert summary.compute == 3.0
    assert summary.communication == 3.0
    assert summary.exposed == pytest.approx(2.0, abs=1e-5)
    assert summary.collectives == {"alltoallv": (1, 2.0), "send": (1, 1.0)}


def test_without_collective_kernels_the_hosts_notes_are_taken():
    """A backend whose kernels carry other names is seen by the annotations that torch makes for all."""
    summary = summarise(
        [event("gemm", 0, 1e6, "kernel"), event("xccl:all_reduce", 2e6, 1e6, "user_annotation")]
    )
    assert summary.collectives == {"all_reduce": (1, 1.0)}


def test_union_joins_what_meets():
    """Sorted, merged where they touch or overlap; nothing of nothing."""
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert union([]) == []
    assert summarise([]).total == 0


class VendorProfile:
    """A profiler of the shape of torch_npu's: a context whose trace is a list; `wrote` or nothing at all."""

    wrote = True

    def __enter__(self) -> "VendorProfile":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def export_chrome_trace(self, path: str) -> None:
        if self.wrote:
            Path(path).write_text(json.dumps([event("Computing", 0, 1e6)]))


@pytest.mark.parametrize("wrote", [True, False])
def test_a_vendors_profiler_is_used_and_must_leave_a_trace(tmp_path, monkeypatch, wrote):
    """Its list of events is kept as any trace; one that swallows its errors and writes nothing is told."""
    monkeypatch.setattr(VendorProfile, "wrote", wrote)
    monkeypatch.setattr(Device, "profiler", types.SimpleNamespace(profile=VendorProfile))
    monkeypatch.setattr(Device, "synchronize", lambda device: None)
    device = Device("npu", 0)
    if wrote:
        with profile(tmp_path, device, 3):
            pass
        assert summarise(read_trace(tmp_path / "trace-rank3.json.gz")).compute == 1.0
    else:
        expected = (
            r"^a trace of npu:0 was asked for; its profiler wrote none; look at its messages above, or run"
        )
        with pytest.raises(RuntimeError, match=expected), profile(tmp_path, device, 3):
            pass
        assert list(tmp_path.iterdir()) == []
