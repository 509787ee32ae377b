"""yunchang and xfuser as engines: right where they run, refused by name and reason where they are wrong."""

from importlib import util

import pytest
import torch
import torch.distributed as dist

from tests import tiny
from tests.usp.test_attention import cached_groups, reference, tensors
from usp import comm
from usp.attention import SequenceAttention, interop
from usp.attention.interop import LongContextAttention, check_engine, external_attention
from usp.config import ParallelConfig
from usp.layout import Split
from usp.mesh import make_groups
from usp.pipeline import ParallelPipeline

needs_yunchang = pytest.mark.skipif(
    util.find_spec("yunchang") is None, reason="yunchang is not installed: pip install 'usp[yunchang]'"
)
LAYOUTS = [(2, 2, 1), (2, 1, 2), (4, 4, 1), (4, 1, 4), (4, 2, 2)]  # ranks, ulysses, ring


def engine_config(ulysses, ring):
    return ParallelConfig(ulysses_degree=ulysses, ring_degree=ring, engine="yunchang")


def attend(ulysses, ring, length, heads, *, kv_heads=None, scale=None, dtype=torch.float32, kernel="auto"):
    """The whole result of the engine's attention, its error, and the bytes this rank is said to have sent."""
    config = engine_config(ulysses, ring)
    groups = make_groups(config, rank=dist.get_rank())
    external = external_attention(config, groups, kernel=kernel)
    sequence = SequenceAttention(groups, "auto", external)
    q, k, v = tensors(length, length, heads, kv_heads=kv_heads, batch=2, dtype=dtype)
    split = sequence.split((length,))
    shares = [comm.split(t, dim=1, sizes=split.sizes, group=groups.sp) for t in (q, k, v)]
    try:
        out = sequence(*shares, split=split, scale=scale)
        sent = {name: count for name, count in groups.sent.items() if name.startswith("yunchang")}
        whole = comm.gather(out, dim=1, sizes=split.sizes, group=groups.sp)
    finally:
        external.close()
        groups.close()
    return (whole - reference(q, k, v, scale=scale)).abs().max().item(), sent


def refusal(*args, **options):
    """The text of the error that `attend` raises."""
    try:
        attend(*args, **options)
    except ValueError as error:
        return str(error)
    return "no error"


@needs_yunchang
@pytest.mark.parametrize(("size", "ulysses", "ring"), LAYOUTS)
def test_engine_matches_one_process(ranks, size, ulysses, ring):
    """Equal shares and heads: 1e-5 in fp32, and to the bit where one rank attends to whole rows."""
    for length, heads, options in ((32, 4, {}), (8, 8, {"scale": 0.5}), (64, 4, {"kernel": "plain"})):
        for error, _ in ranks(size).run(_with_options, (ulysses, ring, length, heads), options):
            assert error <= 1e-5
            if ring == 1 and not options:
                assert error == 0.0


def _with_options(args, options):
    return attend(*args, **options)


@needs_yunchang
def test_engine_serves_grouped_queries(ranks):
    """Key/value heads that divide by the degree are exchanged as they are."""
    assert all(error <= 1e-5 for error, _ in ranks(2).run(_with_options, (2, 1, 16, 8), {"kv_heads": 2}))


@needs_yunchang
def test_bytes_of_the_engine_are_counted(ranks):
    """Ulysses sends (N-1)/N of q, k, v and the result; a ring N-1 times K and V."""
    share = 2 * 16 * 4 * 16 * 4  # batch, tokens here, heads, head dim, bytes
    assert ranks(2).run(attend, 2, 1, 32, 4)[0][1] == {"yunchang ulysses": 4 * share // 2}
    assert ranks(2).run(attend, 1, 2, 32, 4)[1][1] == {"yunchang ring": 2 * share}


@needs_yunchang
def test_unequal_shares_are_refused_before_anything_is_sent(ranks):
    """yunchang ends the process in C++ when shares differ; here the ranks go on."""
    for text in ranks(2).run(refusal, 2, 1, 21, 4):
        assert text == (
            "engine='yunchang' was asked to attend over 21 tokens on 2 ranks (11, 10): it takes equal shares "
            "only, and ends the process at others; use engine='usp', or a size whose tokens divide by 2"
        )
    assert all(error == 0.0 for error, _ in ranks(2).run(attend, 2, 1, 16, 4))


@needs_yunchang
def test_heads_that_do_not_divide_are_refused(ranks):
    """Query heads and key/value heads alike; a ring does not mind."""
    for text in ranks(2).run(refusal, 2, 1, 16, 5):
        assert text == (
            "engine='yunchang' with ulysses_degree=2 on 5 heads: it takes a multiple of the degree only; "
            "use engine='usp', or give these ranks to ring_degree"
        )
    text = ranks(2).run(_refusal_with_options, (2, 1, 16, 4), {"kv_heads": 1})[0]
    assert "on 1 key/value heads" in text
    assert all(error <= 1e-5 for error, _ in ranks(2).run(attend, 1, 2, 16, 5))


def _refusal_with_options(args, options):
    return refusal(*args, **options)


@needs_yunchang
def test_ring_is_refused_where_the_engine_is_wrong():
    """yunchang 0.6.4 on NPU: every rank attends to KV shard 0. Known before anything is loaded."""
    with pytest.raises(ValueError, match="computes only while step <= rank and overwrites") as refused:
        check_engine("yunchang", ring_degree=2, device_type="npu")
    assert str(refused.value).startswith("engine='yunchang' with ring_degree=2 on npu: ")
    check_engine("yunchang", ring_degree=1, device_type="npu")
    check_engine("yunchang", ring_degree=2, device_type="cpu")


def _ring_call_on_a_wrong_device():
    """A call on a device whose ring is wrong; returns the error and the bytes sent."""
    groups = cached_groups(engine_config(1, 2))
    external = external_attention(engine_config(1, 2), groups)
    q = torch.zeros(1, 4, 2, 8)
    interop.WRONG_RINGS["yunchang", "cpu"] = "for this test"
    try:
        external(q, q, q, Split((8,), 2), None)
    except ValueError as error:
        return str(error), groups.sent["yunchang ring"]
    finally:
        del interop.WRONG_RINGS["yunchang", "cpu"]
        external.close()


@needs_yunchang
def test_ring_on_a_wrong_device_is_refused_at_the_call_too(ranks):
    """Groups do not know the device, tensors do; nothing is sent."""
    for text, sent in ranks(2).run(_ring_call_on_a_wrong_device):
        assert text.startswith("engine='yunchang' with ring_degree=2 on cpu: for this test; use engine='usp'")
        assert sent == 0


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        ("torch_math", "gives zeros as its log-sum-exp"),
        ("sparse_sage", "gives no log-sum-exp"),
        ("nonsense", "is not known"),
    ],
)
def test_kernels_without_log_sum_exp_are_refused(kernel, why):
    """A ring that merges with them is wrong (4.5e-2 measured for torch_math)."""
    with pytest.raises(ValueError, match=f"kernel='{kernel}' with engine='yunchang': it {why}") as refused:
        check_engine("yunchang", ring_degree=2, kernel=kernel)
    assert "one of ours: auto, " in str(refused.value)


def test_engine_that_is_not_installed(monkeypatch):
    """One sentence that names the extra."""
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    for engine in ("yunchang", "xfuser"):
        with pytest.raises(ValueError, match="is not installed") as refused:
            check_engine(engine, ring_degree=1)
        assert str(refused.value) == (
            f"engine='{engine}' was asked for; {engine} is not installed; pip install 'usp[{engine}]'"
        )


def test_engine_that_does_not_import(monkeypatch, tmp_path):
    """xfuser without an accelerator raises NotImplementedError at import: its first line is told."""
    package = tmp_path / "brokenengine"
    package.mkdir()
    (package / "__init__.py").write_text("raise NotImplementedError('No Accelerators\\navailable')\n")
    (tmp_path / "brokenengine-1.2.dist-info").mkdir()
    (tmp_path / "brokenengine-1.2.dist-info" / "METADATA").write_text("Name: brokenengine\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(interop.MODULES, "brokenengine", "brokenengine.attention")
    with pytest.raises(ValueError, match="does not import here") as refused:
        check_engine("brokenengine", ring_degree=1)
    assert str(refused.value) == (
        "engine='brokenengine' was asked for; brokenengine 1.2 does not import here "
        "(NotImplementedError: No Accelerators); use engine='usp'"
    )


def _two_attentions_in_one_process():
    """Ulysses and ring attentions, made one after the other, keep their groups; yunchang's stay as before."""
    from yunchang.globals import PROCESS_GROUP

    before = PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG
    made = []
    for ulysses, ring in ((2, 1), (1, 2)):
        groups = cached_groups(engine_config(ulysses, ring))
        made.append(LongContextAttention("yunchang", groups))
    assert before == (PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG)
    q, k, v = tensors(3, 16, 4)
    for external in made:
        share = [t.chunk(2, dim=1)[dist.get_rank()] for t in (q, k, v)]
        out = external(*share, Split((16,), 2), None)
        want = reference(q, k, v).chunk(2, dim=1)[dist.get_rank()]
        torch.testing.assert_close(out, want, rtol=0, atol=1e-5)
        external.close()


@needs_yunchang
def test_two_engines_in_one_process_do_not_see_each_other(ranks):
    """yunchang keeps its groups in a module global; ours stand there only while an attention is made."""
    ranks(2).run(_two_attentions_in_one_process)


def _pipeline_error(ulysses, ring):
    pipe = tiny.build("t2v")
    call = tiny.call("t2v", (1, 2, 4))
    want = pipe(**call, generator=torch.Generator().manual_seed(0)).frames
    with ParallelPipeline(pipe, engine_config(ulysses, ring)) as parallel:
        got = parallel(**call, seed=0).frames
        assert parallel.sent_bytes > 0
    return (got - want).abs().max().item()


@needs_yunchang
@pytest.mark.parametrize(("size", "ulysses", "ring"), [(2, 2, 1), (2, 1, 2), (4, 2, 2)])
def test_pipeline_on_the_engine_matches_one_process(ranks, size, ulysses, ring):
    """ParallelPipeline(pipe, ParallelConfig(engine="yunchang")): latents within 1e-4, as with ours."""
    assert all(error <= 1e-4 for error in ranks(size).run(_pipeline_error, ulysses, ring))


@needs_yunchang
def test_engine_on_one_rank_warns(caplog):
    """Nothing to do for it, and that is said."""
    config = ParallelConfig(engine="yunchang")
    assert external_attention(config, make_groups(config, rank=0)) is None
    assert "engine='yunchang' has no effect: one rank holds the whole sequence" in caplog.text
