"""parallel="auto" of a pipeline: each call gets the layout that suits it, the same on all ranks."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from diffusers import FirstBlockCacheConfig

from runtime.device import Device
from runtime.process_group import connect
from tests import tiny
from tests.usp.in_ranks import SEED, alone, error_of, hooks, rank
from tests.usp.test_planner import DEVICE
from usp.config import ParallelConfig
from usp.pipeline import ParallelPipeline
from usp.planner import Auto

SIZES = pytest.mark.parametrize("size", [1, 2, 3])
CALLS: tuple[dict[str, Any], ...] = (
    {},
    {"guidance_scale": 1.0},
    {"tokens": (1, 1, 3)},
    {"tokens": (2, 3, 5), "guidance_scale": 0.5},
    {},
)


def calls_of_all_kinds() -> tuple[list[tuple[Any, np.ndarray]], int]:
    """The layout and the result of each call; how many hooks stay in the end."""
    plain = tiny.build("t2v")
    found = []
    with ParallelPipeline(plain, "auto") as pipe:
        for changes in CALLS:
            frames = pipe(**tiny.call("t2v", **changes), seed=SEED).frames
            found.append((pipe.parallel, np.asarray(frames)))
    return found, hooks(plain.transformer)


@SIZES
def test_every_call_gets_a_layout_of_its_own(ranks, size):
    """B25: with guidance off the cfg ranks go to the sequence; results are those of one process."""
    every = ranks(size).run(calls_of_all_kinds)
    expected = [alone("t2v", changes) for changes in CALLS]
    layouts = [[config for config, _ in found] for found, _ in every]
    assert all(own == layouts[0] for own in layouts)
    for found, left in every:
        assert left == 0
        for changes, (config, frames), one in zip(CALLS, found, expected, strict=True):
            assert config.world_size == size
            if changes.get("guidance_scale", 3.0) <= 1:
                assert config.sp_degree == size
            assert frames.shape == one.shape
            assert np.abs(frames - one).max() <= 1e-5


def too_small_for_one_call() -> tuple[str, float]:
    """The error where no rank has the memory, and how far the next call is from one process's."""
    with ParallelPipeline(tiny.build("t2v"), "auto") as pipe:
        auto = pipe._auto
        assert auto is not None
        assert auto._machine is not None
        kept, auto._machine = auto._machine, replace(auto._machine, memory_bytes=1000)
        error = error_of(pipe, **tiny.call("t2v"), seed=SEED)
        auto._machine = kept
        frames = np.asarray(pipe(**tiny.call("t2v"), seed=SEED).frames)
        return error, float(np.abs(frames - alone("t2v", {})).max())


def test_a_call_that_fits_no_rank_is_refused_by_all(ranks):
    """Refused before the first forward, with the numbers; the pipeline stays usable."""
    for error, far in ranks(2).run(too_small_for_one_call):
        assert error.startswith("ValueError: parallel='auto' on 2 ranks: no layout can be used; ")
        assert "a rank has 1000 B" in error
        assert far <= 1e-5


def reasons() -> tuple[list[int], list[str], int]:
    """Lines logged by the end of each choice, the lines, and how often the weights were gone through."""
    pipeline, told, counted = tiny.build("t2v"), [], []
    parameters = pipeline.vae.parameters
    pipeline.vae.parameters = lambda: (counted.append(1), parameters())[1]
    auto = Auto(connect(Device("cpu")), pipeline, pipeline.transformer)
    auto._machine = DEVICE  # the same choices on any machine
    handler, logger = logging.Handler(), logging.getLogger("usp.planner.auto")
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    lines = []
    try:
        for guidance in (3.0, 3.0, 1.0, 1.0, 3.0):
            auto.config(tiny.call("t2v", guidance_scale=guidance))
            lines.append(len(told))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return lines, told, len(counted)


def test_a_reason_is_told_when_the_choice_changes(ranks):
    """Five calls, three choices, three lines; the weights are counted once for all calls."""
    for lines, told, counted in ranks(2).run(reasons):
        assert lines == [1, 1, 2, 2, 3]
        assert all(line.startswith("auto: ") for line in told)
        assert told[0].split(":")[1] == told[2].split(":")[1] != told[1].split(":")[1]
        assert counted == 1


def strict_calls() -> tuple[str, ParallelConfig, np.ndarray]:
    """A call that leaves every layout with an idle rank, and then another."""
    with ParallelPipeline(tiny.build("t2v", heads=2), "auto", strict=True) as pipe:
        error = error_of(pipe, **tiny.call("t2v", tokens=(1, 1, 1), guidance_scale=1.0), seed=SEED)
        frames = np.asarray(pipe(**tiny.call("t2v"), seed=SEED).frames)
        return error, pipe.parallel, frames


def test_strict_leaves_no_rank_idle(ranks):
    """One token for three ranks is refused on all before the first forward, and the pipeline stays usable;
    of 2 heads and 2 branches no layout of three is made."""
    one = alone("t2v", {}, pipeline=tiny.build("t2v", heads=2))
    for error, config, frames in ranks(3).run(strict_calls):
        assert error.startswith("ValueError: parallel='auto' on 3 ranks: no layout can be used; ")
        assert " ranks without " in error
        assert config.cfg_degree == config.ulysses_degree == 1
        assert np.abs(frames - one).max() <= 1e-5


def call_and_change(spoil: Callable[[Any], Callable[[], None]], cache: float | None) -> dict[str, Any]:
    """Calls before, while and after a model is spoilt so that another layout cannot be put on."""
    pipeline = tiny.build("t2v")
    before = hooks(pipeline.transformer)
    with ParallelPipeline(pipeline, "auto", cache=cache) as pipe:
        auto = pipe._auto
        assert auto is not None
        auto._machine = DEVICE

        def call(guidance: float) -> str | float:
            """The error, or how far the result is from one process's."""
            changes, far = {"guidance_scale": guidance}, []

            def run() -> None:
                frames = np.asarray(pipe(**tiny.call("t2v", **changes), seed=SEED).frames)
                far.append(float(np.abs(frames - alone("t2v", changes)).max()))

            return error_of(run) or far[0]

        found = {"guided": call(3.0), "first": str(pipe.parallel)}
        heal = spoil(pipeline.transformer)
        found |= {"unguided": call(1.0), "kept": str(pipe.parallel), "guided again": call(3.0)}
        heal()
        found |= {"healed": call(1.0), "last": str(pipe.parallel)}
    return found | {"hooks gone": hooks(pipeline.transformer) == before}


def hide_arguments(model: Any, *, ranks: tuple[int, ...]) -> Callable[[], None]:
    """A first block that does not tell its arguments, on these ranks: it works, but cannot be cut."""
    if rank() not in ranks:
        return lambda: None
    block, own = model.blocks[0], model.blocks[0].forward
    block.forward = lambda *args, **kwargs: own(*args, **kwargs)
    return lambda: delattr(block, "forward")


@pytest.mark.parametrize("spoilt", [(0, 1), (1,)])
def test_a_layout_that_cannot_be_put_on_leaves_the_one_before(ranks, spoilt):
    """On all ranks, also where one alone fails: the error says why, and calls that suit the layout work."""
    for here, found in enumerate(ranks(2).run(call_and_change, partial(hide_arguments, ranks=spoilt), None)):
        assert found["first"] == found["kept"] == "cfg2" != found["last"]
        assert max(found["guided"], found["guided again"], found["healed"]) <= 1e-5
        text = found["unguided"]
        assert text.startswith(f"RuntimeError: this call was to run on {found['last']}, which failed (")
        assert (
            "ValueError: " if here in spoilt else f"PeerError: rank 1 failed in putting {found['last']}"
        ) in text
        assert "splits argument 'hidden_states' of blocks.0, which takes args, kwargs" in text
        assert text.endswith("; cfg2 is on again, for calls that it suits")
        assert found["hooks gone"]


def enable_a_cache(model: Any) -> Callable[[], None]:
    """diffusers' own cache, which no layout of ours goes with."""
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    return model.disable_cache


def test_a_pipeline_that_no_layout_can_be_put_on_says_that_it_is_closed(ranks):
    """Where the layout before cannot be put on either, the error says so, and so does the next call."""
    for found in ranks(2).run(call_and_change, enable_a_cache, 0.1):
        text = found["unguided"]
        assert "has one of diffusers' own enabled already" in text
        assert ", and so did going back to cfg2 (ValueError: a cache was asked for; " in text
        assert text.endswith("); this ParallelPipeline is closed; make a new one around the pipeline")
        closed = "RuntimeError: this ParallelPipeline is closed; make a new one around the pipeline"
        assert found["guided again"] == found["healed"] == closed
        assert found["hooks gone"]
