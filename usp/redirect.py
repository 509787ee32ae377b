"""One attention module's calls, handed to the attention over all ranks while that module runs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from usp import comm
from usp.attention import SequenceAttention
from usp.layout import Split
from usp.mesh import Group


class Redirect(TorchFunctionMode):
    """Hands `scaled_dot_product_attention` to the strategy while the module `name` runs.

    `shares` has this rank's tokens of each stream. `key_mask` gives the mask of all ranks' keys, (B, S) in
    the streams' order, where a plan knows it; None where masks arrive whole.
    """

    def __init__(
        self,
        attention: SequenceAttention,
        split: Split,
        shares: Sequence[int],
        name: str,
        key_mask: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._attention, self._split, self._shares, self._name = attention, split, shares, name
        self._key_mask = key_mask
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """scaled_dot_product_attention over the tokens of all ranks; (B, H, S, D) in and out."""
        if is_causal or dropout_p:
            raise ValueError(
                f"{self._name} asks for is_causal={is_causal}, dropout_p={dropout_p}; attention over ranks "
                "is neither causal nor random; call the model in eval mode"
            )
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            raise RuntimeError(
                f"{self._name} records gradients; attention over ranks is for inference only; call the model "
                "under torch.no_grad()"
            )
        present = [max(1, share) for share in self._shares]  # one token carries an empty share (`own_share`)
        if any(t.shape[2] != sum(present) for t in (query, key, value)):
            raise ValueError(
                f"{self._name} attends from {query.shape[2]} to {key.shape[2]} tokens, this rank's share is "
                f"{sum(present)}; the plan names it as self-attention over the split tokens"
            )
        mask = self._whole_mask(attn_mask, sum(present))
        q, k, v = (_drop_padding(t.transpose(1, 2), present, self._shares) for t in (query, key, value))
        out = self._attention(q, k, v, split=self._split, mask=mask, scale=scale)
        if present != self._shares:
            out = _restore_padding(out, present, self._shares)
        return out.transpose(1, 2)

    def _whole_mask(self, mask: torch.Tensor | None, here: int) -> torch.Tensor | None:
        """The mask over all ranks' keys, for one that the module gave."""
        if mask is None or self._key_mask is None:
            return mask
        if mask.shape[-1] != here or (mask.ndim > 2 and mask.shape[-2] != 1):
            raise ValueError(
                f"{self._name} was given a mask of shape {tuple(mask.shape)}; its plan knows masks of keys, "
                f"(B, 1, 1, {here}) here; a mask by query cannot be made whole from them"
            )
        return self._key_mask()[:, None, None]


def own_share(tensor: torch.Tensor, dim: int, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """This rank's share; an empty one is carried by a copy of the first token, which no other rank ever sees.

    Models and vendor operators need not cope with empty tensors; the token is dropped before attention and
    gather.
    """
    if sizes[group.rank] == 0:
        return tensor.narrow(dim, 0, 1).contiguous()
    return comm.split(tensor, dim=dim, sizes=sizes, group=group)


def _drop_padding(tensor_BSHD: torch.Tensor, present: Sequence[int], shares: Sequence[int]) -> torch.Tensor:
    if list(present) == list(shares):
        return tensor_BSHD
    pieces = tensor_BSHD.split(list(present), dim=1)
    return torch.cat([p[:, :share] for p, share in zip(pieces, shares, strict=True)], dim=1)


def _restore_padding(out_BSHD: torch.Tensor, present: Sequence[int], shares: Sequence[int]) -> torch.Tensor:
    pieces = out_BSHD.split(list(shares), dim=1)
    return torch.cat(
        [F.pad(p, (0, 0, 0, 0, 0, n - p.shape[1])) for p, n in zip(pieces, present, strict=True)], dim=1
    )
