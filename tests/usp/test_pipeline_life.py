"""ParallelPipeline leaves no trace, refuses what it cannot do on all ranks alike, and says why."""

import io
import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import DDPMPipeline, DDPMScheduler, FlowMatchEulerDiscreteScheduler, UNet2DModel
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from torch.overrides import _get_current_function_mode_stack

from tests import tiny
from tests.runtime.processes import fork_ranks, mark, wait_for_marks
from tests.usp.in_ranks import SEED, alone, error_of, hooks, rank, seeded
from usp.config import ParallelConfig
from usp.pipeline import ParallelPipeline

SHORT = {"tokens": (1, 1, 5), "guidance_scale": 1.0, "num_inference_steps": 2}
TOLERANCE = 1e-5  # two or three ranks against one, see test_pipeline.py


def short(pipe: Any, **changes: Any) -> np.ndarray:
    """The latents of a short call."""
    return np.asarray(pipe(**tiny.call("t2v", **{**SHORT, **changes}), seed=SEED).frames)


def close_and_look(layout: str) -> dict[str, Any]:
    """A pipeline before, inside and after a ParallelPipeline."""
    pipeline = tiny.build("two_experts")
    bar = {"disable": True, "desc": "mine"}
    pipeline.set_progress_bar_config(**bar)
    before = hooks(pipeline.transformer) + hooks(pipeline.transformer_2)
    plain = pipeline(**tiny.call("two_experts"), generator=seeded(SEED)).frames
    handles = len(dist.distributed_c10d._world.pg_map)
    pipe = ParallelPipeline(pipeline, layout)
    short(pipe)
    inside = hooks(pipeline.transformer) + hooks(pipeline.transformer_2)
    pipe.close()
    pipe.close()
    after = pipeline(**tiny.call("two_experts"), generator=seeded(SEED)).frames
    return {
        "hooks while it is open": inside > before,
        "hooks gone": hooks(pipeline.transformer) + hooks(pipeline.transformer_2) == before,
        "same bits": torch.equal(plain, after),
        "progress bar": pipeline._progress_bar_config == bar,
        "caller's group": dist.is_initialized() and len(dist.distributed_c10d._world.pg_map) == handles,
        "refuses": error_of(short, pipe),
        "repr": repr(pipe),
    }


@pytest.mark.parametrize(("size", "layout"), [(1, "auto"), (2, "ring2"), (4, "ulysses2 gather_kv2")])
def test_close_gives_the_pipeline_back_as_it_was(ranks, size, layout):
    """B69, req 27, 39: hooks off, the same bits, the progress bar; the caller's group stays, ours go."""
    for found in ranks(size).run(close_and_look, layout):
        assert found.pop("refuses") == (
            "RuntimeError: this ParallelPipeline is closed; make a new one around the pipeline"
        )
        assert found.pop("repr") == "ParallelPipeline(WanPipeline, closed)"
        assert all(found.values()), found


def leave_by_an_error() -> bool:
    pipeline = tiny.build("t2v")
    before = hooks(pipeline.transformer)
    try:
        with ParallelPipeline(pipeline) as pipe:
            short(pipe)
            raise KeyError("the user's own")
    except KeyError:
        return hooks(pipeline.transformer) == before


def test_leaving_by_an_error_closes_too(ranks):
    """Req 27: an error in the body of `with` passes through, and the hooks come off."""
    assert ranks(2).run(leave_by_an_error) == [True, True]


def several_pipelines() -> list[bool]:
    """Two at once by different strategies, a third not wrapped at all, then a second wrap of the first."""
    one, two, bystander = tiny.build("t2v"), tiny.build("two_experts"), tiny.build("t2v")
    plain = bystander(**tiny.call("t2v", **SHORT), generator=seeded(SEED)).frames.numpy()
    checks = []
    with ParallelPipeline(one, "ulysses2") as first, ParallelPipeline(two, "ring2") as second:
        a = short(first)
        if rank() == 0:  # were it seen by either, rank 0 would wait here for rank 1
            lone = bystander(**tiny.call("t2v", **SHORT), generator=seeded(SEED)).frames.numpy()
            checks.append(np.array_equal(lone, plain))
        b = short(second)
        checks += [np.array_equal(a, short(first)), np.array_equal(b, short(second))]
        second.close()
        checks.append(np.array_equal(a, short(first)))
    with ParallelPipeline(one, "gather_kv2") as again:
        checks += [np.abs(short(again) - plain).max() <= TOLERANCE, np.abs(a - plain).max() <= TOLERANCE]
    return checks


def test_pipelines_in_one_process_do_not_see_each_other(ranks):
    """Two by unlike strategies, in turns; one closes first; a bystander runs on one rank; wrapped anew."""
    for checks in ranks(2).run(several_pipelines, timeout_s=60):
        assert all(checks), checks


def wrap_twice(shared: str) -> tuple[str, bool]:
    first = tiny.build("t2v")
    second = first if shared == "pipeline" else tiny.build("t2v")
    second.register_modules(transformer=first.transformer)
    with ParallelPipeline(first) as pipe:
        text = error_of(ParallelPipeline, pipe if shared == "wrapper" else second)
        want = alone("t2v", SHORT)
        return text, np.abs(short(pipe) - want).max() <= TOLERANCE


@pytest.mark.parametrize("shared", ["pipeline", "transformer", "wrapper"])
def test_a_transformer_is_spread_once(ranks, shared):
    """Cut twice, a transformer would give noise: the second wrapper is refused and the first still works."""
    for text, works in ranks(2).run(wrap_twice, shared, timeout_s=60):
        assert text.startswith("ValueError: ")
        assert "transformer" in text
        assert "already" in text
        assert works


def repeated_calls() -> list[bool]:
    """A call after others, longer, shorter and failed, equals the first of a fresh pipeline."""
    with ParallelPipeline(tiny.build("t2v")) as fresh:
        want = short(fresh)
    with ParallelPipeline(tiny.build("t2v")) as pipe:
        pipe(**tiny.call("t2v", tokens=(2, 1, 3)), seed=1)
        failed = error_of(pipe, **tiny.call("t2v", height=20), seed=1)
        assert failed == "ValueError: `height` and `width` have to be divisible by 16 but are 20 and 112."
        rest = tiny.call("t2v", **SHORT)
        by_position = pipe(rest.pop("prompt"), rest.pop("negative_prompt"), **rest, seed=SEED).frames.numpy()
        return [np.array_equal(want, got) for got in (short(pipe), by_position, short(pipe))]


def test_call_n_equals_a_fresh_pipelines_first(ranks):
    """Req 27: neither earlier calls nor one that failed before its first step change a bit of the next."""
    assert ranks(2).run(repeated_calls) == [[True] * 3] * 2


class Brighten(PipelineCallback):
    """Adds to the latents after each step."""

    @property
    def tensor_inputs(self) -> list[str]:
        return ["latents", "prompt_embeds"]

    def callback_fn(self, pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        tensors["prompt_embeds"] = tensors["prompt_embeds"] * 0.5
        return {**tensors, "latents": tensors["latents"] + step + 1}


def stop_after_one(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """A callback that ends the loop early."""
    pipeline._interrupt = True
    return {"latents": tensors["latents"] * 2}


def halve(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """A callback that asks for more than the latents."""
    return {"latents": tensors["latents"] / 2, "prompt_embeds": tensors["prompt_embeds"] / 2}


CALLBACKS: tuple[dict[str, Any], ...] = (
    {"callback_on_step_end": Brighten()},
    {"callback_on_step_end": MultiPipelineCallbacks([Brighten(), Brighten()])},
    {"callback_on_step_end": halve, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]},
    {"callback_on_step_end": stop_after_one},
)


def with_callbacks() -> list[tuple[np.ndarray, int]]:
    found = []
    with ParallelPipeline(tiny.build("t2v")) as pipe:
        for given in CALLBACKS:
            found.append((short(pipe, **given), pipe.step))
    return found


def test_callbacks_run_and_may_change_the_latents(ranks):
    """Req 39: a function, a PipelineCallback, several of them; one that interrupts stops all ranks."""
    want = [alone("t2v", {**SHORT, **given}) for given in CALLBACKS]
    assert np.abs(want[0] - want[1]).max() > 1, "the callbacks are meant to matter"
    for found in ranks(2).run(with_callbacks):
        assert [step for _, step in found] == [2, 2, 2, 1]
        for (latents, _), expected in zip(found, want, strict=True):
            assert np.abs(latents - expected).max() <= TOLERANCE * 4  # the last callback doubles them


def fail_between_steps() -> tuple[str, str, bool]:
    def broken(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        raise OSError("disk full")

    pipeline = tiny.build("t2v")
    with ParallelPipeline(pipeline) as pipe:
        first = error_of(short, pipe, callback_on_step_end=broken)
        second = error_of(short, pipe)
    with ParallelPipeline(pipeline) as pipe:
        return first, second, np.abs(short(pipe) - alone("t2v", SHORT)).max() <= TOLERANCE


def test_b07_after_a_call_that_failed_between_steps_no_further_call_is_taken(ranks):
    """B07, req 25: the error passes through; the next call is refused with it; a new wrapper works."""
    for first, second, works in ranks(2).run(fail_between_steps):
        assert first == "OSError: disk full"
        assert second == (
            "RuntimeError: an earlier call failed (OSError after step 1), so the ranks may be out of step; "
            "close() this ParallelPipeline and make a new one"
        )
        assert works


def fail_in_a_branch(folder: Path) -> None:
    """Rank 1's guidance branch fails in step 2; then what is left is tried, and a new wrapper."""
    pipeline, forwards = tiny.build("t2v"), []

    def broken(module: Any, args: Any) -> None:
        forwards.append(1)
        if len(forwards) == 2:
            raise MemoryError("no room")

    pipe = ParallelPipeline(pipeline, "cfg2", timeout_s=2)
    here = pipe.world.rank
    if here == 1:
        handle = pipeline.transformer.blocks[1].register_forward_pre_hook(broken)
    start = time.monotonic()
    first = error_of(pipe, **tiny.call("t2v"), seed=SEED)
    took = time.monotonic() - start
    mark(folder, here)
    wait_for_marks(folder, 2)  # rank 1 has not gone: rank 0 must find out without that
    second = error_of(pipe, **tiny.call("t2v"), seed=SEED)
    pipe.close()
    if here == 1:
        handle.remove()
    with ParallelPipeline(pipeline, "cfg2") as again:
        far = np.abs(np.asarray(again(**tiny.call("t2v"), seed=SEED).frames) - alone("t2v", {})).max()
    print(json.dumps({"first": first, "took": took, "second": second, "far": float(far)}))


def test_b07_a_branch_that_fails_on_one_rank_is_an_error_on_all_in_time(tmp_path):
    """Without `ending_together` the other rank waits for the branch as long as a collective may; then
    neither takes a further call, and after `close()` a new wrapper works."""
    ends = fork_ranks(2, fail_in_a_branch, tmp_path, tmp_path)
    assert [end.code for end in ends] == [0, 0], ends
    zero, one = (json.loads(end.text.splitlines()[-1]) for end in ends)
    assert one["first"] == "MemoryError: no room"
    assert re.search(r"^RuntimeError: .*[Tt]imed out", zero["first"])
    assert zero["took"] < 2 + 8  # the limit, and a busy machine
    for found, kind in ((zero, "RuntimeError"), (one, "MemoryError")):
        assert found["second"] == (
            f"RuntimeError: an earlier call failed ({kind} after step 1), so the ranks may be out of step; "
            "close() this ParallelPipeline and make a new one"
        )
        assert found["far"] <= TOLERANCE


def interrupt_a_call() -> tuple[str, int, str, bool]:
    """Ctrl-C on all ranks while attention runs; then a call of a bystander on rank 0 alone."""

    def stop(module: Any, args: Any) -> None:
        raise KeyboardInterrupt("Ctrl-C")

    pipeline = tiny.build("t2v")
    with ParallelPipeline(pipeline, "ulysses2") as pipe:
        handle = pipeline.transformer.blocks[0].attn1.to_out[0].register_forward_pre_hook(stop)
        try:
            short(pipe)
        except KeyboardInterrupt as error:
            came = str(error)
        handle.remove()
        left = len(_get_current_function_mode_stack())
        lone = rank() == 1 or np.isfinite(alone("t2v", SHORT)).all()
        return came, left, error_of(short, pipe), bool(lone)


def test_after_ctrl_c_other_pipelines_are_not_caught(ranks):
    """Req 27: Ctrl-C in the middle of attention passes through and redirects nobody else's attention."""
    for came, left, refused, lone in ranks(2).run(interrupt_a_call, timeout_s=60):
        assert (came, left, lone) == ("Ctrl-C", 0, True)
        assert refused.startswith("RuntimeError: an earlier call failed (KeyboardInterrupt after step 0)")


def progress_bar() -> tuple[list[Any], dict[str, Any]]:
    """Whether the bar is off during a call after the user set it up through the wrapper; its set-up after."""
    pipeline = tiny.t2v()
    seen = []

    def look(inner: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(bool(inner._progress_bar_config.get("disable")))
        return tensors

    with ParallelPipeline(pipeline) as pipe:
        pipe.set_progress_bar_config(desc="mine", file=io.StringIO())
        short(pipe, callback_on_step_end=look)
    return seen, {name: value for name, value in pipeline._progress_bar_config.items() if name != "file"}


def test_b37_only_rank_0_shows_a_bar_however_it_is_set_up(ranks):
    """B37, req 38, 40: the user's set-up through the wrapper lasts, and only rank 0's bar is shown."""
    for here, (seen, after) in enumerate(ranks(2).run(progress_bar)):
        assert seen == [here > 0] * 2
        assert after == {"desc": "mine"}


def attributes() -> list[bool]:
    """The pipeline's attributes through the wrapper: read, set during a call, and set once closed."""
    pipeline = tiny.build("t2v")
    with ParallelPipeline(pipeline) as pipe:

        def stop(inner: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            pipe._interrupt = True
            return tensors

        short(pipe, callback_on_step_end=stop)
        checks = [pipe.step == 1, pipe.guidance_scale == 1.0, pipe.vae is pipeline.vae]
        checks.append(
            error_of(lambda: pipe.nothing).startswith("AttributeError: 'WanPipeline' object has no")
        )
    other = tiny.transformer(seed=9)
    pipe.transformer = other
    return [*checks, pipeline.transformer is other]


def test_attributes_are_the_pipelines_own(ranks):
    """Req 39, 40: a private one too (`_interrupt` stops the loop); once closed the transformer may be set."""
    for checks in ranks(2).run(attributes):
        assert checks == [True] * 5


def one_module_twice() -> np.ndarray:
    pipeline = tiny.build("two_experts")
    pipeline.register_modules(transformer_2=pipeline.transformer)
    with ParallelPipeline(pipeline, "ulysses2") as pipe:
        return short(pipe)


def test_one_module_under_two_names_is_cut_once(ranks):
    """B56: both experts may be the same object; its tokens are cut once, not twice."""
    pipeline = tiny.build("two_experts")
    pipeline.register_modules(transformer_2=pipeline.transformer)
    want = alone("t2v", SHORT, pipeline=pipeline)
    for result in ranks(2).run(one_module_twice):
        assert np.abs(result - want).max() <= TOLERANCE


def bad_calls() -> list[str]:
    with ParallelPipeline(tiny.build("t2v")) as pipe:
        texts = [error_of(pipe, **tiny.call("t2v"), num_frame=5), error_of(pipe, 1, 2, prompt="a")]
        other = tiny.transformer(seed=9)
        texts.append(error_of(setattr, pipe, "transformer", other))
        texts.append(error_of(setattr, pipe, "transformer", None))
        short(pipe)
        kept = pipe.pipeline.transformer
        pipe.pipeline.transformer = other
        texts.append(error_of(short, pipe))
        pipe.pipeline.transformer = kept
        short(pipe)
    return texts


@pytest.mark.parametrize("size", [1, 2])
def test_wrong_arguments_and_replaced_transformers_are_named(ranks, size):
    """Req 39, 40: an unknown argument by name; a transformer replaced behind our back; then all is well."""
    for unknown, doubled, replaced, removed, behind in ranks(size).run(bad_calls):
        assert unknown.startswith(
            "ValueError: WanPipeline: got an unexpected keyword argument 'num_frame'; its call takes ("
        )
        assert "num_frames" in unknown
        assert doubled.startswith("ValueError: WanPipeline: multiple values for argument 'prompt'")
        for text in (replaced, removed):
            assert text == (
                "ValueError: transformer is spread over ranks; close() this ParallelPipeline before you "
                "replace it"
            )
        assert behind == (
            "ValueError: transformer was replaced after it was spread over ranks; make a new ParallelPipeline"
        )


def unlike_calls(by_rank: list[dict[str, Any]]) -> str:
    with ParallelPipeline(tiny.build("t2v"), timeout_s=20) as pipe:
        return error_of(short, pipe, **by_rank[rank()])


PAINTED = [tiny.picture(), tiny.picture().rotate(180)]
UNLIKE = {
    "prompt": ([{"prompt": "red circle"}, {"prompt": "blue circle"}], ("'red circle'", "'blue circle'")),
    "steps": ([{"num_inference_steps": 2}, {"num_inference_steps": 3}], ("2", "3")),
    "size": ([{"width": 32}, {"width": 48}], ("32", "48")),
    "guidance": ([{"guidance_scale": 1.0}, {"guidance_scale": 5.0}], ("1.0", "5.0")),
    "argument": ([{"negative_prompt": "blue"}, {}], ("'negative_prompt'",)),
    "shape": (
        [{"latents": torch.zeros(1, 4, 1, 2, n)} for n in (10, 12)],
        ("(1, 4, 1, 2, 10)", "(1, 4, 1, 2, 12)"),
    ),
    "latents": ([{"latents": torch.full((1, 4, 1, 2, 10), n)} for n in (0.1, 0.2)], ("latents",)),
    "embeds": (
        [{"prompt": None, "prompt_embeds": torch.full((1, 5, 16), n)} for n in (0.1, 0.2)],
        ("prompt_embeds",),
    ),
    "array": ([{"attention_kwargs": {"a": np.full(3, n)}} for n in (0.1, 0.2)], ("attention_kwargs",)),
    "picture": ([{"attention_kwargs": {"a": p}} for p in PAINTED], ("attention_kwargs",)),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_ranks_that_call_it_unalike_are_refused_together(ranks, what):
    """B04, req 25: another prompt, size or *value* of a tensor on one rank: an error on all."""
    by_rank, shown = UNLIKE[what]
    for text in ranks(2).run(unlike_calls, by_rank, timeout_s=60):
        assert text.startswith("ValueError: the call's arguments ")
        assert "over ranks: rank 0 has " in text
        for part in shown:
            assert part in text
        assert len(text) < 3000, "a tensor is named by shape and digest, not printed"


def unlike_pipelines(what: str) -> str:
    """Make a ParallelPipeline of something that differs on rank 1."""
    other = rank() == 1
    pipeline = tiny.t2v(seed=9 if what == "weights" and other else 1)
    config: Any = "ulysses2"
    if what == "layout" and other:
        config = "ring2"
    elif what == "transport":
        config = ParallelConfig(ulysses_degree=2, transport="p2p" if other else "all_to_all")
    elif what == "scheduler" and other:
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=9.0)
    elif what == "one weight" and other:
        with torch.no_grad():
            pipeline.transformer.blocks[1].ffn.net[2].weight[5, 5] += 1e-4
    elif what == "expert" and other:
        pipeline.register_modules(transformer_2=tiny.transformer())
    kernel = "plain" if what == "kernel" and other else "auto"

    def make_and_call() -> None:
        with ParallelPipeline(pipeline, config, kernel=kernel, timeout_s=20) as pipe:
            short(pipe)

    return error_of(make_and_call)


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("weights", ("the fingerprint of the weights", "transformer")),
        ("one weight", ("the fingerprint of the weights", "transformer")),
        ("expert", ("the fingerprint of the weights", "transformer_2")),
        ("layout", ("the parallel configuration", "ulysses2", "ring2")),
        ("transport", ("the parallel configuration", "all_to_all", "p2p")),
        ("kernel", ("the parallel configuration", "auto", "plain")),
        ("scheduler", ("scheduler", "3.0", "9.0")),
    ],
)
def test_ranks_with_unlike_pipelines_are_refused_together(ranks, what, shown):
    """Req 25: other weights, layouts, kernels or schedulers on one rank spoil it: an error on all."""
    for text in ranks(2).run(unlike_pipelines, what, timeout_s=60):
        assert text.startswith("ValueError: ")
        assert "over ranks: rank 0 has " in text
        for part in shown:
            assert part in text


def one_rank_cannot() -> tuple[str, bool]:
    """The error where rank 1's first block does not tell its arguments, and whether the hooks are gone."""
    pipeline = tiny.build("t2v")
    block, before = pipeline.transformer.blocks[0], hooks(pipeline.transformer)
    if rank() == 1:
        own = block.forward
        block.forward = lambda *args, **kwargs: own(*args, **kwargs)
    return error_of(ParallelPipeline, pipeline, "ulysses2"), hooks(pipeline.transformer) == before


def test_a_model_that_one_rank_cannot_spread_is_refused_by_all(ranks):
    """Req 25: no rank goes on to wait for one that has given up; the first cause is named."""
    (other, clean), (own, clean_too) = ranks(2).run(one_rank_cannot, timeout_s=20)
    assert own.startswith(
        "ValueError: the plan for WanTransformer3DModel splits argument 'hidden_states' of "
    )
    assert other == f"PeerError: rank 1 failed in putting ulysses2 on: {own}"
    assert clean
    assert clean_too


def errors_of_degrees(configs: list[Any]) -> list[str]:
    pipeline = tiny.build("t2v")
    before = hooks(pipeline.transformer)
    texts = [error_of(ParallelPipeline, pipeline, config) for config in configs]
    assert hooks(pipeline.transformer) == before
    return texts


def test_b19_degrees_that_do_not_fit_are_refused_on_every_rank(ranks):
    """B19, req 11: the product, the world and the choices, before any hook and any collective."""
    configs = ["ulysses8", "ulysses2", ParallelConfig(ulysses_degree=3, ring_degree=2), "ulysses2 rings2", ""]
    choices = "'ulysses4', 'ulysses2 ring2', 'ulysses2 gather_kv2', 'ring4', 'gather_kv4'"
    for eight, two, six, word, empty in ranks(4).run(errors_of_degrees, configs):
        assert eight.startswith(
            "ValueError: cfg 1 x ring 1 x gather_kv 1 x ulysses 8 = 8 ranks were asked for; 4 are running;"
        )
        assert f"use one of: {choices}" in eight
        assert two.startswith(
            "ValueError: cfg 1 x ring 1 x gather_kv 1 x ulysses 2 = 2 ranks were asked for; 4 are running;"
        )
        assert six.startswith(
            "ValueError: cfg 1 x ring 2 x gather_kv 1 x ulysses 3 = 6 ranks were asked for; 4 are running;"
        )
        assert word.startswith(
            "ValueError: parallel='ulysses2 rings2': 'rings2' is not an axis and a degree; write 'auto' or"
        )
        assert empty.startswith("ValueError: parallel='' names no axis; write 'auto' or")


def test_a_pipeline_without_a_plan_is_told_which_models_have_one():
    """Req 40: a model that no plan is for is told the classes with plans, and how to add one."""
    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(32,),
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    text = error_of(ParallelPipeline, DDPMPipeline(unet=unet, scheduler=DDPMScheduler()))
    assert text.startswith("ValueError: UNet2DModel has no shard plan; there are plans for ")
    assert "WanTransformer3DModel" in text
    pipeline = tiny.build("low_noise_only")
    pipeline.register_modules(transformer_2=None)
    text = error_of(ParallelPipeline, pipeline)
    assert text.startswith(
        "ValueError: WanPipeline was given; none of its components (vae, text_encoder) is a transformer"
    )
    assert "WanTransformer3DModel" in text


def test_a_kernel_that_is_not_there_is_refused_with_the_usable_ones():
    """B21, req 40: a named kernel is used or refused; "auto" never fails for want of one."""
    pipeline = tiny.build("t2v")
    before = hooks(pipeline.transformer)
    for name, why in (("flash-attn", "is not known"), ("cuda-flash", "runs on cuda only")):
        assert error_of(ParallelPipeline, pipeline, kernel=name) == (
            f"ValueError: kernel={name!r} {why}; this rank's device is cpu; use auto or one of cpu-flash, "
            "plain"
        )
    assert hooks(pipeline.transformer) == before


class Records(logging.Handler):
    """Keeps the records that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def start_up(layout: str, heads: int) -> list[tuple[str, str]]:
    logger, handler = logging.getLogger("usp"), Records()
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        ParallelPipeline(tiny.build("t2v", heads=heads), layout).close()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [(record.levelname, record.getMessage()) for record in handler.records]


def test_b20_the_start_report_tells_what_was_patched(ranks):
    """B06, B20, req 37: modules patched, weights replicated, the layout, the kernel; alike on all ranks."""
    for records in ranks(2).run(start_up, "ring2", 4):
        ((level, text),) = records
        assert level == "INFO"
        assert "WanTransformer3DModel" in text
        assert "weights replicated x2" in text
        assert "4 heads, 2 attention modules over ranks" in text
        assert "ring2" in text
        assert "cpu-flash (auto" in text
        assert "the process group was made by the caller" in text


def test_idle_ulysses_ranks_are_warned_about(ranks):
    """B03, req 40: 2 heads on ulysses 3 leave a rank without attention to compute; one line says so."""
    for records in ranks(3).run(start_up, "ulysses3", 2):
        (warning,) = [text for level, text in records if level == "WARNING"]
        assert warning == (
            "ulysses_degree=3 with 2 heads: 1 ranks have no attention to compute; ring or gather_kv would "
            "use them"
        )


def run_and_exit(folder: Path) -> None:
    """What a user's script does under a launcher, twice."""
    for _ in range(2):
        with ParallelPipeline(tiny.build("t2v"), "ring2") as pipe:
            latents = short(pipe)
            assert dist.is_initialized()
        assert not dist.is_initialized()
    np.save(folder / f"latents-{pipe.world.rank}.npy", latents)
    print(json.dumps({"sent": pipe.sent_bytes, "left": tiny.STEPS}))


def test_b69_a_group_of_our_own_is_ended_and_the_exit_is_silent(tmp_path):
    """B69, req 38, 39: from a launcher's variables to the same latents; rc 0; no noise; twice over."""
    for code, text, _ in fork_ranks(2, run_and_exit, tmp_path, tmp_path):
        assert code == 0, text
        assert json.loads(text) == {"sent": 0, "left": tiny.STEPS}, "no warning, no log line"
    for here in range(2):
        assert np.abs(np.load(tmp_path / f"latents-{here}.npy") - alone("t2v", SHORT)).max() <= TOLERANCE
