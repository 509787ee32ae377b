"""A shard plan: which tensors of a model have a token axis, where they are cut, and where made whole again.

Plans are data. `usp.adapter.sharded` applies one to a model from outside and removes it again; `usp/plans`
has one per model family. Module names may hold `*` for one path component ("blocks.*.attn1"); "" is the model
itself.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SplitInput:
    """Cut one argument of a module's forward along `dim`; tensors that do not have `ndim` dims are left
    whole.

    `stream` names the sequence: all tensors of one stream are cut by one split table.
    """

    module: str
    argument: str
    dim: int
    ndim: int
    stream: str = "tokens"


@dataclass(frozen=True, kw_only=True)
class SplitOutput:
    """Cut element `index` of a module's result tuple along `dim`, if it has `ndim` dims."""

    module: str
    index: int
    dim: int
    ndim: int
    stream: str = "tokens"


@dataclass(frozen=True, kw_only=True)
class GatherOutput:
    """Make a module's result whole again along `dim`, on every rank."""

    module: str
    dim: int
    stream: str = "tokens"


@dataclass(frozen=True, kw_only=True)
class Replicated:
    """A tensor argument of a block that every rank holds whole, when it has `ndim` dims."""

    argument: str
    ndim: int


@dataclass(frozen=True, kw_only=True)
class SharedAttention:
    """Modules whose attention runs over all ranks' tokens, and the streams that are joined in it, in local
    order.

    Attention modules that no entry names run locally: cross-attention to replicated states.
    """

    modules: str
    streams: tuple[str, ...] = ("tokens",)


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a forward returns, known without computing it: like `argument`, with the channels that the config
    names.

    `batched` lists the arguments that have the batch as their first axis.
    """

    argument: str = "hidden_states"
    channel_dim: int = 1
    channel_config: str = "out_channels"
    batched: tuple[str, ...] = ("hidden_states", "timestep", "encoder_hidden_states")


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How one model class is spread over the ranks of a sequence.

    `blocks` names the list of transformer blocks. `replicated` lists the tensor arguments of a block that
    stay whole; any other tensor argument with an axis as long as the whole sequence must have been cut, or it
    is an error. `head_config` and `head_dim_config` name the model's config entries with the head count and
    size.
    """

    model: str
    splits: tuple[SplitInput | SplitOutput, ...]
    gathers: tuple[GatherOutput, ...]
    attentions: tuple[SharedAttention, ...]
    blocks: str
    replicated: tuple[Replicated, ...] = ()
    output: Output = Output()
    head_config: str = "num_attention_heads"
    head_dim_config: str = "attention_head_dim"
