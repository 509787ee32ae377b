"""Noise is the same bits on every rank and for every number of ranks, wherever the seed comes from."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.usp.in_ranks import SEED, alone, error_of, rank, seeded
from usp.pipeline import ParallelPipeline

SHORT = {"tokens": (1, 1, 5), "guidance_scale": 1.0, "num_inference_steps": 1}


def listened(pipeline: Any) -> list[np.ndarray]:
    """A list that gets the whole latents which enter the transformer at each of its forwards, from now on."""
    seen: list[np.ndarray] = []

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["hidden_states"].numpy().copy())

    pipeline.transformer.register_forward_pre_hook(hook, with_kwargs=True)
    return seen


def noise(seeds: list[int | None]) -> list[tuple[np.ndarray, int]]:
    """For each seed the first latents of a call, and the seed that the report names."""
    pipeline = tiny.build("t2v")
    seen = listened(pipeline)
    found = []
    with ParallelPipeline(pipeline) as pipe:
        for seed in seeds:
            pipe(**tiny.call("t2v", **SHORT), seed=seed)
            assert pipe.report is not None
            found.append((seen.pop(), pipe.report.seed))
    return found


def test_b04_a_seed_gives_the_same_bits_in_any_world(ranks):
    """B04, req 20: seed 7 on 1, 2 and 4 ranks, and a torch.Generator in one process: equal noise."""
    pipeline = tiny.build("t2v")
    seen = listened(pipeline)
    alone("t2v", SHORT, pipeline=pipeline)
    for size in (1, 2, 4):
        for ((found, seed),) in ranks(size).run(noise, [SEED]):
            assert np.array_equal(found, seen[0])
            assert seed == SEED


def test_b04_without_a_seed_rank_0_draws_one_for_all(ranks):
    """B04, req 20: None and -1 give one noise on all ranks, another in each call, that its seed repeats."""
    by_rank = ranks(2).run(noise, [None, None, -1])
    for one, other in zip(*by_rank, strict=True):
        assert np.array_equal(one[0], other[0])
        assert one[1] == other[1] >= 0
    drawn = by_rank[0]
    assert len({seed for _, seed in drawn}) == 3
    assert not np.array_equal(drawn[0][0], drawn[1][0])
    assert not np.array_equal(drawn[1][0], drawn[2][0])
    for (again, _), (first, _) in zip(
        ranks(2).run(noise, [seed for _, seed in drawn])[1], drawn, strict=True
    ):
        assert np.array_equal(again, first)


class Records(logging.Handler):
    """Keeps the texts of the records that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def seeds_logged(seeds: list[int | None]) -> tuple[list[str], list[int]]:
    logger, records = logging.getLogger("usp.randomness"), Records()
    logger.addHandler(records)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        return records.texts, [seed for _, seed in noise(seeds)]
    finally:
        logger.removeHandler(records)
        logger.setLevel(level)


def test_b04_a_drawn_seed_is_logged_as_drawn(ranks):
    """B04, req 37: the log has the seed that was used, and whether it was drawn."""
    texts, (seed, _) = ranks(2).run(seeds_logged, [None, SEED])[0]
    assert texts == [f"seed {seed} (drawn)", f"seed {SEED}"]


def with_generators(seeds: list[int], as_list: bool, worlds_differ: bool) -> tuple[np.ndarray, list[bool]]:
    """A call's latents with the caller's generators; and are these where one process leaves them?"""
    generators = [seeded(s + (rank() if worlds_differ else 0)) for s in seeds]
    prompts = {"prompt": ["red circle"] * len(seeds), "negative_prompt": None}
    with ParallelPipeline(tiny.build("t2v")) as pipe:
        given = generators if as_list else generators[0]
        found = pipe(**tiny.call("t2v", **SHORT, **prompts), generator=given).frames.numpy()
    after = [seeded(s) for s in seeds]
    tiny.build("t2v")(**tiny.call("t2v", **SHORT, **prompts), generator=after if as_list else after[0])
    return found, [torch.equal(g.get_state(), a.get_state()) for g, a in zip(generators, after, strict=True)]


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize(("seeds", "as_list"), [([3], False), ([3, 4], True)])
def test_b41_the_callers_generators_take_rank_0s_state_and_are_advanced(ranks, seeds, as_list, differ):
    """B41, req 39: a CPU generator, or one per item; they end where one process leaves them."""
    want = [
        alone("t2v", {**SHORT, "prompt": "red circle", "negative_prompt": None, "generator": s})
        for s in seeds
    ]
    for size in (1, 2):
        for found, advanced in ranks(size).run(with_generators, seeds, as_list, differ):
            assert np.abs(found - np.concatenate(want)).max() <= 1e-5  # batch 2 against two runs of batch 1
            assert all(advanced)


def with_whole_numbers() -> tuple[np.ndarray, np.ndarray]:
    with ParallelPipeline(tiny.build("t2v")) as pipe:
        one = pipe(**tiny.call("t2v", **SHORT), generator=3).frames.numpy()
        two = pipe(**tiny.call("t2v", **SHORT, num_videos_per_prompt=2), generator=[3, 4]).frames.numpy()
    return one, two


def test_b41_whole_numbers_as_generator_are_seeds(ranks):
    """B41: generator=3 and generator=[3, 4] mean seeds."""
    for one, two in ranks(2).run(with_whole_numbers):
        assert np.abs(one - alone("t2v", {**SHORT, "generator": 3})).max() <= 1e-5  # two ranks against one
        assert (
            np.abs(two - alone("t2v", {**SHORT, "num_videos_per_prompt": 2, "generator": [3, 4]})).max()
            <= 1e-5
        )


def errors_of_seeds(arguments: list[dict[str, Any]]) -> list[str]:
    with ParallelPipeline(tiny.build("t2v")) as pipe:
        texts = [error_of(pipe, **tiny.call("t2v", **SHORT), **given) for given in arguments]
        pipe(**tiny.call("t2v", **SHORT), seed=SEED)  # none of these broke it
    return texts


@pytest.mark.parametrize("size", [1, 2])
def test_seeds_that_make_no_sense_are_refused_with_what_was_given(ranks, size):
    """Req 39, 40: both seed and generator, a seed out of range, a word: a ValueError on every rank."""
    given = [{"seed": 1, "generator": 2}, {"seed": -2}, {"seed": 2**63}, {"seed": True}, {"generator": "7"},
             {"generator": -3}, {"generator": [1, 2**70]}, {"generator": []}]  # fmt: skip
    for texts in ranks(size).run(errors_of_seeds, given):
        assert (
            texts[0]
            == "ValueError: both seed and generator were given; they say the same thing; give one of them"
        )
        for text, value in zip(texts[1:4], ("-2", str(2**63), "True"), strict=True):
            assert text.startswith(
                f"ValueError: seed={value} was given; a seed is a whole number from 0 to {2**63 - 1}"
            )
        assert texts[4].startswith(
            "ValueError: generator='7' was given; it must be a torch.Generator, a seed"
        )
        assert texts[5].startswith("ValueError: seed=-3 was given")
        assert texts[6].startswith(f"ValueError: seed={2**70} was given")
        assert texts[7].startswith("ValueError: ")


def unlike_seeds(by_rank: list[dict[str, Any]]) -> str:
    with ParallelPipeline(tiny.build("t2v"), timeout_s=20) as pipe:
        return error_of(pipe, **tiny.call("t2v", **SHORT), **by_rank[rank()])


@pytest.mark.parametrize(
    "by_rank",
    [
        [{"seed": 1}, {"seed": 2}],
        [{"seed": 1}, {"generator": 1}],
        [{}, {"seed": 1}],
        [{"seed": 1}, {"seed": "x"}],
        [{"generator": 1}, {"generator": [1]}],
    ],
)
def test_ranks_that_give_unlike_seeds_are_refused_together(ranks, by_rank):
    """Req 25: no rank waits for a collective that the other does not enter; both are told both values."""
    for text in ranks(2).run(unlike_seeds, by_rank, timeout_s=60):
        assert text.startswith("ValueError: ")
        assert "differs over ranks: rank 0 has" in text


def draws(seeds: list[int]) -> list[float]:
    """What the default generator gives inside a call with each seed."""
    torch.manual_seed(1000 + rank())
    inside: list[float] = []

    def callback(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        inside.append(torch.rand(()).item())
        return tensors

    with ParallelPipeline(tiny.build("t2v")) as pipe:
        for seed in seeds:
            pipe(**tiny.call("t2v", **SHORT), seed=seed, callback_on_step_end=callback)
    outside = torch.rand(()).item()
    torch.manual_seed(1000 + rank())
    assert outside == torch.rand(()).item(), "the caller's own random state is left alone"
    return inside


def test_requirement_21_draws_without_a_generator_agree(ranks):
    """Req 21: code in the loop draws alike on all ranks from the default generator, whose state stays.

    The seed decides these draws too.
    """
    one, other = ranks(2).run(draws, [SEED, SEED + 1, SEED])
    assert one == other
    assert one[0] != one[1]
    assert one[0] == one[2]
    assert one[:2] == ranks(1).run(draws, [SEED, SEED + 1])[0]
