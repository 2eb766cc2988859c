"""FP4 expert weights: E2M1 codes, two columns a byte (low nibble = even column), and a scale for each group of columns.

That order is the one of the format's own packer and of converters written for this checkpoint; one third-party loader
takes the low nibbles as the first half of a row instead.

MXFP4: UE8M0 scales of 32 columns. NVFP4: E4M3 scales of 16 columns, and an f32 factor of the whole matrix beside.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32
NV_GROUP = 16


def dequantise(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """codes uint8 [..., K/2], scale [..., K/32] uint8 or [..., K/16] E4M3 -> [..., K], without NVFP4's factor."""
    # Looked up in float32, which holds the values exactly: pairs of float64 took 22 times as long on an H200.
    values = _pairs(codes.device, torch.float32)[codes.int()].flatten(-2).to(dtype)
    nv = scale.dtype == torch.float8_e4m3fn
    factor = scale.to(dtype) if nv else scale_value(scale).to(dtype)
    groups = values.unflatten(-1, (-1, NV_GROUP if nv else GROUP)) * factor.unsqueeze(-1)
    return groups.flatten(-2)


def scale_value(scale: Tensor) -> Tensor:
    """2^(byte - 127) as float32, exactly; 255 is NaN."""
    bits = (scale.int() << 23).view(torch.float32)
    bits = torch.where(scale == 0, torch.full_like(bits, 2.0**-127), bits)
    return torch.where(scale == 255, torch.full_like(bits, float("nan")), bits)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest MXFP4 of x [..., K]: (codes [..., K/2], scale [..., K/32]). For tests and for making weights."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    top = groups.abs().amax(-1).clamp(min=2.0**-100)
    exponent = torch.floor(torch.log2(top)).to(torch.int32) - 2
    scaled = groups / torch.exp2(exponent.float()).unsqueeze(-1)
    return encode(scaled.flatten(-2)), (exponent + 127).to(torch.uint8)


def quantise_nv(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nearest NVFP4 of matrices x [..., N, K]: (codes [..., N, K/2], E4M3 scales [..., N, K/16], factors [...])."""
    groups = x.float().unflatten(-1, (-1, NV_GROUP))
    factor = groups.abs().amax((-3, -2, -1)).clamp(min=2.0**-100) / (6 * 448)
    whole = factor[..., None, None]
    scale = (groups.abs().amax(-1) / 6 / whole).clamp(min=2.0**-9).to(torch.float8_e4m3fn)
    return encode((groups / (scale.float() * whole).unsqueeze(-1)).flatten(-2)), scale, factor


def encode(scaled: Tensor) -> Tensor:
    """Nearest E2M1 of [..., K], packed [..., K/2]."""
    table = torch.tensor(MAGNITUDES, device=scaled.device)
    index = (scaled.abs().unsqueeze(-1) - table).abs().argmin(-1)
    code = (index + 8 * (scaled < 0)).to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4)


def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[256, 2]: the two values of every byte."""
    signed = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=device, dtype=dtype)
    byte = torch.arange(256, device=device)
    return torch.stack([signed[byte & 15], signed[byte >> 4]], -1)
