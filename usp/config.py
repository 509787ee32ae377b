"""What the user asks for, checked where it is written down.

Everything here is frozen and validated at construction, so the rest of the package never re-checks a degree.
"""

import re
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

Engine = Literal["usp", "yunchang", "xfuser"]
Transport = Literal["auto", "all_to_all", "p2p"]

ENGINES: tuple[Engine, ...] = ("usp", "yunchang", "xfuser")
TRANSPORTS: tuple[Transport, ...] = ("auto", "all_to_all", "p2p")
AXES = ("cfg", "ring", "gather_kv", "ulysses")  # outermost first; Ulysses ranks are neighbours


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many ranks each axis takes; the product must be the world size.

    `engine` names whose long-context attention runs: ours ("usp"), or that of an installed package.
    `transport` names the collective under the exchanges: "auto" takes the faster one for each, the others
    force one everywhere, for a backend whose all-to-all or point-to-point is broken. All ranks must hold an
    equal config.
    """

    cfg_degree: int = 1
    ring_degree: int = 1
    gather_kv_degree: int = 1
    ulysses_degree: int = 1
    engine: Engine = "usp"
    transport: Transport = "auto"

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = self.degree(axis)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(
                    f"{axis}_degree={degree!r} was asked for; a degree is a whole number of ranks, 1 or "
                    f"more; leave {axis}_degree out to get 1"
                )
        _check_choice("engine", self.engine, ENGINES)
        _check_choice("transport", self.transport, TRANSPORTS)
        if self.ring_degree > 1 and self.gather_kv_degree > 1:
            raise ValueError(
                f"ring_degree={self.ring_degree} with gather_kv_degree={self.gather_kv_degree}: both bring "
                "the keys of other ranks to the local queries; use one of them, with ulysses_degree for the "
                "rest"
            )
        if self.engine != "usp" and self.gather_kv_degree > 1:
            raise ValueError(
                f"gather_kv_degree={self.gather_kv_degree} with engine={self.engine!r}: {self.engine} has "
                "Ulysses and ring only; use ulysses_degree or ring_degree, or engine='usp'"
            )

    def degree(self, axis: str) -> int:
        """The degree of one of AXES."""
        return getattr(self, f"{axis}_degree")

    @property
    def sp_degree(self) -> int:
        """Ranks that share one sequence."""
        return self.ring_degree * self.gather_kv_degree * self.ulysses_degree

    @property
    def world_size(self) -> int:
        """Ranks that this config needs."""
        return self.cfg_degree * self.sp_degree

    def check_world(self, world_size: int) -> None:
        """Raise ValueError unless the degrees multiply to `world_size`, naming the combinations that do."""
        if self.world_size != world_size:
            product = " x ".join(f"{axis} {self.degree(axis)}" for axis in AXES)
            raise ValueError(
                f"{product} = {self.world_size} ranks were asked for; {world_size} are running; use one of: "
                f"{', '.join(spellings(world_size))}, or start {self.world_size} ranks"
            )

    def __str__(self) -> str:
        axes = " ".join(f"{axis}{self.degree(axis)}" for axis in AXES if self.degree(axis) > 1)
        return (axes or "one rank") + ("" if self.engine == "usp" else f" ({self.engine})")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """When a forward may reuse the last computed one's work (`usp.cache`); counted per guidance branch.

    `threshold` is the relative change of the first block's residual below which a forward is skipped; 0 never
    skips. The first `warmup_steps` forwards are computed, since they settle the layout. At most
    `max_skip_streak` in a row are skipped: a latent that has collapsed hardly changes, so without a limit
    nothing would be computed again. All ranks must hold an equal config.
    """

    threshold: float
    warmup_steps: int = 4
    max_skip_streak: int = 3

    def __post_init__(self) -> None:
        threshold = self.threshold
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold < inf:
            raise ValueError(
                f"threshold={threshold!r} was asked for; it is a relative change, a finite number of 0 or "
                "more; use 0.12, or leave the cache out to compute every step"
            )
        for name, least in (("warmup_steps", 0), ("max_skip_streak", 1)):
            steps = getattr(self, name)
            if not isinstance(steps, int) or isinstance(steps, bool) or steps < least:
                raise ValueError(
                    f"{name}={steps!r} was asked for; it is a whole number of steps, {least} or more; leave "
                    f"it out to get {getattr(type(self), name)}"
                )


def parse_parallel(text: str) -> ParallelConfig:
    """The config that "ulysses2 ring2" spells; words in any order, each an axis and a degree.

    Raises ValueError for an unknown word or an axis named twice.
    """
    degrees: dict[str, int] = {}
    for word in text.replace(",", " ").split():
        match = re.fullmatch(
            rf"({'|'.join(AXES)})[_=]?(-?\d+)", word.lower().replace("gather-kv", "gather_kv")
        )
        if match is None or match[1] in degrees:
            raise ValueError(
                f"parallel={text!r}: {word!r} is {'given twice' if match else 'not an axis and a degree'}; "
                f"write 'auto' or words such as 'ulysses2 ring2' from the axes {', '.join(AXES)}"
            )
        degrees[match[1]] = int(match[2])
    if not degrees:
        raise ValueError(f"parallel={text!r} names no axis; write 'auto' or words such as 'ulysses2 ring2'")
    return replace(ParallelConfig(), **{f"{axis}_degree": degree for axis, degree in degrees.items()})


def resolve_parallel(parallel: "ParallelConfig | str", world_size: int) -> ParallelConfig | None:
    """The config that fits `world_size`; `parallel` is "auto", a spelling, or a config.

    None for "auto": `usp.planner` chooses once the ranks have met. Raises ValueError when it does not fit,
    before anything is loaded.
    """
    if isinstance(parallel, str):
        if parallel.strip().lower() == "auto":
            return None
        parallel = parse_parallel(parallel)
    parallel.check_world(world_size)
    return parallel


def choose_parallel(
    parallel: str, attention: str | None, transport: str, world_size: int
) -> ParallelConfig | None:
    """The config that the command line's words mean together; None leaves it to `usp.planner`.

    `attention` names one axis that takes all ranks ("ulysses", "gather-kv", "ring"), or an engine, whose
    degrees `parallel` spells (Ulysses on all ranks by default). None leaves it to `parallel`. Raises
    ValueError if the two contradict each other, or do not fit `world_size`.
    """
    auto = parallel.strip().lower() == "auto"
    name = (attention or "auto").lower().replace("-", "_")
    if name in ("auto", "usp"):
        config = resolve_parallel(parallel, world_size)
    elif name in AXES and name != "cfg":
        if not auto:
            raise ValueError(
                f"attention={attention!r} gives all ranks to one axis, and parallel={parallel!r} spells the "
                "axes; give one of the two"
            )
        config = replace(ParallelConfig(), **{f"{name}_degree": world_size})
    elif name in ENGINES:
        config = resolve_parallel(parallel, world_size) or ParallelConfig(ulysses_degree=world_size)
        config = replace(config, engine=name)
    else:
        known = ("auto", "ulysses", "gather-kv", "ring", *ENGINES)
        raise ValueError(f"attention={attention!r} is not known; use one of {', '.join(known)}")
    _check_choice("transport", transport, TRANSPORTS)
    return None if config is None else replace(config, transport=transport)


def spellings(world_size: int) -> list[str]:
    """The spellings whose degrees multiply to `world_size`: one axis, two, and both with two or with three
    guidance branches."""
    found = _sequence_spellings(world_size)
    for branches in (2, 3):
        if world_size % branches == 0:
            rest = _bare(world_size // branches)
            found += [f"'cfg{branches} {text}'" if text else f"'cfg{branches}'" for text in rest]
    return found


def _bare(world_size: int) -> list[str]:
    return [text.strip("'") for text in _sequence_spellings(world_size)] if world_size > 1 else [""]


def _sequence_spellings(world_size: int) -> list[str]:
    found = []
    for ulysses in range(world_size, 0, -1):
        if world_size % ulysses:
            continue
        rest = world_size // ulysses
        if rest == 1:
            found.append(f"'ulysses{ulysses}'")
        else:
            prefix = f"ulysses{ulysses} " if ulysses > 1 else ""
            found += [f"'{prefix}ring{rest}'", f"'{prefix}gather_kv{rest}'"]
    return found


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(choices)}")
