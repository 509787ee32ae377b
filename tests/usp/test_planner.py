"""The planner: exact bytes, sane times, all layouts, refusals with numbers, one choice on all ranks."""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from safetensors.torch import save_file

from runtime.device import Device
from runtime.process_group import World, connect
from tests import tiny
from tests.usp.caching import caching
from tests.usp.in_ranks import SEED
from usp.bench.ideal import BlockStack
from usp.config import AXES, ParallelConfig, parse_parallel
from usp.demo import DEFAULTS, MODEL_DIR
from usp.mesh import make_groups
from usp.model_folder import read_model_folder
from usp.pipeline import ParallelPipeline
from usp.planner import (
    LINKS,
    Channel,
    Link,
    Machine,
    Workload,
    choice_json,
    choose,
    choose_for,
    layouts_table,
    measure_machine,
    parse_link,
    plan,
    predict,
    workload_of_folder,
    workload_of_pipeline,
)
from usp.planner import measure as measure_module
from usp.planner.__main__ import app
from usp.planner.choose import layouts
from usp.planner.cost import TURNS, activation_bytes, cache_bytes, kept_bytes, sent_bytes
from usp.planner.fit import fit, run_step
from usp.planner.models import parameter_bytes

TINY = Workload(
    tokens=21,
    heads=4,
    head_dim=8,
    layers=2,
    ffn_dim=64,
    itemsize=4,
    patch_channels=4 * tiny.CHANNELS,
    text_tokens=tiny.TEXT_LENGTH,
    branches=2,
    latent_bytes=21 * 4 * tiny.CHANNELS * 4,
)
WAN_14B = Workload(
    tokens=32760,
    heads=40,
    head_dim=128,
    layers=40,
    ffn_dim=13824,
    itemsize=2,
    patch_channels=64,
    text_tokens=512,
    branches=2,
    parameter_bytes=28 * 2**30,
    latent_bytes=32760 * 64 * 2,
)


def channel(microseconds: float, gigabytes: float) -> Channel:
    """A channel of microseconds per message and GB per second."""
    return Channel(latency_s=microseconds * 1e-6, bytes_per_s=gigabytes * 1e9)


def link(microseconds: float, gigabytes: float, *, ring_microseconds: float | None = None) -> Link:
    """A link that is alike in all patterns but for the start of a ring's hop."""
    mesh = channel(microseconds, gigabytes)
    return Link(
        all_to_all=mesh,
        gather=mesh,
        ring=channel(ring_microseconds or microseconds, gigabytes),
        source="test",
    )


FREE = link(0, 1e9)  # a link that costs nothing
DEVICE = Machine(
    matmul_flops=4e14,
    attention_flops=3e14,
    memory_bytes_per_s=2e12,
    link=LINKS["nvlink"],
    memory_bytes=80 * 2**30,
    overlap=1.0,
    source="test",
)
ATTENTION_ONLY = Machine(  # everything else is free
    matmul_flops=1e30, attention_flops=1e9, memory_bytes_per_s=1e30, link=FREE, source="test"
)


# Bytes and buffers against the real exchanges


def step_in_ranks(
    layout: str, transport: str, grid: tuple[int, int, int], heads: int, branches: int, batch: int
) -> Any:
    """This rank's counters and kept buffers after one step of a tiny Wan."""
    config = replace(parse_parallel(layout), transport=transport)
    groups = make_groups(config, rank=torch.distributed.get_rank())
    model = tiny.transformer(heads=heads)
    workload = replace(TINY, tokens=prod(grid), heads=heads, branches=branches, batch=batch)
    with torch.no_grad():
        run_step(model, tiny.model_inputs(grid, batch=batch), workload, config, groups)
    found = dict(+groups.sent), sum(group.buffer_bytes for group in groups.all)
    groups.close()
    return found


STEPS = [
    (2, "ulysses2", "auto", (1, 3, 7), 4, 1, 1),
    (2, "gather_kv2", "auto", (1, 3, 7), 4, 1, 1),
    (2, "ring2", "auto", (1, 3, 7), 4, 1, 1),
    (2, "cfg2", "auto", (1, 3, 7), 4, 2, 1),
    (2, "ulysses2", "auto", (1, 1, 1), 3, 2, 1),  # an empty share
    (3, "ulysses3", "auto", (1, 2, 5), 4, 1, 1),  # uneven heads and tokens
    (3, "ulysses3", "auto", (1, 2, 5), 2, 1, 1),  # a rank without heads
    (3, "gather_kv3", "p2p", (1, 2, 5), 4, 1, 1),
    (3, "ring3", "all_to_all", (1, 2, 5), 4, 1, 1),
    (3, "ring3", "auto", (1, 1, 2), 4, 1, 1),
    (3, "cfg3", "auto", (1, 2, 5), 4, 4, 1),  # one rank has two branches
    (4, "ulysses4", "p2p", (1, 3, 7), 5, 1, 1),
    (4, "ulysses2 ring2", "auto", (1, 3, 7), 5, 1, 1),
    (4, "ulysses2 gather_kv2", "all_to_all", (1, 3, 7), 5, 1, 1),
    (4, "ring4", "auto", (1, 3, 7), 4, 1, 1),
    (4, "cfg2 ulysses2", "auto", (1, 3, 7), 5, 3, 1),
    (4, "cfg2 ring2", "auto", (1, 3, 7), 4, 2, 1),
    (2, "ulysses2", "auto", (1, 3, 7), 4, 1, 3),  # a batch of pictures
    (4, "cfg2 gather_kv2", "auto", (1, 3, 7), 4, 2, 2),
    (4, "ulysses2 ring2", "auto", (1, 3, 7), 5, 1, 2),
]


@pytest.mark.parametrize(("size", "layout", "transport", "grid", "heads", "branches", "batch"), STEPS)
def test_bytes_and_buffers_are_those_of_the_exchanges(
    ranks, size, layout, transport, grid, heads, branches, batch
):
    """Every rank sends what `sent_bytes` says, exchange by exchange, and keeps what `kept_bytes` says."""
    config = replace(parse_parallel(layout), transport=transport)
    workload = replace(TINY, tokens=prod(grid), heads=heads, branches=branches, batch=batch)
    workload = replace(workload, latent_bytes=prod(grid) * 4 * tiny.CHANNELS * 4)
    for rank, (sent, kept) in enumerate(
        ranks(size).run(step_in_ranks, layout, transport, grid, heads, branches, batch)
    ):
        assert sent == sent_bytes(workload, config, rank)
        assert kept == kept_bytes(workload, config, rank % config.sp_degree)


def call_in_ranks(layout: str) -> Any:
    """The report of a whole call, and the workload that the planner sees in it."""
    pipeline = tiny.build("t2v")
    arguments = tiny.call("t2v")
    with ParallelPipeline(pipeline, layout) as pipe:
        workload = workload_of_pipeline(pipeline, pipeline.transformer, arguments)
        pipe(**arguments, seed=SEED)
        assert pipe.report is not None
        return pipe.report.sent_bytes, workload


@pytest.mark.parametrize(
    ("size", "layout"), [(2, "ulysses2"), (2, "cfg2"), (3, "ring3"), (4, "cfg2 gather_kv2")]
)
def test_bytes_of_a_whole_call(ranks, size, layout):
    """A pipeline's call sends the predicted bytes of a step, times its steps; both branches count."""
    want = predict(TINY, DEVICE, parse_parallel(layout)).sent
    for sent, workload in ranks(size).run(call_in_ranks, layout):
        assert replace(workload, parameter_bytes=0) == TINY
        assert sent == [tiny.STEPS * count for count in want]


def test_one_rank_sends_and_keeps_nothing():
    """The plain layout has no exchange."""
    found = predict(WAN_14B, DEVICE, ParallelConfig())
    assert found.sent == (0,)
    assert found.communication_s == found.buffer_bytes == 0


SIZES = {"heads": 8, "attention_head_dim": 32, "ffn_dim": 1024}
SIZED = replace(TINY, tokens=512, heads=8, head_dim=32, ffn_dim=1024, branches=1, latent_bytes=512 * 16 * 4)


def most_live_bytes(work: Callable[[], object]) -> int:
    """The most bytes that tensors made in a work have held at once, by torch's own count."""
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    live = peak = 0
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("batch", [1, 3])
def test_activations_are_not_underestimated(batch):
    """Against torch's own count of live bytes in a forward: never less, and no more than 1.5 times."""
    model, inputs = tiny.transformer(**SIZES), tiny.model_inputs((2, 16, 16), batch=batch)
    peak = most_live_bytes(lambda: model(**inputs))
    assert peak <= activation_bytes(replace(SIZED, batch=batch), ParallelConfig()) <= 1.5 * peak


@pytest.mark.parametrize(("branches", "batch"), [(1, 1), (2, 2)])
def test_a_caches_state_is_counted(branches, batch):
    """What a first-block cache adds to the live bytes of two steps, against the same steps without one."""
    model, inputs = tiny.transformer(**SIZES, num_layers=3), tiny.model_inputs((1, 16, 16), batch=batch)
    workload = replace(SIZED, tokens=256, branches=branches, batch=batch, caches=1)

    def steps() -> None:
        for branch in ("cond", "uncond")[:branches] * 2:
            with model.cache_context(branch):
                model(**inputs)

    alone = most_live_bytes(steps)
    with caching(model, 0.0, warmup_steps=0) as cache:
        cache.begin_call()
        added = most_live_bytes(steps) - alone
    found = cache_bytes(workload, ParallelConfig())
    assert 0.8 * added <= found <= 1.2 * added
    assert 2 * cache_bytes(workload, parse_parallel("ulysses2")) == found, "half of the tokens"
    with_cache, without = (
        predict(replace(workload, caches=count), DEVICE, ParallelConfig()).peak_bytes for count in (1, 0)
    )
    assert with_cache - without == found


# Times


def test_time_follows_the_largest_share():
    """Of 5 heads on 4 ranks one rank has two, so attention takes as long as with 8; 4 heads take half."""
    times = {
        heads: predict(replace(TINY, heads=heads, text_tokens=0), ATTENTION_ONLY, parse_parallel("ulysses4"))
        for heads in (4, 5, 8)
    }
    assert times[5].seconds == pytest.approx(times[8].seconds, rel=1e-6)
    assert times[5].seconds == pytest.approx(2 * times[4].seconds, rel=1e-6)


def test_the_busiest_guidance_rank_counts():
    """Three branches on two cfg ranks take two forwards, on three ranks one."""
    workload = replace(TINY, branches=3)
    single = predict(workload, ATTENTION_ONLY, ParallelConfig()).seconds
    for degree, forwards in ((2, 2), (3, 1)):
        found = predict(workload, ATTENTION_ONLY, ParallelConfig(cfg_degree=degree)).seconds
        assert found == pytest.approx(single * forwards / 3, rel=1e-6)


@pytest.mark.parametrize("layout", ["ulysses4", "gather_kv4", "cfg2 ulysses2"])
def test_ranks_that_share_cores_take_turns(layout):
    """Four ranks on two cores compute half as fast, less a little; on four at full speed."""
    config = parse_parallel(layout)
    workload = replace(TINY, tokens=64)
    free = predict(workload, ATTENTION_ONLY, config).compute_s
    for slots, slowdown in ((2, 2 * TURNS), (4, 1), (1, 4 * TURNS)):
        shared = predict(workload, replace(ATTENTION_ONLY, slots=slots), config).compute_s
        assert shared == pytest.approx(slowdown * free, rel=1e-6)


def test_a_ring_hides_its_transfer_where_it_can():
    """With an engine to spare only the longer of transfer and computation counts, without one both do."""
    workload = replace(TINY, tokens=4096, branches=1, text_tokens=0, layers=1, patch_channels=1)
    slow = replace(ATTENTION_ONLY, link=link(0, 0.0005))
    config = parse_parallel("ring2")
    hop = 2 * 2048 * 32 * 4 / 0.5e6
    last = 2048 * 4 / 0.5e6
    block = 4 * 2048 * 2048 * 32 / 1e9
    assert hop > block
    alone = predict(workload, slow, config)
    hidden = predict(workload, replace(slow, overlap=1.0), config)
    assert alone.communication_s == pytest.approx(hop + last, rel=1e-3)
    assert hidden.communication_s == pytest.approx(hop + last - block, rel=1e-3)


def test_far_links_count_beyond_a_domain():
    """On 2 hosts of 4, Ulysses over 8 crosses between them; of Ulysses 4 with ring 2 only the ring does."""
    near = replace(ATTENTION_ONLY, link=FREE, far_link=link(0, 1), domain=4)
    workload = replace(WAN_14B, branches=1)
    times = {name: predict(workload, near, parse_parallel(name)) for name in ("ulysses8", "ulysses4 ring2")}
    one_host = predict(workload, replace(near, domain=None), parse_parallel("ulysses4 ring2"))
    assert one_host.communication_s < 1e-3 * times["ulysses4 ring2"].communication_s
    crossing = sent_bytes(workload, parse_parallel("ulysses4 ring2"), 0)
    gathered = crossing["gather"] * 4 / 7 / 1e9
    assert times["ulysses4 ring2"].communication_s == pytest.approx(
        crossing["ring"] / 1e9 + gathered, rel=1e-3
    )
    assert near.peers(8, 1) == (3, 4)
    assert near.peers(2, 4) == (0, 1)
    assert near.peers(3, 1) == (0, 2), "groups of 3 lie across the boundary"


def test_a_full_mesh_serves_an_exchange_with_all_peers_best():
    """Where each pair has its own wire, a ring's hop has one, an all-to-all of eight ranks seven."""
    mesh = LINKS["hccs"]
    assert mesh.seconds("ring", 1, 28e9)[1] == pytest.approx(28 / 22.4)
    assert mesh.seconds("all_to_all", 7, 28e9)[1] == pytest.approx(28 / 22.4 / 7, rel=1e-3)
    assert mesh.seconds("all_to_all", 3, 28e9)[1] == pytest.approx(28 / 22.4 / 3, rel=1e-3)


# All layouts, the choice, refusals


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8, 12, 16])
def test_every_layout_fits_its_world_once(world_size):
    """B19: all products are the world size, no layout comes twice, and a valid one is always chosen."""
    found = layouts(world_size, 2)
    assert len(set(found)) == len(found)
    for config in found:
        config.check_world(world_size)
    assert ParallelConfig(ulysses_degree=world_size) in found
    choose(WAN_14B, DEVICE, world_size).config.check_world(world_size)


@pytest.mark.parametrize(
    ("branches", "batch", "stacked", "most"),
    [
        (1, 1, False, 1),
        (2, 1, False, 2),
        (3, 1, False, 3),
        (1, 4, False, 1),
        (1, 4, True, 4),
        (2, 3, True, 6),
    ],
)
def test_the_cfg_axis_needs_branches(branches, batch, stacked, most):
    """B25: without guidance no rank is given to it; with three branches three ranks may be.

    A stacked batch is cut by pictures, so it serves as many ranks without guidance too.
    """
    workload = replace(WAN_14B, branches=branches, batch=batch, stacked=stacked)
    assert max(c.config.cfg_degree for c in plan(workload, DEVICE, 12)) == most
    assert choose(replace(WAN_14B, branches=1), DEVICE, 2).config.cfg_degree == 1


def test_a_batch_takes_as_long_as_its_pictures():
    """Where nothing is to be started, three pictures of a branch are three times one, with their bytes; a
    stacked forward of six pictures is as long as two branches of three."""
    one, three = (replace(TINY, batch=batch) for batch in (1, 3))
    six = replace(three, stacked=True)
    for layout in ("cfg2", "ulysses2", "cfg2 ring2"):
        config = parse_parallel(layout)
        found = [predict(workload, ATTENTION_ONLY, config) for workload in (one, three, six)]
        assert found[1].seconds == pytest.approx(3 * found[0].seconds, rel=1e-6)
        assert found[2].seconds == pytest.approx(found[1].seconds, rel=1e-6)
        assert found[1].sent == found[2].sent == tuple(3 * count for count in found[0].sent)
    less = [activation_bytes(replace(w, latent_bytes=0), ParallelConfig()) for w in (three, six)]
    assert less[1] == 2 * less[0], "both branches are in one forward"


def test_guidance_on_two_ranks_beats_the_sequence():
    """Two branches on two ranks: cfg2, which exchanges once a step, whatever the link."""
    for text in ("nvlink", "pcie4", "ethernet", "loopback"):
        assert choose(WAN_14B, replace(DEVICE, link=parse_link(text)), 2).config == ParallelConfig(
            cfg_degree=2
        )


def test_the_link_decides():
    """Four ranks, one branch: many heads on a fast link take Ulysses; 3 heads leave a rank of it idle."""
    workload = replace(WAN_14B, branches=1)
    assert choose(workload, DEVICE, 4).config == ParallelConfig(ulysses_degree=4)
    few = choose(replace(workload, heads=3), DEVICE, 4).config
    assert few.ulysses_degree < 4


def test_the_order_is_that_of_the_predictions_and_repeats():
    """Fastest first; the same arguments give the same list."""
    first = plan(WAN_14B, DEVICE, 8)
    times = [c.prediction.seconds for c in first]
    assert times == sorted(times)
    assert plan(WAN_14B, DEVICE, 8) == first


def test_layouts_that_are_alike_go_to_the_exact():
    """A ring that is a little faster than gather-KV is not taken, since gather-KV is bit-equal."""
    workload = replace(WAN_14B, branches=1)
    for gigabytes, chosen, words in (
        (50, "gather_kv2", "ring2 is within 6.5% of it, but not bit-equal to one rank"),
        (20, "ring2", "next gather_kv2, "),
    ):
        found = choose(workload, replace(DEVICE, link=link(5, gigabytes)), 2)
        assert str(found.candidates[0].config) == "ring2"
        assert str(found.config) == chosen
        assert words in found.reason


def test_what_does_not_fit_is_refused_with_its_numbers():
    """Layouts over the memory come last, with what they need and what there is."""
    need = [c.prediction.peak_bytes for c in plan(WAN_14B, DEVICE, 4)]
    limit = (min(need) + max(need)) // 2
    found = plan(WAN_14B, replace(DEVICE, memory_bytes=limit), 4)
    refused = [c for c in found if c.refusal]
    assert found[-len(refused) :] == refused
    for candidate in found:
        assert (candidate.refusal is None) == (candidate.prediction.peak_bytes <= limit)
    cached = plan(replace(WAN_14B, caches=2), replace(DEVICE, memory_bytes=limit), 4)
    assert all(
        "; a rank has " in c.refusal and ", first-block cache " in c.refusal for c in cached if c.refusal
    )
    words = refused[0].refusal or ""
    assert words.startswith("needs ")
    assert "cache" not in words
    for part in ("per rank (weights 28.0 GiB, activations ", ", exchange buffers ", "; a rank has "):
        assert part in words


def test_nothing_fits():
    """The error names the smallest layout, its need, and what to do."""
    found = choose(WAN_14B, replace(DEVICE, memory_bytes=24 * 2**30), 2)
    with pytest.raises(
        ValueError, match=r"no layout can be used; the smallest, .*, needs .*weights 28.0 GiB"
    ) as error:
        _ = found.config
    assert "a rank has 24.0 GiB; use a smaller size, a smaller dtype, or offload" in str(error.value)


def test_strict_refuses_idle_ranks():
    """Ranks without heads or tokens are named."""
    few = replace(WAN_14B, heads=3, branches=1)
    by_config = {c.config: c.refusal for c in plan(few, DEVICE, 4, strict=True)}
    assert by_config[ParallelConfig(ulysses_degree=4)] == "1 ranks without heads: there are 3 heads"
    assert by_config[ParallelConfig(ring_degree=4)] is None
    short = plan(replace(few, tokens=2), DEVICE, 4, strict=True)
    assert any(c.refusal == "2 ranks without tokens: there are 2 tokens" for c in short)


def test_the_reason_has_the_numbers():
    """The chosen layout, its time, speed-up and exchange, the next best, the link."""
    reason = choose(WAN_14B, DEVICE, 4).reason
    assert reason.startswith("cfg2 gather_kv2: ")
    for part in (
        " per step predicted, ",
        " times one rank, ",
        "% of it exchange; next cfg2 ulysses2, ",
        "; test",
    ):
        assert part in reason


def test_the_table_shows_every_layout():
    """One line each, the chosen one marked, what is refused with its numbers, the reason; also as JSON."""
    found = choose(WAN_14B, replace(DEVICE, memory_bytes=31 * 2**30), 4)
    out = io.StringIO()
    Console(width=240, file=out).print(layouts_table(found))
    text = out.getvalue()
    marked = [line for line in text.splitlines() if "->" in line]
    assert len(marked) == 1
    assert str(found.config) in marked[0]
    for candidate in found.candidates:
        assert str(candidate.config) in text
    refused = next(c.refusal for c in found.candidates if c.refusal)
    assert refused in text
    assert "times one rank" in text
    plain = choice_json(found)
    assert json.loads(json.dumps(plain)) == plain
    assert plain["chosen"] == str(found.config)


def test_wrong_figures_are_refused():
    """A link, a workload and a link class that cannot be are named."""
    with pytest.raises(ValueError, match="bandwidth must be above 0 and the latency 0 or more"):
        Channel(latency_s=-1, bytes_per_s=1)
    with pytest.raises(ValueError, match=r"layers=0 was given; a workload has 1 or more"):
        replace(TINY, layers=0)
    with pytest.raises(
        ValueError, match=r"link='nvlin' is not known; use one of nvlink, .*, or numbers such as"
    ):
        parse_link("nvlin")


def test_links_are_read():
    """A class by its name, or numbers."""
    assert parse_link("NVLink") is LINKS["nvlink"]
    given = parse_link("2.5 GB/s, 40us")
    assert given.ring == given.gather == given.all_to_all == channel(40, 2.5)
    assert all(found.source for found in LINKS.values())


# What a model's folder says


def test_weights_are_counted_from_headers(tmp_path):
    """Shards of the index only, floats in the run's dtype, the VAE in fp32, whole numbers as they are."""
    half = torch.zeros(3, 5, dtype=torch.float16)
    for part in ("transformer", "vae", "text_encoder"):
        (tmp_path / part).mkdir()
    index = {
        "transformer": ["d", "T"],
        "vae": ["d", "V"],
        "text_encoder": ["t", "E"],
        "scheduler": [None, None],
    }
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "P", **index}))
    shards = {"a": "x-1.safetensors", "b": "x-2.safetensors"}
    for name, file in shards.items():
        save_file({name: half}, tmp_path / "transformer" / file)
    save_file({"a": half, "b": half.clone()}, tmp_path / "transformer" / "leftover.safetensors")
    name = "diffusion_pytorch_model.safetensors"
    (tmp_path / "transformer" / f"{name}.index.json").write_text(json.dumps({"weight_map": shards}))
    save_file({"a": half}, tmp_path / "vae" / name)
    save_file({"a": half}, tmp_path / "vae" / "diffusion_pytorch_model.fp16.safetensors")
    save_file({"ids": torch.zeros(7, dtype=torch.int64)}, tmp_path / "text_encoder" / "model.safetensors")
    assert parameter_bytes(tmp_path, 2) == 30 * 2 + 15 * 4 + 7 * 8


def test_the_bundled_model_is_read():
    """Tokens, branches and weights of the demo's folder."""
    facts = read_model_folder(MODEL_DIR, pipeline="WanPipeline")
    sizes = {"width": DEFAULTS.width, "height": DEFAULTS.height, "num_frames": DEFAULTS.num_frames}
    found = workload_of_folder(facts, {**sizes, "guidance_scale": 3.0}, itemsize=4, cached=True)
    assert found.tokens == facts.tokens(**sizes)
    assert (found.branches, found.batch, found.caches) == (2, 1, 1)
    assert found.parameter_bytes > 2**20


def test_a_pipelines_defaults_fill_in():
    """What a call does not say is the pipeline's own default: size, and guidance of 5, so two branches."""
    pipeline = tiny.build("t2v")
    found = workload_of_pipeline(pipeline, pipeline.transformer, {})
    assert found.tokens == 21 * (480 // 16) * (832 // 16)
    assert found.branches == 2
    off = workload_of_pipeline(pipeline, pipeline.transformer, {"guidance_scale": 1.0})
    assert off.branches == 1
    assert workload_of_pipeline(pipeline, pipeline.transformer, tiny.call("t2v", (1, 3, 7))).tokens == 21


# The machine at hand


def measured_in_ranks(hosts: int) -> Any:
    """What this rank holds after the measurement, and whether the process's own draws were left alone."""
    world = connect(Device("cpu"))
    before = torch.get_rng_state()
    per_host = world.world_size // hosts
    node = measure_module.platform
    measure_module.platform = SimpleNamespace(node=lambda: f"host{world.rank // per_host}")
    try:
        machine = measure_machine(world, replace(TINY, tokens=64), torch.float32)
    finally:
        measure_module.platform = node
    choice = choose(TINY, machine, world.world_size)
    return machine, choice.config, torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("size", "hosts"), [(2, 1), (3, 1), (4, 2)])
def test_measured_numbers_agree_over_ranks(ranks, size, hosts):
    """Every rank holds the same machine, and so the same choice; between hosts a link is measured too."""
    found = ranks(size).run(measured_in_ranks, hosts)
    assert all(each == found[0] for each in found)
    machine, config, left_alone = found[0]
    assert config.world_size == size
    assert left_alone
    assert machine.memory_bytes
    assert 0 <= machine.overlap <= 1
    assert machine.domain == (size // hosts if hosts > 1 else None)
    assert (machine.far_link is None) == (hosts == 1)
    assert 1e6 < machine.matmul_flops < 1e13
    assert 1e5 < machine.link.ring.bytes_per_s < 1e12


def given_link_in_ranks() -> Any:
    """A machine whose link was given."""
    world = connect(Device("cpu"))
    return measure_machine(world, replace(TINY, tokens=64), torch.float32, link=LINKS["roce"]).link


def test_a_given_link_is_not_measured(ranks):
    """A link class stands for the measurement."""
    assert ranks(2).run(given_link_in_ranks) == [LINKS["roce"]] * 2


def test_one_rank_measures_nothing():
    """Alone there is no choice; measuring is refused."""
    world = World(0, 1, 0, Device("cpu"))
    choice = choose_for(world, TINY, torch.float32)
    assert choice.config == ParallelConfig()
    assert choice.machine is None
    assert layouts_table(choice).row_count == 0
    with pytest.raises(ValueError, match="one rank has no link to measure"):
        measure_machine(world, TINY, torch.float32)


# The command line


def run_cli(*words: str) -> list[str]:
    """What a command prints, by line."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        app(list(words), standalone_mode=False)
    return out.getvalue().splitlines()


def test_simulate_is_marked_as_a_projection():
    """8, 16, 32 and 64 ranks, in words and as JSON; the workload and links are stated."""
    lines = run_cli("simulate", "--link", "hccs", "--between", "roce")
    assert lines[0].startswith("PROJECTION")
    assert any("between hosts roce: RoCE" in line for line in lines)
    found = json.loads(lines[-1])
    assert found["projection"] is True
    assert [run["ranks"] for run in found["runs"]] == [8, 16, 32, 64]
    best = [run["layouts"][0]["seconds_per_step"] for run in found["runs"]]
    assert best == sorted(best, reverse=True)


def test_simulate_takes_a_model_folder():
    """The demo model at its own size, on two ranks."""
    lines = run_cli(
        *("simulate", "--model", str(MODEL_DIR), "--size", "112x112", "--frames", "17", "--ranks", "2"),
        *("--dtype", "fp32", "--link", "10GB/s,20us"),
    )
    assert {row["parallel"] for row in json.loads(lines[-1])["runs"][0]["layouts"]} >= {"cfg2", "ring2"}


def test_links_are_listed_with_sources():
    """Every class, its figures, where they are from."""
    text = "\n".join(run_cli("links"))
    assert all(name in text for name in LINKS)
    assert "196" not in text, "what is used is shown, 80 % of the nominal"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("simulate", "--size", "64x64"), "belong to --model"),
        (("simulate", "--link", "string"), "link='string' is not known"),
        (("simulate", "--dtype", "fp64"), "dtype 'fp64' is not known"),
        (("simulate", "--model", "owner/name"), "is a hub name"),
        (("fit",), "one rank has one layout; start with torchrun"),
    ],
)
def test_usage_errors(words: Sequence[str], sentence: str):
    """One sentence each."""
    with pytest.raises((ValueError, typer.BadParameter), match=sentence):
        run_cli(*words)


def fit_in_ranks() -> tuple[int, str]:
    """A tiny fit's code and what it printed."""
    out, stdout = io.StringIO(), sys.stdout
    sys.stdout = out
    try:
        stack = BlockStack(layers=1, heads=3, head_dim=16, ffn=64, text=4)
        return fit(connect(Device("cpu")), stack, (10,), branches=2, rounds=1), out.getvalue()
    finally:
        sys.stdout = stdout


def test_fit_predicts_then_measures_every_layout(ranks):
    """The prediction is printed first; bytes are checked; the last line is JSON; rank 0 alone prints."""
    (code, text), (_, other) = ranks(2).run(fit_in_ranks)
    assert code == 0
    assert other == ""
    assert text.index("predicted, before anything is run") < text.index("measured in 1 rounds")
    found = json.loads(text.splitlines()[-1])
    assert found["bytes_exact"] is True
    layouts_run = found["runs"][0]["layouts"]
    assert {row["parallel"] for row in layouts_run} == {"cfg2", "ulysses2", "gather_kv2", "ring2"}
    assert all(row["measured_s"][0] > 0 and row["predicted_s"] > 0 for row in layouts_run)


def test_the_axes_are_known():
    """A new axis of ParallelConfig needs a place in the cost model."""
    assert AXES == ("cfg", "ring", "gather_kv", "ulysses")
