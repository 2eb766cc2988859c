"""Inline PTX on tensors: the few integer and BF16 instructions that the baseline's kernels write by hand.

Registers hold 32 bits of each lane as int64. It knows no predicates, branches or memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def halves(x: Tensor) -> Tensor:
    """Two BF16 values of each register, [..., 2], the low one first."""
    both = torch.stack([x & 0xFFFF, x >> 16], -1)
    return both.to(torch.int32).to(torch.uint16).view(torch.bfloat16)


def joined(x: Tensor) -> Tensor:
    bits = x.to(torch.bfloat16).view(torch.uint16).to(torch.int64)
    return bits[..., 0] | bits[..., 1] << 16


def permuted(a: Tensor, b: Tensor, select: Tensor) -> Tensor:
    """prmt: byte i of the result is the one of (b, a) that nibble i names."""
    both, found = a | b << 32, torch.zeros_like(a)
    for i in range(4):
        nibble = select >> 4 * i & 0xF
        assert int(nibble.max()) < 8  # bit 3 would spread a sign
        found |= (both >> 8 * nibble & 0xFF) << 8 * i
    return found


INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "prmt.b32": permuted,
    "mad.lo.u32": lambda a, b, c: a * b + c & WORD,
    "shl.b32": lambda a, b: a << b & WORD,
    "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "mul.bf16x2": lambda a, b: joined(halves(a).float() * halves(b).float()),
}


def run(text: str, inputs: list[Tensor], outputs: int) -> list[Tensor]:
    """The output registers $0 .. of `text`, whose inputs follow them."""
    registers = {f"${outputs + i}": x.to(torch.int64) & WORD for i, x in enumerate(inputs)}

    def value(name: str) -> Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    for line in re.sub(r"[{}]|\.reg[^;]*;", "", text).split(";"):
        if line.strip():
            name, rest = line.strip().split(maxsplit=1)
            to, *given = (x.strip() for x in rest.split(","))
            registers[to] = INSTRUCTIONS[name](*map(value, given))
    return [registers[f"${i}"] for i in range(outputs)]
