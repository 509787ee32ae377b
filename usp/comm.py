"""Every collective that the package issues, by name.

Shapes: B batch, S sequence (this rank's share), T tokens of the whole group, H heads, D head dim. All sizes
follow from the split table that every rank holds; each exchange asserts its sizes first, because gloo ends
the process when ranks disagree. Messages are contiguous and land in kept buffers: what an exchange returns is
valid until the same exchange runs again, and must be consumed (attended, copied) before that.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from usp.layout import kv_heads_of, offsets, split_sizes
from usp.mesh import Group


class Pending:
    """An exchange in flight; `wait()` before its receive buffer is read or its send buffer written."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Block until every message of this rank has left and arrived."""
        for work in self._works:
            work.wait()
        self._works = ()


def seq_to_heads(
    q_BSHD: torch.Tensor, k_BSHD: torch.Tensor, v_BSHD: torch.Tensor, *, split: Sequence[int], group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Trade tokens for heads: every rank's tokens of this rank's heads, (B, T, heads here, D) for q, k and v.

    `split` has the tokens of each rank of `group`. One message per peer carries its heads of q, k and v
    together. Collective over `group`. The result is a view of a kept buffer.
    """
    batch, tokens, heads, dim = q_BSHD.shape
    kv_heads = k_BSHD.shape[2]
    _check_share(q_BSHD, split, group)
    spans = [kv_heads_of(heads, kv_heads, group.size, r) for r in range(group.size)]
    counts = [len(q_span) + 2 * len(kv_span) for q_span, kv_span in spans]
    send = group.buffer("heads_send", tokens * batch * dim * sum(counts), q_BSHD.dtype, q_BSHD.device)
    low = 0
    for (q_span, kv_span), count in zip(spans, counts, strict=True):
        message = send[low : (low := low + tokens * batch * count * dim)].view(tokens, batch, count, dim)
        parts = (_heads(q_BSHD, q_span), _heads(k_BSHD, kv_span), _heads(v_BSHD, kv_span))
        torch.cat([p.transpose(0, 1) for p in parts], dim=2, out=message)  # S B h D
    mine = counts[group.rank]
    receive = group.buffer("heads_receive", sum(split) * batch * mine * dim, q_BSHD.dtype, q_BSHD.device)
    send_sizes = [tokens * batch * count * dim for count in counts]
    exchange(send, send_sizes, receive, [s * batch * mine * dim for s in split], group, "seq_to_heads").wait()
    whole_BThD = receive.view(sum(split), batch, mine, dim).transpose(0, 1)
    q_span, kv_span = spans[group.rank]
    q, k, v = whole_BThD.split([len(q_span), len(kv_span), len(kv_span)], dim=2)
    return q, *_align_kv(k, v, q_span, kv_span, heads // kv_heads)


def heads_to_seq(out_BThD: torch.Tensor, *, heads: int, split: Sequence[int], group: Group) -> torch.Tensor:
    """Trade heads back for tokens: all `heads` of this rank's tokens, (B, S, H, D), contiguous.

    The inverse of `seq_to_heads` for one tensor. Collective over `group`.
    """
    batch, total, mine, dim = out_BThD.shape
    assert total == sum(split), f"{total} tokens to hand back, the split table has {sum(split)}"
    tokens = split[group.rank]
    counts = split_sizes(heads, group.size)
    assert mine == counts[group.rank], f"{mine} heads here, the head table has {counts[group.rank]}"
    send = out_BThD.transpose(0, 1).contiguous().view(-1)  # T B h D
    receive = group.buffer("seq_receive", tokens * batch * heads * dim, send.dtype, send.device)
    receive_sizes = [tokens * batch * count * dim for count in counts]
    exchange(
        send, [s * batch * mine * dim for s in split], receive, receive_sizes, group, "heads_to_seq"
    ).wait()
    shares = [p.view(tokens, batch, -1, dim) for p in receive.split(receive_sizes) if p.numel()]
    if not shares:
        return out_BThD.new_empty(batch, tokens, heads, dim)
    return torch.cat([p.transpose(0, 1) for p in shares], dim=2)


def gather_kv_pair(
    k_BSHD: torch.Tensor, v_BSHD: torch.Tensor, *, split: Sequence[int], group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all ranks of `group` in rank order, each (B, T, H, D).

    One message to each peer. Collective over `group`. The result is a view of a kept buffer.
    """
    _check_share(k_BSHD, split, group)
    batch, _, heads, dim = k_BSHD.shape
    row = batch * 2 * heads * dim
    whole = group.buffer("gather_kv", sum(split) * row, k_BSHD.dtype, k_BSHD.device)
    own = whole.split([s * row for s in split])[group.rank].view(split[group.rank], batch, 2 * heads, dim)
    torch.cat([k_BSHD.transpose(0, 1), v_BSHD.transpose(0, 1)], dim=2, out=own)
    _share_in_place(whole, [s * row for s in split], group, "gather_kv")
    k, v = whole.view(sum(split), batch, 2 * heads, dim).transpose(0, 1).chunk(2, dim=2)
    return k, v


def pack_kv(k_BSHD: torch.Tensor, v_BSHD: torch.Tensor, *, room: int, group: Group) -> torch.Tensor:
    """K and V as one message of a ring, (2, B, S, H, D) in a kept buffer with room for `room` tokens."""
    batch, tokens, heads, dim = k_BSHD.shape
    flat = group.buffer("ring_0", 2 * batch * room * heads * dim, k_BSHD.dtype, k_BSHD.device)
    packed = flat[: 2 * k_BSHD.numel()].view(2, batch, tokens, heads, dim)
    return torch.stack([k_BSHD, v_BSHD], out=packed)


def ring_exchange(block: torch.Tensor, receive: torch.Tensor, *, group: Group) -> Pending:
    """Start sending `block` to the next rank of `group` while `receive` fills from the one before.

    Both are contiguous; either may be empty, and then nothing travels that way (both ends know it).
    Collective over `group`: point-to-point, batched, so that no order of sends can deadlock.
    """
    sends, receives = [0] * group.size, [0] * group.size
    sends[(group.rank + 1) % group.size] = block.numel()
    receives[(group.rank - 1) % group.size] = receive.numel()
    return exchange(block.view(-1), sends, receive.view(-1), receives, group, "ring")


def split(tensor: torch.Tensor, *, dim: int, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """This rank's share of a tensor that every rank holds whole; nothing travels."""
    if tensor.shape[dim] != sum(sizes):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is to be split along dim {dim} over {group.size} "
            f"ranks, but the split table is for {sum(sizes)} tokens; check the plan's entry for it"
        )
    return tensor.narrow(dim, offsets(tuple(sizes))[group.rank], sizes[group.rank]).contiguous()


def gather(
    tensor: torch.Tensor, *, dim: int, sizes: Sequence[int], group: Group, name: str = "gather"
) -> torch.Tensor:
    """The whole tensor, on every rank, from the shares along `dim`; the inverse of `split`.

    Collective over `group`. The result is a fresh tensor; `name` counts its bytes.
    """
    assert tensor.shape[dim] == sizes[group.rank], (
        f"rank {group.rank} holds {tensor.shape[dim]} tokens, the split table has {sizes[group.rank]}"
    )
    share = tensor.movedim(dim, 0)
    row = share[:1].numel() if share.shape[0] else share.new_empty(1, *share.shape[1:]).numel()
    whole = tensor.new_empty(sum(sizes) * row)
    whole.split([s * row for s in sizes])[group.rank].view(share.shape).copy_(share)
    _share_in_place(whole, [s * row for s in sizes], group, name)
    return whole.view(sum(sizes), *share.shape[1:]).movedim(0, dim).contiguous()


def agree_sums(sums: torch.Tensor, *, group: Group) -> list[float]:
    """The sums over all ranks of `group` of a few numbers (1-D), the same bits on every rank.

    Every rank's numbers are gathered and added in rank order in float64. An all-reduce need not round alike
    on all ranks, and so would need a broadcast behind it before anything may branch on the result.
    Collective: every rank of `group` must enter it, whatever it holds. Waits for the device. Its few bytes
    are not counted in `sent`.
    """
    if group.handle is None:
        return sums.tolist()
    rows = [torch.empty_like(sums) for _ in range(group.size)]
    dist.all_gather(rows, sums, group=group.handle)
    return [sum(column) for column in zip(*torch.stack(rows).tolist(), strict=True)]


def exchange(
    send: torch.Tensor,
    send_sizes: Sequence[int],
    receive: torch.Tensor,
    receive_sizes: Sequence[int],
    group: Group,
    name: str,
) -> Pending:
    """Start moving consecutive pieces of `send` to the ranks of `group`, and theirs into pieces of `receive`.

    Both are 1-D and contiguous, sizes in elements, one per rank. "seq_to_heads" and "heads_to_seq" ride on
    one all-to-all, the ring on point-to-point, unless the group's transport forces one.
    """
    assert send.is_contiguous(), f"{name}: the message must be contiguous"
    assert receive.is_contiguous(), f"{name}: the room for the message must be contiguous"
    assert len(send_sizes) == len(receive_sizes) == group.size, f"{name}: one size per rank of the group"
    assert send.numel() == sum(send_sizes), (
        f"{name}: {send.numel()} elements to send, sizes say {sum(send_sizes)}"
    )
    assert receive.numel() == sum(receive_sizes), (
        f"{name}: room for {receive.numel()} elements, sizes say {sum(receive_sizes)}"
    )
    group.sent[name] += (send.numel() - send_sizes[group.rank]) * send.element_size()
    if group.handle is None:
        receive.copy_(send)
        return Pending(())
    transport = group.transport if group.transport != "auto" else ("p2p" if name == "ring" else "all_to_all")
    send, receive = _wire(send), _wire(receive)
    if transport == "all_to_all":
        work = dist.all_to_all_single(
            receive, send, list(receive_sizes), list(send_sizes), group=group.handle, async_op=True
        )
        return Pending([work])
    pieces = list(zip(send.split(list(send_sizes)), receive.split(list(receive_sizes)), strict=True))
    pieces[group.rank][1].copy_(pieces[group.rank][0])
    return _point_to_point(pieces, group)


def _share_in_place(whole: torch.Tensor, sizes: Sequence[int], group: Group, name: str) -> None:
    """Fill the other ranks' pieces of `whole`; this rank's piece is already in place."""
    own = whole.split(list(sizes))[group.rank]
    if group.transport == "all_to_all":
        exchange(own.repeat(group.size), [own.numel()] * group.size, whole, sizes, group, name).wait()
        return
    group.sent[name] += own.numel() * own.element_size() * (group.size - 1)
    if group.handle is not None:
        pieces = list(zip([_wire(own)] * group.size, _wire(whole).split(list(sizes)), strict=True))
        _point_to_point(pieces, group).wait()


def _point_to_point(pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], group: Group) -> Pending:
    """Send each peer its piece and receive its own, as one batch; empty pieces are skipped by both ends."""
    operations = []
    for step in range(1, group.size):  # ranks talk to different peers at the same time
        target, source = (group.rank + step) % group.size, (group.rank - step) % group.size
        if pieces[target][0].numel():
            operations.append(dist.P2POp(dist.isend, pieces[target][0], group.ranks[target], group.handle))
        if pieces[source][1].numel():
            operations.append(dist.P2POp(dist.irecv, pieces[source][1], group.ranks[source], group.handle))
    return Pending(dist.batch_isend_irecv(operations) if operations else ())


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it travels: FP8 as bytes, since gloo refuses it and others may."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 and tensor.is_floating_point() else tensor


def _heads(tensor_BSHD: torch.Tensor, span: range) -> torch.Tensor:
    return tensor_BSHD[:, :, span.start : span.stop]


def _align_kv(
    k: torch.Tensor, v: torch.Tensor, q_span: range, kv_span: range, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V with a head count that divides this rank's query heads in order: as they are, or one per query
    head."""
    aligned = q_span.start % group == 0 and q_span.stop % group == 0
    if group == 1 or aligned or not q_span:
        return k, v
    index = torch.tensor([h // group - kv_span.start for h in q_span], device=k.device)
    return k.index_select(2, index), v.index_select(2, index)


def _check_share(tensor_BSHD: torch.Tensor, sizes: Sequence[int], group: Group) -> None:
    assert len(sizes) == group.size, f"the split table has {len(sizes)} shares for {group.size} ranks"
    assert tensor_BSHD.shape[1] == sizes[group.rank], (
        f"rank {group.rank} holds {tensor_BSHD.shape[1]} tokens, the split table has {sizes[group.rank]}"
    )
