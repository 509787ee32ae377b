"""CFG parallel for unmodified pipelines: each rank of the cfg axis computes its own guidance branch.

A pipeline calls the model once per branch, inside `cache_context("cond")`, `("uncond")`, ..., or without a
name in the same order in each step. The rank that owns a branch computes it; every rank, the owner too,
returns a `Deferred` in its place. The first operation that needs a value, normally the guidance formula,
exchanges all branches at once. A pipeline that stacks its branches along the batch instead has the batch cut.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import nn

from runtime.log import get_logger
from usp import comm
from usp.branches import Branches
from usp.deferred import Deferred, concrete
from usp.layout import offsets, split_sizes
from usp.mesh import Group
from usp.plan import ShardPlan, SplitInput
from usp.refusing import refuse
from usp.trees import map_tensors, tensors_in

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
        self._recorded: list[weakref.ref[Deferred]] = []  # what was computed from them, in order
        self._expected: int | None = None  # branches per step, known once a step has passed
        self._told_early = False
        self._made = 0

    def expect(self, branches: int) -> None:
        """A step has passed, and it had this many branches."""
        self._expected = branches

    def begin_call(self) -> None:
        """Forget what an earlier call, which may have failed, left."""
        self._outstanding.clear()
        self._recorded.clear()
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

    def keep(self, recorded: Deferred) -> None:
        """Compute this one, if it is still held, when the values come."""
        self._recorded.append(weakref.ref(recorded))

    def resolve(self, *, early_for: str | None = None) -> None:
        """Give every outstanding result its value: one message from each owner to each other rank.

        What was recorded from them is then computed, before anything can be written to. Collective.
        """
        waiting, self._outstanding = self._outstanding, []
        if not waiting:
            return
        early = early_for is not None and self._expected is not None and len(waiting) < self._expected
        if early and not self._told_early:  # else the step, or the call, is over: guidance has ended in it
            self._told_early = True
            logger.warning(
                "the pipeline needs a branch's value (%s) before it has called all %d guidance branches; "
                "the branches are computed one after the other, which is exact but not faster",
                early_for,
                self._expected,
            )
        for dtype in dict.fromkeys(made.dtype for made, _, _ in waiting):
            self._exchange([entry for entry in waiting if entry[0].dtype == dtype])
        recorded, self._recorded = self._recorded, []
        for reference in recorded:
            if (made := reference()) is not None:
                made.value()

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
    error. `length_of` gives the whole length of a stream in the forward at hand (`Sharded.length_of`), where
    the sequence is spread too: its hooks have cut the arguments before this class sees them.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardPlan,
        exchange: BranchExchange,
        branches: Branches,
        *,
        strict: bool = False,
        length_of: Callable[[str], int] | None = None,
    ) -> None:
        self._length_of = length_of
        self._model, self._plan, self._exchange, self._branches = model, plan, exchange, branches
        self._strict = strict
        self._order: list[str] = []  # branch names in order of first call
        self._seen: set[str] = set()  # in the step at hand
        self._told_idle = False
        self._spread = False  # whether a stacked forward of the call has kept all ranks busy
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
        self._told_idle = self._spread = False

    @property
    def branches(self) -> list[str]:
        """The branches of the call at hand, or of the last one."""
        return list(self._order)

    def _call(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        refuse(self._plan, bound)
        self._notice_step(self._branches.current)
        bound.arguments.update(concrete(dict(bound.arguments), early_for="the next forward"))
        name = self._branches.current
        given = bound.arguments[self._plan.output.argument]
        stacked = not self._branches.named or name == STACKED or self._plan.stacked
        if stacked and len(given) > 1:
            return self._cut_batch(original, bound)
        owner = self._deal(name) % self._exchange.group.size
        likes = self._expected(bound, len(given))
        own: list[torch.Tensor] | None = None
        if owner == self._exchange.group.rank:
            own = self._checked(original(*bound.args, **bound.kwargs), likes, f"in branch {name!r}")
        results = [
            self._exchange.defer(like, tensors_in(given)[0].device, owner, own[place] if own else None)
            for place, like in enumerate(likes)
        ]
        return _output(results if isinstance(given, list) else results[0], bound.arguments)

    def _deal(self, name: str) -> int:
        """The place of a branch in the order."""
        self._seen.add(name)
        if name not in self._order:
            self._order.append(name)
        return self._order.index(name)

    def _notice_step(self, name: str) -> None:
        """A branch that this step has had begins the next one."""
        if name in self._seen:
            self._exchange.expect(len(self._seen))
            self._check_idle(len(self._order))
            self._seen.clear()

    def check_used(self, branches: int | None = None) -> None:
        """At the end of a call, also one of a single step: say, or with `strict` raise, that ranks were
        idle. `branches` in a step, where their names do not tell."""
        if self._order:
            self._check_idle(branches or len(self._order))

    def _check_idle(self, busy: int) -> None:
        size = self._exchange.group.size
        if busy >= size or self._spread or self._told_idle:
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

    def _expected(self, bound: inspect.BoundArguments, batch: int) -> list[torch.Tensor]:
        """Meta tensors like the model's results for a batch: one, or one for each item of a list."""
        plan = self._plan.output
        config: Any = self._model.config
        given = bound.arguments[plan.argument]
        likes = []
        for item in given[:batch] if isinstance(given, list) else [given]:
            tensor = tensors_in(item)[-1]  # of several pictures, the last is the one that is made
            shape = list(tensor.shape)
            if isinstance(given, torch.Tensor):
                shape[0] = batch
            for entry in self._cut_before(tensor):
                assert self._length_of is not None, "a sequence is cut by a Sharded, which knows its length"
                shape[entry.dim] = self._length_of(entry.stream)
            if plan.channels:
                channels = next(config[name] for name in plan.channels if config[name] is not None)
                shape[plan.channel_dim] = channels * prod(config[name] for name in plan.times)
            kind = tensor.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
            likes.append(torch.empty(shape, dtype=dtype, device="meta"))
        return likes

    def _cut_before(self, tensor: torch.Tensor) -> list[SplitInput]:
        """The entries that have cut the argument which the result is like."""
        entries = [e for e in self._plan.splits if isinstance(e, SplitInput) and e.module == ""]
        wanted = (self._plan.output.argument, tensor.ndim)
        return [e for e in entries if (e.argument, e.ndim) == wanted] if self._length_of else []

    def _checked(self, output: Any, likes: list[torch.Tensor], where: str) -> list[torch.Tensor]:
        """A forward's results. Raises RuntimeError unless they are as the other ranks expect."""
        found = tensors_in(output[0])  # of a tuple, or a diffusers output, whose first entry is the sample
        facts, expected = ([f"{tuple(t.shape)} {t.dtype}" for t in side] for side in (found, likes))
        if facts != expected:
            raise RuntimeError(
                f"{type(self._model).__name__} gave {', '.join(facts)} {where}, and the other ranks expect "
                f"{', '.join(expected)}; the plan's `output` does not fit this version"
            )
        return found

    def _cut_batch(self, original: Any, bound: inspect.BoundArguments) -> Any:
        """Each cfg rank computes its share of the batch; all ranks get the whole."""
        group = self._exchange.group
        given = bound.arguments[self._plan.output.argument]
        batch = len(given)
        self._spread |= batch >= group.size
        self._check_idle(min(batch, group.size))
        sizes = split_sizes(batch, group.size)
        low, here = offsets(sizes)[group.rank], sizes[group.rank]
        likes = self._expected(bound, batch)
        kind = {"dtype": likes[0].dtype, "device": tensors_in(given)[0].device}
        pieces = [torch.empty(0, **kind)]
        if here:
            self._cut(bound, batch, slice(low, low + here))
            mine = self._expected(bound, here)
            own = self._checked(
                original(*bound.args, **bound.kwargs), mine, f"for {here} of a batch of {batch}"
            )
            pieces = [tensor.reshape(-1) for tensor in own]
        each = [t.numel() for t in likes] if isinstance(given, list) else [likes[0].numel() // batch] * batch
        counts = [sum(each[i : i + n]) for i, n in zip(offsets(sizes), sizes, strict=True)]
        whole = comm.gather(torch.cat(pieces), dim=0, sizes=counts, group=group, name="branches")
        results = [
            part.view(like.shape)
            for part, like in zip(whole.split([t.numel() for t in likes]), likes, strict=True)
        ]
        return _output(results if isinstance(given, list) else results[0], bound.arguments)

    def _cut(self, bound: inspect.BoundArguments, batch: int, share: slice) -> None:
        """Leave this rank's share of the batch in the arguments."""

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[share] if tensor.ndim and len(tensor) == batch else tensor

        for name, value in bound.arguments.items():
            if name in self._plan.output.batched and isinstance(value, list):
                bound.arguments[name] = value[share] if len(value) == batch else value
            elif name in (*self._plan.output.batched, *self._plan.output.batched_inside):
                bound.arguments[name] = map_tensors(cut, value)


def _output(sample: Any, arguments: dict[str, Any]) -> Any:
    """The sample as the model's forward returns it."""
    if arguments.get("return_dict", True) is False:
        return (sample,)
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    return Transformer2DModelOutput(sample=sample)
