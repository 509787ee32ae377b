"""`usp.run` on one, two and three ranks: one video, one report, one voice; and one end when a rank fails."""

import contextlib
import itertools
import json
import os
import re
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from diffusers import AutoencoderKLWan, WanPipeline  # noqa: F401 (forked ranks then find it imported)

import usp.run
from runtime.log import get_logger
from runtime.world import poll
from tests.processes import (
    LIMIT_S,
    Run,
    completed,
    fork,
    forked,
    loggers_kept,
    process,
    rank_log,
    run_command_line,
    torchrun,
    wait_for,
)
from tests.runtime.processes import is_alive
from tests.usp.films import frames_of, sheet_frames
from usp.demo import MODEL_DIR
from usp.tasks import Request

BOUND_S = 10.0
STEPS, SEED, TOKENS = 2, 3, 245
JOB = ("wan-t2v", "--device", "cpu", "--steps", str(STEPS))
WORDS = (*JOB, "--seed", str(SEED))
LONG = ("wan-t2v", "--device", "cpu", "--steps", "400")
THIRDS = ("--attention", "gather-kv")
SMALL = ("--size", "48x32", "--frames", "5")  # 12 tokens
KEYS = {
    *("task", "out", "contact_sheet", "frames", "width", "height", "fps", "device", "seed", "parallel"),
    *("seconds", "seconds_per_step", "steps", "tokens_per_rank", "bytes_sent_per_rank"),
    "peak_memory_bytes_per_rank",
}


LAYOUTS = {1: "one rank", 2: "cfg2", 3: "gather_kv3"}


class Made(NamedTuple):
    """A finished run and where its files are."""

    run: Run
    folder: Path

    @property
    def report(self) -> dict[str, Any]:
        """The JSON of the last line on rank 0's stdout."""
        return json.loads(self.run.ranks[0].stdout.splitlines()[-1])


@contextlib.contextmanager
def port_29500_taken() -> Iterator[None]:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # someone else holds it: as good
            holder.bind(("", 29500))
            holder.listen()
        yield


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    with loggers_kept():
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Made]:
    """The same video made by python alone, by usprun with two ranks, and by three under torchrun's agent.

    Two ranks are left to "auto", three share the sequence.
    """
    folders = {size: tmp_path_factory.mktemp(f"ranks-{size}") for size in (1, 2, 3)}
    words = (*WORDS, "--out", "new/folder/film.mp4")
    job = ("-m", "usp.run", *words)
    usprun = [sys.executable, "-c", "from launchers.usprun import main; main()", "--nproc", "2"]
    with port_29500_taken(), ThreadPoolExecutor() as side_by_side:
        before = partial(os.chdir, folders[3])
        three = forked(3, folders[3] / "run", usp.run, *words, *THIRDS, before=before)
        one = side_by_side.submit(completed, [sys.executable, *job], folders[1])
        two = side_by_side.submit(completed, [*usprun, *job], folders[2])
        runs = {1: one.result(), 2: two.result(), 3: three}
    for run in runs.values():
        assert run.code == 0, run.text
    return {size: Made(run, folders[size] / "new" / "folder") for size, run in runs.items()}


SIZES = pytest.mark.parametrize("size", [1, 2, 3])


@SIZES
def test_b38_one_video_and_one_sheet_are_all_that_is_left(made, size):
    """Point 6, requirement 38: the folder is made; the two files are whole; no temporary name stays."""
    folder = made[size].folder
    assert sorted(p.name for p in folder.iterdir()) == ["film.mp4", "film.png"]
    frames, fps = frames_of(folder / "film.mp4")
    assert frames.shape == (17, 112, 112, 3)
    assert fps == 8
    assert sheet_frames(folder / "film.png", height=112, width=112).shape == (12, 112, 112, 3)


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_make_the_picture_of_one(made, size):
    """Promise 1, point 6: frames as the lossless sheet holds them agree to 1 grey level (a rounding edge)."""
    one, many = (sheet_frames(made[n].folder / "film.png", height=112, width=112) for n in (1, size))
    assert np.abs(one - many).max() <= 1
    assert one.std() > 10, "a picture of nothing would agree too"


@pytest.mark.parametrize("size", [2, 3])
def test_the_videos_of_all_ranks_and_of_one_show_the_same(made, size):
    """Issue 2, "Shown by": to 1 grey level where the frames that go in are equal, as the sheets show.

    Where a level rounds the other way on some machine, the encoder makes several: mean <= 1, none 32 off.
    """
    sheets = [(made[n].folder / "film.png").read_bytes() for n in (1, size)]
    one, many = (frames_of(made[n].folder / "film.mp4")[0].astype(int) for n in (1, size))
    assert np.abs(one - many).mean() <= 1
    assert np.abs(one - many).max() <= (1 if sheets[0] == sheets[1] else 32)


@SIZES
def test_the_last_line_is_json_with_the_figures(made, size):
    """Point 6: every key, and values that the run must have: what was asked, tokens, bytes, seed."""
    report = made[size].report
    assert report.keys() >= KEYS
    assert {key: report[key] for key in ("task", "frames", "width", "height", "fps", "seed", "steps")} == {
        "task": "wan-t2v",
        "frames": 17,
        "width": 112,
        "height": 112,
        "fps": 8,
        "seed": SEED,
        "steps": STEPS,
    }
    assert (report["out"], report["contact_sheet"]) == ("new/folder/film.mp4", "new/folder/film.png")
    assert report["parallel"] == LAYOUTS[size]
    assert report["seconds"].keys() == {"encode", "denoise", "decode", "total"}
    parts = sum(report["seconds"][name] for name in ("encode", "denoise", "decode"))
    assert report["seconds"]["total"] == pytest.approx(parts, abs=1e-3)
    assert report["seconds_per_step"] * STEPS == pytest.approx(report["seconds"]["denoise"], abs=1e-3)
    assert len(report["peak_memory_bytes_per_rank"]) == size
    assert min(report["peak_memory_bytes_per_rank"]) > 50 * 2**20, "torch alone takes more"


@SIZES
def test_tokens_and_bytes_per_rank_are_exact(made, size):
    """Requirement 2: shares differ by one and sum to 245; each peer is sent K and V, and the output.

    With cfg2 each rank holds the whole, and sends one noise prediction per step.
    """
    report = made[size].report
    tokens = report["tokens_per_rank"]
    layers, width, patch = 6, 5 * 32, 8 * 2 * 2
    if size == 2:
        assert tokens == [TOKENS] * 2
        assert report["bytes_sent_per_rank"] == [STEPS * TOKENS * patch * 4] * 2
        return
    assert sum(tokens) == TOKENS
    assert max(tokens) - min(tokens) <= 1
    expected = [(size - 1) * 2 * STEPS * n * (layers * 2 * width + patch) * 4 for n in tokens]
    assert report["bytes_sent_per_rank"] == expected


@SIZES
def test_the_end_report_is_for_people(made, size):
    """Point 6: time per stage, tokens, bytes, peak memory and seed stand above the JSON, by their names."""
    *rows, _ = made[size].run.ranks[0].stdout.splitlines()
    table = dict(re.split(r"\s{2,}", row.strip(), maxsplit=1) for row in rows[1:])
    assert rows[0] == "done"
    assert table["video"] == "new/folder/film.mp4 (17 frames of 112x112, 8 fps)"
    assert table["contact sheet"] == "new/folder/film.png"
    assert table["tokens per rank"] == {1: "245", 2: "245 245", 3: "82 82 81"}[size]
    assert table["seed"] == str(SEED)
    assert table["steps"].startswith("2, ")
    assert len(re.findall(r"\d (?:B|KiB|MiB)", table["sent per rank"])) == size
    assert len(re.findall(r"\d (?:MiB|GiB)", table["peak memory per rank"])) == size
    assert {"encode", "denoise", "decode", "total"} <= table.keys()


def test_b37_rank_0_alone_speaks(made):
    """Requirement 38: rank 0 of three shows the bar with step time and ETA, and the report."""
    zero, *others = made[3].run.ranks
    assert others == [("", "")] * 2
    assert re.search(r"denoise: +100%\|█+\| 2/2 \[\d\d:\d\d<\d\d:\d\d, +[\d.]+(it/s|s/it)\]", zero.stderr)
    assert "denoise" not in made[3].run.launcher


def test_b37_two_ranks_share_a_terminal_with_one_bar(made):
    """What a user sees of two ranks on one terminal: one bar, one report, one JSON line."""
    text = made[2].run.launcher
    assert len(re.findall(r"denoise: +0%", text)) == 1
    assert len(re.findall(r"^parallel pipeline$", text, re.MULTILINE)) == 1
    assert made[2].run.ranks[0].stdout.count('{"task"') == 1


@pytest.mark.parametrize("size", [2, 3])
def test_the_start_report_says_what_was_chosen(made, size):
    """Requirement 37: device, backend, ranks, layout, kernel, modules patched, weights per rank, seed."""
    text = made[size].run.launcher + made[size].run.ranks[0].stderr
    for row in (
        r"device +cpu \(",
        rf"ranks +{size}, this is rank 0",
        r"backend +gloo",
        rf"parallel +{LAYOUTS[size]}",
        rf"transformer +WanTransformer3DModel, [\d.]+ MiB, weights replicated x{size}, 5 heads"
        + ", 6 attention modules over ranks" * (size == 3),
    ):
        assert re.search(rf"^  {row}", text, re.MULTILINE), f"{row} is not in\n{text}"
    assert bool(re.search(r"^  kernel +torch scaled_dot_product", text, re.MULTILINE)) == (size == 3)
    assert re.search(rf"^seed {SEED}$", text, re.MULTILINE)


@SIZES
def test_b69_the_exit_is_clean(made, size):
    """Exit code 0 (made checks it) and no warning, of a process group or any other, on stderr."""
    text = made[size].run.text
    for sign in ("warning", "destroy_process_group", "ProcessGroup", "Traceback", "leaked"):
        assert sign.lower() not in text.lower(), text


def count_writers(folder: Path) -> None:
    for name in ("write_video", "write_contact_sheet"):
        write = getattr(usp.run, name)

        def counted(*args: Any, name: str = name, write: Callable[..., None] = write, **kwargs: Any) -> None:
            (folder / f"{name}-{os.environ['RANK']}").touch(exist_ok=False)
            write(*args, **kwargs)

        setattr(usp.run, name, counted)
    load = usp.run.load

    def load_and_warn(job: Any, world: Any) -> Any:
        if world.rank == 1:
            get_logger("usp.test").warning("only here")
        return load(job, world)

    usp.run.load = load_and_warn


def test_b37_b38_one_writer_and_warnings_with_their_rank(tmp_path):
    """One rank writes each file, once; a warning of rank 1 carries its rank; what all know is said once."""
    out = tmp_path / "film.mp4"
    words = (*WORDS, "--prompt", "a red zebra", "--out", str(out))
    run = forked(3, tmp_path / "run", usp.run, *words, before=partial(count_writers, tmp_path))
    assert run.code == 0, run.text
    assert sorted(p.name for p in tmp_path.glob("write_*")) == ["write_contact_sheet-0", "write_video-0"]
    assert "warning: the demo model has never seen zebra; see " in run.ranks[0].stderr
    assert run.ranks[1].stderr.endswith("[rank 1] warning: only here\n")
    assert sum(rank.stderr.count("zebra") for rank in run.ranks) == 1, run.text


def test_b41_a_drawn_seed_is_told_and_makes_the_same_video_again(tmp_path):
    """Requirement 20: without --seed rank 0 draws one for all; it is printed, and makes the picture again."""
    first = forked(2, tmp_path / "first", usp.run, *JOB, *SMALL, "--out", str(tmp_path / "a.mp4"))
    assert first.code == 0, first.text
    seed = json.loads(first.ranks[0].stdout.splitlines()[-1])["seed"]
    assert f"seed {seed} (drawn)" in first.ranks[0].stderr
    words = (*JOB, *SMALL, "--seed", str(seed), "--out", str(tmp_path / "b.mp4"))
    again = forked(1, tmp_path / "again", usp.run, *words)
    assert again.code == 0, again.text
    a, b = (sheet_frames(tmp_path / f"{name}.png", height=32, width=48) for name in "ab")
    assert np.abs(a - b).max() <= 1
    assert a.std() > 3, "a picture of nothing would agree too"


def test_cfg_degree_counts_whole_sequences(tmp_path):
    """Point 6: with guidance branches on two ranks each holds all tokens of its branch."""
    out = tmp_path / "film.mp4"
    run = forked(2, tmp_path / "run", usp.run, *WORDS, "--parallel", "cfg2", "--out", str(out))
    assert run.code == 0, run.text
    report = json.loads(run.ranks[0].stdout.splitlines()[-1])
    assert report["parallel"] == "cfg2"
    assert report["tokens_per_rank"] == [TOKENS, TOKENS]


def test_cfg_ring_and_cache_on_four_ranks_make_the_film_of_one(tmp_path, capsys):
    """`--parallel "cfg2 ring2" --cache 0.12`: the skips of one process, and its frames to 1 grey level."""
    words = ("wan-t2v", "--device", "cpu", "--seed", str(SEED), "--steps", "12", "--cache", "0.12")
    words += ("--frames", "9")
    with pytest.raises(SystemExit) as ended:
        run_command_line(usp.run, *words, "--out", str(tmp_path / "one.mp4"))
    assert not ended.value.code
    one = json.loads(capsys.readouterr().out.splitlines()[-1])
    layout = ("--parallel", "cfg2 ring2", "--out", str(tmp_path / "four.mp4"))
    run = forked(4, tmp_path / "run", usp.run, *words, *layout)
    assert run.code == 0, run.text
    four = json.loads(run.ranks[0].stdout.splitlines()[-1])
    assert four["parallel"] == "cfg2 ring2"
    assert four["tokens_per_rank"] == [74, 73] * 2
    assert one["cache"].keys() == four["cache"].keys() == {"transformer/cond", "transformer/uncond"}
    for branch, report in one["cache"].items():
        assert 0 < report["hits"] < 12
        assert four["cache"][branch]["skipped"] == report["skipped"]
    sheets = [sheet_frames(tmp_path / f"{name}.png", height=112, width=112) for name in ("one", "four")]
    assert np.abs(sheets[0] - sheets[1]).max() <= 1
    assert sheets[0].std() > 10, "a picture of nothing would agree too"


# --- failures


def strike(folder: Path, act: Callable[[], Any]) -> None:
    """Note the moment, then do it."""
    (folder / "struck").write_text(str(time.time()))
    act()


def raise_error() -> None:
    raise ValueError("no such frame")


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("link", [(), ("--link", "roce")])
def test_the_layouts_are_shown_without_weights(tmp_path, link):
    """Point 3 of planning: every layout of 2 ranks with time, bytes and memory, the choice and its reason.

    The folder's weight file has a header and no weights, so whoever read them would fail.
    """
    model = tmp_path / "model"
    shutil.copytree(MODEL_DIR, model)
    for file in model.rglob("*.safetensors"):
        with file.open("r+b") as stream:
            stream.truncate(8 + int.from_bytes(stream.read(8), "little"))
    words = ("--layouts", "--model", str(model), "--prompt", "a", "--size", "112x112", "--frames", "17")
    run = forked(2, tmp_path / "run", usp.run, *JOB, *words, *link)
    assert run.code == 0, run.text
    *table, last = run.ranks[0].stdout.splitlines()
    found = json.loads(last)
    names = {row["parallel"] for row in found["layouts"]}
    assert names == {"cfg2", "ulysses2", "gather_kv2", "ring2"}
    assert found["chosen"] in names
    assert all(row["seconds_per_step"] > 0 and row["peak_bytes_per_rank"] > 2**20 for row in found["layouts"])
    assert [line.split()[1] for line in table if line.strip().startswith("->")] == [found["chosen"]]
    assert any("times one rank" in line for line in table)
    assert ("RoCE" in found["reason"]) == bool(link)
    assert list(tmp_path.glob("*.mp4")) == []
    assert [rank.stdout for rank in run.ranks[1:]] == [""]


def in_block_1_of_step_2(folder: Path, rank: int, act: Callable[[], Any], forwards: int = 2) -> None:
    """Have one rank act when block 1 begins its first forward of step 2; a step has as many `forwards`."""
    load = usp.run.load

    def load_with_hook(job: Any, world: Any) -> Any:
        pipeline, config = load(job, world)
        calls = itertools.count(1)

        def hook(module: Any, args: Any) -> None:
            if next(calls) == forwards + 1 and world.rank == rank:
                strike(folder, act)

        pipeline.transformer.blocks[1].register_forward_pre_hook(hook)
        return pipeline, config

    usp.run.load = load_with_hook


def in_callback_of_step_2(folder: Path, rank: int, act: Callable[[], Any]) -> None:
    """Have one rank act in the pipeline's callback_on_step_end."""
    arguments = Request.call_arguments

    def callback(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 1 and os.environ["RANK"] == str(rank):
            strike(folder, act)
        return tensors

    Request.call_arguments = lambda self: {**arguments(self), "callback_on_step_end": callback}


def fails(folder: Path, size: int, before: Callable[[], Any], *words: str) -> Run:
    """A run that ends badly: within 10 s of the strike, non-zero, with no process and no file left."""
    out = folder / "made" / "film.mp4"
    words = words or ("--attention", "gather-kv")
    run = forked(size, folder / "run", usp.run, *JOB, *SMALL, "--out", str(out), *words, before=before)
    assert run.code != 0, run.text
    late = run.ended - float((folder / "struck").read_text())
    assert late < BOUND_S, f"{late:.1f} s\n{run.text}"
    assert not any(is_alive(pid) for pid in run.pids), run.text
    assert len(run.pids) == size
    assert not out.parent.exists() or not list(out.parent.iterdir())
    return run


@pytest.mark.parametrize(
    ("size", "words", "forwards"),
    [(3, (), 2), (4, ("--parallel", "ulysses2 ring2"), 2), (2, ("--parallel", "cfg2"), 1)],
)
def test_b07_an_error_in_a_block_on_rank_1_ends_all(tmp_path, size, words, forwards):
    """Point 9, requirement 25: the first error is named with rank 1 and step 2, once with its traceback.

    With cfg2 rank 0 waits for rank 1's guidance branch, in the exchange after its own.
    """
    before = partial(in_block_1_of_step_2, tmp_path, 1, raise_error, forwards)
    run = fails(tmp_path, size, before, *words)
    assert "rank 1 failed at step 2: ValueError: no such frame" in run.ranks[1].stderr
    for rank in (r for r in range(size) if r != 1):
        said = f"rank {rank} stops: rank 1 failed first at step 2: ValueError: no such frame"
        assert said in run.ranks[rank].stderr, run.text
    assert run.text.count("Traceback") == run.launcher.count("Traceback") + 1, run.text
    assert run.ranks[0].stdout == ""


def test_b07_an_error_in_a_callback_on_rank_0_ends_all(tmp_path):
    """B07: callback_on_step_end of step 2 raises on rank 0 only; the message names step 2, not 3."""
    run = fails(tmp_path, 2, partial(in_callback_of_step_2, tmp_path, 0, raise_error))
    assert "rank 0 failed at step 2: ValueError: no such frame" in run.ranks[0].stderr
    assert "rank 1 stops: rank 0 failed first at step 2: ValueError: no such frame" in run.ranks[1].stderr


@pytest.mark.parametrize(("size", "killed"), [(2, 0), (3, 2)])
def test_b07_a_killed_rank_ends_the_others(tmp_path, size, killed):
    """Point 9: SIGKILL of one rank amid step 2; the others say at which step they lost contact."""
    run = fails(
        tmp_path, size, partial(in_block_1_of_step_2, tmp_path, killed, partial(send, signal.SIGKILL))
    )
    for rank in (r for r in range(size) if r != killed):
        assert re.search(rf"rank {rank} stops at step 2: .*lost contact with another rank", run.text), (
            run.text
        )


def test_an_error_after_the_steps_names_no_step(monkeypatch, capsys, tmp_path):
    """Point 9: the VAE fails on a lone rank: told as decoding, not as a step beyond the last; no file."""

    def out_of_memory(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no room for the frames")

    monkeypatch.setattr(AutoencoderKLWan, "decode", out_of_memory)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        run_command_line(usp.run, *JOB, *SMALL)
    assert caught.value.code == 1
    assert capsys.readouterr().err.endswith("failed at decoding: MemoryError: no room for the frames\n")
    assert list(tmp_path.iterdir()) == []


def test_b07_an_interrupt_of_rank_0_alone_ends_all(tmp_path):
    """B07: KeyboardInterrupt on rank 0: all end, told in one line each, with no traceback."""
    run = fails(tmp_path, 2, partial(in_block_1_of_step_2, tmp_path, 0, partial(send, signal.SIGINT)))
    assert "rank 0 was interrupted at step 2: Ctrl-C" in run.ranks[0].stderr
    assert "rank 1 stops: rank 0 was interrupted first at step 2: Ctrl-C" in run.ranks[1].stderr
    assert "Traceback" not in run.ranks[0].stderr + run.ranks[1].stderr


AMID = re.compile(r" ([2-9]|\d\d+)/400 ")  # the bar: step 2 or later, since it skips steps that are fast


def wait_until(ready: Callable[[], bool]) -> None:
    assert poll(ready, LIMIT_S), "the ranks did not get there"


def test_b07_ctrl_c_on_the_launcher_ends_three_ranks(tmp_path):
    """Point 9: SIGINT to torchrun's agent amid the steps: all ranks end in time, and no video is begun."""
    out, folder = tmp_path / "film.mp4", tmp_path / "run"
    with fork(3, folder, usp.run, *LONG, "--out", str(out)) as launcher:
        bar = folder / "stderr-0"
        wait_until(lambda: bar.exists() and AMID.search(bar.read_text()) is not None)
        struck = time.time()
        os.kill(launcher.pid, signal.SIGINT)
        run = wait_for(launcher, 3, folder)
    assert run.code != 0
    assert run.ended - struck < BOUND_S, run.text
    assert not any(is_alive(pid) for pid in run.pids)
    said = [re.search(r"rank \d (?:was interrupted|stops).* at step \d+: .+", r.stderr) for r in run.ranks]
    assert all(said), run.text
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_b07_ctrl_c_on_torchrun_ends_two_ranks(tmp_path):
    """The same with the real torchrun and real interpreters."""
    words = ("--nproc-per-node", "2", "--log-dir", "logs", "--redirects", "3", "-m", "usp.run")
    command = torchrun("--standalone", "--local-addr=localhost", *words, *LONG)
    with process(command, tmp_path) as started:
        wait_until(
            lambda: (
                AMID.search(_read(rank_log(tmp_path, 0, "stderr"))) is not None or started.poll() is not None
            )
        )
        struck = time.time()
        started.send_signal(signal.SIGINT)
        started.wait(60)
        ended = time.time()
    errors = [_read(rank_log(tmp_path, rank, "stderr")) for rank in range(2)]
    assert started.returncode != 0
    assert ended - struck < BOUND_S, errors
    for rank, text in enumerate(errors):
        assert re.search(rf"rank {rank} (was interrupted|stops).* at step \d+: ", text), text
    assert not list(tmp_path.glob("*.mp4")) + list(tmp_path.glob(".*.part"))


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def full_disk() -> None:
    """From the first byte of the video on, this process can write no file beyond 2 KiB."""
    write = usp.run.write_video

    def write_to_full_disk(*args: Any, **kwargs: Any) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
        try:
            write(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    usp.run.write_video = write_to_full_disk


def test_b38_a_failed_write_fails_all_ranks_and_spares_the_old_file(tmp_path):
    """B38: the disk is full half-way: non-zero, told as writing, the earlier video whole, no other file."""
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "film.mp4").write_text("the video of yesterday")
    out = str(folder / "film.mp4")
    run = forked(2, tmp_path / "run", usp.run, *WORDS, "--out", out, before=full_disk)
    assert run.code != 0
    assert [p.name for p in folder.iterdir()] == ["film.mp4"]
    assert (folder / "film.mp4").read_text() == "the video of yesterday"
    assert run.ranks[0].stdout == "", "no report of a video that is not there"
    for rank, how in enumerate(("rank 0 failed", "rank 1 stops: rank 0 failed first")):
        assert re.search(rf"{how} at writing: OSError: .*File too large", run.ranks[rank].stderr), run.text
