"""The best that can be had: the bytes a strategy must send, the work that no rank is spared, the link."""

import time
from dataclasses import dataclass
from statistics import median

import torch

from runtime.device import Device
from usp import comm
from usp.config import ParallelConfig
from usp.layout import Split, split_sizes
from usp.mesh import Group


@dataclass(frozen=True)
class Traffic:
    """The least a strategy must send in one run: each rank's bytes, and the exchanges one after another."""

    sent: tuple[int, ...]
    exchanges: int

    def __add__(self, other: "Traffic") -> "Traffic":
        sent = tuple(a + b for a, b in zip(self.sent, other.sent, strict=True))
        return Traffic(sent, self.exchanges + other.exchanges)

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(tuple(n * times for n in self.sent), self.exchanges * times)


def attention_traffic(
    config: ParallelConfig, tokens: int, *, heads: int, head_dim: int, itemsize: int, batch: int = 1
) -> Traffic:
    """The least bytes of one self-attention over `tokens`, by the definition of each strategy.

    Ulysses: a token's q, k and v go once to the rank of each head, and its result comes back. gather-KV: this
    rank's K and V go to every other block. Ring: each block of K and V is passed on, except the last one.
    """
    ulysses, ring, gathered = config.ulysses_degree, config.ring_degree, config.gather_kv_degree
    split = Split((tokens,), config.sp_degree, ulysses)
    here = split_sizes(heads, ulysses)
    unit = batch * head_dim * itemsize
    sent = []
    for rank, share in enumerate(split.sizes):
        place, block = rank % ulysses, rank // ulysses
        members = split.sizes[block * ulysses :][:ulysses]
        others = [peer for peer in range(ulysses) if peer != place]
        count = sum(3 * share * here[peer] + members[peer] * here[place] for peer in others)
        count += 2 * here[place] * (gathered - 1) * split.blocks[block]
        count += 2 * here[place] * sum(split.blocks[(block - step) % ring] for step in range(ring - 1))
        sent.append(count * unit)
    return Traffic(tuple(sent), 2 * (ulysses > 1) + (gathered > 1) + ring - 1)


def gather_traffic(tokens: int, ranks: int, *, channels: int, itemsize: int, batch: int = 1) -> Traffic:
    """The least bytes for every rank to hold all tokens: each share goes to all others."""
    unit = (ranks - 1) * channels * itemsize * batch
    return Traffic(tuple(share * unit for share in split_sizes(tokens, ranks)), int(ranks > 1))


@dataclass(frozen=True, kw_only=True)
class BlockStack:
    """The sizes of a Wan transformer; `text` tokens are replicated on every rank."""

    layers: int
    heads: int
    head_dim: int
    ffn: int
    text: int
    channels: int = 16

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim

    def work(self, config: ParallelConfig, tokens: int) -> float:
        """The share of one process's floating point operations that the busiest rank still has."""
        share = split_sizes(tokens, config.sp_degree)[0]
        pairs = attention_work(config, tokens, self.heads) * tokens**2
        return self._flops(share, pairs, tokens) / self._flops(tokens, tokens**2, tokens)

    def _flops(self, share: int, pairs: float, tokens: int) -> float:
        """Of a rank with `share` of `tokens` and `pairs` of query and key; multiply and add count as two."""
        d = self.width
        per_token = 12 * d * d + 4 * d * self.ffn + 4 * d * self.text  # projections, FFN, cross-attention
        text = 4 * d * d * self.text  # its keys and values, on every rank
        ends = 8 * self.channels * d * (tokens + share)  # patches of the whole, the projection of the share
        return self.layers * (share * per_token + 4 * d * pairs + text) + ends + 4 * self.text * d * d


def attention_work(config: ParallelConfig, tokens: int, heads: int) -> float:
    """The share of one attention's pairs of query and key, over all heads, that the busiest rank has."""
    blocks = Split((tokens,), config.sp_degree, config.ulysses_degree).blocks
    return max(blocks) / tokens * split_sizes(heads, config.ulysses_degree)[0] / heads


@dataclass(frozen=True)
class Link:
    """What one exchange costs, both ways at once: seconds for an empty one, and bytes per second on top."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, traffic: Traffic) -> float:
        """The time of an exchange that overlaps nothing, on the rank that sends most."""
        return traffic.exchanges * self.latency_s + max(traffic.sent) / self.bytes_per_s


def measure_link(group: Group, device: Device, *, size: int = 1 << 23, repeats: int = 7) -> Link:
    """The link as our ring uses it, from a message of 1 KiB and one of `size` bytes. Collective."""
    times = {}
    for count in (1024, size):
        message, room = (torch.zeros(count, dtype=torch.uint8, device=device.torch_device) for _ in range(2))
        laps = []
        for _ in range(repeats + 2):
            start = time.perf_counter()
            comm.ring_exchange(message, room, group=group).wait()
            device.synchronize()
            laps.append(time.perf_counter() - start)
        times[count] = median(laps[2:])
    return Link(times[1024], (size - 1024) / max(times[size] - times[1024], 1e-9))


def ideal_ratio(single_s: float, work: float, traffic: Traffic, link: Link | None) -> float:
    """The best speed-up over one process of `single_s`, if a rank works and sends in turn.

    A strategy that computes while its messages travel can pass it.
    """
    return single_s / (single_s * work + (link.seconds(traffic) if link else 0.0))
