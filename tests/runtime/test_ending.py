"""A failure on any rank ends all ranks in bounded time, with the first error, its rank and its step."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from runtime.device import Device
from runtime.process_group import PeerError, World, connect, ending_together
from tests.runtime.processes import ended, fork_ranks, is_alive, mark, torchrun, wait_for_marks

SCRIPT = Path(__file__).with_name("failing_ranks.py")
BOUND_S = 10.0


def run_failing(
    folder: Path, size: int, scenario: str, kill: int | None = None, interrupt: bool = False
) -> str:
    """Run a scenario under torchrun; check time, exit code and orphans; return all it printed."""
    with torchrun(size, SCRIPT, folder, scenario) as launcher:
        pids = wait_for_marks(folder, size)
        since = time.monotonic()
        if kill is not None:
            os.kill(pids[kill], signal.SIGKILL)
        if interrupt:
            time.sleep(0.5)  # for the ranks to get from their marks to where they are stuck
            launcher.send_signal(signal.SIGINT)
        end = ended(launcher, since)
        assert end.code != 0, end.text
        assert end.seconds < BOUND_S, f"{end.seconds:.1f} s\n{end.text}"
        assert not any(is_alive(pid) for pid in pids), end.text
        return end.text


def test_b07_an_error_on_one_rank_ends_ranks_that_sit_in_a_collective(tmp_path):
    """Rank 1 of 3 raises: its traceback and step are printed once, the others name it, none is left."""
    text = run_failing(tmp_path, 3, "rank 1 raises")
    assert "rank 1 failed at step 3: ValueError: no such frame" in text
    for rank in (0, 2):
        assert f"rank {rank} stops: rank 1 failed first at step 3: ValueError: no such frame" in text
    assert text.count('raise ValueError("no such frame")') == 1
    assert "rank      : 1 (local_rank: 1)" in text.split("Root Cause")[1], "torchrun, too, blames rank 1"


def test_b07_an_error_on_rank_0_ends_a_rank_that_is_in_no_collective(tmp_path):
    """Rank 0 of 2 raises while rank 1 sleeps: rank 1 wakes, runs its `finally`, and names the error."""
    text = run_failing(tmp_path, 2, "rank 0 raises")
    assert "rank 0 failed at step 3: ValueError: no such frame" in text
    assert "rank 1 stops: rank 0 failed first at step 3: ValueError: no such frame" in text
    assert (tmp_path / "tidied-1").exists()


def test_b07_a_killed_rank_ends_the_others(tmp_path):
    """SIGKILL of rank 2 of 3 leaves no word behind: the others say at which step they lost contact."""
    text = run_failing(tmp_path, 3, "loop", kill=2)
    for rank in (0, 1):
        assert f"rank {rank} stops at step 3: " in text
    assert "lost contact with another rank" in text


def test_b07_ctrl_c_ends_all_ranks_though_one_is_stuck(tmp_path):
    """SIGINT to torchrun; rank 0 is in a collective, rank 1 in foreign code: gone in time, told why."""
    text = run_failing(tmp_path, 2, "stuck", interrupt=True)
    first = (
        0 if "rank 0 was interrupted at step 3: told to stop while its main thread is stuck" in text else 1
    )
    assert f"rank {first} was interrupted at step 3: told to stop while its main thread is stuck" in text
    assert f"rank {1 - first} stops: rank {first} was interrupted first at step 3: Ctrl-C" in text


def _loop(folder: Path) -> None:
    with connect(Device("cpu")) as world, ending_together(world, lambda: "step 7"):
        dist.all_reduce(torch.ones(4))
        mark(folder, world.rank)
        while True:
            dist.all_reduce(torch.ones(4))


def test_b07_ctrl_c_reaches_all_ranks_at_once(tmp_path):
    """SIGINT to both ranks amid collectives: exit code 130 from the first, no traceback from either."""
    both = fork_ranks(2, _loop, tmp_path, tmp_path, signals={0: signal.SIGINT, 1: signal.SIGINT})
    said = [f"rank {rank} was interrupted at step 7: Ctrl-C" in end.text for rank, end in enumerate(both)]
    first = said.index(True)
    assert both[first].code == 130
    other = both[1 - first]
    assert f"rank {1 - first} stops: rank {first} was interrupted first at step 7: Ctrl-C" in other.text
    assert other.code != 0
    assert not any("Traceback" in end.text for end in both)


def test_b07_sigterm_is_honoured(tmp_path):
    """SIGTERM to one rank alone ends both, each with its step."""
    zero, one = fork_ranks(2, _loop, tmp_path, tmp_path, signals={1: signal.SIGTERM})
    assert (zero.code, one.code) == (1, 143)
    assert zero.seconds < BOUND_S
    assert "rank 1 stops at step 7: told to stop (SIGTERM)" in one.text
    assert "rank 0 stops at step 7: lost contact with another rank" in zero.text


def _raise_without_launcher(folder: Path) -> None:
    with connect(Device("cpu")) as world, ending_together(world, lambda: "step 7"):
        mark(folder, world.rank)
        if world.rank == 1:
            raise KeyError("scheduler")
        time.sleep(60)


def test_b07_ranks_end_together_without_a_launcher(tmp_path):
    """Nobody sends signals here: the store alone carries rank 1's error to rank 0."""
    zero, one = fork_ranks(2, _raise_without_launcher, tmp_path, tmp_path)
    assert (zero.code, one.code) == (1, 1)
    assert zero.seconds < BOUND_S
    assert "rank 1 failed at step 7: KeyError: 'scheduler'" in one.text
    assert "rank 0 stops: rank 1 failed first at step 7: KeyError: 'scheduler'" in zero.text


def test_b07_the_rank_that_serves_the_store_is_killed(tmp_path):
    """Without a launcher rank 0 serves the store; when it is killed rank 1 sees the store go and ends."""
    zero, one = fork_ranks(2, _sleep_at_step_7, tmp_path, tmp_path, signals={0: signal.SIGKILL})
    assert zero.code == -signal.SIGKILL
    assert one.code == 1
    assert one.seconds < BOUND_S
    assert "rank 1 stops at step 7: lost contact with another rank" in one.text


def _server_raises(folder: Path) -> None:
    with connect(Device("cpu")) as world, ending_together(world, lambda: "step 7"):
        dist.all_reduce(torch.ones(4))
        if world.rank == 0:
            raise KeyError("scheduler")
        dist.all_reduce(torch.ones(4))


def test_b07_the_rank_that_serves_the_store_raises(tmp_path):
    """It stays until rank 1, which waits for it in a collective, has heard why."""
    zero, one = fork_ranks(2, _server_raises, tmp_path, tmp_path)
    assert (zero.code, one.code) == (1, 1)
    assert zero.seconds < BOUND_S
    assert "rank 1 stops: rank 0 failed first at step 7: KeyError: 'scheduler'" in one.text


def _sleep_at_step_7(folder: Path) -> None:
    with connect(Device("cpu")) as world, ending_together(world, lambda: "step 7"):
        mark(folder, world.rank)
        time.sleep(60)


def _all_raise() -> None:
    with connect(Device("cpu")) as world, ending_together(world):
        raise ValueError("height=13 is odd")


def test_an_error_of_all_ranks_is_printed_with_one_traceback(tmp_path):
    """Three ranks raise alike: one is the first and shows its traceback, two name it."""
    texts = [end.text for end in fork_ranks(3, _all_raise, tmp_path)]
    assert sum("Traceback" in text for text in texts) == 1
    assert sum("stops: rank" in text and "ValueError: height=13 is odd" in text for text in texts) == 2


def _exit_with(code: int | str | None) -> None:
    with connect(Device("cpu")) as world, ending_together(world):
        if world.rank == 0:
            sys.exit(code)
        time.sleep(0.0 if code is None else 60)


@pytest.mark.parametrize(("code", "said"), [(3, "exit code 3"), ("no such model", "no such model")])
def test_a_bad_exit_on_one_rank_ends_all(tmp_path, code, said):
    """sys.exit(3) and sys.exit("words") on rank 0 are failures: all end non-zero, with no traceback."""
    zero, one = fork_ranks(2, _exit_with, tmp_path, code)
    assert zero.code == (3 if code == 3 else 1)
    assert f"rank 0 failed: {said}" in zero.text
    assert "Traceback" not in zero.text
    assert one.code == 1
    assert f"rank 1 stops: rank 0 failed first: {said}" in one.text


def test_a_good_exit_on_one_rank_is_no_failure(tmp_path):
    """sys.exit() on rank 0 waits for the others and ends with 0, in silence."""
    assert [(end.code, end.text) for end in fork_ranks(2, _exit_with, tmp_path, None)] == [(0, "")] * 2


def _fail_late(folder: Path) -> None:
    with connect(Device("cpu")) as world, ending_together(world, lambda: "saving"):
        dist.all_reduce(torch.ones(1))
        if world.rank == 1:
            time.sleep(0.5)
            raise OSError("disk full")
    (folder / "went on").touch()


def test_no_rank_leaves_before_all_are_done(tmp_path):
    """Rank 0 is through when rank 1 still fails: rank 0 must not end with success."""
    zero, one = fork_ranks(2, _fail_late, tmp_path, tmp_path)
    assert (zero.code, one.code) == (1, 1)
    assert "rank 0 stops: rank 1 failed first at saving: OSError: disk full" in zero.text
    assert not (tmp_path / "went on").exists()


def _main_fails() -> None:
    with connect(Device("cpu")) as world, ending_together(world, lambda: "saving"):
        world.wait_for_main("writing a.mp4", _no_space, 30)


def _no_space() -> None:
    raise OSError("disk full")


def test_b38_a_failed_write_on_rank_0_is_a_failure_on_all(tmp_path):
    """Rank 0's error in wait_for_main is the first error, though rank 1 may hear of it first."""
    zero, one = fork_ranks(2, _main_fails, tmp_path)
    assert (zero.code, one.code) == (1, 1)
    assert "rank 0 failed at saving: OSError: disk full" in zero.text
    assert "rank 1 stops: rank 0 failed first at saving: OSError: disk full" in one.text


def _leave_twice() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with connect(Device("cpu")) as world:
        for _ in range(2):
            with ending_together(world):
                world.broadcast_object(1)
    after = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    print(json.dumps([before == after, signal.set_wakeup_fd(-1)]))


def test_ending_together_gives_the_signals_back_and_can_be_used_again(tmp_path):
    """After the block the handlers and the wake-up descriptor are what they were; a second block works."""
    for end in fork_ranks(2, _leave_twice, tmp_path):
        assert (end.code, json.loads(end.text)) == (0, [True, -1])


def test_a_lone_rank_says_where_it_failed(capsys):
    """World 1: traceback, one line with the place, exit code 1; no store is needed."""
    world = World(0, 1, 0, Device("cpu"))
    with pytest.raises(SystemExit) as caught, ending_together(world, lambda: "step 2"):
        raise ValueError("nan in latents")
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert said.endswith("ValueError: nan in latents\nfailed at step 2: ValueError: nan in latents\n")
    assert "runtime/ending.py" not in said.replace("tests/runtime", ""), "our own frame only hides the user's"


def test_a_lone_rank_is_interrupted(capsys):
    """World 1: Ctrl-C gives one line and exit code 130."""
    with (
        pytest.raises(SystemExit) as caught,
        ending_together(World(0, 1, 0, Device("cpu")), lambda: "step 2"),
    ):
        raise KeyboardInterrupt
    assert caught.value.code == 130
    assert capsys.readouterr().err == "interrupted at step 2: Ctrl-C\n"


def test_a_lone_rank_leaves_a_good_body_alone():
    """World 1: no error, no exit; an exit that was asked for passes through."""
    world = World(0, 1, 0, Device("cpu"))
    with ending_together(world):
        pass
    with pytest.raises(SystemExit) as caught, ending_together(world):
        sys.exit(0)
    assert caught.value.code == 0


def test_a_peer_error_is_a_runtime_error():
    """Callers that know nothing of ranks still catch it as broken surroundings."""
    assert issubclass(PeerError, RuntimeError)
