"""LoRA through the wrapper and by file: exact on all ranks, counted, and gone without a trace."""

import gc
import json
import logging
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests import tiny
from tests.usp import families, originals
from tests.usp.in_ranks import SEED, alone, error_of, hooks, rank
from usp.loading import empty_models
from usp.lora import LoraFile, check_file, check_fits, load_loras, parse_lora
from usp.pipeline import ParallelPipeline

pytestmark = pytest.mark.filterwarnings("ignore:Adapter .* was active which is now deleted")

# fp32, adapters beside the weights against adapters merged into them: one sum more per layer.
TOLERANCE = 2e-5
LAYERS = ("blocks.0.attn1.to_q", "blocks.1.attn2.to_v", "blocks.1.ffn.net.2", "proj_out")
CALL = {"num_inference_steps": 2, "tokens": (1, 1, 7)}
State = dict[str, torch.Tensor]


def lora(seed: int, *, r: int = 2, layers: tuple[str, ...] = LAYERS, size: float = 0.3) -> State:
    """A LoRA of rank r on some layers of the tiny transformer, in peft's layout."""
    model, generator, state = tiny.transformer(), torch.Generator().manual_seed(seed), {}
    for name in layers:
        out, into = model.get_submodule(name).weight.shape
        state[f"transformer.{name}.lora_A.weight"] = torch.randn(r, into, generator=generator) * size
        state[f"transformer.{name}.lora_B.weight"] = torch.randn(out, r, generator=generator) * size
    return state


def merge(model: nn.Module, state: State, scale: float = 1.0) -> None:
    """Add a LoRA to a model's weights, summed in float64."""
    for key, a in state.items():
        if ".lora_A." in key:
            layer: Any = model.get_submodule(key.removeprefix("transformer.").removesuffix(".lora_A.weight"))
            delta = state[key.replace("lora_A", "lora_B")].double() @ a.double()
            layer.weight.data = (layer.weight.double() + scale * delta).float()


def merged(*loras: tuple[State, float], kind: str = "t2v", part: str = "transformer") -> np.ndarray:
    """One process's latents with LoRAs merged into the weights by hand."""
    pipeline = tiny.build(kind)
    for state, scale in loras:
        merge(getattr(pipeline, part), state, scale)
    return alone(kind, CALL, pipeline=pipeline)


def latents(pipe: Any, kind: str = "t2v", **changes: Any) -> np.ndarray:
    return pipe(**tiny.call(kind, **{**CALL, **changes}), seed=SEED).frames.cpu().numpy()


def through_the_wrapper(layout: str) -> dict[str, np.ndarray]:
    """Every method that the wrapper hands on, in one session; results by what was in force."""
    one, two = lora(1), lora(2, r=3, layers=(*LAYERS[:2], "blocks.0.attn1.to_out.0"))
    pipeline = tiny.build("t2v")
    found = {}
    with ParallelPipeline(pipeline, layout) as pipe:
        found["base"] = latents(pipe)
        pipe.load_lora_weights(one, adapter_name="one")
        found["one"] = latents(pipe)
        pipe.set_adapters("one", 0.6)
        found["one 0.6"] = latents(pipe)
        found["one 0.3 in the call"] = latents(pipe, attention_kwargs={"scale": 0.5})
        found["base by scale 0 in the call"] = latents(pipe, attention_kwargs={"scale": 0.0})
        found["one 0.6 again"] = latents(pipe)
        pipe.set_adapters("one", 0.0)
        found["base by scale 0"] = latents(pipe)
        pipe.load_lora_weights(two, adapter_name="two")
        pipe.set_adapters(["one", "two"], [0.6, -1.5])
        found["both"] = latents(pipe)
        pipe.disable_lora()
        found["base by disable"] = latents(pipe)
        pipe.enable_lora()
        found["both again"] = latents(pipe)
        pipe.delete_adapters("one")
        pipe.set_adapters("two", -1.5)
        found["two"] = latents(pipe)
        pipe.unload_lora_weights()
        found["base by unload"] = latents(pipe)
        pipe.load_lora_weights(one)
        pipe.fuse_lora(lora_scale=0.6)
        pipe.unload_lora_weights()
        found["one 0.6 fused"] = latents(pipe)
    return found


def check_against_merged(by_rank: list[dict[str, np.ndarray]], tolerance: float = TOLERANCE) -> None:
    """Assert that `through_the_wrapper` gave on every rank what weights merged by hand in float64 give."""
    one, two = lora(1), lora(2, r=3, layers=(*LAYERS[:2], "blocks.0.attn1.to_out.0"))
    want = {
        "one": merged((one, 1.0)),
        "one 0.6": merged((one, 0.6)),
        "one 0.3": merged((one, 0.3)),
        "both": merged((one, 0.6), (two, -1.5)),
        "two": merged((two, -1.5)),
        "base": merged(),
    }
    assert min(np.abs(want[name] - want["base"]).max() for name in want if name != "base") > 0.01
    for found in by_rank:
        for name, result in found.items():
            (key,) = [k for k in sorted(want, key=len, reverse=True) if name.startswith(k)][:1]
            assert np.abs(result - want[key]).max() <= tolerance, name
            if key == "base":
                assert np.array_equal(result, found["base"]), name
        assert np.array_equal(found["one 0.6"], found["one 0.6 again"])
        assert np.array_equal(found["both"], found["both again"])
        for name, result in found.items():
            assert np.array_equal(result, by_rank[0][name])


@pytest.mark.parametrize(
    ("size", "layout"),
    [(2, "ulysses2"), (2, "gather_kv2"), (2, "ring2"), (2, "cfg2")],
)
def test_b11_strength_stacking_switch_and_unload_are_exact(ranks, size, layout):
    """B11, req 35: against weights merged by hand in float64; scale 0, disable, unload: the base's bits."""
    check_against_merged(ranks(size).run(through_the_wrapper, layout))


def before_and_after(layout: str) -> list[bool]:
    """Adapters loaded before going parallel, unloaded while parallel; loaded while parallel, kept after."""
    state = lora(1)
    pipeline = tiny.build("t2v")
    plain = alone("t2v", CALL, pipeline=pipeline)
    marks = hooks(pipeline.transformer)
    pipeline.load_lora_weights(state)
    with ParallelPipeline(pipeline, layout) as pipe:
        early = latents(pipe)
        pipe.unload_lora_weights()
        base = latents(pipe)
        pipe.load_lora_weights(state)
        late = latents(pipe)
    after = alone("t2v", CALL, pipeline=pipeline)
    pipeline.unload_lora_weights()
    return [
        np.abs(early - merged((state, 1.0))).max() <= TOLERANCE,
        np.array_equal(early, late),
        np.abs(base - plain).max() <= TOLERANCE,
        np.abs(after - early).max() <= TOLERANCE,
        np.array_equal(alone("t2v", CALL, pipeline=pipeline), plain),
        hooks(pipeline.transformer) == marks,
    ]


@pytest.mark.parametrize("layout", ["ulysses2", "ring2", "cfg2"])
def test_before_or_after_going_parallel_is_one(ranks, layout):
    """Req 35, 39: an adapter on the gathered projection too, loaded on either side; hooks all come off."""
    assert ranks(2).run(before_and_after, layout) == [[True] * 6] * 2


def on_the_experts(layout: str, folder: Path) -> list[np.ndarray]:
    """A LoRA on one expert, on the other, a pair of two, and one for both, as files."""
    one, two = (str(folder / f"{seed}.safetensors") for seed in (1, 2))
    choices = [
        [f"transformer={one}:0.5"],
        [f"transformer_2={two}"],
        [f"transformer={one}", f"transformer_2={two}:0.5"],
        [one],
    ]
    found = []
    with ParallelPipeline(tiny.build("two_experts"), layout) as pipe:
        for texts in choices:
            load_loras(pipe.pipeline, [parse_lora(text) for text in texts], pipe.world)
            found.append(latents(pipe, "two_experts"))
            pipe.unload_lora_weights()
        pipe.load_lora_weights(lora(2), load_into_transformer_2=True)
        found.append(latents(pipe, "two_experts"))
    return found


@pytest.mark.parametrize("layout", ["ulysses2", "cfg2"])
def test_both_experts_of_wan_2_2_take_files(ranks, tmp_path, layout):
    """B56, req 35: high- and low-noise files by expert, one file for both; stacked with unlike strengths."""
    one, two = lora(1), lora(2)
    save_file(one, tmp_path / "1.safetensors")
    save_file(two, tmp_path / "2.safetensors")

    def want(high: tuple[State, float] | None, low: tuple[State, float] | None) -> np.ndarray:
        pipeline = tiny.build("two_experts")
        for part, given in (("transformer", high), ("transformer_2", low)):
            if given:
                merge(getattr(pipeline, part), *given)
        return alone("two_experts", CALL, pipeline=pipeline)

    wants = [
        want((one, 0.5), None),
        want(None, (two, 1.0)),
        want((one, 1.0), (two, 0.5)),
        want((one, 1.0), (one, 1.0)),
        want(None, (two, 1.0)),
    ]
    assert all(np.abs(a - b).max() > 0.01 for a, b in pairwise(wants))
    for found in ranks(2).run(on_the_experts, layout, tmp_path):
        for result, expected in zip(found, wants, strict=True):
            assert np.abs(result - expected).max() <= TOLERANCE


def original(*, alpha: float | None = None, down: str = "lora_A", prefix: str = "diffusion_model.") -> State:
    """The same LoRA on every attention and feed-forward layer, in Wan's own names or musubi's."""
    names = {"self_attn": "attn1", "cross_attn": "attn2"}
    layers = {}
    for block in range(2):
        for theirs, ours in names.items():
            for c, d in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0")):
                layers[f"blocks.{block}.{theirs}.{c}"] = f"blocks.{block}.{ours}.{d}"
        for c, d in (("0", "net.0.proj"), ("2", "net.2")):
            layers[f"blocks.{block}.ffn.{c}"] = f"blocks.{block}.ffn.{d}"
    ours = lora(3, layers=tuple(layers.values()), size=0.2)
    state: State = {}
    for theirs, name in layers.items():
        key = prefix + (theirs.replace(".", "_") if prefix == "lora_unet_" else theirs)
        up = "lora_B" if down == "lora_A" else "lora_up"
        state[f"{key}.{down}.weight"] = ours[f"transformer.{name}.lora_A.weight"]
        state[f"{key}.{up}.weight"] = ours[f"transformer.{name}.lora_B.weight"]
        if alpha is not None:
            state[f"{key}.alpha"] = torch.tensor(alpha)
    return state


def peft_file(path: Path, state: State, alpha: float) -> None:
    """A file as peft saves it: the strength is in its metadata, not in a key."""
    config = {"r": 2, "lora_alpha": alpha, "target_modules": list(LAYERS)}
    text = json.dumps({f"transformer.{name}": value for name, value in config.items()})
    save_file(state, path, metadata={"format": "pt", "lora_adapter_metadata": text})


def from_files(folder: Path) -> list[np.ndarray]:
    """The latents with each file of a folder, by name."""
    found = []
    with ParallelPipeline(tiny.build("t2v"), "ulysses2") as pipe:
        for path in sorted(folder.iterdir()):
            pipe.load_lora_weights(str(path))
            found.append(latents(pipe))
            pipe.unload_lora_weights()
        pipe.load_lora_weights(folder, weight_name="1.safetensors")
        found.append(latents(pipe))
    return found


def test_files_in_every_layout_mean_the_same(ranks, tmp_path):
    """Req 35: peft's keys, with metadata; Wan's own keys (ComfyUI); lora_down and alpha; musubi's (kohya)."""
    attention = [f"{a}.{c}" for a in ("attn1", "attn2") for c in ("to_q", "to_k", "to_v", "to_out.0")]
    names = [f"blocks.{b}.{n}" for b in range(2) for n in (*attention, "ffn.net.0.proj", "ffn.net.2")]
    all_layers = lora(3, layers=tuple(names), size=0.2)
    save_file(lora(1), tmp_path / "1.safetensors")
    peft_file(tmp_path / "2.safetensors", lora(1), alpha=1.0)
    save_file(original(), tmp_path / "3.safetensors")
    save_file(original(alpha=1.0, down="lora_down"), tmp_path / "4.safetensors")
    save_file(original(alpha=2.0, down="lora_down", prefix="lora_unet_"), tmp_path / "5.safetensors")
    wants = [
        merged((lora(1), 1.0)),
        merged((lora(1), 0.5)),
        merged((all_layers, 1.0)),
        merged((all_layers, 0.5)),
        merged((all_layers, 1.0)),
        merged((lora(1), 1.0)),
    ]
    for found in ranks(2).run(from_files, tmp_path):
        for i, (result, expected) in enumerate(zip(found, wants, strict=True)):
            assert np.abs(result - expected).max() <= 2 * TOLERANCE, i


class Records(logging.Handler):
    """Keeps what is logged, by level."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.levelname, record.getMessage()))


def logged(rounds: list[list[State]]) -> list[tuple[list[tuple[str, str]], np.ndarray]]:
    """For each round, what this rank logs of the loads, and the latents; other packages' words count too."""
    names = ("usp.lora", "diffusers.loaders.peft", "diffusers.loaders.lora_pipeline")
    found = []
    with ParallelPipeline(tiny.build("t2v"), "ulysses2") as pipe:
        for states in rounds:
            records = Records()
            for name in names:
                logging.getLogger(name).addHandler(records)
            logging.getLogger("usp.lora").setLevel(logging.INFO)
            try:
                for i, state in enumerate(states):
                    pipe.load_lora_weights(state, adapter_name=f"n{i}")
            finally:
                logging.getLogger("usp.lora").setLevel(logging.NOTSET)
                for name in names:
                    logging.getLogger(name).removeHandler(records)
            found.append((records.records, latents(pipe)))
            pipe.unload_lora_weights()
    return found


PAIR = {"lora_A": torch.ones(2, 32), "lora_B": torch.ones(32, 2)}
WRONG: dict[str, tuple[State, list[str]]] = {
    "a module that is not there": (
        {**lora(1), **{f"transformer.blocks.0.attn1.to_x.{s}.weight": t for s, t in PAIR.items()}},
        [f"transformer.blocks.0.attn1.to_x.{s}.weight" for s in PAIR],
    ),
    "half a pair": (
        {**lora(1), "transformer.blocks.0.attn1.to_k.lora_A.weight": PAIR["lora_A"]},
        ["transformer.blocks.0.attn1.to_k.lora_A.weight"],
    ),
    "no LoRA key": ({**lora(1), "transformer.foo": torch.ones(2)}, ["transformer.foo"]),
    "another component": (
        {**lora(1), "text_encoder.layers.0.q.lora_A.weight": torch.ones(2, 2)},
        ["text_encoder.layers.0.q.lora_A.weight"],
    ),
    "Wan's layout, a key that diffusers does not know": (
        {**original(), "diffusion_model.blocks.0.self_attn.zz.lora_A.weight": PAIR["lora_A"]},
        ["diffusion_model.blocks.0.self_attn.zz.lora_A.weight"],
    ),
    "Wan's layout, a key that diffusers drops": (
        {**original(), "diffusion_model.blocks.0.norm3.diff": torch.ones(32)},
        ["diffusion_model.blocks.0.norm3.diff"],
    ),
    "musubi's layout": (
        {
            **original(alpha=2.0, down="lora_down", prefix="lora_unet_"),
            "lora_unet_blocks_0_zz.lora_down.weight": torch.ones(2, 2),
        },
        ["lora_unet_blocks_0_zz.lora_down.weight"],
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_b11_a_wrong_key_is_warned_of_with_key_and_count(ranks, what):
    """B11, req 35: the rest is in force, as if the key were not there; one line, on rank 0 alone."""
    state, unmatched = WRONG[what]
    right = {key: value for key, value in state.items() if key not in unmatched}
    count = sum(not key.endswith(".alpha") for key in right)
    by_rank = ranks(2).run(logged, [[state], [right]])
    ((told, result), (told_right, expected)), ((silent, other), _) = by_rank
    ((level, text),) = told
    assert level == "WARNING"
    assert text == (
        f"lora from a dict: {count} keys matched in transformer, {len(unmatched)} unmatched, which "
        f"have no effect: {', '.join(map(repr, unmatched))}"
    )
    assert silent == []
    assert told_right == [("INFO", f"lora from a dict: {count} keys matched in transformer, 0 unmatched")]
    assert np.array_equal(result, expected)
    assert np.array_equal(result, other)


def test_several_are_loaded_without_a_false_word(ranks):
    """Req 35: diffusers takes the first adapter's keys for missing ones when a second comes; we count."""
    ((told, _),), _ = ranks(2).run(logged, [[lora(1), lora(2, layers=LAYERS[:1])]])
    assert [text.split(":")[1] for _, text in told] == [
        f" {n} keys matched in transformer, 0 unmatched" for n in (8, 2)
    ]


def refused(states: list[list[State]]) -> list[str]:
    """The errors of loads that must not work, state by rank; the pipeline afterwards is as before."""
    pipeline = tiny.build("t2v")
    texts = []
    with ParallelPipeline(pipeline, "ulysses2", timeout_s=20) as pipe:
        base = latents(pipe)
        for by_rank in states:
            texts.append(error_of(pipe.load_lora_weights, by_rank[rank()], adapter_name="x"))
            assert np.array_equal(latents(pipe), base)
            assert not any("lora" in name for name, _ in pipeline.transformer.named_parameters())
        pipe.load_lora_weights(lora(1), adapter_name="kept")
        pipe.set_adapters("kept", 0.3)
        kept = latents(pipe)
        for by_rank in states:
            text = error_of(pipe.load_lora_weights, by_rank[rank()], adapter_name="x")
            texts.append("same" if text[:40] == texts.pop(0)[:40] != "" else text)
            assert np.array_equal(latents(pipe), kept)
            assert pipe.get_list_adapters() == {"transformer": ["kept"]}
    return texts


def errors(states: list[list[State]]) -> list[str]:
    with ParallelPipeline(tiny.build("t2v"), "ulysses2", timeout_s=20) as pipe:
        return [error_of(pipe.load_lora_weights, by_rank[rank()]) for by_rank in states]


def test_b11_no_match_or_unlike_files_are_errors_on_all_ranks(ranks):
    """B11, req 25, 35: a file for another model; one that does not fit; another file on one rank."""
    foreign = {key.replace("blocks", "layers").replace("proj_out", "out"): v for key, v in lora(1).items()}
    bare = {key.removeprefix("transformer."): value for key, value in lora(1).items()}
    narrow = {**lora(1), "transformer.blocks.0.attn1.to_q.lora_A.weight": torch.ones(2, 31)}
    states = [[foreign] * 2, [bare] * 2, [narrow] * 2, [lora(1), lora(2)], [lora(1), foreign]]
    assert ranks(2).run(refused, states, timeout_s=100) == [["same"] * len(states)] * 2
    for none, unprefixed, shape, unlike, one_foreign in ranks(2).run(errors, states, timeout_s=60):
        assert none.startswith(
            "ValueError: lora from a dict: none of its 8 keys matches a module of transformer; its keys are "
            "'transformer.layers.0.attn1.to_q.lora_A.weight', "
        )
        assert none.endswith(" and 5 more; it is for another model")
        assert "'blocks.0.attn1.to_q.lora_A.weight'" in unprefixed
        assert shape.startswith(
            "ValueError: lora from a dict does not fit WanPipeline: RuntimeError: size mism"
        )
        assert "blocks.0.attn1.to_q" in shape
        told = "ValueError: the LoRA that was loaded differs over ranks: rank 0 has ({'transformer': ["
        assert unlike.startswith(f"{told}'default_0']}}, '8 keys matched', [], '")
        assert one_foreign.startswith(told)
        assert 'rank 1 has "ValueError: lora from a dict: none of its 8 keys' in one_foreign


def unlike_adapters(change: Callable[[Any], None]) -> str:
    """The error of a call after one rank alone has changed its adapters."""
    with ParallelPipeline(tiny.build("t2v"), "ulysses2", timeout_s=20) as pipe:
        pipe.load_lora_weights(lora(1), adapter_name="one")
        latents(pipe)
        if rank() == 1:
            change(pipe)
        return error_of(latents, pipe)


def set_strength(pipe: Any) -> None:
    pipe.set_adapters("one", 0.5)


def disable(pipe: Any) -> None:
    pipe.disable_lora()


def fuse(pipe: Any) -> None:
    pipe.fuse_lora()


def unload(pipe: Any) -> None:
    pipe.unload_lora_weights()


def load_behind(pipe: Any) -> None:
    with warnings.catch_warnings(action="ignore"):  # of peft's, on the second adapter
        pipe.pipeline.load_lora_weights(lora(2), adapter_name="two")


@pytest.mark.parametrize("change", [set_strength, disable, fuse, unload, load_behind])
def test_adapters_changed_on_one_rank_are_an_error_on_all(ranks, change):
    """Req 25, 35: strength, switch, fusing, unloading, loading past the wrapper: seen at the next call."""
    for text in ranks(2).run(unlike_adapters, change, timeout_s=60):
        assert text.startswith("ValueError: the fingerprint of the weights differs over ranks: rank 0 has ")


@pytest.mark.parametrize(
    ("text", "path", "scale", "part"),
    [
        ("a.safetensors", "a.safetensors", 1.0, None),
        ("a.safetensors:0.8", "a.safetensors", 0.8, None),
        ("dir/a.safetensors:-1", "dir/a.safetensors", -1.0, None),
        ("dir:2/a.safetensors", "dir:2/a.safetensors", 1.0, None),
        ("dir:2/a.safetensors:1e-1", "dir:2/a.safetensors", 0.1, None),
        ("C:\\loras\\a.safetensors", "C:\\loras\\a.safetensors", 1.0, None),
        ("C:a.safetensors:0", "C:a.safetensors", 0.0, None),
        ("style:v2.SafeTensors", "style:v2.SafeTensors", 1.0, None),
        ("transformer_2=low.safetensors:0.5", "low.safetensors", 0.5, "transformer_2"),
        ("transformer=high.safetensors", "high.safetensors", 1.0, "transformer"),
        ("a=b.safetensors", "a=b.safetensors", 1.0, None),
    ],
)
def test_the_text_of_a_file_a_strength_and_an_expert(text, path, scale, part):
    """A colon belongs to the path unless a number follows it."""
    assert parse_lora(text) == LoraFile(path=Path(path), scale=scale, part=part)


@pytest.mark.parametrize("text", ["a.safetensors:", "a.safetensors:strong", "a:nan", "a:inf", ":0.5", ""])
def test_a_strength_that_is_no_number_is_refused(text):
    """Req 40: one sentence with what was given and how to write it."""
    assert error_of(parse_lora, text).startswith(f"ValueError: lora {text!r} was given; ")


def test_files_are_checked_before_weights_are_read(tmp_path):
    """Req 40: not there, a folder, another kind of file, cut short, empty, no LoRA: one sentence each."""
    good = tmp_path / "good.safetensors"
    save_file(lora(1), good)
    whole, cut, text = (
        tmp_path / "whole.safetensors",
        tmp_path / "cut.safetensors",
        tmp_path / "a.safetensors",
    )
    save_file({"blocks.0.weight": torch.ones(2)}, whole)
    cut.write_bytes(good.read_bytes()[:-10])
    text.write_text("<html>not found</html>")
    empty = tmp_path / "empty.safetensors"
    save_file({}, empty)
    check_file(good)
    for path, said in (
        (tmp_path / "none.safetensors", "does not exist here; check the path"),
        (tmp_path, "is a folder; name the .safetensors file in it"),
        (text, "is not a safetensors file ("),
        (cut, "is not a safetensors file ("),
        (whole, "holds no LoRA weights: its first key is 'blocks.0.weight'; check the file"),
        (empty, "holds no LoRA weights: it holds no keys; check the file"),
    ):
        assert error_of(check_file, path).startswith(f"ValueError: lora {str(path)!r} {said}")


FOLDERS = ["wan22-t2v", "flux", "sd15", "z-image"]


@pytest.mark.parametrize("family", [*FOLDERS, "original"])
def test_keys_are_checked_against_a_folders_configs(tmp_path, family):
    """Of each kind of folder: a LoRA of its own model passes, also for one expert; another model's does not.

    No weights are there to be read: the files hold none.
    """
    if family == "original":
        pipeline = originals.pipeline("t2v", experts=2)
        originals.write_original(pipeline, "t2v", tmp_path / "model")
    else:
        pipeline = families.tiny.build(family)
        pipeline.save_pretrained(tmp_path / "model")
        for file in (tmp_path / "model").rglob("*.safetensors"):
            file.write_bytes(b"")
    kind = type(pipeline)
    models = empty_models(tmp_path / "model", kind._lora_loadable_modules)
    assert models
    assert all(parameter.is_meta for model in models.values() for parameter in model.parameters())
    name, model = next(iter(families.transformers_of(pipeline).items()))
    own, other = tmp_path / "own.safetensors", tmp_path / "other.safetensors"
    save_file(families.lora_for(name, model), own)
    save_file({f"{name}.layer.lora_{half}.weight": torch.ones(2, 2) for half in "AB"}, other)
    check_fits(kind, models, [LoraFile(path=own)])
    text = error_of(check_fits, kind, models, [LoraFile(path=own), LoraFile(path=other)])
    assert text.startswith(f"ValueError: lora {other}: none of its 2 keys matches a module of ")
    expert = error_of(check_fits, kind, models, [LoraFile(path=own, part="transformer_2")])
    assert expert.startswith(
        "" if "transformer_2" in models else f"ValueError: lora {str(own)!r} is for trans"
    )
    assert bool(expert) == ("transformer_2" not in models)


def through_load(paths: list[str]) -> list[str]:
    with ParallelPipeline(tiny.build("t2v"), timeout_s=20) as pipe:
        found = [error_of(pipe.load_lora_weights, path) for path in paths[:1]]
        low = [LoraFile(path=Path(paths[1]), part="transformer_2")]
        found.append(error_of(load_loras, pipe.pipeline, low, pipe.world))
        names = load_loras(pipe.pipeline, [LoraFile(path=Path(p)) for p in (paths[1], paths[1])], pipe.world)
        found += [str(names), str(pipe.get_list_adapters())]
    with ParallelPipeline(tiny.build("low_noise_only"), timeout_s=20) as pipe:
        return [*found, error_of(pipe.load_lora_weights, lora(1), load_into_transformer_2=True)]


def test_files_that_cannot_be_loaded_are_named(ranks, tmp_path):
    """Req 40: through the wrapper too; an expert that is not there; one file twice has two names."""
    path = tmp_path / "my style.safetensors"
    save_file(lora(1), path)
    paths = [str(tmp_path / "none.safetensors"), str(path)]
    for missing, no_such, names, listed, lone in ranks(2).run(through_load, paths, timeout_s=60):
        assert missing == f"ValueError: lora {paths[0]!r} does not exist here; check the path"
        assert no_such == (
            f"ValueError: lora {paths[1]!r} is for transformer_2, which this WanPipeline has not; it has "
            "transformer; leave the part out"
        )
        assert names == "['my_style', 'my_style_2']"
        assert listed == "{'transformer': ['my_style', 'my_style_2']}"
        assert lone.startswith("ValueError: this WanPipeline has transformer_2 and no transformer; ")


def on_i2v() -> np.ndarray:
    with ParallelPipeline(tiny.build("i2v"), "ulysses2") as pipe:
        pipe.load_lora_weights(lora(4, layers=("blocks.0.attn2.to_k", "blocks.1.attn1.to_q")))
        return latents(pipe, "i2v")


def test_a_text_to_video_file_serves_image_to_video(ranks):
    """Req 35: diffusers adds zeros for the image's projections; the rest is exact."""
    state = lora(4, layers=("blocks.0.attn2.to_k", "blocks.1.attn1.to_q"))
    want = merged((state, 1.0), kind="i2v")
    assert np.abs(want - merged(kind="i2v")).max() > 0.01
    for result in ranks(2).run(on_i2v):
        assert np.abs(result - want).max() <= TOLERANCE


def load_and_unload() -> list[int]:
    """Live tensors after each of some rounds."""
    found = []
    with ParallelPipeline(tiny.build("t2v")) as pipe:
        for _ in range(3):
            pipe.load_lora_weights(lora(1))
            latents(pipe, num_inference_steps=1)
            pipe.unload_lora_weights()
            gc.collect()
            found.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    return found


def test_b45_loading_and_unloading_again_keeps_nothing(ranks):
    """B45: the count of live tensors is constant over rounds of load and unload."""
    for _, second, third in ranks(2).run(load_and_unload, timeout_s=60):
        assert second == third
