"""Arrivals on barriers that do not wait for loads, in machine code as nvdisasm prints it."""

from __future__ import annotations

import pytest

from sandbox.sass import early_arrivals, parse

ARRIVE = "@!P4 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R103+URZ+0x255a8], RZ"
LOAD = "LDS.128 R92, [R0+0x740]"


def found(*lines: str) -> tuple[int, ...]:
    body = "\n".join(
        f"        /*{16 * n:04x}*/                   {x} ;" for n, x in enumerate(lines)
    )
    (code,) = parse(f".text.kernel:\n{body}\n")
    return early_arrivals(code)


def test_an_arrival_behind_a_load_that_nobody_used() -> None:
    assert found("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R103+URZ+0x25580], R6", LOAD, ARRIVE) == (32,)
    assert found(LOAD, "NOP", "IMAD.MOV.U32 R5, RZ, RZ, RZ", ARRIVE, ARRIVE) == (48, 64)
    # of four registers one is still on its way
    assert found(LOAD, "IADD3 R1, R92, R93, R94", ARRIVE) == (32,)


@pytest.mark.parametrize(
    "between",
    [
        "FENCE.VIEW.ASYNC.S",
        "BAR.SYNC.DEFER_BLOCKING 0x1, 0x1c0",
        "HMMA.16816.F32.BF16 R4, R92, R12, RZ",
        "STG.E.128 desc[UR12][R8.64], R92",
        "MOV R92, RZ",
    ],
)
def test_what_waits_for_the_load(between: str) -> None:
    lines = ["MOV R93, RZ", "MOV R94, RZ", "MOV R95, RZ"] if between.startswith("MOV") else []
    assert found(LOAD, *lines, between, ARRIVE) == ()


def test_other_arrivals_and_loads_say_nothing() -> None:
    copy = "SYNCS.ARRIVE.TRANS64 RZ, [UR13+0x25580], R8"
    assert found(LOAD, copy) == ()
    assert found("LDG.E.128.STRONG.GPU R92, desc[UR12][R64.64]", ARRIVE) == ()
