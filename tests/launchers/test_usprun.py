"""`usprun` is torchrun plus --nproc, a free port and shared-out cores; all else passes through unchanged."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launchers import usprun
from launchers.usprun import read_options, thread_environment, torchrun_arguments

ROOT = Path(__file__).parents[2]
ALONE = ["--standalone", "--local-addr", "localhost"]


def rewritten(line: str, **environ: str) -> str:
    return " ".join(torchrun_arguments(line.split(), environ)).replace(" ".join(ALONE), "ALONE")


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        ("--nproc 2 -m usp.run wan", "ALONE --nproc-per-node 2 -m -- usp.run wan"),
        ("--nproc=2 -m usp.run wan", "ALONE --nproc-per-node 2 -m -- usp.run wan"),
        ("-m --nproc 3 usp.run", "ALONE -m --nproc-per-node 3 -- usp.run"),
        ("--nproc gpu a.py", "ALONE --nproc-per-node gpu -- a.py"),
        ("--nproc-per-node 2 a.py", "ALONE --nproc-per-node 2 -- a.py"),
        ("--nproc_per_node=2 a.py", "ALONE --nproc_per_node=2 -- a.py"),
        ("a.py", "ALONE -- a.py"),
        # the program's own --nproc is not ours
        ("a.py --nproc 2", "ALONE -- a.py --nproc 2"),
        ("-m usp.run --nproc x", "ALONE -m -- usp.run --nproc x"),
        ("--nproc 2 a.py --nproc 3", "ALONE --nproc-per-node 2 -- a.py --nproc 3"),
        ("--nproc 2 -- a.py --nproc 3", "ALONE --nproc-per-node 2 -- a.py --nproc 3"),
        # nor is a value that looks like it, nor what follows an option that torchrun will refuse
        ("--role --nproc a.py", "ALONE --role --nproc -- a.py"),
        ("--no-such --nproc 2 a.py", "ALONE --no-such --nproc 2 a.py"),
        ("--n --nproc 2 a.py", "ALONE --n --nproc 2 a.py"),
        # short and shortened options take their values
        ("-r 3 --nproc 2 a.py", "ALONE -r 3 --nproc-per-node 2 -- a.py"),
        ("-r3 -mt 1 --nproc 2 a", "ALONE -r3 -mt 1 --nproc-per-node 2 -- a"),
        ("--max-r 0 --log_d /tmp --nproc 2 a.py", "ALONE --max-r 0 --log_d /tmp --nproc-per-node 2 -- a.py"),
        ("--local-addr 10.0.0.1 a.py", "--standalone --local-addr 10.0.0.1 -- a.py"),
    ],
)
def test_only_the_launchers_own_nproc_is_spelled_out(typed, given):
    """Everything else stays as it is, in order; on one host a free port is asked for."""
    assert rewritten(typed) == given


@pytest.mark.parametrize(
    "options",
    [
        "--standalone",
        "--nnodes 2",
        "--nnodes=1:4",
        "--nno 2 --node-rank 1",
        "--node_rank=0",
        "--master-port 29501",
        "--master_addr=10.0.0.1",
        "--rdzv-backend c10d",
        "--rdzv_endpoint=host:29400",
        "--rdzv-id 7",
        "--rdzv-conf a=1",
    ],
)
def test_a_rendezvous_that_the_user_gives_is_left_alone(options):
    """No port is chosen when the user says where to meet, in any spelling."""
    assert rewritten(f"{options} --nproc 2 a.py") == f"{options} --nproc-per-node 2 -- a.py"


def test_one_node_spelled_out_is_still_one_host():
    """--nnodes 1 and 1:1 are torchrun's default."""
    assert rewritten("--nnodes 1 a.py") == "ALONE --nnodes 1 -- a.py"
    assert rewritten("--nnodes=1:1 a.py") == "ALONE --nnodes=1:1 -- a.py"


def test_b23_the_environment_is_honoured():
    """MASTER_ADDR and MASTER_PORT, which torchrun does not read, become options; PET_ ones it reads."""
    assert rewritten("a.py", MASTER_PORT="29555") == "--master-port 29555 -- a.py"
    both = rewritten("a.py", MASTER_ADDR="::1", MASTER_PORT="1")
    assert both == "--master-addr ::1 --master-port 1 -- a.py"
    assert rewritten("--nnodes 2 a.py", MASTER_PORT="29555") == "--nnodes 2 -- a.py"
    for name in ("PET_MASTER_PORT", "PET_RDZV_ENDPOINT", "PET_NNODES", "PET_STANDALONE"):
        assert rewritten("a.py", **{name: "2"}) == "-- a.py"
    assert rewritten("a.py", PET_NPROC_PER_NODE="2", PET_LOCAL_ADDR="::1") == "--standalone -- a.py"


def test_b68_without_libuv_a_port_is_picked_for_the_plain_rendezvous():
    """--standalone needs libuv; with USE_LIBUV=0 a free port of this host is given instead."""
    words = torchrun_arguments(["a.py"], {"USE_LIBUV": "0"})
    assert words[:3] == ["--master-addr", "127.0.0.1", "--master-port"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", int(words[3])))
    assert words[4:] == ["--", "a.py"]


def test_the_tables_are_those_of_torchrun():
    """Every option of the installed torchrun is known here, with or without a value; none is made up."""
    from torch.distributed.run import get_args_parser

    flags, values, shorts = set(), set(), {}
    for action in get_args_parser()._actions:
        for spelling in action.option_strings:
            if spelling.startswith("--"):
                (flags if action.nargs == 0 else values).add(spelling.replace("_", "-"))
            else:
                shorts[spelling[1:]] = next(s for s in action.option_strings if s.startswith("--"))
    assert flags == set(usprun.FLAGS)
    assert values == set(usprun.VALUE_OPTIONS)
    assert shorts == {**usprun.SHORT_FLAGS, **usprun.SHORT_VALUE_OPTIONS}


@pytest.mark.parametrize(
    "line",
    [
        "-m --role x pkg --role y",
        "--rdzv_endp h:1 --redirects=3 -t 2 a.py -t 9",
        "--nnodes 1 --no-python --virtual-local-rank a.py --nnodes 5",
        "-mr 3 pkg",
        "--monitor_interval .5 --tee 1 --start-m fork -- a.py --tee 5",
    ],
)
def test_options_are_read_as_torchrun_reads_them(line):
    """For every line torchrun accepts, names and values agree with its own parser's."""
    from torch.distributed.run import get_args_parser

    words = line.split()
    theirs = vars(get_args_parser().parse_args(words))
    default = vars(get_args_parser().parse_args(["a.py"]))
    ours = {option.name[2:].replace("-", "_"): option.value for option in read_options(words)}
    for name, value in ours.items():
        assert theirs[name] == (True if value is None else type(theirs[name])(value))
    changed = {name for name, value in theirs.items() if value != default[name]}
    assert changed - {"training_script", "training_script_args"} <= set(ours)
    program = read_options(words)[-1].end + ("--" in words)
    assert [theirs["training_script"], *theirs["training_script_args"]] == words[program:]


def test_the_programs_options_cannot_be_ambiguous_to_torchrun():
    """argparse would refuse a script's own --log or --nproc as ambiguous: "--" keeps it away."""
    from torch.distributed.run import get_args_parser

    words = torchrun_arguments(
        ["--nproc", "2", "-m", "usp.run", "wan", "--log", "x", "--nproc", "3", "--r"], {}
    )
    theirs = get_args_parser().parse_args(words)
    assert theirs.training_script == "usp.run"
    assert theirs.training_script_args == ["wan", "--log", "x", "--nproc", "3", "--r"]
    assert (theirs.nproc_per_node, theirs.module) == ("2", True)


@pytest.mark.parametrize(
    ("line", "environ", "expected"),
    [
        ("--nproc 2 a.py", {}, "4"),
        ("--nproc 3 a.py", {}, "2"),
        ("--nproc 100 a.py", {}, "1"),
        ("--nproc cpu a.py", {}, "1"),
        ("a.py", {}, "8"),
        ("a.py", {"PET_NPROC_PER_NODE": "4"}, "2"),
        ("--nproc-per-node=4 a.py", {"PET_NPROC_PER_NODE": "2"}, "2"),
        ("--nproc gpu a.py", {}, None),
        ("--nproc 2 a.py", {"OMP_NUM_THREADS": "3"}, None),
    ],
)
def test_ranks_share_the_cores(line, environ, expected):
    """OMP_NUM_THREADS is cores / ranks, at least 1; not if it is set or the count is unknown."""
    chosen = thread_environment(read_options(line.split()), environ, cores=8)
    assert chosen.get("OMP_NUM_THREADS") == expected


@pytest.mark.parametrize(("value", "got"), [("x", '"x"'), ("0", '"0"'), ("-1", '"-1"'), ("2.5", '"2.5"')])
def test_a_bad_number_of_ranks_is_a_usage_error(capsys, value, got):
    """One sentence on stderr, exit code 2."""
    with pytest.raises(SystemExit) as caught:
        usprun.main(["--nproc", value, "a.py"])
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", f"usprun: --nproc takes a whole number or cpu/gpu/auto; got {got}\n")


def test_a_missing_number_of_ranks_is_a_usage_error(capsys):
    """`usprun --nproc` alone names what it lacks."""
    with pytest.raises(SystemExit) as caught:
        usprun.main(["--nproc"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "usprun: --nproc takes a whole number or cpu/gpu/auto; got nothing\n"


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), (["--nproc", "2", "-h"], 0), ([], 2)])
def test_help_is_short_and_points_to_torchrun(capsys, argv, code):
    """What usprun adds, in under 25 lines; a program's own --help is not taken."""
    with pytest.raises(SystemExit) as caught:
        usprun.main(argv)
    out = capsys.readouterr().out
    assert caught.value.code == code
    assert "--nproc N" in out
    assert "torchrun --help" in out
    assert len(out.splitlines()) < 25


def test_the_programs_help_is_the_programs(monkeypatch):
    """`usprun -m usp.run --help` reaches the program; torchrun takes over by exec."""
    called = []
    monkeypatch.setattr(os, "execve", lambda *args: called.append(args))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    for name in ("MASTER_ADDR", "MASTER_PORT", "USE_LIBUV"):
        monkeypatch.delenv(name, raising=False)
    usprun.main(["-m", "usp.run", "--help"])
    path, words, environ = called[0]
    assert path == sys.executable
    assert words == [sys.executable, "-m", "torch.distributed.run", *ALONE, "-m", "--", "usp.run", "--help"]
    assert environ["OMP_NUM_THREADS"] == "7"


def test_the_launchers_import_no_torch():
    """Working out a command line needs the standard library only."""
    code = "import sys, launchers.usprun; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert (done.stdout, done.stderr) == ("False\n", "")


PROGRAM = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
rank = os.environ["RANK"]
names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS", "USE_LIBUV")
facts = {name: os.environ.get(name) for name in names} | {"argv": sys.argv[2:]}
(folder / f"env-{rank}.new").write_text(json.dumps(facts))
(folder / f"env-{rank}.new").rename(folder / f"env-{rank}")
while not (folder / "go").exists():
    time.sleep(0.05)
sys.exit(int(sys.argv[-1]))
"""


def start(folder: Path, *code: str, **environ: str) -> "subprocess.Popen[str]":
    """A usprun of two ranks, which wait for the file `go`; only the launcher imports torch."""
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-c", "from launchers.usprun import main; main()", "--nproc", "2"]
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMP", "MASTER", "PET_", "TORCHELASTIC"))
    }
    return subprocess.Popen(
        [*command, str(folder / "program.py"), str(folder), "--nproc", *code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**clean, **environ},
        start_new_session=True,
    )


def seen(folder: Path) -> list[dict[str, object]]:
    return [json.loads((folder / f"env-{rank}").read_text()) for rank in range(2)]


def test_b23_two_wrappers_run_side_by_side_while_29500_is_taken(tmp_path):
    """Both reach all ranks at once, each with its own port, and pass on arguments and the exit code."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("", 29500))
        except OSError:
            pass  # someone else holds it: as good
        else:
            holder.listen()
        first, second = tmp_path / "first", tmp_path / "second"
        runs = [start(first, "0"), start(second, "3", USE_LIBUV="0")]
        try:
            wait_until_all_are_here(runs, [first, second])
            for folder in (first, second):
                (folder / "go").touch()
            texts = [run.communicate(timeout=60)[0] for run in runs]
        finally:
            for run in runs:
                if run.poll() is None:
                    run.terminate()
                    run.communicate(timeout=40)
    assert runs[0].returncode == 0, texts[0]
    assert texts[0] == "", "a good run adds no line of its own"
    assert runs[1].returncode == 1, "torchrun's code for a failed rank"
    assert "exitcode  : 3" in texts[1]
    ports = {rank["MASTER_PORT"] for folder in (first, second) for rank in seen(folder)}
    assert len(ports) == 2
    assert "29500" not in ports
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert [(r["RANK"], r["WORLD_SIZE"], r["OMP_NUM_THREADS"]) for r in seen(first)] == [
        ("0", "2", share),
        ("1", "2", share),
    ]
    assert [r["argv"] for r in seen(first)] == [["--nproc", "0"]] * 2
    assert {r["USE_LIBUV"] for r in seen(second)} == {"0"}


def wait_until_all_are_here(runs: "list[subprocess.Popen[str]]", folders: list[Path]) -> None:
    end = time.monotonic() + 60
    while not all((folder / f"env-{rank}").exists() for folder in folders for rank in range(2)):
        gone = [run for run in runs if run.poll() is not None]
        assert not gone, gone[0].communicate()[0]
        assert time.monotonic() < end, "the ranks did not all start"
        time.sleep(0.05)
