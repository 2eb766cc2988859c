"""PTX splitting, assembly and lint on small hand-written modules."""

import pytest

from sandbox import ptx
from sandbox.artifact import Artifact, Launch, LaunchPlan
from sandbox.assemble import AssemblyFailed, assemble
from sandbox.lint import lint, lint_ptx, must_fit, polls, stranded
from sandbox.sass import disassemble

HEAD = ".version 9.4\n.target sm_90a\n.address_size 64\n\n"


def kernel(name: str, number: int, body: str = "") -> str:
    return f"""\t// .globl\t{name}
.visible .entry {name}(
	.param .align 8 .b8 {name}_param_0[8],
	.param .u32 {name}_param_1,
	.param .u64 .ptr .global .align 16 {name}_param_2
)
.reqntid 128, 1, 1
{{
	.reg .pred %p<4>;
	.reg .b32 %r<8>;
	.reg .b64 %rd<4>;
	ld.param.b64 %rd1, [{name}_param_0];
	ld.param.b64 %rd2, [{name}_param_2];
	mov.u32 %r1, %tid.x;
{body}
	setp.gt.s32 %p1, %r1, 99;
	@%p1 bra $L__BB{number}_2;
	mul.wide.s32 %rd3, %r1, 4;
	add.s64 %rd1, %rd1, %rd3;
	st.global.b32 [%rd1], %r1;
$L__BB{number}_2:
	ret;

}}
"""


POLL = """	setp.ne.s32 %p2, %r1, 0;
	@%p2 bra $L__done;
$L__poll:
	ld.relaxed.gpu.global.b32 %r2, [%rd2];
	setp.lt.s32 %p3, %r2, 4;
	@%p3 bra $L__poll;
$L__done:
	bar.sync 0;
	ld.global.b32 %r3, [%rd2+4];
	add.s32 %r1, %r1, %r3;
"""


def plan(
    text: str, name: str, grid: int = 4, cooperative: bool = False, smem: int = 0, pdl: bool = False
) -> LaunchPlan:
    launch = Launch(
        name,
        (grid, 1, 1),
        (128, 1, 1),
        bytes(24),
        (0, 8, 16),
        (),
        smem=smem,
        cooperative=cooperative,
        pdl=pdl,
    )
    return LaunchPlan(text, (launch,))


def rules(text: str, name: str, **kw: object) -> set[str]:
    return {f.rule for f in lint_ptx("sm_90a", plan(text, name, **kw))}  # type: ignore[arg-type]


def test_parameters_are_laid_out_as_c_structs() -> None:
    (entry,) = ptx.entries(HEAD + kernel("k", 0))
    assert [(p.offset, p.size) for p in entry.params] == [(0, 8), (8, 4), (16, 8)]
    assert entry.param_bytes == 24


def test_dedupe_keeps_one_of_equal_kernels_and_all_others() -> None:
    text = HEAD + kernel("k_0", 0) + kernel("k_1", 1) + kernel("k_2", 2, "\tadd.s32 %r1, %r1, 1;")
    short, names = ptx.dedupe(text)
    assert names == {"k_0": "k_0", "k_1": "k_0", "k_2": "k_2"}
    assert [e.name for e in ptx.entries(short)] == ["k_0", "k_2"]
    assert {r.kernel for r in assemble(short, "sm_90a").resources} == {"k_0", "k_2"}


def test_names_that_contain_another_name_are_told_apart() -> None:
    text = HEAD + kernel("k", 0) + kernel("k1", 1, "\tadd.s32 %r1, %r1, 1;")
    assert ptx.dedupe(text)[1] == {"k": "k", "k1": "k1"}


@pytest.mark.parametrize(
    "text", ["", HEAD + ".visible .entry k(.param .u64 a) {", HEAD + ".entry k(.param z) { }"]
)
def test_broken_modules_raise(text: str) -> None:
    with pytest.raises(ptx.PtxError):
        ptx.entries(text) or ptx.target(text)


def test_assembly_reports_resources_and_the_line_of_an_error() -> None:
    good = assemble(HEAD + kernel("k", 0), "sm_90a")
    assert good.resources[0].registers > 3 and good.cubin[:4] == b"\x7fELF"
    bad = (HEAD + kernel("k", 0)).replace("mul.wide.s32", "mul.odd.s32")
    with pytest.raises(AssemblyFailed) as caught:
        assemble(bad, "sm_90a")
    line = 1 + bad[: bad.index("mul.odd")].count("\n")
    assert caught.value.failure.where == {"ptx_line": line}


def test_a_spin_needs_the_cooperative_attribute() -> None:
    text = HEAD + kernel("k", 0, POLL)
    assert rules(text, "k") == {"spin-not-cooperative"}
    assert rules(text, "k", cooperative=True) == set()
    assert rules(text, "k", grid=1) == set()
    assert rules(HEAD + kernel("k", 0), "k") == set()
    # a programmatic launch may do without the attribute: the device asks that it fits whole
    (launch,) = plan(text, "k", pdl=True).launches
    assert rules(text, "k", pdl=True) == set() and must_fit(launch, polls(text))
    (launch,) = plan(text, "k", pdl=True).launches
    assert not must_fit(launch, polls(HEAD + kernel("k", 0)))


def test_one_loose_launch_of_a_polling_kernel_is_enough_for_a_refusal() -> None:
    text = HEAD + kernel("k", 0, POLL)
    (safe,), (loose,) = (plan(text, "k", pdl=p).launches for p in (True, False))
    assert not stranded(LaunchPlan(text, (safe, safe)))
    for launches in ((safe, loose), (loose, safe)):
        assert [f.rule for f in stranded(LaunchPlan(text, launches))] == ["spin-not-cooperative"]


@pytest.mark.parametrize(
    "line, rule",
    [
        ("\tmov.u32 %r2, %clock;", "clock"),
        ("\tmov.u64 %rd3, %globaltimer;", "clock"),
        ("\tmov.u32 %r2, %pm0;", "clock"),
        ("\tmov.u64 %rd3, %gridid;", "launch-number"),
        ("\tmov.u64 %rd3, %current_graph_exec;", "launch-number"),
        ("\tmov.b32 %r2, %envreg1;", "launch-number"),
    ],
)
def test_registers_that_tell_the_time_or_the_launch_are_refused(line: str, rule: str) -> None:
    """Also where a function reads them for the kernel."""
    text = HEAD + kernel("k", 0, line)
    assert rules(text, "k") == {rule}
    assemble(text, "sm_90a")  # the assembler takes it
    apart = f".func asked ()\n{{\n\t.reg .b32 %r<4>;\n\t.reg .b64 %rd<4>;\n{line}\n\tret;\n}}\n"
    assert rules(HEAD + apart + kernel("k", 0, "\tcall asked, ();"), "k") == {rule}


def test_only_builds_with_marks_read_the_clock_and_no_build_the_launch() -> None:
    for line, found in (
        ("mov.u64 %rd3, %globaltimer;", []),
        ("mov.u64 %rd3, %gridid;", ["launch-number"]),
    ):
        text = HEAD + kernel("k", 0, line)
        assert [f.rule for f in lint_ptx("sm_90a", plan(text, "k"), clocks=True)] == found


def test_module_state_externs_and_other_architectures_are_refused() -> None:
    text = HEAD + ".global .align 4 .u32 counter;\n.extern .func vprintf ();\n" + kernel("k", 0)
    assert rules(text, "k") == {"writable-global", "extern-function"}
    assert rules(HEAD.replace("sm_90a", "sm_100a") + kernel("k", 0), "k") == {"target-mismatch"}
    assert rules(HEAD + ".const .align 4 .u32 table;\n" + kernel("k", 0), "k") == set()


@pytest.mark.parametrize(
    "text",
    [
        ".common .global .align 8 .b64 kept[4];",
        ".const .align 4 .u32 table = 1; .global .align 8 .b64 kept[4];",
        ".global .align 8 .b64 kept[4]; .global .texref t;",
        ".visible // here\n\t.global .align 4 .u32 kept;",
        "/* x */ .global .align 4 .u32 kept;",
    ],
)
def test_module_state_is_found_wherever_it_stands(text: str) -> None:
    assert rules(HEAD + text + "\n" + kernel("k", 0), "k") == {"writable-global"}


@pytest.mark.parametrize(
    "text",
    [
        ".extern .func (.param .b64 r) malloc (.param .b64 s); // __assertfail",
        ".extern .func (.param .b64 __assertfail) malloc (.param .b64 s);",
        ".const .u32 c; .extern /**/ .func malloc\n(\n.param .b64 s\n)\n;",
    ],
)
def test_functions_of_the_device_runtime_are_found_by_name(text: str) -> None:
    (found,) = lint_ptx("sm_90a", plan(HEAD + text + "\n" + kernel("k", 0), "k"))
    assert found.rule == "extern-function" and found.message.startswith("calls malloc")


def test_assertions_and_pointers_to_global_memory_are_fine() -> None:
    text = ".extern .func __assertfail\n(\n.param .b64 m\n)\n.noreturn;\n"
    assert rules(HEAD + text + "// .global .u32 x;\n" + kernel("k", 0), "k") == set()


def test_a_spin_counts_under_any_label_and_in_a_function() -> None:
    plain = POLL.replace("$L__poll", "again").replace("$L__done", "done")
    assert rules(HEAD + kernel("k", 0, plain), "k") == {"spin-not-cooperative"}
    body = "\t.reg .pred %p<4>;\n\t.reg .b32 %r<4>;\n\t.reg .b64 %rd<4>;\n" + plain
    text = HEAD + f".func wait ()\n{{\n{body}\tret;\n}}\n" + kernel("k", 0, "\tcall wait, ();")
    assert rules(text, "k") == {"spin-not-cooperative"}
    line = polls(text)["k"]
    assert text.splitlines()[line - 1].strip().startswith("ld.relaxed")


def test_stale_poll_is_seen_in_machine_code_and_an_acquire_cures_it() -> None:
    for load, expected in (("ld.relaxed", True), ("ld.acquire", False)):
        text = HEAD + kernel("k", 0, POLL.replace("ld.relaxed", load))
        artifact = Artifact("t", {}, "sm_90a", (), plan(text, "k", cooperative=True))
        report = lint(artifact, {"step": assemble(text, "sm_90a")})
        assert not report.refusals
        assert ("stale-poll" in {f.rule for f in report.advice}) is expected


def test_shared_memory_of_plan_and_kernel_is_added_up() -> None:
    text = HEAD + kernel(
        "k", 0, "\t.shared .align 16 .b8 tile[1024];\n\tst.shared.b32 [tile], %r1;"
    )
    artifact = Artifact("t", {}, "sm_90a", (), plan(text, "k", smem=232448))
    report = lint(artifact, {"step": assemble(text, "sm_90a")})
    assert [f.rule for f in report.refusals] == ["shared-memory"]


def test_disassembly_finds_loops_and_opcodes() -> None:
    (code,) = disassemble(assemble(HEAD + kernel("k", 0, POLL), "sm_90a").cubin)
    assert code.kernel == "k" and len(code.loops) == 1
    assert code.histogram()["STG"] == 1 and code.bytes % 128 == 0
