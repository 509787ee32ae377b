"""`--profile DIR`: a trace of each rank beside the video, and a summary before the end report."""

import json
from pathlib import Path

import usp.run
from runtime.profiling import read_trace, summarise, trace_path
from tests.processes import forked


def test_profile_leaves_a_trace_of_each_rank_and_a_summary(tmp_path: Path):
    """Two ranks: two traces with the call's exchanges; rank 0 alone tells; the last line is still JSON."""
    traces = tmp_path / "traces"
    words = ["wan-t2v", "--steps", "2", "--frames", "1", "--size", "32x32", "--seed", "1"]
    words += ["--parallel", "ulysses2", "--out", str(tmp_path / "film.mp4"), "--profile", str(traces)]
    run = forked(2, tmp_path / "run", usp.run, *words)
    assert run.code == 0, run.text
    for rank in range(2):
        assert "all_to_all" in summarise(read_trace(trace_path(traces, rank))).collectives
        assert ("profile of rank 0" in run.ranks[rank].stderr) == (rank == 0)
    assert json.loads(run.ranks[0].stdout.splitlines()[-1])["parallel"] == "ulysses2"
