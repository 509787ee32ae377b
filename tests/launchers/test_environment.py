"""Which variables a launch sets: one allocator variable, timeouts in order, buffers within a budget."""

import importlib
import itertools

import pytest
import typer.main

from launchers.environment import BUFFERS_MB, Host, buffer_mb, check_order, environment
from launchers.program import OURS, TIMED, count_groups, describe, option_value, read_degrees
from launchers.usprun import UsageError
from launchers.vendors import VENDORS
from usp.config import parse_parallel
from usp.mesh import axis_ranks

RUN = ("-m", "usp.run", "wan-t2v")
HOST = Host(cores=64)


def values(kind, *, words=RUN, nproc=8, host=HOST, given=None, **options):
    """The variables of a launch by name, those that are kept marked with a star."""
    launch = describe(kind, words, nproc=nproc, **options)
    settings = environment(launch, host, given or {})
    assert len({s.name for s in settings}) == len(settings)
    return {s.name + "*" * s.kept: s.value for s in settings}


def test_hazard_42_one_allocator_variable_and_only_if_none_is_set():
    """npu: two abort torch; so one is set, one that is there is kept, and two are refused."""
    ours, theirs = "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    chosen = values("npu")
    assert chosen[ours] == "expandable_segments:True"
    assert theirs not in chosen
    kept = values("npu", given={theirs: "max_split_size_mb:64"})
    assert kept[theirs + "*"] == "max_split_size_mb:64"
    assert not [name for name in kept if name.startswith(ours)]
    with pytest.raises(
        UsageError, match=rf"^{ours} and {theirs} are both set; they mean the same; unset all"
    ):
        values("npu", given={ours: "x", theirs: "y"})


@pytest.mark.parametrize("kind", VENDORS)
def test_each_vendor_gets_its_own_variables_and_no_others(kind):
    """No variable of one vendor is set for another; each that can take expandable segments gets them once."""
    names = set(values(kind, nproc=1 if kind == "mps" else 8))
    words = {"npu": ("NPU", "HCCL", "ASCEND"), "musa": ("MUSA", "MCCL"), "cuda": ("CUDA", "NCCL")}
    for other, marks in words.items():
        if kind != other and not (kind == "rocm" and other == "cuda"):
            assert not [n for n in names for mark in marks if mark in n], f"{other}'s variables for {kind}"
    allocators = [n for n in names if n.endswith("ALLOC_CONF")]
    assert len(allocators) == VENDORS[kind].expandable
    assert "OMP_NUM_THREADS" in names


@pytest.mark.parametrize("timeout_s", [169, 170, 300, 600, 601.5, 3600, 100_000])
def test_hccl_gives_up_before_torch_does(timeout_s):
    """connect <= 600, exec < event < torch's; exec a multiple of 68, which first cards round down to."""
    chosen = values("npu", timeout_s=timeout_s)
    connect, execution, event = (int(chosen[f"HCCL_{n}_TIMEOUT"]) for n in ("CONNECT", "EXEC", "EVENT"))
    assert 120 <= connect <= 600
    assert 0 < execution <= 17340
    assert execution % 68 == 0
    assert connect <= execution < event < timeout_s
    assert event - execution == 32


@pytest.mark.parametrize("timeout_s", [1, 60, 168])
def test_a_timeout_that_hccl_cannot_keep_below_is_refused(timeout_s):
    """HCCL takes no connect timeout under 120 s; the message says from where on it works."""
    with pytest.raises(
        UsageError, match=r"HCCL waits at least 120 s for a peer.*give the program --timeout 169"
    ):
        values("npu", timeout_s=timeout_s)
    assert values("cuda", timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"HCCL_EXEC_TIMEOUT": "1836"},
            r"^HCCL_EXEC_TIMEOUT=1836, HCCL_EVENT_TIMEOUT=576; the second must be",
        ),
        ({"HCCL_EXEC_TIMEOUT": "0"}, r"0 waits for ever; unset both$"),
        ({"HCCL_CONNECT_TIMEOUT": "600"}, r"^HCCL_CONNECT_TIMEOUT=600 with a timeout of 600 s .* below that"),
        ({"HCCL_EVENT_TIMEOUT": "1868"}, r"^HCCL_EVENT_TIMEOUT=1868 with a timeout of 600 s"),
        (
            {"HCCL_CONNECT_TIMEOUT": "2m"},
            r"^HCCL_CONNECT_TIMEOUT=2m is not a whole number of seconds; unset it$",
        ),
    ],
)
def test_the_users_own_hccl_timeouts_are_kept_if_they_are_in_order(given, message):
    """A value that would let torch speak first is an error that names both numbers."""
    with pytest.raises(UsageError, match=message):
        values("npu", given=given)
    assert values("npu", given={"HCCL_CONNECT_TIMEOUT": "130"})["HCCL_CONNECT_TIMEOUT*"] == "130"


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "NCCL"), ("rocm", "NCCL"), ("musa", "MCCL")])
def test_the_watchdogs_heartbeat_outlasts_the_timeout(kind, backend):
    """nccl and mccl: torch's own message comes first; where the default is late enough nothing is set."""
    name = f"TORCH_{backend}_HEARTBEAT_TIMEOUT_SEC"
    assert values(kind)[name] == "660"
    assert name not in values(kind, timeout_s=300)
    with pytest.raises(UsageError, match=rf"^{name}=480 with a timeout of 600 s .* it must be above that"):
        values(kind, given={name: "480"})


def test_check_order_ignores_what_is_no_timeout():
    """Only variables named TIMEOUT are compared."""
    check_order(1.0, {"HCCL_BUFFSIZE": "200", "OMP_NUM_THREADS": "8"})


def test_hazard_17_hccl_buffers_stay_within_a_budget():
    """Each communicator holds two buffers: many groups get smaller ones, few the vendor's 200 MB."""
    assert [buffer_mb(groups) for groups in (1, 2, 3, 5)] == [200, 200, 170, 102]
    for groups in range(1, 17):
        assert 2 * groups * buffer_mb(groups) <= BUFFERS_MB
    mixed = values("npu", words=(*RUN, "--parallel", "cfg2 ulysses2 ring2"))
    assert mixed["HCCL_BUFFSIZE"] == "102"
    assert values("npu", groups=1)["HCCL_BUFFSIZE"] == "200"
    assert "HCCL_BUFFSIZE" not in values("npu", nproc=1)


def layouts():
    for degrees in itertools.product((1, 2, 3), repeat=3):
        for third in ("ring", "gather_kv"):
            words = zip(("cfg", "ulysses", third), degrees, strict=True)
            yield " ".join(f"{axis}{degree}" for axis, degree in words if degree > 1) or "ulysses1"


@pytest.mark.parametrize("layout", sorted(set(layouts())))
def test_the_launcher_counts_the_groups_that_the_mesh_makes(layout):
    """`count_groups` is the world and what `usp.mesh` makes for each rank, for every layout."""
    config = parse_parallel(layout)
    made = {ranks for groups in axis_ranks(config).values() for ranks in groups if len(ranks) > 1}
    per_rank = [sum(rank in ranks for ranks in made) for rank in range(config.world_size)]
    world_too = {n + (tuple(range(config.world_size)) not in made) for n in per_rank}
    expected = 0 if config.world_size == 1 else world_too.pop()
    assert not world_too or expected == 0
    assert count_groups((*RUN, "--parallel", layout), config.world_size) == expected


def test_groups_without_a_spelling():
    """One axis by --attention is one group; what the program chooses itself is taken as cfg by one axis."""
    assert count_groups((*RUN, "--attention", "ring"), 8) == 1
    assert count_groups((*RUN, "--parallel=auto"), 8) == 3
    assert count_groups(RUN, 2) == 1
    assert count_groups(RUN, 1) == 0
    assert read_degrees("gather-kv2, cfg=2") == {"gather_kv": 2, "cfg": 2}


def test_the_timeout_is_the_programs():
    """Read from its own words, last one wins; a launcher's that differs is refused."""
    assert describe("cpu", (*RUN, "--timeout", "5", "--timeout=90"), nproc=1).timeout_s == 90
    assert describe("cpu", RUN, nproc=1).timeout_s == 600
    assert describe("cpu", RUN, nproc=1, timeout_s=30).timeout_s == 30
    assert option_value(("--timeout",), "--timeout") is None
    with pytest.raises(
        UsageError, match=r"^--timeout 30 differs from the program's own --timeout 90; give one$"
    ):
        describe("cpu", (*RUN, "--timeout", "90"), nproc=1, timeout_s=30)
    with pytest.raises(UsageError, match=r"^the program's --timeout soon is not a number of seconds$"):
        describe("cpu", (*RUN, "--timeout", "soon"), nproc=1)


@pytest.mark.parametrize("name", OURS)
def test_our_commands_are_told_the_timeout_of_the_launch(name):
    """Else torch's limit stays 600 s, below the vendor's timeouts; one that has no such option is refused."""
    words = ("-m", name, "wan-t2v", "--device", "npu")
    if name not in TIMED:
        told = rf"^--timeout 1800 for {name}, whose limit is always 600 s; leave it out$"
        with pytest.raises(UsageError, match=told):
            describe("npu", words, nproc=2, timeout_s=1800.0)
        assert describe("npu", words, nproc=2, timeout_s=600.0).program == words
        return
    for timeout_s, word in ((1800.0, "1800"), (601.5, "601.5"), (1234567.0, "1234567")):
        launch = describe("npu", words, nproc=2, timeout_s=timeout_s)
        assert (launch.program, launch.timeout_s) == ((*words, "--timeout", word), timeout_s)
    own = (*words, "--timeout=1800")
    assert describe("npu", own, nproc=2, timeout_s=1800.0).program == own
    assert describe("npu", words, nproc=2).program == words


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_must_be_a_limit(timeout_s):
    """It goes to the program and into variables: one sentence here, before either."""
    with pytest.raises(UsageError, match=r"^--timeout \S+ is no limit; give a number of seconds above 0$"):
        describe("npu", RUN, nproc=2, timeout_s=timeout_s)


@pytest.mark.parametrize("start", [("train.py",), ("-m", "other"), ("-m", "usp.planner")])
def test_the_words_of_another_program_are_its_own(start):
    """They may look like ours and mean something else: the launcher's own, and its defaults, hold."""
    words = (*start, "--timeout", "soon", "--parallel", "cfg2 ulysses2 ring2", "--attention", "ring")
    words += ("--device", "7", "usp.run")
    launch = describe("npu", words, nproc=8)
    assert (launch.program, launch.timeout_s, launch.groups) == (words, 600, 3)
    launch = describe("npu", words, nproc=8, timeout_s=1800, groups=5)
    assert (launch.program, launch.timeout_s, launch.groups) == (words, 1800, 5)


def test_devices_are_shown_and_counted():
    """The list goes into the vendor's variable; fewer than ranks, or two lists that differ, are refused."""
    eight = Host(cores=8, devices=tuple(range(8)))
    for kind, vendor in VENDORS.items():
        if vendor.visible:
            assert values(kind, host=eight)[vendor.visible[0]] == "0,1,2,3,4,5,6,7"
            assert not set(vendor.visible) & set(values(kind))
        for name in vendor.visible:
            chosen = values(kind, nproc=2, given={name: "4,5"})
            assert {n: v for n, v in chosen.items() if "VISIBLE" in n or "MASK" in n} == {name + "*": "4,5"}
    name = "ASCEND_RT_VISIBLE_DEVICES"
    with pytest.raises(UsageError, match=rf"^{name}=0,1 shows 2 devices; --nproc 8 needs .* use --nproc 2"):
        values("npu", given={name: "0,1"})
    with pytest.raises(UsageError, match=rf"^--devices 0,1,2,3,4,5,6,7 but {name}=0,1 is set; unset one"):
        values("npu", host=eight, given={name: "0,1"})
    with pytest.raises(UsageError, match=r"^--devices on cpu, whose devices have no numbers; leave it out$"):
        values("cpu", host=eight)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, vendor in VENDORS.items() for name in vendor.visible]
)
def test_a_users_own_list_must_have_a_device_for_each_rank(kind, name):
    """Each of the vendor's variables, alone or beside a good one; one sentence that names it."""
    for value, told in (
        ("", f"{name}= hides every {kind} device; unset it"),
        ("-1", f"{name}=-1 hides every {kind} device; unset it"),
        ("4,5,4,5", f"{name}=4,5,4,5 lists a device twice; ranks cannot share one; list each once"),
        ("4, 4", f"{name}=4, 4 lists a device twice; ranks cannot share one; list each once"),
        ("4-7", f"{name}=4-7; ranges are not read there; list each number, as in 4,5,6,7"),
        ("4", f"{name}=4 shows 1 devices; --nproc 2 needs one for each rank; use --nproc 1, or show more"),
    ):
        for given in ({}, dict.fromkeys(VENDORS[kind].visible, "4,5")):
            with pytest.raises(UsageError) as caught:
                values(kind, nproc=2, given={**given, name: value})
            assert str(caught.value) == told
    kept = values(kind, nproc=2, given={name: "GPU-12-34,GPU-12-35"})
    assert kept[name + "*"] == "GPU-12-34,GPU-12-35", "a device's own name is no range"


def test_hazard_9_hccl_gets_free_ports_by_one_rule():
    """Known ones on this host, the system's on hosts that are not seen; a rule that is set stays alone."""
    rules = ("HCCL_IF_BASE_PORT", "HCCL_HOST_SOCKET_PORT_RANGE")
    known = Host(cores=64, hccl_port=60032)
    for options, expected in (
        ({"host": known}, {"HCCL_IF_BASE_PORT": "60032"}),
        ({"nodes": 2}, {"HCCL_HOST_SOCKET_PORT_RANGE": "auto"}),
        ({"host": known, "given": {rules[1]: "61000-61050"}}, {rules[1] + "*": "61000-61050"}),
        ({"nodes": 2, "given": {rules[0]: "50000"}}, {rules[0] + "*": "50000"}),
        ({"nproc": 1}, {}),
        ({"nproc": 1, "host": known}, {}),
    ):
        chosen = values("npu", **options)
        assert {name: v for name, v in chosen.items() if name.startswith(rules)} == expected


def test_npu_affinity_and_task_queue():
    """Cores are shared out; operators are queued unless they are waited for."""
    chosen = values("npu")
    assert (chosen["CPU_AFFINITY_CONF"], chosen["TASK_QUEUE_ENABLE"]) == ("1", "1")
    other = values("npu", given={"ASCEND_LAUNCH_BLOCKING": "1"})
    assert "TASK_QUEUE_ENABLE" not in other
    assert other["ASCEND_LAUNCH_BLOCKING*"] == "1"


def test_ranks_share_the_cores_of_a_host():
    """64 cores for 8 ranks are 8 threads each; a number that is set stays."""
    assert values("cpu")["OMP_NUM_THREADS"] == "8"
    assert values("cpu", nproc=100)["OMP_NUM_THREADS"] == "1"
    assert values("cpu", given={"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS*"] == "3"


@pytest.mark.parametrize("kind", VENDORS)
def test_our_commands_are_told_the_device_of_the_launch(kind):
    """Else they take the first kind that is there, as an accelerator in a launch on cpu."""
    pinned = describe(kind, ("--numa-binding", "node", "-m", *RUN[1:]), nproc=1).program
    assert pinned[-3:] == ("wan-t2v", "--device", kind)
    assert describe(kind, (*RUN, "--device", kind), nproc=1).program == (*RUN, "--device", kind)
    for other in (("script.py", "--device", "7"), ("-m", "other"), ("-m", "usp.planner", "links")):
        assert describe(kind, other, nproc=1).program == other
    with pytest.raises(
        UsageError, match=rf"^the program's --device tpu in a launch on {kind}; leave it out, or"
    ):
        describe(kind, (*RUN, "--device", "tpu"), nproc=1)
    assert describe("rocm", (*RUN, "--device=cuda"), nproc=1).program == (*RUN, "--device=cuda")


@pytest.mark.parametrize("name", OURS)
def test_our_commands_take_a_device_and_those_named_a_timeout(name):
    """In every one of their forms."""
    module = importlib.import_module(f"{name}.__main__" if name == "usp.bench" else name)
    for command in typer.main.get_command(module.app).commands.values():
        taken = {word for option in command.params for word in option.opts}
        assert "--device" in taken, command.name
        assert ("--timeout" in taken) == (name in TIMED), command.name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"program": ()}, r"^no program was given; put it behind --, as in -- -m usp.run wan-t2v$"),
        ({"nproc": 0}, r"^--nproc 0 --nodes 1 makes no rank; give numbers of at least 1$"),
        ({"nodes": 0}, r"^--nproc 2 --nodes 0 makes no rank"),
        ({"kind": "mps"}, r"^--nproc 2 on mps; such a host has one device; use --nproc 1$"),
    ],
)
def test_what_cannot_be_started_is_refused(options, message):
    """One sentence that says what to give instead."""
    chosen = {"kind": "cpu", "program": RUN, "nproc": 2, **options}
    with pytest.raises(UsageError, match=message):
        describe(**chosen)
