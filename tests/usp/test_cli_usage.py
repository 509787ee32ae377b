"""What bad input gets: one sentence on rank 0, exit code 2 on every rank, before weights are read."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import usp.loading
import usp.run
import usp.verify
from runtime import device
from tests.processes import completed, loggers_kept, torchrun
from tests.usp.folders import FAULTS, copy_of_demo
from usp import cli
from usp.config import choose_parallel, spellings
from usp.demo import MODEL_DIR
from usp.job import prepare
from usp.options import JobOptions
from usp.tasks import WAN_T2V

Refuse = Callable[..., str]
ULYSSES8 = (
    "cfg 1 x ring 1 x gather_kv 1 x ulysses 8 = 8 ranks were asked for; {size} are running; "
    "use one of: {these}"
)


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    with loggers_kept():
        yield


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """Set torchrun's variables."""
    for name, value in (
        ("RANK", rank),
        ("LOCAL_RANK", rank),
        ("WORLD_SIZE", size),
        ("LOCAL_WORLD_SIZE", size),
    ):
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """`refuse(*words)` gives rank 0's sentence; on the way it checks all that every refusal promises."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    slept: list[float] = []

    def too_late(*args: Any, **kwargs: Any) -> None:
        pytest.fail("not refused before the ranks meet and weights are read")

    for module in (usp.run, usp.verify):
        monkeypatch.setattr(module, "connect", too_late)
    monkeypatch.setattr(usp.loading, "load_pipeline", too_late)

    def run(*words: str, module: ModuleType = usp.run, size: int = 2) -> str:
        said = []
        for rank in range(size):
            be_rank(monkeypatch, rank, size)
            with monkeypatch.context() as patch:
                patch.setattr("sys.argv", [module.__name__, *words])
                patch.setattr(time, "sleep", slept.append)
                with pytest.raises(SystemExit) as caught:
                    cli.main(module.app, module.__name__)
            assert caught.value.code == 2, f"rank {rank} of {size}"
            captured = capsys.readouterr()
            assert captured.out == ""
            said.append(captured.err)
        # After the pause, in which a launcher ends them if rank 0 has found the same.
        of_rank = [said[0].replace(" error: ", f" error on rank {r}: ", 1) for r in range(1, size)]
        assert said[1:] == of_rank
        assert slept == [cli.LATER_S] * (size - 1), (
            "the others leave later, or a launcher would end rank 0 first"
        )
        slept.clear()
        assert os.listdir(".") == [], "nothing is written"
        prefix = f"{module.__name__}: error: "
        assert said[0].startswith(prefix)
        assert said[0].count("\n") == 1
        return said[0].removeprefix(prefix).removesuffix("\n")

    return run


NO_MODEL = "model '{}' does not exist here; give a diffusers folder, or a hub name like owner/name"
REFUSALS: dict[str, str] = {
    # degrees (B19)
    "wan-t2v --parallel ulysses8": ULYSSES8.format(
        size=2, these=f"{', '.join(spellings(2))}, or start 8 ranks"
    ),
    "wan-t2v --parallel ulysses0": (
        "ulysses_degree=0 was asked for; a degree is a whole number of ranks, 1 or more; leave "
        "ulysses_degree out to get 1"
    ),
    "wan-t2v --parallel ring-1": (
        "ring_degree=-1 was asked for; a degree is a whole number of ranks, 1 or more; leave "
        "ring_degree out to get 1"
    ),
    "wan-t2v --parallel foo2": (
        "parallel='foo2': 'foo2' is not an axis and a degree; write 'auto' or words such as 'ulysses2"
        " ring2' from the axes cfg, ring, gather_kv, ulysses"
    ),
    "wan-t2v --parallel ulysses2,ulysses2": (
        "parallel='ulysses2,ulysses2': 'ulysses2' is given twice; write 'auto' or words such as "
        "'ulysses2 ring2' from the axes cfg, ring, gather_kv, ulysses"
    ),
    "wan-t2v --attention ring --parallel ulysses2": (
        "attention='ring' gives all ranks to one axis, and parallel='ulysses2' spells the axes; give "
        "one of the two"
    ),
    # tasks
    "flux --prompt a": "no model was given; flux has none bundled; name one with --model",
    "wan-t2v --image none.png": "1 image was given; wan-t2v takes 0; leave --image away",
    "wan-i2v --model x/y --prompt a --image none.png": (
        "image 'none.png' does not exist; give the name of an image file"
    ),
    "wan-t2v --count 2": "2 images were asked for; wan-t2v makes one video; leave the count away",
    "qwen-image --model x/y --prompt a --frames 5": (
        "--frames 5 was given; qwen-image makes images; leave it away"
    ),
    "qwen-image-edit --model x/y --prompt a": (
        "0 images were given; qwen-image-edit takes 1 or more; give each with --image FILE"
    ),
    # loading
    "wan-t2v --hub civitai": "hub 'civitai' is not known; use huggingface or modelscope",
    "wan-t2v --weights model.safetensors": (
        "weights 'model.safetensors' were given; write each component once, as COMPONENT=FILE, for example "
        "transformer=flux1-dev.safetensors"
    ),
    "wan-t2v --lora none.safetensors:0.5": ("lora 'none.safetensors' does not exist here; check the path"),
    # names
    "wan-t2v --attention flash": (
        "attention='flash' is not known; use one of auto, ulysses, gather-kv, ring, usp, yunchang, xfuser"
    ),
    "wan-t2v --kernel foo": (
        "kernel='foo' is not known; this rank's device is cpu; use auto or one of cpu-flash, plain"
    ),
    "wan-t2v --kernel cuda-flash": (
        "kernel='cuda-flash' runs on cuda only; this rank's device is cpu; use auto or one of "
        "cpu-flash, plain"
    ),
    "wan-t2v --fused on": "fused=on on cpu; only npu has fused norms and rotations; use auto or off",
    "wan-t2v --fused yes": "fused='yes' was given; use one of auto, on, off",
    "wan-t2v --transport tcp": "transport='tcp' is not known; use one of auto, all_to_all, p2p",
    "wan-t2v --scheduler ddim": (
        "scheduler 'ddim' was given; the model of WanPipeline predicts a flow, which it does not serve; use "
        "one of euler, heun, lcm, unipc, dpm++, dpm++sde"
    ),
    "wan-t2v --dtype int8": "dtype 'int8' is not known; use auto or one of fp32, bf16, fp16",
    "wan-t2v --device tpu": (
        'device="tpu" is not a device; use one of npu, musa, cuda, xpu, mps, cpu, or an index as in npu:1'
    ),
    "wan-t2v --device cpu:1": "device=cpu:1: cpu has no index; use cpu",
    # numbers
    "wan-t2v --size 112": "size '112' was given; write WIDTHxHEIGHT in pixels, for example 832x480",
    "wan-t2v --size 120x112": (
        "width 120 was asked for; this model makes multiples of 16 pixels; use 112 or 128"
    ),
    "wan-t2v --size 112x8": "height 8 was asked for; this model makes multiples of 16 pixels; use 16 or 32",
    "wan-t2v --frames 16": (
        "16 frames were asked for; this model makes 1 more than a multiple of 4; use 13 or 17"
    ),
    "wan-t2v --frames 0": "0 frames were asked for; this model makes 1 more than a multiple of 4; use 1 or 5",
    "wan-t2v --steps 0": "num inference steps 0 was asked for; use 1 or more",
    "wan-t2v --seed -2": (
        "seed=-2 was given; a seed is a whole number from 0 to 9223372036854775807, or -1 to draw one"
    ),
    "wan-t2v --seed 9223372036854775808": (
        "seed=9223372036854775808 was given; a seed is a whole number from 0 to 9223372036854775807, "
        "or -1 to draw one"
    ),
    # models
    "wan-t2v --model /no/such --prompt cat": NO_MODEL.format("/no/such"),
    # what needs no file, then the model, then the rest
    "wan-t2v --model a/b/c": NO_MODEL.format("a/b/c"),
    "wan-t2v --model a/b/c --lora none.safetensors": NO_MODEL.format("a/b/c"),
    "wan-i2v --model a/b/c --image none.png": NO_MODEL.format("a/b/c"),
    "wan-t2v --model a/b/c --steps 0": "num inference steps 0 was asked for; use 1 or more",
    "wan-t2v --model a/b/c --lora :2": (
        "lora ':2' was given; '2' is not a number, or no file stands before it; write FILE.safetensors or "
        "FILE.safetensors:SCALE, for example style.safetensors:0.8"
    ),
    "wan-t2v --model x/y": "no prompt was given; say what the video shall show with --prompt",
}
RUN_ONLY: dict[str, str] = {
    "sd3 --model x/y --prompt a --out a.mp4": (
        "output 'a.mp4' was asked for; this task writes PNG; use a name that ends in .png"
    ),
    "wan-t2v --fps 0": "fps 0 was asked for; use 1 or more",
    "wan-t2v --out film.avi": (
        "output 'film.avi' was asked for; this task writes mp4; use a name that ends in .mp4"
    ),
    "wan-t2v --out .": "output '.' was asked for; this task writes mp4; use a name that ends in .mp4",
}


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with nothing but a cpu, whatever this one has."""
    monkeypatch.setattr(device, "device_count", lambda kind: int(kind == "cpu"))


@pytest.mark.parametrize("words", [*REFUSALS, *RUN_ONLY])
def test_run_refuses_in_a_sentence(refuse, words):
    """Point 9, requirements 11 and 12, B19: asked, so, to do; code 2 on both ranks; nothing made."""
    assert refuse(*words.split()) == {**REFUSALS, **RUN_ONLY}[words]


@pytest.mark.parametrize("words", REFUSALS)
def test_verify_refuses_alike(refuse, words):
    """The same options, the same sentences."""
    assert refuse(*words.split(), module=usp.verify) == REFUSALS[words]


@pytest.mark.parametrize("module", [usp.run, usp.verify])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("wan-t2v --bogus", "No such option: --bogus"),
        ("wan-t9v", "No such command 'wan-t9v'"),
        ("wan-t2v film", "Got unexpected extra argument(s) (film)"),
        ("wan-t2v --steps", "Option '--steps' requires an argument"),
        ("wan-t2v --steps many", "Invalid value for '--steps': "),
    ],
)
def test_what_the_parser_finds_is_told_alike(refuse, module, words, sentence):
    """Point 9, unknown options and tasks: the word is named; the rest is the CLI library's wording."""
    assert refuse(*words.split(), module=module).startswith(sentence)


@pytest.mark.parametrize("words", ["--attention ring", "--parallel ring2"])
def test_all_strategies_and_one_of_them_are_refused(refuse, words):
    """verify: --all with --attention or --parallel."""
    assert refuse("wan-t2v", "--all", *words.split(), module=usp.verify) == (
        "--all sweeps every strategy, and --parallel or --attention names one; leave one of them out"
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_b19_degrees_that_do_not_fit_list_those_that_do(refuse, size):
    """The product, the ranks that run, and the combinations that fit them; each of these, tried, is taken."""
    said = refuse("wan-t2v", "--parallel", "ulysses8", size=size)
    assert said.startswith(ULYSSES8.format(size=size, these=""))
    assert said.endswith(", or start 8 ranks")
    proposals = re.findall(r"'([^']+)'", said)
    assert f"ulysses{size}" in proposals
    assert len(proposals) >= {1: 1, 2: 3, 3: 3, 4: 5}[size]
    for proposal in proposals:
        assert choose_parallel(proposal, None, "auto", size).world_size == size


def test_without_a_task_the_tasks_are_listed(monkeypatch, capsys):
    """`python -m usp.run` alone: help that names wan-t2v, exit code 2, and no empty error."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["usp.run"])
    with pytest.raises(SystemExit) as caught:
        cli.main(usp.run.app, "usp.run")
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert "wan-t2v" in captured.out + captured.err
    assert "error: \n" not in captured.err


@pytest.mark.parametrize("module", [usp.run, usp.verify])
def test_help_is_short_grouped_and_from_rank_0(monkeypatch, capsys, module):
    """Point 6: under 50 lines, by topic, code 0 on all ranks, silent on rank 1."""
    monkeypatch.setenv("COLUMNS", "100")
    said = []
    for rank in (0, 1):
        be_rank(monkeypatch, rank, 2)
        monkeypatch.setattr("sys.argv", [module.__name__, "wan-t2v", "--help"])
        with pytest.raises(SystemExit) as caught:
            cli.main(module.app, module.__name__)
        assert caught.value.code == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        said.append(captured.out)
    assert said[1] == ""
    assert len(said[0].splitlines()) < 50
    for topic in ("Picture", "Parallel", "Model", "Output"):
        assert re.search(rf"─ {topic} ─", said[0]), topic


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_model_folder_is_refused(refuse, tmp_path, fault):
    """Point 9, missing files: the file is named before weights are read, with the same words on any rank."""
    folder = copy_of_demo(tmp_path / "model")
    spoil, message = FAULTS[fault]
    spoil(folder)
    said = refuse("wan-t2v", "--prompt", "a cat", "--model", str(folder))
    assert said == message.format(folder=folder)


@pytest.mark.parametrize("fault", ["another pipeline", "no weights"])
def test_a_broken_model_is_told_before_the_rest(refuse, tmp_path, fault):
    """A folder that cannot be run is what is wrong first; a prompt and a LoRA come after."""
    folder = copy_of_demo(tmp_path / "model")
    spoil, message = FAULTS[fault]
    spoil(folder)
    said = refuse("wan-t2v", "--model", str(folder), "--lora", "none.safetensors")
    assert said == message.format(folder=folder)


def test_files_with_wrong_keys_are_told_before_weights_are_read(refuse, tmp_path):
    """`--weights` and `--lora` of another model: the file and its key, with code 2 on every rank."""
    state = load_file(MODEL_DIR / "transformer" / "diffusion_pytorch_model.safetensors")
    first = next(iter(state))
    kinds = {
        "more": {**state, "blocks.9.extra": torch.ones(2)},
        "less": {key: value for key, value in state.items() if key != first},
        "other": {**state, first: state[first][..., :-1].contiguous()},
        "whole": {"blocks.0.lora_A.weight": torch.ones(2, 2), "blocks.0.lora_B.weight": torch.ones(2, 2)},
    }
    said = {}
    for name, tensors in kinds.items():
        path = tmp_path / f"{name}.safetensors"
        save_file(tensors, path)
        option = ("--lora", str(path)) if name == "whole" else ("--weights", f"transformer={path}")
        said[name] = refuse("wan-t2v", *option).replace(f"{tmp_path}/", "")
    does_not_fit = "the tensors of {}.safetensors do not fit WanTransformer3DModel: "
    assert said["more"].startswith(does_not_fit.format("more") + "it has no place for 'blocks.9.extra' (more")
    assert said["less"].startswith(does_not_fit.format("less") + f"{first!r} is in none of them (1 of its ")
    shapes = f"has the shape {tuple(kinds['other'][first].shape)}; WanTransformer3DModel's {first} has "
    assert said["other"].startswith(f"other.safetensors: key {first!r} {shapes}{tuple(state[first].shape)}; ")
    assert said["whole"].startswith(
        "lora whole.safetensors: none of its 2 keys matches a module of transformer; its keys are "
    )


def test_a_folder_that_looks_like_a_hub_name_is_told_apart(monkeypatch, capsys, tmp_path):
    """A mistyped relative folder, and no hub in reach: no traceback; both readings are mentioned."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["usp.run", "wan-t2v", "--prompt", "a cat", "--model", "models/wan"])
    with pytest.raises(SystemExit) as caught:
        cli.main(usp.run.app, "usp.run")
    assert caught.value.code
    said = f"{capsys.readouterr().err}{caught.value.code}"  # a code in words is printed as Python ends
    assert "models/wan" in said
    assert "folder" in said
    assert "huggingface" in said
    assert "Traceback" not in said


def test_a_device_that_is_not_here_names_what_is(refuse):
    """Point 9: --device cuda on a machine without one."""
    said = refuse("wan-t2v", "--device", "cuda")
    assert said == "device=cuda; no cuda device is usable here; available: cpu"


def test_b65_more_ranks_than_devices_is_told_alike_on_all_ranks(refuse, monkeypatch):
    """Requirement 15: four ranks, two cards; rank 0, whose own card exists, says what rank 3 would."""
    monkeypatch.setattr(device, "device_count", lambda kind: {"cpu": 1, "cuda": 2}.get(kind, 0))
    sentence = (
        "LOCAL_RANK=3 needs cuda device 3; this host has 2 cuda devices; start at most 2 per host, "
        "or show more in CUDA_VISIBLE_DEVICES"
    )
    assert refuse("wan-t2v", "--device", "cuda", size=4) == sentence
    for rank in range(4):
        be_rank(monkeypatch, rank, 4)
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            prepare(WAN_T2V, JobOptions(device="cuda"))


def test_b05_an_index_with_several_ranks_is_refused(refuse, monkeypatch):
    """B05: cuda:1 would put both ranks on one card."""
    monkeypatch.setattr(device, "device_count", lambda kind: {"cpu": 1, "cuda": 2}.get(kind, 0))
    assert refuse("wan-t2v", "--device", "cuda:1") == (
        "device=cuda:1 on 2 ranks; that would put every rank on card 1; "
        "use cuda, each rank takes the card of its LOCAL_RANK"
    )


@pytest.mark.parametrize(("environ", "sentence"), [
    ({"RANK": "x"}, 'RANK="x" in the environment is not a whole number; start with torchrun'),
    ({"LOCAL_RANK": "5"}, "LOCAL_RANK=5 does not fit LOCAL_WORLD_SIZE=2; start the ranks with torchrun"),
])  # fmt: skip
def test_a_wrong_environment_is_refused(monkeypatch, capsys, environ, sentence):
    """One sentence, though nobody can tell which rank this is."""
    be_rank(monkeypatch, 0, 2)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["usp.run", "wan-t2v"])
    with pytest.raises(SystemExit) as caught:
        cli.main(usp.run.app, "usp.run")
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"usp.run: error: {sentence}\n"


@pytest.mark.parametrize(("words", "named"), [
    ("--guidance nan", "guidance"),
    ("--timeout 0", "timeout"),
    ("--timeout -5", "timeout"),
    ("--timeout nan", "timeout"),
    ("--size 1040x112", "1040"),
    ("--frames 257", "257"),
    ("--attention xfuser", "xfuser"),
    ("--attention yunchang", "245 tokens"),
    ("--attention yunchang --parallel gather_kv2", "yunchang"),
])  # fmt: skip
def test_more_that_cannot_work_is_refused_before_weights(refuse, monkeypatch, words, named):
    """Promise 3: each of these fails later, or does nothing sensible, though it can be seen at once."""
    monkeypatch.setitem(sys.modules, "xfuser", None)  # not to be imported, installed or not
    assert named in refuse("wan-t2v", *words.split())


@pytest.mark.parametrize(("words", "named"), [
    ("--kernel plain", "kernel"),
    ("--transport p2p", "transport"),
    ("--attention ring", "attention"),
    ("--guidance 1 --negative-prompt blue", "negative"),
])  # fmt: skip
def test_an_option_without_effect_is_not_passed_over(monkeypatch, capsys, words, named):
    """Requirement 40: on one rank, or without guidance, these do nothing; an error or a warning says so."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(usp.run, "make", lambda *args, **kwargs: None)
    monkeypatch.setattr("sys.argv", ["usp.run", "wan-t2v", *words.split()])
    with pytest.raises(SystemExit):
        cli.main(usp.run.app, "usp.run")
    said = capsys.readouterr().err
    assert re.search(rf"(warning|error): .*{named}", said), said or "nothing was said"


def test_torchrun_ends_both_ranks_with_one_sentence(tmp_path):
    """B19: real ranks, degrees that do not fit: rank 0's sentence is all that they say; no file is left."""
    words = ("--nproc-per-node", "2", "--log-dir", "logs", "--redirects", "3", "-m", "usp.run")
    command = torchrun("--standalone", "--local-addr=localhost", *words, "wan-t2v", "--parallel", "ulysses8")
    run = completed(command, tmp_path, log_ranks=2)
    assert run.code not in (0, None)
    assert run.ranks[0] == ("", f"usp.run: error: {REFUSALS['wan-t2v --parallel ulysses8']}\n")
    assert run.ranks[1] == ("", "")
    assert "exitcode  : 2" in run.launcher
    assert sorted(os.listdir(tmp_path)) == ["logs", "stderr", "stdout"]
