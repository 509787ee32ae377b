"""What a machine can do: computation, memory and links, as the cost model sees them.

Link classes are nominal figures of hardware with their source; a machine is measured (`measure`), or built
from a class.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Channel:
    """One pattern of exchange: seconds that each message costs, and bytes that each rank sends per second.

    The bandwidth holds while all ranks send and receive at once, which is what every exchange of ours does.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bytes_per_s > 0):
            raise ValueError(
                f"a link of {self.bytes_per_s:g} bytes/s and {self.latency_s:g} s per message was given; the "
                "bandwidth must be above 0 and the latency 0 or more; write a link like '25GB/s,20us'"
            )


@dataclass(frozen=True, kw_only=True)
class Link:
    """What lies between ranks, for each pattern of exchange.

    "all_to_all" is the collective, "gather" point-to-point messages to all peers at once, "ring" to one peer.
    `wire` is what two ranks can send each other at most where each pair has wires of its own (a full mesh),
    bytes per second; None where all wires serve any peer.
    """

    all_to_all: Channel
    gather: Channel
    ring: Channel
    source: str
    wire: float | None = None

    def seconds(self, pattern: str, peers: int, sent: float) -> tuple[float, float]:
        """Seconds until the messages to `peers` have started, and those that `sent` bytes then take."""
        channel: Channel = getattr(self, pattern)
        rate = channel.bytes_per_s if self.wire is None else min(channel.bytes_per_s, peers * self.wire)
        return peers * channel.latency_s, sent / rate if peers else 0.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All ranks are alike. Rates are those of one rank that has its cores, or its device, to itself.

    `memory_bytes_per_s` is what elementwise operators read and write, `operator_s` what starting one costs.
    `memory_bytes` is what one rank may use, None if unknown. `domain` ranks that follow one another are
    joined by `link`, beyond them `far_link` is used; None is one domain. `overlap` is the share of a ring's
    transfer, 0 to 1, that a rank can hide behind its computation: 0 where the cores that compute also copy.
    `slots` is how many ranks of one domain can compute at once at full speed, None if all: ranks of one host
    that outnumber its cores take turns.
    """

    matmul_flops: float
    attention_flops: float
    memory_bytes_per_s: float
    link: Link
    source: str
    memory_bytes: int | None = None
    operator_s: float = 0.0
    far_link: Link | None = None
    domain: int | None = None
    overlap: float = 0.0
    slots: int | None = None

    def peers(self, size: int, stride: int) -> tuple[int, int]:
        """Of the peers in a group of `size` ranks, `stride` apart: how many are near, and how many far.

        A group that lies across domains unevenly counts as far, since its slowest member sets the pace.
        """
        span, domain = size * stride, self.domain
        if domain is None or (span <= domain and domain % span == 0):
            return size - 1, 0
        if stride < domain and span % domain == 0 and domain % stride == 0:
            near = domain // stride - 1
            return near, size - 1 - near
        return 0, size - 1

    def exchange_s(self, pattern: str, size: int, stride: int, sent: float) -> float:
        """Seconds of an exchange with all peers of a group; each rank sends `sent` bytes, alike to each.

        Messages start one after another; the two links carry theirs at the same time.
        """
        if size == 1:
            return 0.0
        near, far = self.peers(size, stride)
        parts = [
            link.seconds(pattern, count, sent * count / (size - 1))
            for count, link in ((near, self.link), (far, self.far_link or self.link))
        ]
        return sum(start for start, _ in parts) + max(move for _, move in parts)

    def hop_s(self, pattern: str, size: int, stride: int, sent: float) -> tuple[float, float]:
        """Seconds until a ring's hop has started, and those that its bytes then take, on the slowest link."""
        far = self.peers(size, stride)[1]
        link = self.far_link if far and self.far_link else self.link
        return link.seconds(pattern, 1, sent)


def _nominal(gigabytes: float, latency_us: float, source: str, *, wire: float | None = None) -> Link:
    """A link class: 80 % of the nominal bandwidth per direction, as large messages reach in practice."""
    channel = Channel(latency_s=latency_us * 1e-6, bytes_per_s=0.8e9 * gigabytes)
    wire = None if wire is None else 0.8e9 * wire
    return Link(all_to_all=channel, gather=channel, ring=channel, source=source, wire=wire)


# GB/s per direction and device; microseconds per message as a collective library starts it from a stream.
LINKS: dict[str, Link] = {
    "nvlink": _nominal(
        450, 15, "NVLink 4: 18 links of 25 GB/s each way (H100 data sheet: 900 GB/s both ways)"
    ),
    "pcie5": _nominal(63, 20, "PCIe 5.0 x16: 32 GT/s x 16 x 128/130"),
    "pcie4": _nominal(31.5, 20, "PCIe 4.0 x16: 16 GT/s x 16 x 128/130"),
    "hccs": _nominal(
        196, 30, "Atlas A2, 8 devices in a full mesh: 7 links of 56 GB/s both ways, one per pair", wire=28
    ),
    "infiniband": _nominal(50, 25, "NDR InfiniBand, one 400 Gbit/s port per device"),
    "roce": _nominal(25, 30, "RoCE v2, one 200 Gbit/s port per device"),
    "ethernet": _nominal(1.25, 60, "10 Gbit/s Ethernet"),
    "loopback": Link(
        all_to_all=Channel(latency_s=300e-6, bytes_per_s=1.3e9),
        gather=Channel(latency_s=250e-6, bytes_per_s=0.9e9),
        ring=Channel(latency_s=250e-6, bytes_per_s=0.9e9),
        source="gloo between processes of a two-core host, measured: 64 MiB in 49 and 72 ms",
    ),
}


def parse_link(text: str) -> Link:
    """The link that `text` gives: a class of LINKS, or numbers such as "25GB/s,20us".

    GB is 1e9 bytes per direction and device; the microseconds are per message. Raises ValueError otherwise.
    """
    if text.lower() in LINKS:
        return LINKS[text.lower()]
    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(rf"{number}\s*gb/s\s*,\s*{number}\s*us", text.strip().lower())
    if match is None:
        raise ValueError(
            f"link={text!r} is not known; use one of {', '.join(LINKS)}, or numbers such as '25GB/s,20us'"
        )
    channel = Channel(latency_s=float(match[2]) * 1e-6, bytes_per_s=float(match[1]) * 1e9)
    return Link(all_to_all=channel, gather=channel, ring=channel, source=f"given: {text}")
