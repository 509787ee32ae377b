"""The machine at hand, measured in about a second when a run starts; every rank then holds the same numbers.

Each figure is a median of a few repeats on each rank, and the slowest rank's counts, so a choice that follows
from them is the same everywhere.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from runtime.process_group import World
from runtime.report import format_bytes
from runtime.world import gather_text
from usp import comm
from usp.config import ParallelConfig
from usp.mesh import Group, make_groups
from usp.planner.cost import FP32, Workload
from usp.planner.machine import Channel, Link, Machine

EMPTY_BYTES, MOST_BYTES = 4096, 1 << 25
REPEATS = 7
LEAST_S = 0.012  # a work is doubled in size until it takes this long: small ones reach less of a core
PATTERNS = {"all_to_all": "seq_to_heads", "ring": "ring", "gather": "ring"}  # an exchange that travels so


def measure_machine(
    world: World, workload: Workload, dtype: torch.dtype, *, link: Link | None = None
) -> Machine:
    """This machine, from short runs of what `workload` needs; alike on all ranks. Collective.

    Two messages of each kind of exchange, between neighbours and, with several hosts, between hosts; a matrix
    product, an attention, elementwise operators; a transfer beside a computation. A given `link` joins all
    ranks, and then nothing is exchanged. Raises ValueError if the rank is alone, since nothing is to be
    chosen then.
    """
    if world.world_size == 1:
        raise ValueError("one rank has no link to measure and no layout to choose; start more ranks")
    hosts = share_over_ranks(world, [platform.node(), _cores(), torch.get_num_threads()])
    per_host, slots = _ranks_per_host(hosts), _slots(world, hosts)
    earlier = sum(host[0] == hosts[world.rank][0] for host in hosts[: world.rank])  # ranks of this host
    measures = slots is None or earlier < slots  # else it would take their core
    found = share_over_ranks(world, _rates(world, workload, dtype) if measures else None)
    rates = [max(column) for column in zip(*(figures for figures in found if figures), strict=True)]
    has_engine = float(world.device.kind != "cpu")  # that copies while the rank computes
    far, overlap = None, has_engine
    if link is None:
        link, far, overlap = _measure_links(world, per_host, workload, dtype)
    return Machine(
        matmul_flops=1 / rates[0],
        attention_flops=1 / rates[1],
        memory_bytes_per_s=1 / rates[2],
        operator_s=rates[3],
        link=link,
        far_link=far,
        domain=per_host if per_host < world.world_size else None,
        overlap=overlap,
        slots=slots,
        memory_bytes=_memory(world, per_host),
        source=_source(link, far),
    )


def _measure_links(
    world: World, per_host: int, workload: Workload, dtype: torch.dtype
) -> tuple[Link, Link | None, float]:
    """The link of a host's ranks, that between hosts if there are several, and the overlap of the first."""
    config = ParallelConfig(ring_degree=world.world_size // per_host, ulysses_degree=per_host)
    groups = make_groups(config, rank=world.rank, timeout_s=world.timeout_s)
    size = _message_bytes(workload, world.world_size)
    try:
        near = groups.ulysses if per_host > 1 else groups.ring
        link = measure_link(world, near, size)
        far = measure_link(world, groups.ring, size) if 1 < per_host < world.world_size else None
        return link, far, _overlap(world, near, size, workload, dtype)
    finally:
        groups.close()


def measure_link(world: World, group: Group, size: int) -> Link:
    """The link between the ranks of `group`: an almost empty message and one of `size` bytes in each pattern.

    Buffers are kept between repeats, as our exchanges keep theirs. All groups of the world measure at once;
    the slowest counts. Collective over the world.
    """
    device = world.device.torch_device
    send, receive = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    channels = {}
    for pattern, name in PATTERNS.items():
        if pattern == "gather" and group.size == 2:
            continue  # to all peers, or to one, is the same
        peers = 1 if pattern == "ring" else group.size - 1
        seconds, counts = [], [count // peers * peers for count in (EMPTY_BYTES, size)]
        for count in counts:
            sizes = _sizes(pattern, group, count)
            laps = [_lap(world, group, send[:count], receive[:count], sizes, name) for _ in range(REPEATS)]
            seconds.append(max(share_over_ranks(world, median(laps[1:]))))
        moving_s = max(seconds[1] - seconds[0], seconds[1] / 10)  # where the empty message was held up
        rate = (counts[1] - counts[0]) / moving_s
        channels[pattern] = Channel(latency_s=min(seconds) / peers, bytes_per_s=rate)
    channels.setdefault("gather", channels["ring"])
    source = f"measured over {group.size} ranks with messages of {format_bytes(size)}"
    return Link(**channels, source=source)


def _sizes(pattern: str, group: Group, count: int) -> tuple[list[int], list[int]]:
    """Bytes to and from each rank of the group, `count` in all."""
    if pattern != "ring":
        each = [0 if rank == group.rank else count // (group.size - 1) for rank in range(group.size)]
        return each, each
    sends, receives = [0] * group.size, [0] * group.size
    sends[(group.rank + 1) % group.size] = receives[(group.rank - 1) % group.size] = count
    return sends, receives


def _lap(
    world: World,
    group: Group,
    send: torch.Tensor,
    receive: torch.Tensor,
    sizes: tuple[list[int], list[int]],
    name: str,
) -> float:
    start = time.perf_counter()
    comm.exchange(send, sizes[0], receive, sizes[1], group, name).wait()
    world.device.synchronize()
    return time.perf_counter() - start


def _rates(world: World, workload: Workload, dtype: torch.dtype) -> list[float]:
    """Seconds per operation of a matrix product and of attention, per elementwise byte, per operator."""
    device, width = world.device.torch_device, workload.width
    weight = _noise((workload.ffn_dim, width), dtype, device)
    matmul = _per_unit(
        world, workload, 128, lambda rows: _matmul(_noise((rows, width), dtype, device), weight)
    )
    attention = _per_unit(
        world, workload, 256, lambda rows: _attention(rows, workload.head_dim, dtype, device)
    )
    elementwise = _per_unit(world, workload, 64, lambda rows: _elementwise(rows, width, device))
    return [matmul, attention, elementwise, _operator_s(world)]


def _matmul(rows: torch.Tensor, weight: torch.Tensor) -> tuple[float, Callable[[], object]]:
    return 2 * rows.shape[0] * weight.numel(), lambda: F.linear(rows, weight)


def _attention(
    rows: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, Callable[[], object]]:
    q_BHSD = _noise((1, 4, rows, head_dim), dtype, device)
    return 4 * rows**2 * q_BHSD.shape[1] * head_dim, lambda: F.scaled_dot_product_attention(
        q_BHSD, q_BHSD, q_BHSD
    )


def _elementwise(rows: int, width: int, device: torch.device) -> tuple[float, Callable[[], object]]:
    """A block's mix: norm, modulation and residual twice (2 + 2 + 2 + 3 tensors each), an activation (2)."""
    x, row = (_noise(shape, torch.float32, device) for shape in ((rows, width), (width,)))

    def half(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (width,)) * row + row + x

    return 20 * rows * width * FP32, lambda: F.gelu(half(half(x)), approximate="tanh")


def _noise(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers (zeros compute faster on some devices) that leave the process's own draws alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def _per_unit(
    world: World, workload: Workload, rows: int, build: Callable[[int], tuple[float, Callable[[], object]]]
) -> float:
    """Seconds per unit of a work, doubled from `rows` until it takes LEAST_S, or has the tokens of a rank."""
    most = max(rows, workload.tokens // world.world_size)
    with torch.inference_mode():
        while True:
            units, work = build(rows)
            work()  # the first run may load kernels
            seconds = _time(world, work)
            if seconds >= LEAST_S or 2 * rows > most:
                return median([seconds, *(_time(world, work) for _ in range(4))]) / units
            rows *= 2


def _operator_s(world: World) -> float:
    """Seconds to start one operator that has nothing to do."""
    tiny, times = torch.zeros(8, device=world.device.torch_device), 200

    def run() -> None:
        for _ in range(times):
            torch.add(tiny, 1)

    with torch.inference_mode():
        return median(_time(world, run) for _ in range(3)) / times


def _overlap(world: World, group: Group, size: int, workload: Workload, dtype: torch.dtype) -> float:
    """The share of a ring's transfer that hides behind a matrix product which lasts as long. Collective."""
    device = world.device.torch_device
    send, receive = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    sizes = _sizes("ring", group, size)
    rows = _noise((min(256, workload.tokens), workload.width), dtype, device)
    weight = _noise((workload.ffn_dim, workload.width), dtype, device)

    def slowest(work: Callable[[], object]) -> float:
        return max(share_over_ranks(world, median(_time(world, work) for _ in range(3))))

    transfer_s = slowest(lambda: comm.exchange(send, sizes[0], receive, sizes[1], group, "ring").wait())
    once_s = slowest(lambda: F.linear(rows, weight))
    times = max(1, round(transfer_s / once_s))

    def both() -> None:
        pending = comm.exchange(send, sizes[0], receive, sizes[1], group, "ring")
        for _ in range(times):
            F.linear(rows, weight)
        pending.wait()

    with torch.inference_mode():
        together_s = slowest(both)
    hidden = transfer_s + times * once_s - together_s
    return min(1.0, max(0.0, hidden / min(transfer_s, times * once_s)))


def _time(world: World, work: Callable[[], object]) -> float:
    world.device.synchronize()
    start = time.perf_counter()
    work()
    world.device.synchronize()
    return time.perf_counter() - start


def share_over_ranks(world: World, value: Any) -> list[Any]:
    """Every rank's plain value in rank order, through the store, the same on all ranks. Collective."""
    key = world.next_key("planner")
    texts = gather_text(world, key, json.dumps(value), "measuring the machine", world.timeout_s)
    return [json.loads(text) for text in texts]


def _ranks_per_host(hosts: list[Any]) -> int:
    """Ranks of each host if they follow one another and are as many on each, else all ranks."""
    names = [name for name, _, _ in hosts]
    count = names.count(names[0])
    whole = len(names) % count == 0
    even = whole and all(len(set(names[low : low + count])) == 1 for low in range(0, len(names), count))
    return count if even and len(set(names)) == len(names) // count else len(names)


def _slots(world: World, hosts: list[Any]) -> int | None:
    """How many ranks of the busiest host can compute at once; None where each has a device of its own."""
    if world.device.kind != "cpu":
        return None
    found = []
    for name in {name for name, _, _ in hosts}:
        here = [(cores, threads) for host, cores, threads in hosts if host == name]
        cores = len(set().union(*(cores for cores, _ in here)))
        slots = max(1, cores // max(threads for _, threads in here))
        found.append(slots if slots < len(here) else None)
    fewest = [slots for slots in found if slots is not None]
    return min(fewest) if fewest else None


def _cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _memory(world: World, per_host: int) -> int | None:
    """Bytes that the poorest rank may use; ranks of one host share its memory if they have no device."""
    total = world.device.memory_total()
    mine = total // per_host if world.device.index is None else total
    return min(share_over_ranks(world, mine)) or None


def _message_bytes(workload: Workload, world_size: int) -> int:
    """What a rank hands over in an attention, between 256 KiB and 32 MiB."""
    share = workload.tokens * workload.width * workload.itemsize // world_size
    return min(MOST_BYTES, max(1 << 18, 3 * share))


def _source(link: Link, far: Link | None) -> str:
    """The link in words, and where its figures are from."""
    words = f"{_link_words(link)} ({link.source})"
    return words if far is None else f"{words}; between hosts {_link_words(far)}"


def _link_words(link: Link) -> str:
    words = [
        f"{name} {channel.bytes_per_s / 1e9:.3g} GB/s, {channel.latency_s * 1e6:.0f} us"
        for name, channel in (("all-to-all", link.all_to_all), ("ring", link.ring))
    ]
    return ", ".join(words)
