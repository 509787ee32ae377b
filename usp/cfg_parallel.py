"""CFG parallel for unmodified pipelines: each rank of the cfg axis computes its own guidance branch.

A pipeline calls the model once per branch, inside `cache_context("cond")`, `("uncond")`, ... . The rank that
owns a branch computes it; every rank, the owner too, returns a `Deferred` in its place. The first operation
that needs a value, normally the guidance formula, exchanges all branches at once. A pipeline that stacks its
branches along the batch instead has the batch cut.
"""

import functools
import inspect
from typing import Any

import torch
from torch import nn

from runtime.log import get_logger
from usp import comm
from usp.branches import Branches
from usp.deferred import Deferred, concrete
from usp.layout import split_sizes
from usp.mesh import Group
from usp.plan import ShardPlan

logger = get_logger(__name__)

STACKED = "cond_uncond"  # the name that pipelines give to a forward that holds all branches in its batch


class BranchExchange:
    """The outstanding branch results of a pipeline, over one cfg group. Every rank of it holds the same
    list."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._outstanding: list[
            tuple[Deferred, int, torch.Tensor | None]
        ] = []  # result to come, owner, own value
        self._expected: int | None = None  # branches per step, known once a step has passed
        self._told_early = False
        self._made = 0

    def expect(self, branches: int) -> None:
        """A step has passed, and it had this many branches."""
        self._expected = branches

    def begin_call(self) -> None:
        """Forget what an earlier call, which may have failed, left."""
        self._outstanding.clear()
        self._expected = None

    def defer(
        self, like: torch.Tensor, device: torch.device, owner: int, own: torch.Tensor | None
    ) -> Deferred:
        """The result of a branch that cfg rank `owner` computes; `own` is its value on that rank."""
        made = Deferred(like, device, self, frozenset({self._made}))
        self._made += 1
        self._outstanding.append((made, owner, own))
        return made

    def may_record(self, leaves: frozenset[int]) -> bool:
        """Operations wait while branches of this step are still to be called."""
        if self._expected is None:
            return len(leaves) < 2
        return len(self._outstanding) < self._expected

    def resolve(self, *, early_for: str | None = None) -> None:
        """Give every outstanding result its value: one message from each owner to each other rank.
        Collective."""
        waiting, self._outstanding = self._outstanding, []
        if not waiting:
            return
        if self._expected is not None and len(waiting) < self._expected and not self._told_early:
            self._told_early = True
            logger.warning(
                "the pipeline needs a branch's value (%s) before it has called all %d guidance branches; "
                "the branches are computed one after the other, which is exact but not faster",
                early_for,
                self._expected,
            )
        for dtype in dict.fromkeys(made.dtype for made, _, _ in waiting):
            self._exchange([entry for entry in waiting if entry[0].dtype == dtype])

    def _exchange(self, waiting: list[tuple[Deferred, int, torch.Tensor | None]]) -> None:
        sizes = [0] * self.group.size
        for made, owner, _ in waiting:
            sizes[owner] += made.numel()
        own = [
            value.reshape(-1) for _, owner, value in waiting if owner == self.group.rank and value is not None
        ]
        first = waiting[0][0]
        mine = torch.cat(own) if own else torch.empty(0, dtype=first.dtype, device=first.device)
        shares = comm.gather(mine, dim=0, sizes=sizes, group=self.group, name="branches").split(sizes)
        taken = [0] * self.group.size
        for made, owner, _ in waiting:
            low = taken[owner]
            taken[owner] += made.numel()
            made.set_value(shares[owner][low : taken[owner]].view(made.shape))


class CfgParallel:
    """One model whose guidance branches are spread over the ranks of `exchange.group`, until `close()`.

    Branches are dealt to ranks in the order in which they are first called. `strict` makes an idle rank an
    error.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardPlan,
        exchange: BranchExchange,
        branches: Branches,
        *,
        strict: bool = False,
    ) -> None:
        self._model, self._plan, self._exchange, self._branches = model, plan, exchange, branches
        self._strict = strict
        self._order: list[str] = []  # branch names in order of first call
        self._seen: set[str] = set()  # in the step at hand
        self._told_idle = False
        self._signature = inspect.signature(model.forward)
        self._wrap()

    def _wrap(self) -> None:
        """Put our forward around the model's; an offload hook may have taken it off again, or wrapped it.

        Where one of ours is still inside, the outer one does the work and the inner one passes through.
        """
        own = self._model.__dict__.get("forward")
        original = self._model.forward

        @functools.wraps(original)  # hooks and caches read the signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._open or self._inside:
                return original(*args, **kwargs)
            self._inside = True
            try:
                return self._call(original, *args, **kwargs)
            finally:
                self._inside = False

        self._own, self._ours, self._open, self._inside = own, forward, True, False
        self._model.forward = forward

    def close(self) -> None:
        """Give the model its own forward back. May be called again.

        A forward that somebody has wrapped since stays under that wrapper, and only passes through.
        """
        self._open = False
        if self._model.__dict__.get("forward") is self._ours:
            del self._model.forward
            if self._own is not None:
                self._model.forward = self._own

    def begin_call(self) -> None:
        """Forget the branches of the call before."""
        if self._ours not in (self._model.__dict__.get("forward"), self._model.__dict__.get("_old_forward")):
            self._wrap()
        self._order.clear()
        self._seen.clear()
        self._told_idle = False

    @property
    def branches(self) -> list[str]:
        """The branches of the call at hand, or of the last one."""
        return list(self._order)

    def _call(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        bound.arguments.update(concrete(dict(bound.arguments), early_for="the next forward"))
        name = self._branches.current
        batch = bound.arguments[self._plan.output.argument].shape[0]
        if name in ("", STACKED) and batch > 1:
            return self._cut_batch(original, bound, batch)
        owner = self._deal(name) % self._exchange.group.size
        like = self._expected_output(bound)
        device = bound.arguments[self._plan.output.argument].device
        own = None
        if owner == self._exchange.group.rank:
            own = _tensor_of(original(*bound.args, **bound.kwargs))
            if own.shape != like.shape or own.dtype != like.dtype:
                raise RuntimeError(
                    f"{type(self._model).__name__} gave {tuple(own.shape)} {own.dtype} in branch {name!r}, "
                    f"and the other ranks expect {tuple(like.shape)} {like.dtype}; the plan's `output` does "
                    "not fit this version"
                )
        return _output(self._exchange.defer(like, device, owner, own), bound.arguments)

    def _deal(self, name: str) -> int:
        """The place of a branch in the order; notices when a new step begins."""
        if name in self._seen:
            self._exchange.expect(len(self._order))
            self._check_idle(len(self._order))
            self._seen.clear()
        self._seen.add(name)
        if name not in self._order:
            self._order.append(name)
        return self._order.index(name)

    def _check_idle(self, busy: int) -> None:
        size = self._exchange.group.size
        if busy >= size or self._told_idle:
            return
        self._told_idle = True
        sentence = (
            f"cfg_degree={size}, but this call has {busy} guidance branch{'es' * (busy > 1)}: {size - busy} "
            f"of {size} cfg ranks are idle; turn guidance on, or give these ranks to the sequence, for "
            "example with ulysses"
        )
        if self._strict:
            raise ValueError(sentence)
        logger.warning(sentence)

    def _expected_output(self, bound: inspect.BoundArguments) -> torch.Tensor:
        """A meta tensor like the model's result: like its input, with the model's output channels."""
        given = bound.arguments[self._plan.output.argument]
        shape = list(given.shape)
        config: Any = self._model.config
        shape[self._plan.output.channel_dim] = config[self._plan.output.channel_config]
        kind = given.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else given.dtype
        return torch.empty(shape, dtype=dtype, device="meta")

    def _cut_batch(self, original: Any, bound: inspect.BoundArguments, batch: int) -> Any:
        """Each cfg rank computes its share of the batch; all ranks get the whole."""
        group = self._exchange.group
        sizes = split_sizes(batch, group.size)
        self._check_idle(min(batch, group.size))
        like = self._expected_output(bound)
        low = sum(sizes[: group.rank])
        for name in self._plan.output.batched:
            value = bound.arguments.get(name)
            if isinstance(value, (torch.Tensor, list)) and len(value) == batch:
                bound.arguments[name] = value[low : low + sizes[group.rank]]
        if sizes[group.rank]:
            share = _tensor_of(original(*bound.args, **bound.kwargs))
        else:
            share = torch.empty(
                0,
                *like.shape[1:],
                dtype=like.dtype,
                device=bound.arguments[self._plan.output.argument].device,
            )
        return _output(comm.gather(share, dim=0, sizes=sizes, group=group, name="branches"), bound.arguments)


def _tensor_of(output: Any) -> torch.Tensor:
    return output[0]  # a tuple, or a diffusers output, whose first entry is the sample


def _output(sample: torch.Tensor, arguments: dict[str, Any]) -> Any:
    """The sample as the model's forward returns it."""
    if arguments.get("return_dict", True) is False:
        return (sample,)
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    return Transformer2DModelOutput(sample=sample)
