"""All layouts of a world, the one to use, and why."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.table import Table

from runtime.report import format_bytes, format_seconds
from usp.config import ParallelConfig
from usp.planner.cost import Prediction, Workload, predict
from usp.planner.machine import Machine

# Predictions closer than this are alike, since the model errs by as much: attention that is bit-equal to one
# rank's is then preferred to a ring's, so that a film made by "auto" does not depend on a measurement.
ALIKE = 0.10


@dataclass(frozen=True)
class Candidate:
    """A layout and what is predicted of it; `refusal` says with numbers why it cannot be used."""

    config: ParallelConfig
    prediction: Prediction
    refusal: str | None = None


@dataclass(frozen=True)
class Choice:
    """What `choose` found: every candidate, the chosen one (None if none can be used), and why."""

    workload: Workload | None  # None, with the machine: there was one layout, so nothing was measured
    machine: Machine | None
    candidates: tuple[Candidate, ...]
    chosen: ParallelConfig | None
    reason: str

    @property
    def config(self) -> ParallelConfig:
        """The layout to use. Raises ValueError, with the numbers, if none can be used."""
        if self.chosen is None:
            raise ValueError(self.reason)
        return self.chosen


def layouts(world_size: int, pieces: int) -> list[ParallelConfig]:
    """Every layout of `world_size` ranks: guidance branches outside, ring or gather-KV, Ulysses inside.

    The cfg axis is used only as far as there are pieces for it (`Workload.pieces`).
    """
    found = []
    for cfg in _divisors(world_size):
        if cfg > pieces:
            continue
        for ulysses in reversed(_divisors(world_size // cfg)):
            outer = world_size // cfg // ulysses
            axes = ("gather_kv", "ring") if outer > 1 else ("ring",)
            for axis in axes:
                degrees = {"cfg_degree": cfg, "ulysses_degree": ulysses, f"{axis}_degree": outer}
                found.append(replace(ParallelConfig(), **degrees))
    return found


def plan(
    workload: Workload,
    machine: Machine,
    world_size: int,
    *,
    transport: str = "auto",
    strict: bool = False,
) -> list[Candidate]:
    """Every layout of `world_size` ranks, the fastest first, then those refused.

    Refused is what needs more memory than a rank has, and with `strict` also what leaves a rank without
    heads, tokens or a guidance branch. The order depends on the arguments alone.
    """
    candidates = []
    for config in layouts(world_size, workload.pieces):
        config = replace(config, transport=transport)
        prediction = predict(workload, machine, config)
        refusal = _too_large(prediction, machine) or (_idle(workload, config) if strict else None)
        candidates.append(Candidate(config, prediction, refusal))
    return sorted(candidates, key=lambda c: (c.refusal is not None, c.prediction.seconds, str(c.config)))


def choose(
    workload: Workload,
    machine: Machine,
    world_size: int,
    *,
    transport: str = "auto",
    strict: bool = False,
) -> Choice:
    """The layout for `world_size` ranks among all, and why it or none."""
    candidates = tuple(plan(workload, machine, world_size, transport=transport, strict=strict))
    usable = [c for c in candidates if c.refusal is None]
    if not usable:
        return Choice(workload, machine, candidates, None, _none_fits(candidates, world_size))
    alike = [c for c in usable if c.prediction.seconds <= usable[0].prediction.seconds * (1 + ALIKE)]
    chosen = next((c for c in alike if c.config.ring_degree == 1), alike[0])
    others = [c for c in usable if c is not chosen]
    reason = _reason(chosen, others, workload, machine)
    return Choice(workload, machine, candidates, chosen.config, reason)


def only(config: ParallelConfig, why: str) -> Choice:
    """The choice where there is none."""
    return Choice(None, None, (), config, f"{config}: {why}")


def layouts_table(choice: Choice) -> Table:
    """Every candidate layout, one line each, the chosen one marked; the reason below."""
    columns = ("", "layout", "per step", "speed-up", "exchange", "sent per rank", "memory per rank", "")
    title = "the only layout"
    if choice.workload is not None:
        title = f"layouts for {_words(choice.workload)}"
    table = Table(title=title, caption=choice.reason, box=box.SIMPLE)
    table.title_justify = table.caption_justify = "left"
    for name in columns:
        table.add_column(name, justify="left" if name in ("", "layout") else "right")
    for candidate in choice.candidates:
        mark = "->" if candidate.config == choice.chosen else ""
        table.add_row(mark, *candidate_cells(candidate, _single_s(choice)), candidate.refusal or "")
    return table


def candidate_cells(candidate: Candidate, single_s: float) -> list[str]:
    """A candidate in words: layout, time, speed-up, share of exchange, bytes, memory."""
    found = candidate.prediction
    return [
        str(candidate.config),
        format_seconds(found.seconds),
        f"{single_s / found.seconds:.2f}",
        f"{found.communication_s / found.seconds:.0%}",
        format_bytes(max(found.sent)),
        format_bytes(found.peak_bytes),
    ]


def choice_json(choice: Choice) -> dict[str, object]:
    """A choice as plain values."""
    single_s = _single_s(choice)
    return {
        "chosen": None if choice.chosen is None else str(choice.chosen),
        "reason": choice.reason,
        "one_rank_s": single_s or None,  # one rank alone is not measured
        "layouts": [candidate_json(c, single_s) for c in choice.candidates],
    }


def candidate_json(candidate: Candidate, single_s: float) -> dict[str, object]:
    """One candidate as plain values; seconds and bytes."""
    found = candidate.prediction
    return {
        "parallel": str(candidate.config),
        "seconds_per_step": float(f"{found.seconds:.5g}"),
        "communication_s": float(f"{found.communication_s:.5g}"),
        "speedup": float(f"{single_s / found.seconds:.4g}"),
        "sent_bytes_per_rank": list(found.sent),
        "peak_bytes_per_rank": found.peak_bytes,
        "refused": candidate.refusal,
    }


def _too_large(prediction: Prediction, machine: Machine) -> str | None:
    if machine.memory_bytes is None or prediction.peak_bytes <= machine.memory_bytes:
        return None
    parts = f"weights {format_bytes(prediction.weight_bytes)}"
    parts += f", activations {format_bytes(prediction.activation_bytes)}"
    parts += f", exchange buffers {format_bytes(prediction.buffer_bytes)}"
    if prediction.cache_bytes:
        parts += f", first-block cache {format_bytes(prediction.cache_bytes)}"
    return (
        f"needs {format_bytes(prediction.peak_bytes)} per rank ({parts}); a rank has "
        f"{format_bytes(machine.memory_bytes)}"
    )


def _idle(workload: Workload, config: ParallelConfig) -> str | None:
    """Why some rank would have nothing to compute."""
    if config.ulysses_degree > workload.heads:
        return (
            f"{config.ulysses_degree - workload.heads} ranks without heads: there are {workload.heads} heads"
        )
    if config.sp_degree > workload.tokens:
        return (
            f"{config.sp_degree - workload.tokens} ranks without tokens: there are {workload.tokens} tokens"
        )
    return None


def _none_fits(candidates: Sequence[Candidate], world_size: int) -> str:
    least = min(candidates, key=lambda c: c.prediction.peak_bytes)
    return (
        f"parallel='auto' on {world_size} ranks: no layout can be used; the smallest, {least.config}, "
        f"{least.refusal}; use a smaller size, a smaller dtype, or offload"
    )


def _reason(chosen: Candidate, others: list[Candidate], workload: Workload, machine: Machine) -> str:
    found = chosen.prediction
    single = predict(workload, machine, ParallelConfig()).seconds
    sentence = (
        f"{chosen.config}: {format_seconds(found.seconds)} per step predicted, "
        f"{single / found.seconds:.2f} times one rank, "
        f"{found.communication_s / found.seconds:.0%} of it exchange"
    )
    if others:
        rival = min(others, key=lambda c: c.prediction.seconds)
        ratio = rival.prediction.seconds / found.seconds
        if ratio < 1:
            sentence += f"; {rival.config} is within {1 - ratio:.1%} of it, but not bit-equal to one rank"
        else:
            sentence += f"; next {rival.config}, {format_seconds(rival.prediction.seconds)}"
    return f"{sentence}; {machine.source}"


def _words(workload: Workload) -> str:
    """What a step is, for a title."""
    branches = f"{workload.branches} guidance branch{'es' * (workload.branches > 1)}"
    batch = f" of {workload.batch} pictures" if workload.batch > 1 else ""
    return f"{workload.tokens} tokens, {branches}{batch}"


def _single_s(choice: Choice) -> float:
    """Seconds of one rank's step."""
    if choice.workload is None or choice.machine is None:
        return 0.0
    return predict(choice.workload, choice.machine, ParallelConfig()).seconds


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
