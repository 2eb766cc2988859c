"""Where persistent kernels give stages of the ring back: behind the loads of them, in the machine code."""

from __future__ import annotations

import pytest

from sandbox.assemble import assemble
from sandbox.compile_client import CompileClient
from sandbox.sass import disassemble, early_arrivals
from tests.targets.seeds.harness import Case
from tests.targets.seeds.persistent.test_numbers import built


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "rows"),
    [("decode", 1), ("kda", 1), ("kda", 8), ("latent-moe-tiles", 1), ("latent-moe-tiles", 8)],
)
def test_no_stage_is_given_back_before_its_loads_are_done(
    compiler: CompileClient, part: str, rows: int
) -> None:
    """At the sizes of a GPU: without the fences of `ring.stage_loaded` 4 to 12 arrivals of each kernel are early."""
    layers = 4 if part == "decode" else 2
    case = Case(part.removesuffix("-tiles"), rows=rows, preset="tp8", layers=layers)
    artifact = built(compiler, case, part)
    code = disassemble(assemble(artifact.step.ptx, artifact.arch).cubin)
    assert code and [early_arrivals(c) for c in code] == [()] * len(code)
