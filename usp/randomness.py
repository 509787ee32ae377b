"""The same random bits on every rank and for every world size."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from runtime.log import get_logger
from runtime.process_group import World

logger = get_logger(__name__)

Generators = torch.Generator | list[torch.Generator]
MAX_SEED = 2**63 - 1


def agree_generator(
    world: World, generator: Generators | int | Sequence[int] | None, seed: int | None
) -> tuple[Generators, int | None]:
    """The generators that all ranks shall draw from, in one state on all ranks, and the seed if one was used.

    `seed` None or -1, without a generator, means: rank 0 draws one, all use it, and it is logged. Whole
    numbers given as `generator` are seeds. Seeded generators live on the CPU, so the bits do not depend on
    the device. The caller's own generators take rank 0's state and are advanced by the draws, as in one
    process. Collective. Raises ValueError, on all ranks, for a seed out of range, both a seed and a
    generator, or ranks that pass different kinds.
    """
    world.agree((repr(seed), _kinds(generator)), "the seed or generator")
    if generator is not None and seed is not None:
        raise ValueError("both seed and generator were given; they say the same thing; give one of them")
    if isinstance(generator, int):
        generator, seed = None, generator
    elif isinstance(generator, (list, tuple)) and generator and all(isinstance(g, int) for g in generator):
        generator = [_seeded(check_seed(int(g))) for g in generator]  # type: ignore[arg-type]
    if generator is None:
        drawn = seed is None or seed == -1
        seed = world.broadcast_object(_draw() if seed is None or seed == -1 else check_seed(seed))
        logger.info("seed %d%s", seed, " (drawn)" if drawn else "")
        return _seeded(seed), seed
    given: list[Any] = list(generator) if isinstance(generator, (list, tuple)) else [generator]
    if not all(isinstance(g, torch.Generator) for g in given):
        raise ValueError(
            f"generator={generator!r} was given; it must be a torch.Generator, a seed, or a list of either"
        )
    for own, state in zip(given, world.broadcast_object([g.get_state() for g in given]), strict=True):
        own.set_state(state)
    return (given if isinstance(generator, (list, tuple)) else given[0]), None


def check_seed(seed: int) -> int:
    """The seed. Raises ValueError unless it is -1 or a whole number that torch takes."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not -1 <= seed <= MAX_SEED:
        raise ValueError(
            f"seed={seed!r} was given; a seed is a whole number from 0 to {MAX_SEED}, or -1 to draw one"
        )
    return seed


@contextmanager
def same_default_rng(world: World, generator: Generators) -> Iterator[None]:
    """All ranks' default generators in one state for the body, then each back in its own.

    Covers pipelines and schedulers that draw without the caller's generator. Their state follows from that of
    `generator`, which all ranks share, so a seed repeats these draws too; they are unlike its own.
    """
    device = world.device
    devices = [] if device.index is None else [device.index]
    given = generator if isinstance(generator, list) else [generator]
    states = b"".join(g.get_state().numpy().tobytes() for g in given)
    seed = int.from_bytes(hashlib.sha256(states).digest()[:7])
    with torch.random.fork_rng(devices=devices, device_type=device.kind):
        torch.default_generator.manual_seed(
            seed
        )  # torch.manual_seed would touch vendors that this rank does not use
        if devices:
            torch.get_device_module(device.kind).manual_seed(seed)
        yield


def _kinds(generator: Any) -> Any:
    """What ranks must agree on of a `generator`: seeds as they are, objects by kind."""
    if isinstance(generator, (list, tuple)):
        return [_kinds(item) for item in generator]
    if isinstance(generator, torch.Generator):
        return f"generator on {generator.device.type}"
    return generator if generator is None or isinstance(generator, int) else type(generator).__name__


def _draw() -> int:
    """A new seed, from the default generator: new in every process, unless the user has seeded that."""
    return int(torch.randint(2**31, ()))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)
