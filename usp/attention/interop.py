"""Long-context attention of other installed packages, named as an engine: yunchang, xfuser.

Theirs are the exchange and the merge of the ring's blocks; the local kernel is ours, through the
`attn_processor` that both take. Of the ways into yunchang 0.6.4 it is the one that is right on every device:
its own torch kernels have no CPU path, round the log-sum-exp to the input's dtype or set it to zero, and its
`UlyssesAttention` on torch's kernels runs a ring over the whole world. What they get wrong or cannot do is
refused by name before anything is sent.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata, util
from typing import Any

import torch
import torch.distributed as dist

from runtime.log import get_logger
from runtime.world import end_groups
from usp.attention.kernels import KERNELS, attention, lse_attention
from usp.config import ParallelConfig
from usp.layout import Split
from usp.mesh import Group, Groups

logger = get_logger(__name__)

MODULES = {"yunchang": "yunchang", "xfuser": "xfuser.core.long_ctx_attention"}
CLASSES = {"yunchang": "LongContextAttention", "xfuser": "xFuserLongContextAttention"}

# Devices on which an engine's ring is wrong, and why.
OVERWRITES = (
    "its ring there computes only while step <= rank and overwrites instead of merging, so that every rank "
    "attends to the keys of rank 0 alone"
)
WRONG_RINGS = {("yunchang", "npu"): OVERWRITES}
# Their local kernels whose log-sum-exp is not one.
WRONG_KERNELS = {
    "torch_math": "gives zeros as its log-sum-exp",
    "torch_cudnn": "gives zeros as its log-sum-exp",
    "sparse_sage": "gives no log-sum-exp",
    "npu": "gives no log-sum-exp",
}
OURS = "usp"  # stands for attn_type; any name that is not one of theirs makes them call the attn_processor


def external_attention(
    config: ParallelConfig, groups: Groups, *, kernel: str = "auto"
) -> "LongContextAttention | None":
    """The attention of `config.engine`, or None for our own and for a sequence that one rank holds alone.

    `kernel` names the local kernel. Call it on all ranks alike. Raises ValueError if the engine is not
    installed, does not import here, or does not take the kernel.
    """
    if config.engine == "usp":
        return None
    check_engine(config.engine, ring_degree=config.ring_degree, kernel=kernel)
    if config.sp_degree == 1:
        logger.warning("engine=%r has no effect: one rank holds the whole sequence", config.engine)
        return None
    return LongContextAttention(config.engine, groups, kernel)


def check_engine(
    engine: str, *, ring_degree: int, kernel: str = "auto", device_type: str | None = None
) -> None:
    """Raise ValueError unless `engine` is installed, imports, and is right for this ring, kernel and device.

    Needs no process group, so it can be called before anything is loaded.
    """
    _check_ring(engine, ring_degree, device_type)
    if kernel != "auto" and kernel not in KERNELS:
        why = WRONG_KERNELS.get(kernel, "is not known")
        raise ValueError(
            f"kernel={kernel!r} with engine={engine!r}: it {why}; the local kernel of an engine is one of "
            f"ours: auto, {', '.join(KERNELS)}"
        )
    _attention_class(engine)


class LongContextAttention:
    """An engine's attention over the ranks of `groups`: shares in, share out, (B, S, H, D). See `External`.

    Both packages keep their process groups in one object per process (`yunchang.globals.PROCESS_GROUP`), read
    once, when an attention is made. Ours stand there for that moment only, so two pipelines with different
    degrees do not see each other. `close()` ends the communicator of one rank that an axis of degree 1 needs,
    since they take None for the whole world.
    """

    def __init__(self, engine: str, groups: Groups, kernel: str = "auto") -> None:
        self.engine = engine
        self._groups = groups
        self._single: list[Any] = []
        run = _with_lse(kernel) if groups.ring.size > 1 else _without_lse(kernel)
        with _process_groups(self._handle(groups.ulysses), self._handle(groups.ring)):
            try:
                made = _attention_class(engine)(attn_type=OURS, attn_processor=run)
            except ImportError as error:  # xfuser 0.7.0 asks here for a name that yunchang 0.6.4 lacks
                self.close()
                raise _does_not_import(engine, error) from error
        # xfuser takes first the module whose keys it may cache
        self._attend: Callable[..., torch.Tensor] = made if engine == "yunchang" else partial(made, None)

    def __call__(
        self,
        q_BSHD: torch.Tensor,
        k_BSHD: torch.Tensor,
        v_BSHD: torch.Tensor,
        split: Split,
        scale: float | None,
    ) -> torch.Tensor:
        """Attend this rank's tokens to those of all ranks. Collective over `groups.sp`.

        Raises ValueError, on all ranks and before anything is sent, for what the engine cannot do: shares of
        different length, heads that do not divide, a ring on a device where it is wrong.
        """
        self._check(q_BSHD, k_BSHD, split)
        out = self._attend(q_BSHD, k_BSHD, v_BSHD, softmax_scale=scale)
        share = q_BSHD.numel() * q_BSHD.element_size()
        kv_share = 2 * k_BSHD.numel() * k_BSHD.element_size()
        ulysses, ring = self._groups.ulysses, self._groups.ring
        away = ulysses.size - 1
        ulysses.sent[f"{self.engine} ulysses"] += (2 * share + kv_share) * away // ulysses.size
        ring.sent[f"{self.engine} ring"] += kv_share * (ring.size - 1)
        return out

    def close(self) -> None:
        """End the communicators made here. May be called again."""
        end_groups(self._single)

    def _check(self, q_BSHD: torch.Tensor, k_BSHD: torch.Tensor, split: Split) -> None:
        ulysses, ring = self._groups.ulysses.size, self._groups.ring.size
        _check_ring(self.engine, ring, q_BSHD.device.type)
        for what, heads in (("heads", q_BSHD.shape[2]), ("key/value heads", k_BSHD.shape[2])):
            check_shares(self.engine, split, heads=heads, what=what, ulysses_degree=ulysses)

    def _handle(self, group: Group) -> Any:
        """The group's communicator; for a group of one, which has none, one made for them."""
        if group.handle is not None:
            return group.handle
        self._single.append(dist.new_group(list(group.ranks), use_local_synchronization=True))
        return self._single[-1]


def check_shares(engine: str, split: Split, *, heads: int, ulysses_degree: int, what: str = "heads") -> None:
    """Raise ValueError unless the engine can spread these tokens and heads (of queries, or of keys)."""
    if len(set(split.sizes)) > 1:
        raise ValueError(
            f"engine={engine!r} was asked to attend over {split.total} tokens on {split.parts} ranks "
            f"({', '.join(map(str, split.sizes))}): it takes equal shares only, and ends the process at "
            f"others; use engine='usp', or a size whose tokens divide by {split.parts}"
        )
    if heads % ulysses_degree:
        raise ValueError(
            f"engine={engine!r} with ulysses_degree={ulysses_degree} on {heads} {what}: it takes a multiple "
            "of the degree only; use engine='usp', or give these ranks to ring_degree"
        )


def _check_ring(engine: str, ring_degree: int, device_type: str | None) -> None:
    why = WRONG_RINGS.get((engine, device_type or ""))
    if ring_degree > 1 and why is not None:
        raise ValueError(
            f"engine={engine!r} with ring_degree={ring_degree} on {device_type}: {why}; use engine='usp', or "
            "ulysses_degree alone"
        )


def _with_lse(kernel: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Our kernel as their processor, for a ring that merges by the log-sum-exp; they use BSHD and BHS too."""

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float | None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return lse_attention(q, k, v, None, kernel=kernel, scale=softmax_scale)

    return run


def _without_lse(kernel: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Our kernel as their processor where there is one block, so that its log-sum-exp is not used."""

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float | None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = attention(q, k, v, None, kernel=kernel, scale=softmax_scale)
        return out, out.new_zeros(out.shape[0], out.shape[2], out.shape[1])

    return run


def _attention_class(engine: str) -> Any:
    """The engine's attention class. Raises ValueError if it is not installed or does not import."""
    if util.find_spec(engine) is None:
        raise ValueError(
            f"engine={engine!r} was asked for; {engine} is not installed; pip install 'usp[{engine}]'"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # yunchang 0.6.4 decorates with torch.jit.script
            return getattr(importlib.import_module(MODULES[engine]), CLASSES[engine])
    except Exception as error:
        raise _does_not_import(engine, error) from error


def _does_not_import(engine: str, error: Exception) -> ValueError:
    reason = (str(error).splitlines() or [""])[0]
    return ValueError(
        f"engine={engine!r} was asked for; {engine} {metadata.version(engine)} does not import here "
        f"({type(error).__name__}: {reason}); use engine='usp'"
    )


@contextmanager
def _process_groups(ulysses: Any, ring: Any) -> Iterator[None]:
    """These groups in yunchang's global object, for the body."""
    state = importlib.import_module("yunchang.globals").PROCESS_GROUP
    kept = state.ULYSSES_PG, state.RING_PG
    state.ULYSSES_PG, state.RING_PG = ulysses, ring
    try:
        yield
    finally:
        state.ULYSSES_PG, state.RING_PG = kept
