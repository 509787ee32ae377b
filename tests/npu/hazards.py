"""What ranks on simulated NPUs run to meet the traps of the device and its communication."""

import ast
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.npu.bodies import WORLD, device
from tests.usp.in_ranks import error_of
from tests.usp.test_attention import cached_groups
from usp import comm
from usp.attention import npu_kernels
from usp.attention.kernels import KERNELS, attention, choice, choose, lse_attention, plain
from usp.attention.npu_kernels import log_sum_exp
from usp.config import parse_parallel
from usp.mesh import make_groups

ROOT = Path(__file__).parents[2]
ARRANGED = {  # from (B, S, N, D)
    "BSND": lambda t: t,
    "BNSD": lambda t: t.transpose(1, 2),
    "BSH": lambda t: t.flatten(2),
    "SBH": lambda t: t.flatten(2).transpose(0, 1),
}


def counted(what: str) -> int:
    """How often the simulated CANN was asked for `what`."""
    from tests.npu import kernels

    return kernels.counted(what)


def ring_path(layout: str) -> tuple[float, dict[str, int]]:
    """The error of a ring against the CPU, and which point-to-point path of torch_npu it took."""
    from tests.usp import test_attention

    q, k, v = test_attention.tensors(3, 21, 3, kv_heads=1, batch=2)
    got = test_attention.attend(layout, q, k, v)
    error = (got - test_attention.reference(q, k, v)).abs().max().item()
    return error, {name: counted(name) for name in ("HcclGroup", "HcclBatchSendRecv")}


def ring_and_own_blocks(layout: str) -> tuple[float, float]:
    """How far a ring is from the CPU's attention, and from attention of each block to itself alone."""
    from tests.usp import test_attention

    q, k, v = test_attention.tensors(3, 21, 3)
    got = test_attention.attend(layout, q, k, v)
    blocks = [torch.tensor_split(t, dist.get_world_size(), dim=1) for t in (q, k, v)]
    own = torch.cat([test_attention.reference(*block) for block in zip(*blocks, strict=True)], dim=1)
    wanted = test_attention.reference(q, k, v)
    return (got - wanted).abs().max().item(), (got - own).abs().max().item()


def keys_and_values_apart() -> str:
    """Two sends to one peer in a batch, as other packages' rings do."""
    peer = 1 - dist.get_rank()
    tensors = [torch.ones(4, device=device()) for _ in range(4)]
    operations = [
        dist.P2POp(operation, tensor, peer)
        for operation, tensor in zip((dist.isend, dist.isend, dist.irecv, dist.irecv), tensors, strict=True)
    ]

    def both() -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        torch.npu.synchronize()

    return error_of(both)


def transposed_send() -> bool:
    """Whether a transposed tensor, given to torch_npu as it is, arrives as its values; ours never is."""
    rank = dist.get_rank()
    values = torch.arange(6.0).view(2, 3)
    sent = values.t().contiguous().t().to(device())
    sent = torch.empty_strided((2, 3), (1, 2), device=device()).copy_(values) if rank == 0 else sent
    received = torch.zeros(2, 3, device=device())
    operation = dist.P2POp(dist.isend, sent, 1) if rank == 0 else dist.P2POp(dist.irecv, received, 0)
    for work in dist.batch_isend_irecv([operation]):
        work.wait()
    return rank == 0 or torch.equal(received.cpu(), values)


def unwaited(wait: bool) -> float:
    """The first number of a sum that was read at once, with or without waiting for it."""
    tensor = torch.ones(8, device=device())
    work = dist.all_reduce(tensor, async_op=True)
    if wait:
        work.wait()
    first = tensor[0].item()
    work.wait()
    torch.npu.synchronize()
    return first


def divergent() -> str:
    """Rank 0 sums while rank 1 gathers."""
    tensor = torch.ones(8, device=device())
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]

    def differ() -> None:
        dist.all_reduce(tensor) if dist.get_rank() == 0 else dist.all_gather(rows, tensor)
        torch.npu.synchronize()

    return error_of(differ)


def absent() -> str:
    """Rank 0 sums, and rank 1 never comes."""
    if dist.get_rank() == 1:
        return ""

    def come() -> None:
        dist.all_reduce(torch.ones(8, device=device()))
        torch.npu.synchronize()

    return error_of(come)


def one_card_for_two() -> str:
    """Both ranks make npu:0 current, and then meet."""
    torch.npu.set_device(0)
    group = dist.new_group([0, 1])

    def meet() -> None:
        dist.all_reduce(torch.ones(2, device="npu:0"), group=group)
        torch.npu.synchronize()

    return error_of(meet)


def communicators(layout: str) -> tuple[int, int]:
    """How many communicators the groups of a layout add once all have talked, and their buffers in MB."""
    from tests.usp import test_attention

    before = counted("HcclCommInit"), counted("communicator MB")
    groups = make_groups(parse_parallel(layout), rank=dist.get_rank())
    for group in groups.all:
        share = torch.full((2,), float(group.rank), device=device())
        comm.gather(share, dim=0, sizes=(2,) * group.size, group=group)
    q, k, v = test_attention.tensors(0, 16, 4)
    test_attention.attend(layout.replace("cfg2 ", ""), q, k, v) if "cfg" not in layout else None
    return counted("HcclCommInit") - before[0], counted("communicator MB") - before[1]


def generations(times: int) -> list[float]:
    """The group ended and made again over one store: a sum in each."""
    from runtime.process_group import connect

    found = []
    for _ in range(times):
        old = WORLD.pop()
        old.close()
        WORLD.append(connect(old.device, timeout_s=60.0))
        tensor = torch.ones(2, device=device())
        dist.all_reduce(tensor)
        found.append(tensor[0].item())
    return found


def loaded_module() -> tuple[set[str], set[str], bool]:
    """A module from a file: where it lies, where safetensors was told to read to, whether it is the same."""
    from runtime import checkpoint
    from runtime.loading import load_module, open_checkpoint

    told, plain = set(), checkpoint.safe_open
    weights = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file, torch.device("meta"):
        save_file(weights, file.name)
        module = torch.nn.Linear(3, 2)
        checkpoint.safe_open = lambda *args, device, **rest: (
            told.add(str(device)) or plain(*args, device=device, **rest)
        )
        try:
            load_module(module, open_checkpoint([Path(file.name)]), device=WORLD[0].device)
        finally:
            checkpoint.safe_open = plain
    held = dict(module.state_dict())
    same = all(torch.equal(held[name].cpu(), tensor) for name, tensor in weights.items())
    return {str(tensor.device) for tensor in held.values()}, told, same


def runtime_facts() -> dict[str, Any]:
    """What the device answers, and what the runtime has made of it."""
    from runtime.device import Device

    here = Device("npu", device().index)
    here.make_current()
    convolution = torch.nn.Conv3d(2, 2, 3).to(device())
    here.reset_memory_peak()
    held = torch.empty(1 << 20, device=device())
    facts = {
        "total": here.memory_total(),
        "peak": here.memory_peak() >= held.numel() * 4,
        "format": torch.ops.npu.get_npu_format(convolution.weight),
        "capability": torch.npu.get_device_capability(),
        "fp64": here.supports_float64,
        "cpu generator": error_of(
            lambda: torch.randn(2, generator=torch.Generator().manual_seed(1), device=device())
        ),
    }
    here.synchronize()
    here.empty_cache()
    return facts


def late_error() -> str:
    """The error of a mark in a call's stopwatch, after collectives on which ranks disagree were queued."""
    from usp.report import Stopwatch

    tensor, watch = torch.ones(8, device=device()), Stopwatch(WORLD[0].device)
    differ = dist.all_reduce if dist.get_rank() == 0 else partial(dist.broadcast, src=1)
    work = differ(tensor, async_op=True)
    told = error_of(watch.mark_step)
    del work  # its own end would have waited
    return told


def too_much() -> str:
    """A tensor that is larger than the device."""
    return error_of(lambda: torch.empty(1 << 28, device=device()))


def chosen_kernels() -> dict[str, str]:
    """Which kernel serves which call, and why."""
    found = {}
    masks = {"no mask": None, "bool": torch.ones(1, 1, 1, 8, dtype=torch.bool, device=device())}
    masks |= {"per head": torch.ones(1, 2, 1, 8, dtype=torch.bool, device=device())}
    masks |= {"additive": torch.zeros(1, 1, 1, 8, device=device())}
    for dtype, dim, tokens, heads, what in (
        (torch.bfloat16, 64, 5, 2, "no mask"),
        (torch.bfloat16, 64, 5, 2, "bool"),
        (torch.bfloat16, 64, 5, 2, "per head"),
        (torch.bfloat16, 64, 5, 2, "additive"),
        (torch.bfloat16, 40, 5, 2, "no mask"),
        (torch.bfloat16, 64, 1, 2, "no mask"),
        (torch.bfloat16, 64, 5, 300, "no mask"),
        (torch.float32, 64, 5, 2, "no mask"),
    ):
        q = torch.zeros(1, tokens, heads, dim, dtype=dtype, device=device())
        name = f"{str(dtype).removeprefix('torch.')} D{dim} S{tokens} H{heads} {what}"
        found[name] = choice("auto", q, masks[what])
    return found


def farthest(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> float:
    """How far results are from what is wanted, at most; -inf from -inf is 0."""
    both = zip(found, wanted, strict=True)
    return max(torch.nan_to_num(a.cpu() - b, posinf=torch.inf).abs().max().item() for a, b in both)


def kernel_errors() -> tuple[dict[str, float], int]:
    """Each kernel of the device against plain fp32 attention: out and log-sum-exp, masked rows, a scale.

    And how often an operator met a row without keys that it was not told to mind.
    """
    from tests import simulated

    simulated.reset_counts()
    generator = torch.Generator().manual_seed(0)
    found = {}
    for dtype, dim in ((torch.float32, 40), (torch.float32, 64), (torch.bfloat16, 64), (torch.float16, 40)):
        q, k, v = (torch.randn(2, n, h, dim, generator=generator) for n, h in ((5, 6), (8, 3), (8, 3)))
        square = torch.rand(2, 1, 5, 8, generator=generator) > 0.5
        square[0, 0, 2] = False  # a row without a key
        cases = {
            "no mask": None,
            "square": square,
            "keys": square[:, :, :1],
            "keys of all samples": square[1:, :, 1:2],
            "keys of none": square[:, :, :1] & torch.tensor([True, False]).view(2, 1, 1, 1),
            "heads": square.expand(2, 6, 5, 8),
        }
        for name, kernel in KERNELS.items():
            for what, mask in cases.items():
                for scale in (None, 0.05):
                    there = [t.to(device(), dtype) for t in (q, k, v)]
                    hidden = None if mask is None else mask.to(device())
                    if kernel.misfit(there[0], hidden) is not None:
                        continue
                    out, lse = lse_attention(*there, hidden, kernel=name, scale=scale)
                    wanted = plain(*(t.to(dtype) for t in (q, k, v)), mask, scale)
                    assert out.dtype == lse.dtype == torch.float32
                    error = farthest((out, lse), wanted)
                    same_rows = torch.equal(lse.cpu() == -torch.inf, wanted[1] == -torch.inf)
                    key = f"{name} {dtype} D{dim} {what} {scale}"
                    found[key] = error if same_rows else float("nan")
    return found, simulated.CALLS["a masked row without inner_precise=2"]


def masks_in_parts() -> dict[str, tuple[float, int, int]]:
    """Errors to plain attention where a mask may have 64 bytes, the largest one given, and how many calls."""
    from tests import simulated

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 16, generator=generator) for n in (13, 8, 8))
    square = torch.rand(2, 1, 13, 8, generator=generator) > 0.3
    square[0, 0, 5] = False
    cases = {"keys": square[:, :, :1], "shown keys": torch.ones(1, 1, 1, 8, dtype=torch.bool)}
    cases |= {"square": square, "heads": square.expand(2, 2, 13, 8)[:, :, :1]}
    kernels = (
        ("npu-fusion", "npu_fusion_attention", torch.float32),
        ("npu-infer", "npu_fused_infer_attention_score", torch.bfloat16),
    )
    kept, npu_kernels.MASK_BYTES = npu_kernels.MASK_BYTES, 64
    found = {}
    try:
        for name, kernel, dtype in kernels:
            for what, mask in cases.items():
                there = [t.to(device(), dtype) for t in (q, k, v)]
                if KERNELS[name].misfit(there[0], mask.to(device())) is not None:
                    continue
                lse_attention(*there, None, kernel=name)  # its self-test, whose mask has 40 bytes
                simulated.reset_counts()
                out, lse = lse_attention(*there, mask.to(device()), kernel=name)
                wanted = plain(*(t.to(dtype) for t in (q, k, v)), mask, None)
                calls = simulated.CALLS
                found[f"{name} {what}"] = farthest((out, lse), wanted), calls["largest mask"], calls[kernel]
    finally:
        npu_kernels.MASK_BYTES = kept
    return found


def log_sum_exps() -> dict[str, float]:
    """Ours of the fused operator's statistics, in each layout that has dense ones, against float64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 16, generator=generator) for n, h in ((5, 6), (8, 3), (8, 3)))
    hidden = torch.rand(2, 1, 5, 8, generator=generator) > 0.5
    hidden[..., 0] = False
    scores = 0.3 * q.double().transpose(1, 2) @ k.double().repeat_interleave(2, 2).permute(0, 2, 3, 1)
    found = {}
    for layout, arranged in ARRANGED.items():
        for mask in (None, hidden):
            there = [arranged(t).contiguous().to(device()) for t in (q, k, v)]
            there_mask = None if mask is None else mask.to(device())
            options = {"atten_mask": there_mask, "scale": 0.3}
            _, *statistics = torch.ops.npu.npu_fusion_attention(*there, 6, layout, **options)[:3]
            shown = scores if mask is None else scores.masked_fill(mask, -torch.inf)
            error = (log_sum_exp(*statistics).cpu() - shown.logsumexp(-1)).abs().max().item()
            found[f"{layout} {'masked' if mask is not None else 'whole'}"] = error
    return found


def without_infinities() -> tuple[list[float], str]:
    """What the device gives for inf, -inf and NaN, and which kernel serves fp32 with a mask."""
    one = torch.ones(1, device=device())
    numbers = [(one * 1000).exp(), one.masked_fill(one > 0, -torch.inf), (one - one) / (one - one)]
    q = torch.zeros(1, 5, 2, 64, device=device())
    mask = torch.ones(1, 1, 1, 8, dtype=torch.bool, device=device())
    return [number.item() for number in numbers], choice("auto", q, mask)


def an_additive_mask() -> tuple[float, dict[str, int]]:
    """Attention with a float mask against the CPU's, and which operators ran."""
    from tests import simulated

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 16, 2, 32, generator=generator) for _ in range(3))
    bias = torch.randn(1, 1, 16, 16, generator=generator)
    simulated.reset_counts()
    got = attention(*(t.to(device()) for t in (q, k, v)), bias.to(device()))
    return (got.cpu() - attention(q, k, v, bias)).abs().max().item(), dict(simulated.CALLS)


def fp8_exchanges(transport: str) -> tuple[list[str], dict[str, int]]:
    """What was wrong with FP8 tensors that travelled, and how many HCCL messages there were of each dtype."""
    from tests.usp import test_comm

    names = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 int128"
    names += " hif8 fp8_e4m3 fp8_e5m2 fp8_e8m0 ?"
    before = {name: counted(f"messages of {name}") for name in names.split()}
    kept = test_comm.DTYPES, test_comm.TRANSPORTS
    test_comm.DTYPES, test_comm.TRANSPORTS = (torch.float8_e4m3fn, torch.float8_e5m2), (transport,)
    try:
        wrong = test_comm.gathers() + test_comm.exchanges()
    finally:
        test_comm.DTYPES, test_comm.TRANSPORTS = kept
    sent = {name: counted(f"messages of {name}") - times for name, times in before.items()}
    return wrong, {name: times for name, times in sent.items() if times}


def calls_of(module: str) -> list[tuple[str, str]]:
    """Each `module.name(...)` in our code: file and name."""
    found = []
    for path in (p for top in ("usp", "runtime") for p in (ROOT / top).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith(f"{module}."):
                found.append((path.name, ast.unparse(call.func).removeprefix(f"{module}.")))
    return found


def our_calls() -> list[str]:
    """What is wrong with each call of a torch_npu operator in our code, by the schemas of the wheel."""
    wrong, seen = [], []
    for path in (p for top in ("usp", "runtime") for p in (ROOT / top).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func).startswith("torch.ops.npu.")):
                continue
            name = ast.unparse(call.func).removeprefix("torch.ops.npu.")
            seen.append(name)
            arguments = {a.name: a for a in getattr(torch.ops.npu, name).default._schema.arguments}
            given = [keyword.arg for keyword in call.keywords]
            wrong += [f"{name}: no argument {a}" for a in given if a not in arguments]
            scales = [a for a in arguments if a.endswith("scale") and arguments[a].default_value == 1.0]
            heads = [a for a in arguments if a in ("num_heads", "num_query_heads")]
            wrong += [f"{name}: {a} has a default of 1" for a in (*scales, *heads) if a not in given]
            limits = [a for a in given if a and a.startswith(("pre_to", "next_to"))]
            wrong += [f"{name}: {a} cuts long sequences" for a in limits]
    return wrong if len(set(seen)) >= 2 else [*wrong, f"only {seen} were found"]


def after_transfer_to_npu() -> tuple[str, bool, str]:
    """Detection, and attention, once the user has had torch.cuda redirected."""
    from torch_npu.contrib import transfer_to_npu  # noqa: F401

    from runtime.device import detect_device

    found = str(detect_device(None, local_rank=0, world_size=1))
    q = torch.ones(1, 4, 2, 64, dtype=torch.bfloat16, device=found)
    return found, torch.cuda.is_available(), choose("auto", q, None).name


def refused_index() -> str:
    """A device with its index on two ranks."""
    from runtime.device import detect_device

    return error_of(lambda: detect_device("npu:0", local_rank=0, world_size=2))


def sums_of(device_dtype: torch.dtype) -> list[float]:
    """What ranks branch on, added over HCCL."""
    group = cached_groups(parse_parallel(f"ulysses{dist.get_world_size()}")).ulysses
    numbers = torch.tensor([1.0 + dist.get_rank(), 0.1], dtype=device_dtype, device=device())
    return comm.agree_sums(numbers, group=group)
