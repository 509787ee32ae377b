"""A shard plan: which tensors of a model have a token axis, where they are cut, and where made whole again.

Plans are data. `usp.adapter.sharded` applies one to a model from outside and removes it again; `usp/plans`
has one per model family; `python -m usp.plan show MODEL` prints one. Module names may hold `*` for one path
component ("blocks.*.attn1"), and "-1" for the last of a list; "" is the model itself.

A stream is one sequence: all its tensors are cut by one split table. "tokens" is the picture's in every plan;
models with joint attention have "text" beside it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SplitInput:
    """Cut one argument of a module's forward along `dim`; tensors that do not have `ndim` dims are left
    whole.

    In a list, tuple or dict each such tensor is cut. An `optional` entry may match no module.
    """

    module: str
    argument: str
    dim: int
    ndim: int
    stream: str = "tokens"
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class SplitMask(SplitInput):
    """Cut a key mask, True where a token is attended to: (B, S) of `stream`, whole when it arrives.

    From its share a model makes a mask of the keys that this rank holds; attention over all ranks takes the
    whole one instead, joined with True for streams that have none.
    """

    dim: int = 1
    ndim: int = 2


@dataclass(frozen=True, kw_only=True)
class SplitOutput:
    """Cut a module's result along `dim`, if it has `ndim` dims: element `index` of a tuple; None if it is no
    tuple."""

    module: str
    index: int | None = None
    dim: int
    ndim: int
    stream: str = "tokens"
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class SplitCount:
    """Make a count of the first tokens of `stream` a count of those in this rank's share.

    A module that does not take the argument is passed over.
    """

    module: str
    argument: str
    stream: str = "tokens"


@dataclass(frozen=True, kw_only=True)
class GatherOutput:
    """Make a module's result whole again along `dim`, on every rank."""

    module: str
    dim: int
    stream: str = "tokens"


@dataclass(frozen=True, kw_only=True)
class SharedAttention:
    """Modules whose attention runs over all ranks' tokens, and the streams that are joined in it, in local
    order.

    Attention modules that no entry names run locally: cross-attention to replicated states. An `optional`
    entry may match no module.
    """

    modules: str
    streams: tuple[str, ...] = ("tokens",)
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Held:
    """What this rank holds of a block's tensor argument, when it has `ndim` dims: its shares of `streams`,
    one after another along `dim`.

    Of a tuple, element `index`; every tensor where it is None.
    """

    argument: str
    ndim: int = 3
    streams: tuple[str, ...] = ("tokens",)
    dim: int = 1
    index: int | None = None


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A tensor argument of a block, with `ndim` dims, that has no token axis, or that every rank holds
    whole."""

    argument: str
    ndim: int


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A list of transformer blocks: what each is given, and what it returns.

    What `held` lists is checked in every forward; any other tensor argument whose second axis is as long as a
    whole sequence must be listed in `whole`, or it is an error. `outputs` has the argument that each element
    of a result continues; one name for a block that returns a tensor. `cached` is False for blocks that a
    first-block cache always runs.
    """

    modules: str
    held: tuple[Held, ...] = (Held(argument="hidden_states"),)
    whole: tuple[Whole, ...] = ()
    outputs: tuple[str, ...] = ("hidden_states",)
    cached: bool = True

    def streams(self, argument: str) -> tuple[str, ...]:
        """The streams that an argument holds; () for one that `held` does not list."""
        return next((held.streams for held in self.held if held.argument == argument), ())


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a forward returns, known without computing it: like `argument`, with other channels.

    The channels are the first of the `channels` entries in the config that is set, times the config entries
    `times`; with no `channels`, those of `argument`. An argument that is a list gives a list. `batched` lists
    the arguments that have the batch as their first axis, or one item for each; `batched_inside` those that
    are containers of such tensors.
    """

    argument: str = "hidden_states"
    channel_dim: int = 1
    channels: tuple[str, ...] = ("out_channels",)
    times: tuple[str, ...] = ()
    batched: tuple[str, ...] = ("hidden_states", "timestep", "encoder_hidden_states")
    batched_inside: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Refused:
    """An argument of the model's forward that must keep its default, because of `why`."""

    argument: str
    why: str


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How one model class is spread over the ranks of a sequence.

    A plan without `attentions` has no sequence to spread: the model takes cfg ranks only. `stacked` says that
    pipelines hold all guidance branches in the batch of one forward, so that forwards need no name;
    `told_apart_by` names arguments whose values set other forwards of such a pipeline apart. Above a
    `guidance_scale` of `guided_above`, pipelines make a second branch. `head_config`
    and `head_dim_config` name the config's entries with the head count and size; a size that is a list is the
    sum.
    """

    model: str
    splits: tuple[SplitInput | SplitOutput | SplitCount, ...] = ()
    gathers: tuple[GatherOutput, ...] = ()
    attentions: tuple[SharedAttention, ...] = ()
    blocks: tuple[Blocks, ...] = ()
    output: Output = Output()
    refused: tuple[Refused, ...] = ()
    stacked: bool = False
    told_apart_by: tuple[str, ...] = ()
    guided_above: float = 1.0
    head_config: str = "num_attention_heads"
    head_dim_config: str = "attention_head_dim"
