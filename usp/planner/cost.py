"""The cost model: from a workload, a machine and the degrees to seconds, bytes and memory of one step.

Bytes and kept buffers are exact: they follow from the same split tables as `usp.comm`. Seconds are a sum of
phases, each as long as its slowest rank, since every attention makes the ranks of a sequence wait for one
another.
"""

from dataclasses import dataclass

from usp.config import ParallelConfig
from usp.layout import Split, split_sizes
from usp.planner.machine import Machine

FP32 = 4  # norms, rotary tables, gates and the merge of a ring are computed in fp32
# What a Wan block's elementwise operators read and write, in tensors of a token's width: 3 layer norms with
# their modulations, 3 RMS norms of 7, 2 rotations of 9, gates and residuals (counted over diffusers 0.42).
BLOCK_PASSES = 66
BLOCK_OPERATORS = 65  # that compute; views are free
ULYSSES_OPERATORS, GATHER_OPERATORS, RING_OPERATORS = (
    8,
    3,
    15,
)  # pack, send, unpack; for a ring: of each block
TURNS = 1.06  # ranks that take turns on a core also take each other's caches: 4 gloo ranks on 2 cores, fitted
MERGE_PASSES = 5  # the running sum is scaled (2) and the block added (3)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One denoising step of one model: `batch` pictures of `tokens`, each in all guidance `branches`.

    A branch is a forward over the batch; where a pipeline is `stacked`, one forward holds all branches.
    `text_tokens` are attended to by cross-attention and held by every rank; 0 for a model without one, whose
    text is then part of `tokens`. `patch_channels` is what a token holds before the first and after the last
    layer. `parameter_bytes` is all that a rank keeps loaded, `latent_bytes` one picture's noise prediction.
    `caches` counts the models, experts that take turns, with a first-block cache.
    """

    tokens: int
    heads: int
    head_dim: int
    layers: int
    ffn_dim: int
    itemsize: int
    patch_channels: int
    text_tokens: int = 0
    branches: int = 1
    batch: int = 1
    stacked: bool = False
    parameter_bytes: int = 0
    latent_bytes: int = 0
    caches: int = 0
    passes: int = BLOCK_PASSES

    def __post_init__(self) -> None:
        none = ("text_tokens", "stacked", "parameter_bytes", "latent_bytes", "caches", "passes")
        for name in self.__dataclass_fields__:
            value, least = getattr(self, name), int(name not in none)
            if value < least:
                raise ValueError(f"{name}={value} was given; a workload has {least} or more")

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim

    @property
    def pieces(self) -> int:
        """What cfg ranks can have one each of: branches, or the pictures of a stacked forward."""
        return self.branches * self.batch if self.stacked else self.branches

    @property
    def block_parameters(self) -> int:
        """Parameters of all blocks' matrices: self- and cross-attention, feed-forward."""
        crossed = 4 if self.text_tokens else 0
        return self.layers * ((4 + crossed) * self.width**2 + 2 * self.width * self.ffn_dim)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One denoising step as predicted. `sent` is by global rank; memory is that of the fullest rank."""

    compute_s: float
    communication_s: float
    sent: tuple[int, ...]
    weight_bytes: int
    activation_bytes: int
    buffer_bytes: int
    cache_bytes: int

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.compute_s + self.communication_s

    @property
    def peak_bytes(self) -> int:
        """Memory that a rank needs while it denoises."""
        return self.weight_bytes + self.activation_bytes + self.buffer_bytes + self.cache_bytes


@dataclass(frozen=True)
class Shares:
    """Forwards, and pictures in each of them, by cfg rank; tokens by rank of the sequence and by block;
    heads by Ulysses rank.

    The first cfg rank has the most.
    """

    config: ParallelConfig
    forwards: tuple[int, ...]
    pictures: tuple[int, ...]
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    heads: tuple[int, ...]

    @classmethod
    def of(cls, workload: Workload, config: ParallelConfig) -> "Shares":
        """The shares of a workload; branches are dealt round-robin, a stacked batch and heads cut like
        tokens."""
        split = Split((workload.tokens,), config.sp_degree, config.ulysses_degree)
        pieces = split_sizes(workload.pieces, config.cfg_degree)
        forwards = tuple(min(1, count) for count in pieces) if workload.stacked else pieces
        pictures = pieces if workload.stacked else (workload.batch,) * config.cfg_degree
        heads = split_sizes(workload.heads, config.ulysses_degree)
        return cls(config, forwards, pictures, split.sizes, split.blocks, heads)

    @property
    def made(self) -> tuple[int, ...]:
        """Noise predictions of a step by cfg rank."""
        return tuple(n * each for n, each in zip(self.forwards, self.pictures, strict=True))

    def members(self, place: int) -> tuple[int, ...]:
        """Tokens of the Ulysses group of a rank of the sequence."""
        low = place - place % self.config.ulysses_degree
        return self.tokens[low : low + self.config.ulysses_degree]


def predict(workload: Workload, machine: Machine, config: ParallelConfig) -> Prediction:
    """One step on `config.world_size` ranks. `engine` is taken to be ours."""
    shares = Shares.of(workload, config)
    every = [_picture_bytes(workload, shares, place) for place in range(config.sp_degree)]
    started_s = workload.layers * _operators(config) * machine.operator_s
    attention_s = _busy(_attention_s(workload, machine, shares), 0.0, shares, machine)
    rest_s = _busy(_rest_s(workload, machine, shares), started_s, shares, machine)
    exchange_s = _forward_exchange_s(workload, machine, shares, every, attention_s)
    told = workload.latent_bytes * (config.cfg_degree - 1)  # of each prediction, to the other cfg ranks
    pattern = _pattern(config, "branches")
    branches_s = machine.exchange_s(pattern, config.cfg_degree, config.sp_degree, shares.made[0] * told)
    picture = [sum(counts.values()) for counts in every]
    return Prediction(
        compute_s=attention_s + rest_s,
        communication_s=shares.forwards[0] * exchange_s + branches_s,
        sent=tuple(n * (count + told) for n in shares.made for count in picture),
        weight_bytes=workload.parameter_bytes,
        activation_bytes=activation_bytes(workload, config),
        buffer_bytes=max(_kept_bytes(workload, shares, place) for place in range(config.sp_degree)),
        cache_bytes=cache_bytes(workload, config),
    )


def sent_bytes(workload: Workload, config: ParallelConfig, rank: int) -> dict[str, int]:
    """Bytes that a global rank hands to other ranks in one step, by exchange as `Group.sent` names them.

    Ulysses: a token's q, k and v go once to the rank of each head, and its result comes back. gather-KV: this
    rank's K and V go to every other block. Ring: each block of K and V is passed on, except the last. The
    last layer's result goes to all ranks of the sequence, a branch's noise prediction to all cfg ranks.
    """
    shares = Shares.of(workload, config)
    branch, place = divmod(rank, config.sp_degree)
    made = shares.made[branch]
    counts = {name: made * count for name, count in _picture_bytes(workload, shares, place).items()}
    counts["branches"] = made * workload.latent_bytes * (config.cfg_degree - 1)
    return {name: count for name, count in counts.items() if count}


def _picture_bytes(workload: Workload, shares: Shares, place: int) -> dict[str, int]:
    """Bytes that one rank of the sequence sends for one picture of a forward, by exchange."""
    config = shares.config
    block, inner = divmod(place, config.ulysses_degree)
    here, tokens = shares.heads[inner], shares.tokens[place]
    unit = workload.layers * workload.head_dim * workload.itemsize
    passed_on = sum(
        shares.blocks[(block - step) % config.ring_degree] for step in range(config.ring_degree - 1)
    )
    gathered = tokens * workload.patch_channels * workload.itemsize * (config.sp_degree - 1)
    return {
        "seq_to_heads": 3 * tokens * (workload.heads - here) * unit,
        "heads_to_seq": (sum(shares.members(place)) - tokens) * here * unit,
        "gather_kv": 2 * here * shares.blocks[block] * (config.gather_kv_degree - 1) * unit,
        "ring": 2 * here * passed_on * unit,
        "gather": gathered,
    }


def kept_bytes(workload: Workload, config: ParallelConfig, place: int) -> int:
    """Bytes of the buffers that the exchanges of one rank of the sequence keep between calls."""
    return _kept_bytes(workload, Shares.of(workload, config), place)


def _kept_bytes(workload: Workload, shares: Shares, place: int) -> int:
    config = shares.config
    block_tokens = sum(shares.members(place))
    here, tokens = shares.heads[place % config.ulysses_degree], shares.tokens[place]
    kept = 0
    if config.ulysses_degree > 1:
        kept += 4 * tokens * workload.heads + 3 * block_tokens * here  # q, k, v and the result; their heads
    if config.gather_kv_degree > 1:
        kept += 2 * workload.tokens * here
    if config.ring_degree > 1:
        kept += 4 * max(shares.blocks) * here
    return kept * shares.pictures[0] * workload.head_dim * workload.itemsize


def activation_bytes(workload: Workload, config: ParallelConfig) -> int:
    """An estimate of the largest activations of a rank, without the kept buffers.

    The whole embedded sequence lives until the first block is done; beside it either attention (residual,
    fp32 norm, q, k, v before and after rotation, result; for a ring also the fp32 sum and a block's) or the
    feed-forward layer (its input and result, and twice its width).
    """
    shares, width = Shares.of(workload, config), workload.width
    tokens, here = shares.tokens[0], shares.heads[0] * workload.head_dim
    attention = (
        tokens * width * (8 * workload.itemsize + FP32) + max(shares.blocks) * here * workload.itemsize
    )
    if config.ring_degree > 1:
        attention += 3 * FP32 * max(shares.blocks) * here
    feed_forward = tokens * (2 * workload.ffn_dim + 3 * width) * workload.itemsize + tokens * width * FP32
    whole = workload.tokens * (width + 2 * workload.patch_channels) * workload.itemsize
    pictures = shares.pictures[0] * (whole + max(attention, feed_forward))
    return pictures + 4 * workload.batch * workload.latent_bytes


def cache_bytes(workload: Workload, config: ParallelConfig) -> int:
    """Bytes that first-block caches hold on a rank: of each prediction and model two tensors of a share's
    width, and one more of the forward at hand."""
    if not workload.caches:
        return 0
    shares = Shares.of(workload, config)
    share = shares.tokens[0] * workload.width * workload.itemsize
    return (2 * workload.caches * shares.made[0] + shares.pictures[0]) * share


def _attention_s(workload: Workload, machine: Machine, shares: Shares) -> list[float]:
    """Seconds of each rank of the sequence for the self-attention of one picture."""
    degree = shares.config.ulysses_degree
    pair = 4 * workload.head_dim * workload.tokens * workload.layers / machine.attention_flops
    return [pair * shares.heads[p % degree] * shares.blocks[p // degree] for p in range(len(shares.tokens))]


def _rest_s(workload: Workload, machine: Machine, shares: Shares) -> list[float]:
    """Seconds of each rank of the sequence for all of one picture but its self-attention: matrices,
    elementwise, copies."""
    width, text, layers = workload.width, workload.text_tokens, workload.layers
    crossed = 2 * bool(text)
    per_token = 2 * (4 + crossed) * width**2 + 4 * width * workload.ffn_dim
    ends = 2 * width * workload.patch_channels
    found = []
    for place, share in enumerate(shares.tokens):
        tokens = max(1, share)  # an empty share is carried by one token
        matrices = layers * (tokens * per_token + 4 * width**2 * text)
        matrices += (
            ends * (workload.tokens + tokens) + 4 * width**2 * text
        )  # the text is embedded on every rank
        cross = layers * 4 * width * tokens * text
        moved = layers * tokens * (workload.passes * width * FP32 + 2 * workload.ffn_dim * workload.itemsize)
        moved += layers * _copied_bytes(workload, shares, place)
        compute = matrices / machine.matmul_flops + cross / machine.attention_flops
        found.append(compute + moved / machine.memory_bytes_per_s)
    return found


def _operators(config: ParallelConfig) -> int:
    """Operators that one block starts."""
    count = BLOCK_OPERATORS
    count += ULYSSES_OPERATORS * (config.ulysses_degree > 1) + GATHER_OPERATORS * (
        config.gather_kv_degree > 1
    )
    return count + RING_OPERATORS * config.ring_degree * (config.ring_degree > 1)


def _copied_bytes(workload: Workload, shares: Shares, place: int) -> int:
    """What a layer's strategy reads and writes to pack, unpack and merge; each copy counts twice."""
    config, size = shares.config, workload.itemsize
    here = shares.heads[place % config.ulysses_degree] * workload.head_dim
    block = sum(shares.members(place)) * here
    moved = 0
    if config.ulysses_degree > 1:
        moved += (2 * 3 + 2) * shares.tokens[place] * workload.width * size + 2 * block * size
    if config.gather_kv_degree > 1 or config.ring_degree > 1:
        moved += 2 * 2 * block * size
    if config.ring_degree > 1:
        moved += (
            ((config.ring_degree - 1) * MERGE_PASSES + 4) * block * FP32
        )  # 4: the last division, the cast
    return moved


def _forward_exchange_s(
    workload: Workload,
    machine: Machine,
    shares: Shares,
    every: list[dict[str, int]],
    attention_s: float,
) -> float:
    """Seconds of one forward's exchanges that no computation hides, where there are the most pictures."""
    config, layers, pictures = shares.config, workload.layers, shares.pictures[0]
    ulysses, ring, gathered = config.ulysses_degree, config.ring_degree, config.gather_kv_degree
    most = {name: pictures * max(counts[name] for counts in every) / layers for name in every[0]}
    # What a rank sends of q, k and v is three times what comes back to it, and the other way round.
    there = max(most["seq_to_heads"], 3 * most["heads_to_seq"])
    trade, fetch = _pattern(config, "seq_to_heads"), _pattern(config, "gather_kv")
    seconds = sum(layers * machine.exchange_s(trade, ulysses, 1, sent) for sent in (there, there / 3))
    seconds += layers * machine.exchange_s(fetch, gathered, ulysses, most["gather_kv"])
    if ring > 1:
        sent = most["ring"] / (ring - 1)
        start, transfer = machine.hop_s(_pattern(config, "ring"), ring, ulysses, sent)
        block_s = attention_s / shares.forwards[0] / layers / ring
        seconds += layers * (ring - 1) * (start + transfer - min(machine.overlap * transfer, block_s))
    whole = most["gather"] * layers
    return seconds + machine.exchange_s(_pattern(config, "gather"), config.sp_degree, 1, whole)


def _busy(picture_s: list[float], started_s: float, shares: Shares, machine: Machine) -> float:
    """Seconds of a step's phase: the slowest rank's, or all work over the slots where ranks take turns.

    `picture_s` is by rank of the sequence, `started_s` comes on top once in each forward.
    """
    longest = shares.made[0] * max(picture_s) + shares.forwards[0] * started_s
    if machine.slots is None:
        return longest
    starts = sum(shares.forwards) * len(picture_s)
    work = sum(shares.made) * sum(picture_s) + starts * started_s
    here = min(1.0, (machine.domain or shares.config.world_size) / shares.config.world_size)
    shared = work * here / machine.slots
    return max(longest, shared * TURNS) if shared > longest else longest


def _pattern(config: ParallelConfig, name: str) -> str:
    """The pattern of an exchange, as `usp.comm.exchange` chooses it."""
    if config.transport == "all_to_all":
        return "all_to_all"
    if name == "ring":
        return "ring"
    trades_heads = name in ("seq_to_heads", "heads_to_seq")
    return "all_to_all" if trades_heads and config.transport == "auto" else "gather"
