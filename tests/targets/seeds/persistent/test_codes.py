"""Codes of the routed experts as the tile kernel packs and spreads them, on the cpu device: bits of every operand."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest
import torch

from sandbox import artifact_store
from sandbox.artifact import Buffer
from sandbox.compile_client import CompileClient
from sandbox.devices.cpu.device import CpuDevice
from sandbox.jobs import CompileJob
from targets.base import Options, find
from targets.kimi_k3.maths.mxfp4 import MAGNITUDES
from targets.kimi_k3.seeds import persistent
from targets.kimi_k3.seeds.persistent.tile_pack import MOST_COPIES, code_copies, copies_fit
from tests.targets.seeds.harness import placed

WORDS = 1 << 16
USED = ("scale_of", "spread", "spread_packed", "pair_of", "pack_word")
KERNEL = """

@cute.kernel
def both_kernel(mWord: cute.Tensor, mByte: cute.Tensor, mOut: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    i = cta * 256 + tid
    word, scale = Uint32(mWord[i]), scale_of(Uint32(mByte[i]))
    plain, packed = spread(word, scale), spread_packed(pack_word(word), scale)
    for e in cutlass.range_constexpr(4):
        mOut[0, i, e], mOut[1, i, e] = Int32(plain[e]), Int32(packed[e])


@cute.jit
def step(t, cfg, stream):
    both_kernel(t.inputs.word, t.inputs.byte, t.outputs.y).launch(
        grid=(cute.size(t.inputs.word) // 256, 1, 1), block=(256, 1, 1), stream=stream)
"""


def candidate() -> str:
    """A kernel that spreads words as they are and packed, with the definitions of the bundle."""
    text = persistent.source("latent-moe-tiles")
    nodes = {n.name: n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    heads = "import cutlass\nimport cutlass.cute as cute\nfrom cutlass import Int32, Uint32\n"
    return heads + "\n\n".join(ast.unparse(nodes[name]) for name in USED) + KERNEL


def words() -> torch.Tensor:
    """Each code at each place alone, all of one code, then anything."""
    alone = [c << (4 * place) for place in range(8) for c in range(16)]
    same = [c * 0x11111111 for c in range(16)]
    generator = torch.Generator().manual_seed(3)
    first = torch.tensor([*alone, *same], dtype=torch.int64)
    more = torch.randint(0, 2**32, (WORDS - len(first),), generator=generator)
    return torch.cat([first, more])


def signed(word: torch.Tensor) -> torch.Tensor:
    """The same 32 bits as i32."""
    return torch.where(word < 2**31, word, word - 2**32).to(torch.int32)


@pytest.mark.slow
def test_packed_codes_are_the_same_operands(compiler: CompileClient) -> None:
    """All scales that `scale_of` can give; where the product is a normal number its value is the table's."""
    n = (WORDS,)
    buffers = (
        Buffer("inputs.word", "i32", n), Buffer("inputs.byte", "i32", n), Buffer("outputs.y", "i32", (2, *n, 4)),
    )  # fmt: skip
    outcome = compiler.compile(CompileJob(candidate(), "codes", {"preset": "tiny"}, {}, buffers))
    assert outcome.artifact, outcome.failure
    word, byte = words(), torch.arange(WORDS) % 191
    artifact = artifact_store.load(outcome.artifact)
    got = placed(artifact, {"inputs.word": signed(word), "inputs.byte": byte})
    CpuDevice().load(artifact).bind("step", got, frozenset(("outputs.y",))).launch()
    plain, packed = got["outputs.y"].view(torch.bfloat16).view(2, WORDS, 4, 2)
    assert torch.equal(plain.view(torch.int16), packed.view(torch.int16))
    code = torch.stack([(word >> (4 * k)) & 15 for k in range(8)], -1).view(WORDS, 2, 4).mT
    table = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], dtype=torch.float64)
    value = table[code] * torch.exp2(byte.double() - 127 - 62)[:, None, None]
    normal = byte > 64
    assert torch.equal(packed.double()[normal], value[normal])


def test_copies_have_a_place_for_each_matrix_and_an_end() -> None:
    """Twelve layers at tp8 have copies, and so many that a judge has no room for those of an incumbent have none."""
    dims = lambda n: SimpleNamespace(  # noqa: E731
        **find("kimi-k3-decode").workload(Options("tp8", n, 1)).dims
    )
    dtype, shape, *_ = code_copies(dims(12))["packed"]
    assert (dtype, shape) == ("i32", (36, 896 * 384 * 3584 // 8)) and copies_fit(dims(12))
    assert not copies_fit(dims(24)) and 4 * shape[0] * shape[1] <= MOST_COPIES
