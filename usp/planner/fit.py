"""Predicted against measured: every layout of the ranks that run, on a stack of Wan blocks."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn

from runtime.process_group import World
from runtime.report import format_bytes
from usp import comm
from usp.adapter import sharded
from usp.attention import SequenceAttention
from usp.bench import sheet
from usp.bench.contenders import wan, wan_inputs
from usp.bench.ideal import BlockStack
from usp.config import ParallelConfig
from usp.mesh import Groups, make_groups
from usp.planner.choose import Candidate, plan
from usp.planner.cost import Shares, Workload, predict, sent_bytes
from usp.planner.machine import Machine
from usp.planner.measure import measure_machine, share_over_ranks
from usp.plans import plan_for

PATCH_VOLUME = 4  # Wan's patches are 1 x 2 x 2
ALONE_LIMIT_S = 3600.0
TARGET = 0.15  # predictions further off than this are marked


def workload_of_stack(stack: BlockStack, tokens: int, branches: int, parameter_bytes: int) -> Workload:
    """The workload of a step over `tokens` of a stack of Wan blocks in fp32."""
    channels = PATCH_VOLUME * stack.channels
    return Workload(
        tokens=tokens,
        heads=stack.heads,
        head_dim=stack.head_dim,
        layers=stack.layers,
        ffn_dim=stack.ffn,
        itemsize=4,
        patch_channels=channels,
        text_tokens=stack.text,
        branches=branches,
        parameter_bytes=parameter_bytes,
        latent_bytes=tokens * channels * 4,
    )


@dataclass
class Row:
    """A layout: its prediction, what each round took on the slowest rank, whether the bytes were right."""

    candidate: Candidate
    seconds: list[float] = field(default_factory=list)
    bytes_exact: bool = True

    @property
    def measured_s(self) -> float:
        """The median round."""
        return median(self.seconds)

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.candidate.prediction.seconds / self.measured_s


def fit(world: World, stack: BlockStack, tokens: Sequence[int], *, branches: int, rounds: int) -> int:
    """Measure the machine, predict, run every layout, print both; the last line is JSON. Collective.

    Returns 1 if a rank sent other bytes than predicted. Two errors are shown: that of the prediction as
    `parallel="auto"` makes it, from the start-up measurement alone, and what is left of it when one factor is
    fitted for all layouts together.
    """
    model = wan(stack, max(tokens), torch.float32, world)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    runs, exact = [], True
    for count in tokens:
        workload = workload_of_stack(stack, count, branches, parameters)
        machine = measure_machine(world, workload, torch.float32)
        rows = [Row(c) for c in plan(workload, machine, world.world_size)]
        single = predict(workload, machine, ParallelConfig()).seconds
        _print_predicted(world, machine, rows, workload, single)
        inputs = wan_inputs(stack, count, torch.float32, world)
        alone = run_rounds(world, model, inputs, workload, rows, rounds)
        _print_measured(world, rows, alone)
        runs.append(_as_json(rows, workload, machine, single, alone))
        exact = exact and all(row.bytes_exact for row in rows)
    if world.is_main:
        print(json.dumps(_summary(world, stack, branches, runs, rounds, exact)), flush=True)
    return 0 if exact else 1


def run_rounds(
    world: World,
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    workload: Workload,
    rows: Sequence[Row],
    rounds: int,
) -> list[float]:
    """Run one process, then every layout, round by round, after one untimed round; one process's seconds.

    The rounds are interleaved, so that a machine that slows down slows all of them. Collective.
    """
    alone = []
    with ExitStack() as stack, torch.inference_mode():
        steps = [stack.enter_context(_ready(world, model, inputs, workload, row)) for row in rows]
        for _ in range(rounds + 1):
            found = world.wait_for_main(
                "one process", lambda: _timed(world, _alone, model, inputs, workload), ALONE_LIMIT_S
            )
            alone.append(share_over_ranks(world, found)[0])
            for row, step in zip(rows, steps, strict=True):
                world.any(False)  # all ranks start now
                row.seconds.append(max(share_over_ranks(world, _timed(world, step))))
    for row in rows:
        del row.seconds[0]
    return alone[1:]


@contextmanager
def _ready(
    world: World, model: nn.Module, inputs: dict[str, torch.Tensor], workload: Workload, row: Row
) -> Iterator[Callable[[], None]]:
    """One step in a layout, to be called by all ranks; checks its bytes against the prediction."""
    config = row.candidate.config
    groups = make_groups(config, rank=world.rank, timeout_s=world.timeout_s)
    want = sent_bytes(workload, config, world.rank)

    def step() -> None:
        before = groups.sent
        run_step(model, inputs, workload, config, groups)
        row.bytes_exact = row.bytes_exact and dict(groups.sent - before) == want

    try:
        yield step
    finally:
        row.bytes_exact = all(share_over_ranks(world, row.bytes_exact))
        groups.close()


def run_step(
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    workload: Workload,
    config: ParallelConfig,
    groups: Groups,
) -> None:
    """One denoising step without its guidance formula: this rank's branches, then their exchange."""
    forwards = Shares.of(workload, config).forwards
    with ExitStack() as stack:
        if config.sp_degree > 1:
            stack.enter_context(sharded(model, plan_for(model), SequenceAttention(groups)))
        made = [model(**inputs, return_dict=False)[0] for _ in range(forwards[groups.cfg.rank])]
    if config.cfg_degree > 1:
        count = inputs["hidden_states"].numel()
        mine = torch.cat([m.flatten() for m in made]) if made else inputs["hidden_states"].new_empty(0)
        comm.gather(mine, dim=0, sizes=[n * count for n in forwards], group=groups.cfg, name="branches")


def _alone(model: nn.Module, inputs: dict[str, torch.Tensor], workload: Workload) -> None:
    for _ in range(workload.branches):
        model(**inputs, return_dict=False)


def _timed(world: World, work: Callable[..., None], *args: Any) -> float:
    world.device.synchronize()
    start = time.perf_counter()
    work(*args)
    world.device.synchronize()
    return time.perf_counter() - start


def _print_predicted(
    world: World, machine: Machine, rows: Sequence[Row], workload: Workload, single_s: float
) -> None:
    if not world.is_main:
        return
    print(
        f"{world.world_size} ranks, {workload.tokens} tokens, {workload.branches} branches; {machine.source}"
    )
    print(
        f"  matmul {machine.matmul_flops / 1e9:.3g} GFLOP/s, attention {machine.attention_flops / 1e9:.3g}, "
        f"elementwise {machine.memory_bytes_per_s / 1e9:.3g} GB/s, "
        f"{machine.operator_s * 1e6:.1f} us per operator, "
        f"overlap {machine.overlap:.0%}, {machine.slots or 'all'} ranks at once"
    )
    table = sheet.new_table(
        "predicted, before anything is run", "layout", "ms per step", "speed-up", "exchange", "sent"
    )
    for row in rows:
        found = row.candidate.prediction
        table.add_row(
            str(row.candidate.config),
            f"{1000 * found.seconds:.1f}",
            f"{single_s / found.seconds:.2f}",
            f"{found.communication_s / found.seconds:.0%}",
            format_bytes(max(found.sent)),
        )
    sheet.show(table)


def _print_measured(world: World, rows: Sequence[Row], alone: list[float]) -> None:
    if not world.is_main:
        return
    single = median(alone)
    factor = median(row.ratio for row in rows)
    table = sheet.new_table(
        f"measured in {len(alone)} rounds; one process {1000 * single:.1f} ms; *: off by over {TARGET:.0%}",
        *(
            "layout",
            "ms per step",
            "speed-up",
            "predicted",
            "off by",
            f"off by / {factor:.2f}",
            "bytes",
        ),
    )
    for row in sorted(rows, key=lambda row: row.measured_s):
        predicted_s = row.candidate.prediction.seconds
        cells = [
            str(row.candidate.config),
            sheet.spread(row.seconds, 1, 1000),
            f"{single / row.measured_s:.2f}",
        ]
        cells += [f"{1000 * predicted_s:.1f}", _off(row.ratio - 1), _off(row.ratio / factor - 1)]
        table.add_row(*cells, "exact" if row.bytes_exact else "WRONG")
    sheet.show(table)


def _as_json(
    rows: Sequence[Row], workload: Workload, machine: Machine, single_s: float, alone: list[float]
) -> dict[str, Any]:
    factor = median(row.ratio for row in rows)
    found = [
        {
            "parallel": str(row.candidate.config),
            "predicted_s": _short(row.candidate.prediction.seconds),
            "measured_s": [_short(f(row.seconds)) for f in (median, min, max)],
            "off_by": _short(row.ratio - 1),
            "off_by_with_one_factor": _short(row.ratio / factor - 1),
            "sent_bytes_per_rank": list(row.candidate.prediction.sent),
            "bytes_exact": row.bytes_exact,
        }
        for row in rows
    ]
    one = {"predicted_s": _short(single_s), "measured_s": [_short(f(alone)) for f in (median, min, max)]}
    figures = {
        name: getattr(machine, name) for name in ("overlap", "slots", "domain", "memory_bytes", "source")
    }
    rates = {name: _short(getattr(machine, name)) for name in RATES}
    return {"tokens": workload.tokens, "machine": rates | figures, "one_process": one, "layouts": found}


RATES = ("matmul_flops", "attention_flops", "memory_bytes_per_s", "operator_s")


def _summary(
    world: World, stack: BlockStack, branches: int, runs: list[dict[str, Any]], rounds: int, exact: bool
) -> dict[str, Any]:
    every = [row for run in runs for row in run["layouts"]]
    return {
        "command": "fit",
        "ranks": world.world_size,
        "backend": world.backend,
        "device": str(world.device),
        "torch": torch.__version__,
        "shape": asdict(stack) | {"branches": branches},
        "rounds": rounds,
        "worst_off_by": max(abs(row["off_by"]) for row in every),
        "worst_off_by_with_one_factor": max(abs(row["off_by_with_one_factor"]) for row in every),
        "bytes_exact": exact,
        "runs": runs,
    }


def _off(error: float) -> str:
    return f"{error:+.0%}{'*' if abs(error) > TARGET else ''}"


def _short(value: float) -> float:
    return float(f"{value:.5g}")
