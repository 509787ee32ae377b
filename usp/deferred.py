"""A tensor whose value another rank is still computing: it has shape, dtype and device, and takes its value
when needed.

Views, casts and arithmetic on it are recorded; anything else needs the value and so causes the exchange. All
ranks run the same Python on tensors that are pending alike (a rank's own branch is wrapped too), so all ranks
exchange at the same place.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from usp.trees import map_tensors, tensors_in

aten = torch.ops.aten

RECORDED = frozenset(
    {
        *(
            aten.view.default,
            aten._unsafe_view.default,
            aten.slice.Tensor,
            aten.select.int,
            aten.expand.default,
        ),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int, aten.permute.default, aten.t.default),
        *(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.alias.default),
        *(aten.detach.default, aten.clone.default, aten._to_copy.default, aten.neg.default),
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Scalar),
        *(aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar),
    }
)


class Source(Protocol):
    """Where deferred values come from."""

    def may_record(self, leaves: frozenset[int]) -> bool:
        """Whether an operation on results of these branches may still wait."""
        ...

    def keep(self, recorded: "Deferred") -> None:
        """Compute this one, in the order of recording, when the values come."""
        ...

    def resolve(self, *, early_for: str | None = None) -> None:
        """Bring every outstanding value. Collective."""
        ...


class Deferred(torch.Tensor):
    """A value to come from `source`; `leaves` numbers the branches that it depends on."""

    source: Source
    leaves: frozenset[int]
    _recipe: Callable[[], torch.Tensor] | None
    _value: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, device: torch.device, source: Source, leaves: frozenset[int]
    ) -> "Deferred":
        """`like` is a meta tensor with the shape, strides and dtype of the value to come."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
        )
        made.source, made.leaves, made._recipe, made._value = source, leaves, None, None
        return made

    def set_value(self, value: torch.Tensor) -> None:
        """Give a branch its value."""
        self._value = value

    def record(self, recipe: Callable[[], torch.Tensor]) -> "Deferred":
        """This tensor, with the recipe that makes its value from others'."""
        self._recipe = recipe
        self.source.keep(self)
        return self

    @property
    def pending(self) -> bool:
        """Whether the value is still to come."""
        return self._value is None and self._recipe is None

    def value(self) -> torch.Tensor:
        """The value, once the source has been resolved; computed from the record the first time.

        The source asks for it when it is resolved, since an operand may be written to afterwards.
        """
        if self._value is None:
            assert self._recipe is not None, "the source was not resolved"
            self._value, self._recipe = self._recipe(), None
        return self._value

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Deferred({tuple(self.shape)}, {self.dtype}, branches {sorted(self.leaves)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in NEEDS_STORAGE:
            args, kwargs = (concrete(tree, early_for=func.__name__) for tree in (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():  # else plain results would be cast to this class
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in tensors_in((args, kwargs)) if isinstance(t, Deferred) and t._value is None]
        if not inputs:
            return func(*_values(args), **_values(kwargs))
        leaves = frozenset().union(*(t.leaves for t in inputs))
        source = inputs[0].source
        if func in RECORDED and source.may_record(leaves):
            return _record(func, args, kwargs, inputs[0], leaves)
        source.resolve(early_for=str(func))
        return func(*_values(args), **_values(kwargs))


NEEDS_STORAGE = frozenset(
    {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.data_ptr}
)


def concrete(tree: Any, *, early_for: str | None = None) -> Any:
    """The same containers with plain tensors; resolves first if any is outstanding."""
    for tensor in tensors_in(tree):
        if isinstance(tensor, Deferred) and tensor._value is None:
            tensor.source.resolve(early_for=early_for)
    return _values(tree)


def _record(func: Any, args: Any, kwargs: Any, first: Deferred, leaves: frozenset[int]) -> Any:
    """Deferred results of an operation; concrete inputs are copied, since they may change before it runs."""
    args, kwargs = (
        map_tensors(lambda t: t if isinstance(t, Deferred) else t.clone(), tree) for tree in (args, kwargs)
    )
    shape_kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    meta = func(*map_tensors(_meta, args), **map_tensors(_meta, shape_kwargs))
    made: list[Any] = []

    def run() -> Any:
        if not made:
            made.append(func(*_values(args), **_values(kwargs)))
        return made[0]

    device = torch.device(kwargs.get("device") or first.device)
    if isinstance(meta, torch.Tensor):
        return Deferred(meta, device, first.source, leaves).record(run)
    return [
        Deferred(m, device, first.source, leaves).record(lambda place=place: run()[place])
        for place, m in enumerate(meta)
    ]


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _values(tree: Any) -> Any:
    return map_tensors(lambda t: t.value() if isinstance(t, Deferred) else t, tree)
