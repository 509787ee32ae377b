"""parallel="auto" of a pipeline: each call gets the layout that suits it, the same on all ranks."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runtime.device import Device
from runtime.process_group import connect
from tests import tiny
from tests.usp.in_ranks import SEED, alone, error_of, hooks
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
