"""What is compared: our strategies on one attention call, and on a stack of Wan blocks."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import nn

from runtime.process_group import World
from usp import comm
from usp.adapter import sharded
from usp.attention import SequenceAttention
from usp.attention.interop import check_engine, external_attention
from usp.bench.ideal import BlockStack, Traffic, attention_traffic, attention_work, gather_traffic
from usp.bench.rounds import Compute, Contender, Running
from usp.config import ParallelConfig, parse_parallel, spellings
from usp.layout import offsets, split_sizes
from usp.mesh import Groups, make_groups
from usp.plans import plan_for

Inputs = dict[str, torch.Tensor]


def layouts(ranks: int, chosen: Sequence[str] = ()) -> list[ParallelConfig]:
    """The configs that `chosen` spells, or all that spread one sequence over `ranks`.

    Raises ValueError if one does not fit.
    """
    words = chosen or [text.strip("'") for text in spellings(ranks) if "cfg" not in text]
    configs = [parse_parallel(text) for text in words]
    for config in configs:
        config.check_world(ranks)
        if config.cfg_degree > 1:
            raise ValueError(
                f"strategy {str(config)!r} spreads guidance branches; one forward has one branch"
            )
    return configs


def qkv(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, world: World) -> tuple[torch.Tensor, ...]:
    """Whole random q, k and v, (1, S, H, D), the same on every rank."""
    generator = torch.Generator().manual_seed(tokens)
    made = torch.randn(3, 1, tokens, heads, head_dim, generator=generator).to(dtype)
    return made.to(world.device.torch_device).unbind(0)


def attention_alone(qkv_BSHD: Sequence[torch.Tensor]) -> Compute:
    """torch's own attention over the whole sequence, (B, S, H, D)."""
    q, k, v = (t.transpose(1, 2) for t in qkv_BSHD)
    return lambda: F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def attention_contender(world: World, config: ParallelConfig, qkv_BSHD: Sequence[torch.Tensor]) -> Contender:
    """One attention call: this rank's share in, this rank's share out."""
    _, tokens, heads, head_dim = qkv_BSHD[0].shape
    sizes = split_sizes(tokens, config.sp_degree)

    def build() -> Running:
        attention, groups, close = _attention(world, config)
        shares = [comm.split(t, dim=1, sizes=sizes, group=groups.sp) for t in qkv_BSHD]
        compute = partial(attention, *shares, split=attention.split((tokens,)))
        return Running(compute, partial(_sent, groups), close)

    def pick(whole: torch.Tensor) -> torch.Tensor:
        return whole.narrow(1, offsets(sizes)[world.rank], sizes[world.rank])

    itemsize = qkv_BSHD[0].element_size()
    least = attention_traffic(config, tokens, heads=heads, head_dim=head_dim, itemsize=itemsize)
    return Contender(name_of(config), build, least, attention_work(config, tokens, heads), pick=pick)


def wan(stack: BlockStack, tokens: int, dtype: torch.dtype, world: World) -> nn.Module:
    """A WanTransformer3DModel of these sizes for inputs of `tokens`; random weights, alike on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = WanTransformer3DModel(
            num_layers=stack.layers,
            num_attention_heads=stack.heads,
            attention_head_dim=stack.head_dim,
            ffn_dim=stack.ffn,
            text_dim=stack.width,
            in_channels=stack.channels,
            out_channels=stack.channels,
            rope_max_seq_len=max(1024, *grid(tokens)),
        )
    return nn.Module.to(model, world.device.torch_device, dtype).eval()


def wan_inputs(stack: BlockStack, tokens: int, dtype: torch.dtype, world: World) -> Inputs:
    """One forward's inputs with exactly `tokens` tokens, alike on all ranks."""
    generator = torch.Generator().manual_seed(tokens)
    frames, rows, columns = grid(tokens)
    latents = torch.randn(1, stack.channels, frames, 2 * rows, 2 * columns, generator=generator)
    text = torch.randn(1, stack.text, stack.width, generator=generator)
    inputs = {"hidden_states": latents.to(dtype), "encoder_hidden_states": text.to(dtype)}
    inputs["timestep"] = torch.tensor([500.0])
    return {name: value.to(world.device.torch_device) for name, value in inputs.items()}


def grid(tokens: int) -> tuple[int, int, int]:
    """Frames, rows and columns of patches whose product is `tokens`, as near to a cube as can be."""
    factors = [(f, r, tokens // f // r) for f in _divisors(tokens) for r in _divisors(tokens // f)]
    return min((triple for triple in factors if list(triple) == sorted(triple)), key=lambda t: t[2] - t[0])


def forward(model: nn.Module, inputs: Inputs) -> Compute:
    """The model's forward on these inputs."""
    return lambda: model(**inputs, return_dict=False)[0]


def twin(model: nn.Module) -> nn.Module:
    """A copy that shares the parameters and buffers, so that hooks on it leave the model alone."""
    shared = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def transformer_contender(
    world: World, config: ParallelConfig, model: nn.Module, inputs: Inputs, stack: BlockStack
) -> Contender:
    """A forward of the sharded model: whole inputs in, the whole result out on every rank.

    With an engine of another package, its attention stands where ours would, in our adapter.
    """

    def build() -> Running:
        attention, groups, close = _attention(world, config)
        shard = sharded(twin(model), plan_for(model), attention)
        return Running(forward(shard.model, inputs), partial(_sent, groups), close)

    least, work = transformer_traffic(config, inputs, stack), stack.work(config, tokens_of(inputs))
    if config.engine == "usp":
        return Contender(name_of(config), build, least, work)
    note = f"{config.engine}: its attention in our adapter, over our local kernel"
    return Contender(name_of(config), build, least, work, config.engine, notes=(note,))


def transformer_traffic(config: ParallelConfig, inputs: Inputs, stack: BlockStack) -> Traffic:
    """The least a forward must send: the attention of each layer, and the result's patches to every rank."""
    tokens, itemsize = tokens_of(inputs), inputs["hidden_states"].element_size()
    layer = attention_traffic(config, tokens, heads=stack.heads, head_dim=stack.head_dim, itemsize=itemsize)
    last = gather_traffic(tokens, config.sp_degree, channels=4 * stack.channels, itemsize=itemsize)
    return layer * stack.layers + last


def tokens_of(inputs: Inputs) -> int:
    """Tokens of these inputs: patches of 1 x 2 x 2."""
    return inputs["hidden_states"][0, 0].numel() // 4


def name_of(config: ParallelConfig) -> str:
    """The config in words, the engine first if it is not ours."""
    ours = str(replace(config, engine="usp"))
    return ours if config.engine == "usp" else f"{config.engine} {ours}"


def _attention(world: World, config: ParallelConfig) -> tuple[SequenceAttention, Groups, Callable[[], None]]:
    """The attention of a config, its groups, and what ends both."""
    if config.engine != "usp":
        check_engine(config.engine, ring_degree=config.ring_degree, device_type=world.device.kind)
    groups = make_groups(config, rank=world.rank, timeout_s=world.timeout_s)
    external = external_attention(config, groups)

    def close() -> None:
        if external is not None:
            external.close()
        groups.close()

    return SequenceAttention(groups, "auto", external), groups, close


def _sent(groups: Groups) -> int:
    return sum(groups.sent.values())


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
