"""The bench: bytes are exactly the least, each contender's error is told, a peer that fails ends nothing."""

import json
import math
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image

import usp.bench.__main__
from runtime.device import Device
from runtime.process_group import connect
from tests.processes import forked, loggers_kept, run_command_line
from usp.bench.__main__ import is_sound
from usp.bench.contenders import grid, layouts
from usp.bench.ideal import BlockStack, Link, Traffic, attention_traffic, gather_traffic, ideal_ratio
from usp.bench.peers import check_peers
from usp.bench.rounds import Contender, Row, Running, end, run_rounds, warm_up
from usp.bench.sheet import lead
from usp.config import ParallelConfig

ROOT = Path(__file__).parents[2]
KEYS = {"cpu", "cores", "load", "device", "ranks", "threads", "backend", "versions", "commit", "link"}
KEYS |= {"command", "sound", "shape", "runs"}
ROW_KEYS = {"name", "peer", "notes", "seconds", "speedup", "ideal_speedup", "sent_bytes_per_rank"}
ROW_KEYS |= {"least_bytes_per_rank", "max_abs_error"}
SMALL = ("--layers", "1", "--heads", "4", "--head-dim", "8", "--ffn", "32", "--text", "5", "--rounds", "2")


def bench(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc-per-node ranks -m usp.bench words`."""
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "usp.bench")
    command = [sys.executable, "-m", *launch, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_transformer_on_two_ranks_with_peers():
    """Bytes equal the least, errors stay under 1e-5; peers that run agree, those that fail are told."""
    peers = ["diffusers", *(["yunchang"] if util.find_spec("yunchang") else [])]
    asked = [word for peer in peers for word in ("--peer", peer)]
    done = bench(2, "transformer", "--tokens", "24", "--tokens", "13", *SMALL, "--warmup", "1", *asked)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    found = json.loads(lines[-1])
    assert found.keys() == KEYS
    assert found["sound"] is True
    assert sum(line.startswith("usp.bench transformer") for line in lines) == 1, "rank 0 alone prints"
    even, odd = found["runs"]
    assert even["lead"]["ours"] in ("ulysses2", "ring2", "gather_kv2")
    assert [even["tokens"], odd["tokens"]] == [24, 13]
    assert even["one_process_s"].keys() == {"median", "min", "max"}
    for row in even["contenders"]:
        assert row.keys() == ROW_KEYS
        assert row["max_abs_error"] <= 1e-5, row
        if row["peer"] != "diffusers":
            assert row["sent_bytes_per_rank"] == row["least_bytes_per_rank"]
    ours = [row["name"] for row in even["contenders"] if row["peer"] is None]
    assert ours == ["ulysses2", "ring2", "gather_kv2"]
    for row in odd["contenders"]:
        assert (row["peer"] is None) == ("failed" not in row)
    failed = {row["name"]: row["failed"] for row in odd["contenders"] if "failed" in row}
    assert failed["diffusers ulysses2"].startswith("AssertionError: Tensor size along dimension")
    assert f"diffusers ring2 failed: {failed['diffusers ring2']}" in done.stdout
    assert "diffusers, shim: torch.accelerator.device_count says 1" in done.stdout


def test_usage_errors_are_one_sentence():
    """Unknown peers, peers on one rank, and strategies that do not fit."""
    with pytest.raises(
        ValueError, match="peer='deepspeed' is not known; use one of diffusers, yunchang, xfu"
    ):
        check_peers(["diffusers", "deepspeed"], 2)
    with pytest.raises(ValueError, match="peer='diffusers' was asked for on 1 rank; a peer is compared over"):
        check_peers(["diffusers"], 1)
    with pytest.raises(ValueError, match="= 3 ranks were asked for; 2 are running; use one of: 'ulysses2', "):
        layouts(2, ["ulysses3"])
    with pytest.raises(ValueError, match="strategy 'cfg2' spreads guidance branches; one forward has one"):
        layouts(2, ["cfg2"])


def test_all_layouts_are_compared_by_default():
    """Single axes and the 2-D mixes; no guidance branches."""
    assert [str(config) for config in layouts(4)] == [
        *("ulysses4", "ring2 ulysses2", "gather_kv2 ulysses2", "ring4", "gather_kv4")
    ]


def test_least_bytes_by_hand():
    """5 tokens (3 and 2) and 3 heads (2 and 1) of 4 floats on 2 ranks; 16 bytes are one head of one token."""
    sizes = {"heads": 3, "head_dim": 4, "itemsize": 4}
    ulysses = attention_traffic(ParallelConfig(ulysses_degree=2), 5, **sizes)
    # Rank 0 sends q, k, v of its 3 tokens for 1 head, and 2 heads' results for 2 tokens; rank 1 the reverse.
    assert ulysses == Traffic((16 * (3 * 3 * 1 + 2 * 2), 16 * (3 * 2 * 2 + 3 * 1)), 2)
    for config in (ParallelConfig(gather_kv_degree=2), ParallelConfig(ring_degree=2)):
        assert attention_traffic(config, 5, **sizes) == Traffic((16 * 2 * 3 * 3, 16 * 2 * 2 * 3), 1)
    assert gather_traffic(5, 2, channels=4, itemsize=4) == Traffic((48, 32), 1)
    assert attention_traffic(ParallelConfig(), 5, **sizes) == Traffic((0,), 0)


def test_ideal_counts_replicated_work_and_the_link():
    """N ranks are N times as fast only if nothing is replicated and nothing travels."""
    stack = BlockStack(layers=4, heads=12, head_dim=64, ffn=3072, text=128)
    assert stack.work(ParallelConfig(), 512) == 1.0
    half = stack.work(ParallelConfig(ulysses_degree=2), 4096)
    assert 0.5 < half < 0.51, "the text's keys and values are made on every rank"
    assert stack.work(ParallelConfig(ulysses_degree=2), 512) > half
    assert ideal_ratio(8.0, 0.5, Traffic((0, 0), 0), None) == 2.0
    link = Link(latency_s=0.5, bytes_per_s=100.0)
    assert ideal_ratio(8.0, 0.5, Traffic((100, 200), 4), link) == 1.0


@pytest.mark.parametrize("tokens", [1, 7, 13, 24, 512, 1024, 4096])
def test_grid_has_exactly_the_tokens(tokens):
    """Any count, primes too."""
    assert math.prod(grid(tokens)) == tokens
    assert grid(4096) == (16, 16, 16)


class _Fakes:
    """One process's result, and contenders that are right, wrong, or fail on one rank."""

    def __init__(self, world):
        self.world, self.closed = world, 0

    def alone(self):
        return torch.ones(3)

    def right(self):
        return Running(lambda: torch.ones(3), sent=lambda: 0, close=self.close)

    def off(self):
        return Running(lambda: torch.full((3,), 1.0 + self.world.rank))

    def not_a_number(self):
        return Running(lambda: torch.full((3,), torch.nan if self.world.rank else 1.0))

    def fails(self):
        if self.world.rank == 1:
            raise RuntimeError("no such kernel\nsecond line")
        return self.right()

    def fails_everywhere(self):
        raise RuntimeError("no such kernel")

    def close(self):
        self.closed += 1


def test_lead_is_over_the_fastest_peer_round_by_round():
    """Ours against theirs in the same round; None without a peer that ran."""

    def row(name, peer, *seconds):
        contender = Contender(name, lambda: Running(torch.ones), Traffic((0,), 0), 1.0, peer)
        return Row(contender, seconds=list(seconds))

    rows = [row("a", None, 4.0, 4.0, 9.0), row("b", None, 1.0, 2.0, 2.0), row("c", "them", 3.0, 3.0, 5.0)]
    assert lead([*rows, row("slow", "them", 9.0, 9.0, 2.0), row("failed", "them")]) == (
        *("b", "c"),
        [3.0, 1.5, 2.5],
    )
    assert lead(rows[:2]) is None


def measured(world, *builds, peer="them"):
    """The rows of one round of these."""
    least = Traffic((0,) * world.world_size, 0)
    contenders = [Contender(build.__name__, build, least, 0.5, peer) for build in builds]
    _, rows = warm_up(world, torch.ones(3).clone, contenders, 1)
    singles = run_rounds(world, torch.ones(3).clone, rows, 2)
    assert len(singles) == 2
    end(rows)
    return rows


def _with_a_failing_peer():
    with connect(Device("cpu")) as world:
        fakes = _Fakes(world)
        builds = (fakes.right, fakes.fails, fakes.off, fakes.not_a_number)
        right, fails, off, nan = measured(world, *builds)
        assert nan.error == math.inf, "NaN on one rank is the worst error on all"
        assert right.error == 0.0
        assert right.sends_the_least
        assert len(right.seconds) == len(right.ratios) == 2
        assert fails.fault == "RuntimeError: no such kernel"
        assert fails.seconds == []
        assert off.error == 1.0, "the worst rank counts"
        assert off.sends_the_least is None
        return fakes.closed


def test_a_peer_that_fails_on_one_rank_is_left_out_on_all(ranks):
    """Its error's first line is known to every rank, what it set up is closed, and the others go on."""
    assert ranks(2).run(_with_a_failing_peer) == [2, 1]


@pytest.mark.parametrize(
    ("error", "sent", "peer", "sound"),
    [
        (1e-6, [16, 8], None, True),
        (1e-3, [16, 8], None, False),
        (math.nan, [16, 8], None, False),
        (1e-6, [16, 16], None, False),
        (1e-6, None, None, False),
        (1e-3, [16, 16], "them", True),
    ],
)
def test_run_is_sound_only_with_right_results_and_exact_bytes(error, sent, peer, sound):
    """Exit code 1 else; peers are only reported."""
    contender = Contender("any", lambda: Running(torch.ones), Traffic((16, 8), 1), 0.5, peer)
    assert is_sound(Row(contender, error=error, sent=sent), 1e-4) is sound


def _with_our_own_failing():
    with connect(Device("cpu")) as world:
        with pytest.raises(RuntimeError, match="no such kernel"):
            measured(world, _Fakes(world).fails_everywhere, peer=None)
        dist.barrier()


def test_our_own_failure_ends_the_run(ranks):
    """Only peers are forgiven."""
    ranks(2).run(_with_our_own_failing)


def test_the_cache_is_judged_and_drawn(tmp_path):
    """Threshold 0 skips nothing and is the uncached film; a large one skips; the plot is a PNG."""
    plot = tmp_path / "new" / "cache.png"
    words = ("--threshold", "0", "--threshold", "0.3", "--steps", "8", "--rounds", "1", "--plot", str(plot))
    small = ("--size", "48x32", "--frames", "5", "--prompt", "a red circle moving right")
    words += (*small, "--parallel", "ulysses2", "--device", "cpu")
    done = forked(2, tmp_path / "run", usp.bench.__main__, "cache", *words)
    assert done.code == 0, done.text
    *lines, last = done.ranks[0].stdout.splitlines()
    found = json.loads(last)
    assert found["shape"]["parallel"] == "ulysses2"
    off, never, often = found["runs"]
    assert (off["threshold"], never["threshold"], often["threshold"]) == (None, 0, 0.3)
    assert off["ssim"] == never["ssim"] == [1.0]
    assert never["psnr_db"] == [None]
    assert never["skipped"] == [0]
    assert 0 < often["skipped"][0] < 1
    assert often["ssim"][0] < 1
    assert often["psnr_db"][0] > 10
    assert any("SSIM (worst)" in line for line in lines)
    with Image.open(plot) as image:
        assert image.format == "PNG"
        assert min(image.size) >= 400
    assert [path.name for path in plot.parent.iterdir()] == ["cache.png"]


@pytest.mark.parametrize(("words", "sentence"), [
    (("--plot", "a.jpg"), "plot a.jpg was asked for; plots are PNG images; use a name that ends in .png"),
    (("--threshold", "-1"), "threshold=-1.0 was asked for; it is a relative change, a finite number of 0"),
    (("--model", "x/y"), "--model was given without a prompt; say what it shall show with --prompt"),
])  # fmt: skip
def test_a_cache_bench_that_cannot_be_is_refused(capsys, words, sentence):
    """One sentence and exit code 2, before the model is read."""
    with pytest.raises(SystemExit) as caught, loggers_kept():
        run_command_line(usp.bench.__main__, "cache", *words)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"usp.bench.__main__: error: {sentence}")
