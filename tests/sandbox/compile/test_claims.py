"""Result frames of workers as hostile input: a good one becomes an artifact, every damaged one is refused."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

from sandbox.artifact import Buffer
from sandbox.compile import claims, relocate
from sandbox.jobs import CompileJob
from sandbox.strict import Malformed

JOB = CompileJob(
    "source",
    "demo",
    {"preset": "tiny"},
    {},
    (Buffer("inputs.x", "f32", (8,)), Buffer("outputs.y", "f32", (8,))),
)
KERNEL = """
.visible .entry {name}(
	.param .u64 {name}_param_0,
	.param .u64 {name}_param_1,
	.param .u32 {name}_param_2
)
{{
	ld.param.b64 %rd1, [{name}_param_0];
	ld.param.b64 %rd2, [{name}_param_1];
	ld.param.b32 %r1, [{name}_param_2];
	ret;
}}
"""
PTX = (
    ".version 9.4\n.target sm_90a\n.address_size 64\n"
    + KERNEL.format(name="k_0")
    + KERNEL.format(name="k_1")
    + '\t.file\t1 "/box/scratch-17/candidate.py"\n'
)
LAUNCH = [[2, 1, 1], [64, 1, 1], 0, False, False, None]


def params(recording: int, output: int = 1) -> bytes:
    base, stride = relocate.SENTINELS[recording]
    return struct.pack("<QQI", base, base + stride * output, 3)


def good() -> tuple[dict[str, Any], dict[str, bytes]]:
    rows = [["k_0", *LAUNCH], ["k_1", *LAUNCH]]
    body = {"ok": True, "plans": ["step"], "tunables": {"n": [1, 2]}, "seconds": {}}
    blocks = {
        "ptx.step": PTX.encode(),
        "plan.step": json.dumps([rows, rows]).encode(),
        "params.step.0": params(0) * 2,
        "params.step.1": params(1) * 2,
        "declared": json.dumps(
            [
                ["workspace.w", "i32", [4], "zero", "persistent"],
                ["constants.c", "u8", [3], None, None],
            ]
        ).encode(),
        "constants.c": b"abc",
    }
    return body, blocks


def read(body: dict[str, Any], blocks: dict[str, bytes]) -> claims.Claim:
    return claims.read(JOB, body, blocks, {"cutlass_dsl": "4.8.1"})


def test_a_good_frame_becomes_an_artifact_with_equal_kernels_once() -> None:
    claim = read(*good())
    artifact = claim.artifact
    assert [x.kernel for x in artifact.step.launches] == ["k_0", "k_0"]
    assert artifact.step.ptx.count(".entry") == 1
    launch = artifact.step.launches[1]
    assert launch.param_offsets == (0, 8, 16) and launch.params[16:] == b"\3\0\0\0"
    assert [(r.offset, r.buffer) for r in launch.relocations] == [(0, "inputs.x"), (8, "outputs.y")]
    assert artifact.constants == {"constants.c": b"abc"}
    assert artifact.tunables == {"n": 1} and claim.tunables == {"n": (1, 2)}
    assert '.file\t1 "candidate.py"' in artifact.step.ptx


def test_the_folder_of_a_box_does_not_change_the_address() -> None:
    body, blocks = good()
    moved = blocks | {"ptx.step": blocks["ptx.step"].replace(b"scratch-17", b"other")}
    assert read(body, blocks).artifact.sha256 == read(body, moved).artifact.sha256


def test_the_line_table_is_in_the_address_but_not_in_the_identity_of_the_machine_work() -> None:
    body, blocks = good()
    moved = blocks | {"ptx.step": blocks["ptx.step"].replace(b"\tret;", b"\t.loc\t1 7 3\n\tret;")}
    other = blocks | {"ptx.step": blocks["ptx.step"].replace(b"\tret;", b"\texit;")}
    first, second, third = (read(body, b).artifact for b in (blocks, moved, other))
    assert first.sha256 != second.sha256 and first.ptx_sha256 == second.ptx_sha256
    assert first.ptx_sha256 != third.ptx_sha256


Change = Callable[[dict[str, Any], dict[str, bytes]], object]
DAMAGE: dict[str, Change] = {
    "extra field": lambda body, blocks: body.update(verdict="passed"),
    "no step": lambda body, blocks: body.update(plans=["prepare"]),
    "plan twice": lambda body, blocks: body.update(plans=["step", "step"]),
    "tunable of a wrong type": lambda body, blocks: body.update(tunables={"n": [[1]]}),
    "tunable without values": lambda body, blocks: body.update(tunables={"n": []}),
    "block missing": lambda body, blocks: blocks.pop("ptx.step"),
    "constant missing": lambda body, blocks: blocks.pop("constants.c"),
    "constant too short": lambda body, blocks: blocks.update({"constants.c": b"ab"}),
    "params too short": lambda body, blocks: blocks.update({"params.step.0": params(0)}),
    "params too long": lambda body, blocks: blocks.update({"params.step.1": params(1) * 3}),
    "ptx not ascii": lambda body, blocks: blocks.update({"ptx.step": b"\xff" + PTX.encode()}),
    "declares an input": lambda body, blocks: blocks.update(
        declared=json.dumps([["inputs.z", "i32", [4], None, None]]).encode()
    ),
    "declares a buffer twice": lambda body, blocks: blocks.update(
        declared=json.dumps([["workspace.w", "i32", [4], "zero", "step"]] * 2).encode()
    ),
    "huge shape": lambda body, blocks: blocks.update(
        declared=json.dumps([["workspace.w", "i32", [1 << 39, 1 << 39], "zero", "step"]]).encode()
    ),
    "unknown kernel": lambda body, blocks: blocks.update(
        {"plan.step": json.dumps([[["q", *LAUNCH]]] * 2).encode()}
    ),
    "empty plan": lambda body, blocks: blocks.update(
        {"plan.step": b"[[], []]", "params.step.0": b"", "params.step.1": b""}
    ),
    "grid of zero": lambda body, blocks: blocks.update(
        {"plan.step": json.dumps([[["k_0", [0, 1, 1], *LAUNCH[1:]]] * 2] * 2).encode()}
    ),
    "deep nesting": lambda body, blocks: blocks.update({"plan.step": b"[" * 100_000}),
    "NaN": lambda body, blocks: blocks.update({"plan.step": b"[NaN, NaN]"}),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused(name: str) -> None:
    body, blocks = good()
    DAMAGE[name](body, blocks)
    with pytest.raises(Malformed):
        read(body, blocks)


def test_launches_that_depend_on_addresses_make_no_plan() -> None:
    body, blocks = good()
    first, second = json.loads(blocks["plan.step"])
    second[0][1] = [3, 1, 1]
    blocks["plan.step"] = json.dumps([first, second]).encode()
    with pytest.raises(claims.PlanError, match="different launches"):
        read(body, blocks)


def test_an_address_of_nothing_makes_no_plan() -> None:
    body, blocks = good()
    blocks["params.step.0"] = params(0, 700) * 2
    with pytest.raises(claims.PlanError, match="parameter 1 of kernel k_0"):
        read(body, blocks)


@pytest.mark.parametrize(
    "text",
    [
        ".entry k(" + ".param " * 400_000 + "{",
        ".entry k(.param .b32" + " " * 3_000_000 + "x) {}",
        ".entry k()\n{" + "ld.param.b32 x" * 200_000,
        '\t.file\t1 "' + "/" * 3_000_000,
        "".join(f".entry k{i}()\n{{ret;}}\n" for i in range(20_000)),
        "".join(f".entry k{i}()\n{{ret;}}\n" for i in range(4096)),
    ],
    ids=["many params", "spaces", "loads", "file", "too many kernels", "many kernels"],
)
def test_hostile_ptx_does_not_stall_the_server(text: str) -> None:
    body, blocks = good()
    blocks["ptx.step"] = (".version 9.4\n.target sm_90a\n" + text).encode()
    start = time.process_time()
    with pytest.raises((Malformed, claims.PlanError)):
        read(body, blocks)
    assert time.process_time() - start < 5
