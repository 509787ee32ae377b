"""The plain forms of fused norms, rotations and gates; the operators are tested in tests/npu."""

import pytest
import torch

from runtime import fused

ATOL = 3e-7  # fp32 against fp64, numbers of about 1


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_the_plain_norm_is_its_formula():
    """In fp64 to the last digits, in fp32 to a rounding; with and without weight; in the wider dtype."""
    x, weight = numbers(2, 5, 24).double(), numbers(24).double()
    want = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(fused.rms_norm(x, None, 1e-5), want)
    torch.testing.assert_close(fused.rms_norm(x, weight, 1e-5), want * weight)
    torch.testing.assert_close(
        fused.rms_norm(x.float(), weight.float(), 1e-5).double(), want * weight, atol=ATOL * 10, rtol=0
    )
    assert fused.rms_norm(x.bfloat16(), weight.float(), 1e-5).dtype == torch.float32
    assert fused.rms_norm(x.float(), weight.bfloat16(), 1e-5).dtype == torch.float32


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_plain_rotation_turns_pairs_of_numbers_as_complex_ones(interleaved):
    """Neighbours, or numbers half a head apart, as real and imaginary part; one head stays one head."""
    x, angles = numbers(2, 7, 3, 16).double(), numbers(1, 7, 1, 8).double()
    pairs = x.unflatten(-1, (8, 2)) if interleaved else x.unflatten(-1, (2, 8)).transpose(-1, -2)
    complex_x = torch.view_as_complex(pairs.contiguous())
    turned = torch.view_as_real(complex_x * torch.polar(torch.ones_like(angles), angles))
    want = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    whole = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    got = fused.rotary(x, whole.cos(), whole.sin(), interleaved=interleaved)
    torch.testing.assert_close(got, want)
    half = fused.rotary(x.bfloat16(), whole.cos(), whole.sin(), interleaved=interleaved)
    assert half.dtype == torch.bfloat16


def test_the_plain_gate_is_its_formula():
    """The first half times the exact GELU, by the error function, of the second."""
    x = numbers(2, 5, 24).double()
    values, gate = x[..., :12], x[..., 12:]
    want = values * gate * (1 + torch.erf(gate / 2**0.5)) / 2
    torch.testing.assert_close(fused.geglu(x), want)
    assert fused.geglu(x.bfloat16()).dtype == torch.bfloat16


def test_a_device_without_operators_says_so():
    """The reason names the device; `on` is an error there, and modes are known."""
    x, table = numbers(1, 4, 2, 8), numbers(1, 4, 1, 8)
    assert fused.rms_norm_limit(x, None) == "cpu has no fused norm"
    limit = fused.rotary_limit(x.shape, x.dtype, "cpu", table, table, interleaved=True)
    assert limit == "cpu has no fused rotation"
    assert fused.geglu_limit(x) == "cpu has no fused GEGLU"
    for mode in ("auto", "off"):
        fused.check_fused(mode, "cpu")
    for kind in ("cpu", "cuda", "musa"):
        with pytest.raises(ValueError, match=f"fused=on on {kind}; only npu has fused"):
            fused.check_fused("on", kind)
    with pytest.raises(ValueError, match="fused='yes' was given; use one of auto, on, off"):
        fused.check_fused("yes", "npu")
