"""Joining, agreeing, waiting and parting: the same on every rank, and bounded in time."""

import json
import os
import socket
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import runtime.process_group as process_group
from runtime.device import Device, detect_device
from runtime.log import setup_logging
from runtime.process_group import PeerError, RankEnv, World, communicator_bytes, connect, read_rank_env
from tests.runtime.processes import fork_ranks, free_port
from usp.config import ParallelConfig
from usp.mesh import make_groups

CPU = Device("cpu")
ALL = -1
TWO_HOSTS = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}


def test_no_environment_is_rank_0_of_1():
    """A program started without torchrun is alone."""
    assert read_rank_env({}) == RankEnv(0, 0, 1, 1)
    assert read_rank_env({"MASTER_PORT": "29500"}) == RankEnv()


def test_the_environment_of_torchrun_is_read():
    """All four numbers; an older launcher's missing LOCAL_WORLD_SIZE means one host."""
    assert read_rank_env(TWO_HOSTS) == RankEnv(rank=5, local_rank=1, world_size=8, local_world_size=4)
    assert read_rank_env({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}).local_world_size == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"LOCAL_RANK": ""},
            r"^RANK=5, WORLD_SIZE=8, LOCAL_WORLD_SIZE=4 but no LOCAL_RANK in the environment; start",
        ),
        ({"RANK": "one"}, r'^RANK="one" in the environment is not a whole number; start with torchrun$'),
        ({"RANK": "8"}, r"^RANK=8 does not fit WORLD_SIZE=8; start the ranks with torchrun$"),
        ({"LOCAL_RANK": "4"}, r"^LOCAL_RANK=4 does not fit LOCAL_WORLD_SIZE=4; start"),
        ({"LOCAL_WORLD_SIZE": "9"}, r"^LOCAL_WORLD_SIZE=9 does not fit WORLD_SIZE=8; start"),
        ({"WORLD_SIZE": "-2"}, r'^WORLD_SIZE="-2" in the environment is not a whole number'),
    ],
)
def test_a_wrong_or_half_set_environment_is_refused(change, message):
    """One sentence with what is set and what is missing, before anything waits for anybody."""
    with pytest.raises(ValueError, match=message):
        read_rank_env({**TWO_HOSTS, **change})


def test_ranks_without_an_address_are_refused(monkeypatch):
    """RANK and WORLD_SIZE alone do not say where to meet."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(
        ValueError, match=r"^WORLD_SIZE=2 but no MASTER_ADDR in the environment; start with torchrun$"
    ):
        connect(CPU, env=RankEnv(0, 0, 2, 2))


def test_a_lone_rank_makes_no_group():
    """World 1: every method works and torch.distributed is left alone."""
    with connect(CPU, env=RankEnv()) as world:
        assert not dist.is_initialized()
        assert (world.group, world.backend, world.owned, world.store) == (None, None, False, None)
        assert world.wait_for_main("save", lambda: "saved", 1) == "saved"
        with pytest.raises(ZeroDivisionError):
            world.wait_for_main("save", lambda: 1 // 0, 1)
        assert world.all_or_none("work", lambda: 3) == 3
        with pytest.raises(ZeroDivisionError):
            world.all_or_none("work", lambda: 1 // 0)


class Recorder:
    """A device that notes when it is made current, and an init that notes how it was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[object] = []
        store = dist.HashStore()
        monkeypatch.setattr(Device, "make_current", lambda device: self.events.append(str(device)))
        monkeypatch.setattr(
            process_group, "backend_for", lambda kind, choice: (Device(kind, 1).backend, None)
        )
        monkeypatch.setattr(process_group, "_stores", lambda env, timeout_s: (store, store))
        monkeypatch.setattr(process_group, "gather_text", lambda *args: [])
        monkeypatch.setattr(World, "meet", lambda *args: None)
        monkeypatch.setattr(process_group, "_backend_of", lambda device: device.backend)
        monkeypatch.setattr(dist, "init_process_group", self.init)

    def init(self, backend: str, **options: object) -> None:
        self.events.append((backend, options["device_id"], options["rank"], options["timeout"]))


@pytest.mark.parametrize(
    ("kind", "device_id"), [("cuda", torch.device("cuda:1")), ("npu", None), ("musa", None)]
)
def test_b05_the_device_is_current_before_the_group_and_bound_where_taken(monkeypatch, kind, device_id):
    """Order: set the device, then init; device_id goes to nccl only; the timeout is passed on."""
    record = Recorder(monkeypatch)
    world = connect(Device(kind, 1), env=RankEnv(5, 1, 8, 4), timeout_s=90, self_test=False)
    backend = {"cuda": "nccl", "npu": "hccl", "musa": "mccl"}[kind]
    assert [str(event).split(",")[0] for event in record.events] == [f"{kind}:1", f"('{backend}'"]
    assert record.events[1][1:3] == (device_id, 5)
    assert record.events[1][3].total_seconds() == 90
    assert (world.rank, world.world_size, world.local_rank, world.owned) == (5, 8, 1, True)


class _Raises:
    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"torch.cuda.{name} was touched")


def _whole_life(folder: Path) -> None:
    torch.cuda = _Raises()  # type: ignore[assignment]
    env = read_rank_env()
    setup_logging(env.rank, env.world_size)
    told = []
    for turn in range(2):
        device = detect_device(None, local_rank=env.local_rank, world_size=env.world_size)
        with connect(device, env=env, timeout_s=20) as world:
            told.append([world.rank, world.world_size, world.backend, world.owned, dist.is_initialized()])
            world.agree((1, "ring"), "degrees")
            try:
                world.agree(10 + world.rank, "seed")
            except ValueError as error:
                told.append(str(error))
            told.append(world.broadcast_object(f"from rank {world.rank} in turn {turn}"))
            told += [
                world.wait_for_main("load", partial(str, f"loaded in turn {turn}"), 10) for _ in range(2)
            ]
        world.close()
        told.append(dist.is_initialized())
    (folder / f"told-{world.rank}").write_text(json.dumps(told))


def test_b69_two_runs_in_one_process_end_without_a_word(tmp_path):
    """Connect, agree, broadcast, wait, close, twice: rc 0, nothing on stderr. B08: torch.cuda raises."""
    ends = fork_ranks(3, _whole_life, tmp_path, tmp_path)
    assert [(end.code, end.text) for end in ends] == [(0, "")] * 3
    held = (
        "seed differs over ranks: rank 0 has 10, rank 1 has 11, rank 2 has 12; give every rank the same value"
    )
    for rank in range(3):
        expected = []
        for turn in range(2):
            loaded = f"loaded in turn {turn}" if rank == 0 else None
            expected += [
                [rank, 3, "gloo", True, True],
                held,
                f"from rank 0 in turn {turn}",
                loaded,
                loaded,
                False,
            ]
        assert json.loads((tmp_path / f"told-{rank}").read_text()) == expected


def _generations(folder: Path) -> None:
    keys: list[list[str]] = []
    for _ in range(3):
        with connect(CPU, timeout_s=20) as world:
            pair = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(1), group=pair)
            store = dist.distributed_c10d._get_default_store()
            while isinstance(store, dist.PrefixStore):
                store = store.underlying_store
            world.meet("all keys are written", 10)
            keys.append(store.list_keys())
            world.meet("keys are read", 10)
    if world.rank == 0:
        (folder / "keys").write_text(json.dumps(keys))


@pytest.mark.skipif(not hasattr(dist.TCPStore, "list_keys"), reason="this torch cannot list a store's keys")
def test_hazard_45_each_generation_of_the_group_has_a_prefix_of_its_own(tmp_path):
    """Three groups over one store: each writes under a new prefix, and none under an older one's again."""
    ends = fork_ranks(2, _generations, tmp_path, tmp_path)
    assert [(end.code, end.text) for end in ends] == [(0, "")] * 2
    seen: set[str] = set()
    prefixes = []
    for keys in json.loads((tmp_path / "keys").read_text()):
        fresh = {key for key in set(keys) - seen if "/group/" in key}
        seen |= set(keys)
        found = {key.split("/group/")[0] for key in fresh}
        assert len(found) == 1, f"keys of the group and its subgroups under {found}"
        assert len(fresh) > 2
        prefixes += found
    assert len(set(prefixes)) == 3


def test_hazard_17_the_buffers_of_a_communicator_are_known():
    """hccl: two of HCCL_BUFFSIZE, 200 MB by default; other backends tell of none."""
    assert communicator_bytes("hccl", {}) == 400 * 2**20
    assert communicator_bytes("hccl", {"HCCL_BUFFSIZE": "64"}) == 128 * 2**20
    assert communicator_bytes("hccl", {"HCCL_BUFFSIZE": "x"}) == 400 * 2**20
    assert communicator_bytes("nccl", {"HCCL_BUFFSIZE": "64"}) == communicator_bytes(None, {}) == 0


def test_hazard_42_two_allocator_variables_are_refused_before_torch_aborts(monkeypatch):
    """One is fine; with two of the device's own the message names both; another vendor's do not matter."""
    made_current = []
    monkeypatch.setattr(Device, "make_current", lambda device: made_current.append(str(device)))
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
    with connect(Device("npu", 0), env=RankEnv()):
        assert made_current == ["npu:0"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(
        ValueError,
        match=r"^PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF are both set; on npu both .*; unset ",
    ):
        connect(Device("npu", 0), env=RankEnv())
    assert made_current == ["npu:0"]
    with connect(Device("cuda", 0), env=RankEnv()):
        pass


def _use_callers_group() -> list[object]:
    with connect(CPU, timeout_s=20) as world:
        world.agree(1, "degree")
        told = [world.rank, world.world_size, world.owned, world.backend, world.broadcast_object(world.rank)]
    world.close()
    dist.all_reduce(torch.ones(1))
    with pytest.raises(
        ValueError, match=r"^backend=nccl; the default group that exists already talks gloo; leave"
    ):
        connect(CPU, backend="nccl")
    return [*told, dist.is_initialized()]


def test_b69_a_group_made_by_the_caller_is_used_and_not_destroyed(ranks):
    """Its rank, size and backend are taken over; after close() its collectives still work."""
    for _ in range(2):
        assert ranks(2).run(_use_callers_group) == [[r, 2, False, "gloo", 0, True] for r in range(2)]


def _destroyed_before(folder: Path) -> None:
    told = []
    for again in (False, True):
        world = connect(CPU, timeout_s=20)
        groups = make_groups(ParallelConfig(cfg_degree=2, ulysses_degree=2), rank=world.rank)
        world.meet("all groups are made", 10)
        dist.destroy_process_group()
        if again:
            dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        groups.close()
        world.close()
        total = torch.ones(1)
        if again:
            dist.all_reduce(total)
            dist.destroy_process_group()
        told.append([total.item(), world.group is None, dist.is_initialized()])
    (folder / f"told-{world.rank}").write_text(json.dumps(told))


def test_groups_that_the_caller_has_destroyed_are_let_go_of(tmp_path):
    """The default group and those of the axes; a group that was made since is not touched."""
    ends = fork_ranks(4, _destroyed_before, tmp_path, tmp_path)
    assert [(end.code, end.text) for end in ends] == [(0, "")] * 4
    for rank in range(4):
        told = json.loads((tmp_path / f"told-{rank}").read_text())
        assert told == [[1.0, True, False], [4.0, True, False]]


def _broken(name: str, rank: int, how: str) -> str:
    real = getattr(dist, name)
    zeroed = []

    class Done:
        def wait(self, timeout: object = None) -> None:
            for tensor in zeroed:
                tensor.zero_()

    def wrong(*args: object, **options: object) -> object:
        if how == "raises":
            raise RuntimeError("op not supported")
        work = real(*args, **options)
        zeroed.append(args[0] if name != "batch_isend_irecv" else args[0][1].tensor)
        works = work if isinstance(work, list) else [work]
        for one in works:
            one.wait()
        return [Done()] if isinstance(work, list) else Done()

    if rank in (ALL, dist.get_rank()):
        setattr(dist, name, wrong)
    try:
        connect(CPU, timeout_s=10)
    except RuntimeError as error:
        return str(error)
    finally:
        setattr(dist, name, real)
    return "no error"


@pytest.mark.parametrize(
    ("name", "expected", "got"),
    [
        ("all_reduce", "[6.0, 3.0]", "[0.0, 0.0]"),
        ("broadcast", "[3.0, 1.0, 4.0]", "[0.0, 0.0, 0.0]"),
        ("all_to_all_single", "[11.0, 12.0, 211.0]", "[0.0, 0.0, 0.0]"),
        ("batch_isend_irecv", "[1.0, 7.0]", "[0.0, 0.0]"),
    ],
)
def test_b30_a_backend_that_returns_zeros_is_found_at_start(ranks, name, expected, got):
    """Zeros on rank 1 of 3 alone: all ranks raise and name collective, backend, numbers and rank."""
    texts = ranks(3).run(_broken, name, 1, "zeros")
    assert len(set(texts)) == 1
    assert texts[0].startswith(
        f"self-test: {name} over gloo gave wrong numbers: expected {expected}, got {got} on rank 1; gloo on"
    )


def test_b30_a_missing_collective_is_told_on_all_ranks(ranks):
    """A collective that all ranks refuse: one message, with the backend's own words."""
    texts = ranks(2).run(_broken, "all_to_all_single", ALL, "raises")
    assert len(set(texts)) == 1
    assert "all_to_all_single over gloo failed (op not supported) on rank 0 and 1 more" in texts[0]
    assert "cannot be trusted here" in texts[0]


def test_b30_a_sound_backend_passes(ranks):
    """The self-test has no complaint at 2, 3 and 4 ranks of real gloo."""
    for size in (2, 3, 4):
        assert ranks(size).run(_broken, "all_reduce", size, "zeros") == ["no error"] * size


def _slow_main() -> list[object]:
    with connect(CPU, timeout_s=1.0, self_test=False) as world:
        begin = time.monotonic()
        world.wait_for_main("decode", lambda: time.sleep(2.5), 30)
        waited = time.monotonic() - begin
        if world.rank == 1:
            time.sleep(1.5)
        world.meet("load", 30)
        total = torch.ones(1)
        dist.all_reduce(total)
    return [waited > 2.4, total.item()]


def _slow_main_in_own_group(folder: Path) -> None:
    (folder / f"told-{os.environ['RANK']}").write_text(json.dumps(_slow_main()))


def test_b16_slow_work_on_one_rank_outlasts_the_group_timeout(tmp_path):
    """Group timeout 1 s; rank 0 decodes for 2.5 s, rank 1 loads 1.5 s more: no collective is open."""
    ends = fork_ranks(2, _slow_main_in_own_group, tmp_path, tmp_path)
    assert [(end.code, end.text) for end in ends] == [(0, "")] * 2
    assert [json.loads((tmp_path / f"told-{r}").read_text()) for r in range(2)] == [[True, 2.0]] * 2


def _main_fails() -> list[str]:
    texts = []
    with connect(CPU, self_test=False) as world:
        for _ in range(2):  # a name can be used again after a failure
            try:
                world.wait_for_main("saving", lambda: 1 // 0, 10)
            except (ZeroDivisionError, PeerError) as error:
                texts.append(f"{type(error).__name__}: {error}")
        assert world.wait_for_main("saving", lambda: 7, 10) == (7 if world.is_main else None)
    return texts


def test_b38_rank_0s_failure_reaches_the_waiting_ranks(ranks):
    """Rank 0 raises its own error; the others one that names it."""
    zero, one = ranks(2).run(_main_fails)
    assert zero == ["ZeroDivisionError: integer division or modulo by zero"] * 2
    told = "PeerError: rank 0 failed in saving: ZeroDivisionError: integer division or modulo by zero"
    assert one == [told] * 2


def _some_fail(failing: tuple[int, ...]) -> str:
    with connect(CPU, self_test=False) as world:
        try:
            return str(world.all_or_none("work", lambda: 1 // (world.rank not in failing)))
        except (ZeroDivisionError, PeerError) as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("failing", [(), (1,), (1, 2), (0, 1, 2)])
def test_work_is_done_by_all_ranks_or_none(ranks, failing):
    """A rank that fails raises its own error, the others the first of these, by its rank."""
    own = "ZeroDivisionError: integer division or modulo by zero"
    other = f"PeerError: rank {failing[0]} failed in work: {own}" if failing else "1"
    assert ranks(3).run(_some_fail, failing) == [own if here in failing else other for here in range(3)]


def _too_slow() -> str:
    with connect(CPU, self_test=False) as world:
        try:
            world.wait_for_main("decode", lambda: time.sleep(0.6), 0.2)
            if world.rank == 0:
                world.meet("load", 0.2)
        except PeerError as error:
            return str(error)
    return ""


def test_b16_waiting_has_a_limit_of_its_own(ranks):
    """Rank 1 gives up on rank 0 after 0.2 s; rank 0 then misses rank 1: messages name whom and how long."""
    zero, one = ranks(2).run(_too_slow)
    assert one.startswith(
        "rank 1 waited 0.2 s for rank 0 to finish decode; it did not; look at rank 0's output"
    )
    assert zero == "load: rank 1 of 2 did not come within 0.2 s; look at the output of rank 1"


def test_b16_a_rank_that_never_joins_is_named(monkeypatch):
    """Rank 0 of 2 alone: after the timeout an error says who is missing."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(PeerError, match=r"^joining the other ranks: rank 1 of 2 did not come within 0\.3 s"):
        connect(CPU, env=RankEnv(0, 0, 2, 2), timeout_s=0.3)


def test_b23_a_port_in_use_is_told_with_a_remedy(monkeypatch):
    """Without a launcher rank 0 serves the store; a taken port names the address and usprun."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(
            RuntimeError, match=rf"^rank 0 could not serve the store at 127\.0\.0\.1:{port} \(.*usprun"
        ):
            connect(CPU, env=RankEnv(0, 0, 2, 2), timeout_s=5)


def test_agree_refuses_tensors():
    """A tensor's repr is shortened, so two that differ could pass."""
    with pytest.raises(AssertionError, match="pass a tuple"):
        World(0, 1, 0, CPU).agree(torch.zeros(2000), "latents")
