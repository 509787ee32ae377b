"""From groups to one attention function: Ulysses outside, ring or gather-KV inside, a local kernel at the
core."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from usp.attention.gather_kv import gather_kv
from usp.attention.kernels import CHOSEN_HERE, Attention, attention, choice, lse_attention
from usp.attention.ring import ring
from usp.attention.ulysses import ulysses
from usp.layout import Split, offsets
from usp.mesh import Groups

# q, k, v (this rank's shares, BSHD), the split table, the softmax scale
External = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Split, float | None], torch.Tensor]


@dataclass(frozen=True)
class SequenceAttention:
    """Attention whose tokens are spread over `groups.sp`.

    `kernel` names the local kernel, or "auto". `external` replaces ours by an installed package's attention.
    """

    groups: Groups
    kernel: str = "auto"
    external: External | None = None

    def chosen_kernel(self, dtype: torch.dtype, head_dim: int, device: torch.device) -> str:
        """The name of the local kernel that serves calls without a mask, and why."""
        if self.external is not None:
            return "that of the external engine"
        if self.groups.ring.size == 1 and self.kernel == "auto" and device.type not in CHOSEN_HERE:
            return "torch scaled_dot_product_attention (auto)"
        probe = torch.empty(1, 2, 1, head_dim, dtype=dtype, device=device)
        return choice(self.kernel, probe, None)

    def split(self, streams: tuple[int, ...]) -> Split:
        """The split table for sequences of these whole lengths."""
        return Split(streams, self.groups.sp.size, self.groups.ulysses.size)

    def __call__(
        self,
        q_BSHD: torch.Tensor,
        k_BSHD: torch.Tensor,
        v_BSHD: torch.Tensor,
        *,
        split: Split,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attend this rank's tokens to those of all ranks of `groups.sp`; shares in, share out, (B, S, H, D).

        `mask` is (Sk), (B, Sk), (Sq, Sk) or (B|1, H|1, Sq|1, Sk) over the *whole* sequence, alike on all
        ranks, bool (True attends) or additive. Collective over `groups.sp`. Raises ValueError for a mask of
        any other shape.
        """
        groups = self.groups
        if self.external is not None:
            if mask is not None:
                raise ValueError(
                    "an attention mask was given; the external engines drop masks; use engine='usp'"
                )
            return self.external(q_BSHD, k_BSHD, v_BSHD, split, scale)
        mask = self._whole_mask(mask, split, q_BSHD)
        members = split.sizes[groups.sp.rank - groups.ulysses.rank :][: groups.ulysses.size]
        inner: Attention
        if groups.ring.size > 1:
            kernel = partial(lse_attention, kernel=self.kernel, scale=scale)
            inner = _with_mask(partial(ring, split=split.blocks, group=groups.ring, attention_lse=kernel))
        else:
            kernel = partial(attention, kernel=self.kernel, scale=scale)
            inner = _with_mask(
                partial(gather_kv, split=split.blocks, group=groups.gather_kv, attention=kernel)
            )
        return ulysses(
            q_BSHD, k_BSHD, v_BSHD, mask=mask, split=members, group=groups.ulysses, attention=inner
        )

    def _whole_mask(
        self, mask: torch.Tensor | None, split: Split, q_BSHD: torch.Tensor
    ) -> torch.Tensor | None:
        """The mask with rows for the queries of this rank's Ulysses group and columns in rank order."""
        if mask is None:
            return None
        mask = _four_dims(mask, q_BSHD.shape[0], split.total)
        sp = self.groups.sp
        if mask.shape[-1] != split.total or mask.shape[2] not in (1, split.total):
            raise ValueError(
                f"an attention mask of shape {tuple(mask.shape)} was given for {split.total} tokens on "
                f"{sp.size} ranks; rows must be 1 or {split.total} and columns {split.total}; give the whole "
                "mask on every rank"
            )
        order = split.key_order()
        if order is not None:
            order = order.to(mask.device)
            mask = mask.index_select(-1, order)
            mask = mask if mask.shape[2] == 1 else mask.index_select(2, order)
        if mask.shape[2] > 1:
            block = sp.rank // split.inner
            mask = mask.narrow(2, offsets(split.blocks)[block], split.blocks[block])
        return mask


def _with_mask(function: Callable[..., torch.Tensor]) -> Attention:
    """The strategy as an Attention, which takes its mask by position."""
    return lambda q, k, v, mask: function(q, k, v, mask=mask)


def _four_dims(mask: torch.Tensor, batch: int, total: int) -> torch.Tensor:
    """The mask as (B|1, H|1, Sq|1, Sk); two dims are torch's (Sq, Sk), or (B, Sk) where they can only be
    that."""
    if mask.ndim == 2 and mask.shape[0] == batch != 1 and batch == total:
        raise ValueError(
            f"an attention mask of shape {tuple(mask.shape)} was given for batch {batch} and {total} tokens, "
            "so its rows may be batch items or queries; give it four dims, (B, 1, 1, Sk) or (1, 1, Sq, Sk)"
        )
    if mask.ndim == 2 and mask.shape[0] == batch:
        return mask[:, None, None]
    return mask[:, None] if mask.ndim == 3 else mask[(None,) * (4 - mask.ndim)]
