"""Every degree, engine and spelling is checked where it is written; the message says what would do."""

from dataclasses import FrozenInstanceError
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.usp.in_ranks import STEADY
from usp.config import (
    AXES,
    ENGINES,
    TRANSPORTS,
    ParallelConfig,
    choose_parallel,
    parse_parallel,
    resolve_parallel,
    spellings,
)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("degree", [0, -1, True, 2.0, "2", None])
def test_b19_a_degree_is_a_whole_number_of_ranks(axis, degree):
    """B19: 0, -1, True, 2.0 and words are refused at once, with the axis, the value and what to do."""
    with pytest.raises(ValueError, match=f"^{axis}_degree=") as caught:
        ParallelConfig(**{f"{axis}_degree": degree})
    assert str(caught.value) == (
        f"{axis}_degree={degree!r} was asked for; a degree is a whole number of ranks, 1 or more; "
        f"leave {axis}_degree out to get 1"
    )


@pytest.mark.parametrize(
    ("world", "config"),
    [
        (4, ParallelConfig(ulysses_degree=8)),
        (4, ParallelConfig(ulysses_degree=2)),
        (4, ParallelConfig(cfg_degree=2, ulysses_degree=3)),
        (1, ParallelConfig(ring_degree=2)),
        (6, ParallelConfig(ulysses_degree=2, gather_kv_degree=2)),
    ],
)
def test_b19_the_product_must_be_the_world(world, config):
    """B19, req 11: the message has every axis, the product, the world, and only choices that do fit."""
    with pytest.raises(ValueError, match="ranks were asked for") as caught:
        resolve_parallel(config, world)
    text = str(caught.value)
    axes = " x ".join(f"{axis} {config.degree(axis)}" for axis in AXES)
    needed = config.world_size
    assert text.startswith(f"{axes} = {needed} ranks were asked for; {world} are running; use one of: '")
    assert text.endswith(f", or start {needed} ranks")
    choices = text.split("use one of: ")[1].split(", or start")[0].split(", ")
    for choice in choices:
        assert resolve_parallel(choice.strip("'"), world).world_size == world


def test_axes_that_bring_the_same_keys_are_not_combined():
    """Ring and gather-KV both bring foreign keys to the local queries; the message says which to keep."""
    with pytest.raises(
        ValueError, match=r"^ring_degree=2 with gather_kv_degree=3: both bring the keys of other ranks"
    ):
        ParallelConfig(ring_degree=2, gather_kv_degree=3)


@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "usp"])
def test_external_engines_have_no_gather_kv(engine):
    """Req 40: gather-KV with an engine that lacks it is refused by name, not ignored."""
    with pytest.raises(
        ValueError, match=f"^gather_kv_degree=2 with engine='{engine}': {engine} has Ulysses and ring only"
    ):
        ParallelConfig(gather_kv_degree=2, engine=engine)


@pytest.mark.parametrize(("name", "known"), [("engine", ENGINES), ("transport", TRANSPORTS)])
def test_unknown_words_are_answered_with_the_known_ones(name, known):
    """Req 40: an engine or transport that does not exist is an error that lists those that do."""
    with pytest.raises(ValueError, match=f"^{name}='nccl' is not known; use one of {', '.join(known)}$"):
        ParallelConfig(**{name: "nccl"})


def test_a_config_is_frozen_and_takes_keywords_only():
    """A config that was checked cannot be changed to one that was not."""
    config = ParallelConfig(ulysses_degree=2)
    with pytest.raises(FrozenInstanceError):
        config.ulysses_degree = 0
    with pytest.raises(TypeError):
        ParallelConfig(2)


DEGREES = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES}).filter(
    lambda d: d["ring"] == 1 or d["gather_kv"] == 1
)


@STEADY
@given(degrees=DEGREES, order=st.permutations(AXES))
def test_what_a_config_prints_can_be_typed(degrees, order):
    """parse(str(config)) is the config, words in any order, with '=', '-' and commas as people write."""
    config = ParallelConfig(**{f"{axis}_degree": n for axis, n in degrees.items()})
    assert config.world_size == prod(degrees.values()) == config.cfg_degree * config.sp_degree
    if config.world_size > 1:
        assert parse_parallel(str(config)) == config
    words = [f"{axis.replace('_', '-')}={degrees[axis]}" for axis in order]
    assert parse_parallel(", ".join(words).upper()) == config
    assert resolve_parallel(" ".join(words), config.world_size) == config


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "ulysses2 rings2",
            "parallel='ulysses2 rings2': 'rings2' is not an axis and a degree; write 'auto' or words such as",
        ),
        ("ulysses2 ulysses2", "parallel='ulysses2 ulysses2': 'ulysses2' is given twice;"),
        ("ring", "parallel='ring': 'ring' is not an axis and a degree;"),
        ("4", "parallel='4': '4' is not an axis and a degree;"),
        ("", "parallel='' names no axis;"),
        ("ring-2", "ring_degree=-2 was asked for; a degree is a whole number of ranks"),
        ("ulysses0", "ulysses_degree=0 was asked for; a degree is a whole number of ranks"),
    ],
)
def test_misspelt_layouts_are_answered_with_the_grammar(text, what):
    """B19, req 40: the word that is wrong, and what a right one looks like."""
    with pytest.raises(ValueError, match=r"write 'auto' or words such as|was asked for") as caught:
        parse_parallel(text)
    assert str(caught.value).startswith(what)


@pytest.mark.parametrize("world", range(1, 13))
def test_every_choice_that_a_message_offers_fits(world):
    """Each spelling is distinct, parses and multiplies to the world; each single axis is among them."""
    offered = [text.strip("'") for text in spellings(world)]
    assert len(set(offered)) == len(offered) > 0
    configs = [parse_parallel(text) for text in offered]
    assert all(config.world_size == world for config in configs)
    for axis in ("ulysses", "ring", "gather_kv"):
        assert any(config.degree(axis) == world for config in configs)
    cfg = {config.cfg_degree for config in configs} - {1}
    assert cfg == {degree for degree in (2, 3) if world % degree == 0}, "two and three guidance branches"


def test_auto_is_left_to_the_planner():
    """The word alone, however written, and the command line's default; a wrong transport is still refused."""
    assert resolve_parallel("AUTO ", 4) is None
    assert choose_parallel("auto", None, "auto", 4) is None
    with pytest.raises(ValueError, match=r"^transport='tcp' is not known; use one of auto, all_to_all, p2p$"):
        choose_parallel("auto", None, "tcp", 4)


def test_the_command_lines_words_become_one_config():
    """`--attention` alone gives one axis all ranks, an engine takes degrees; nothing is dropped."""
    assert choose_parallel("auto", "gather-kv", "auto", 3) == ParallelConfig(gather_kv_degree=3)
    assert choose_parallel("auto", "Ring", "p2p", 4) == ParallelConfig(ring_degree=4, transport="p2p")
    assert choose_parallel("ulysses2 ring2", None, "auto", 4) == ParallelConfig(
        ulysses_degree=2, ring_degree=2
    )
    assert choose_parallel("auto", "yunchang", "auto", 2) == ParallelConfig(
        ulysses_degree=2, engine="yunchang"
    )
    assert choose_parallel("ring2", "xfuser", "auto", 2) == ParallelConfig(ring_degree=2, engine="xfuser")
    for words, text in (
        (
            ("ulysses4", "ring"),
            "attention='ring' gives all ranks to one axis, and parallel='ulysses4' spells the axes; give one",
        ),
        (("auto", "flash"), "attention='flash' is not known; use one of auto, ulysses, gather-kv, ring, "),
        (
            ("ulysses3", None),
            "cfg 1 x ring 1 x gather_kv 1 x ulysses 3 = 3 ranks were asked for; 4 are running",
        ),
    ):
        with pytest.raises(ValueError, match="; ") as caught:
            choose_parallel(*words, "auto", 4)
        assert str(caught.value).startswith(text)
