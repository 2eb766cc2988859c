"""Code by phase: which phase an instruction counts for, and which loop is the kernel's."""

from __future__ import annotations

import pytest

from benchmarks import code_size
from sandbox import sass

SOURCE = """\
def shared():
    x = 1
    return x

def one():
    return shared()

def two():
    return shared() + inner()

def inner():
    return 3

def all():
    one()
    two()
"""
LISTING = """\
.text.k:
	//## File "candidate.py", line 15
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
	//## File "candidate.py", line 6
        /*0010*/                   LDG.E R0, desc[UR4][R2.64] ;
	//## File "candidate.py", line 2
        /*0020*/                   FADD R0, R0, R1 ;
	//## File "candidate.py", line 9
        /*0030*/                   FMUL R0, R0, R1 ;
	//## File "candidate.py", line 2
        /*0040*/                   FADD R0, R0, R1 ;
.L_x_3:
	//## File "host.py", line 2
        /*0050*/              @!P0 BRA `(.L_x_2) ;
	//## File "candidate.py", line 12
        /*0060*/               @P1 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
.L_x_2:
        /*0080*/                   BRA `(.L_x_3) ;
.L_x_4:
        /*0090*/                   BRA `(.L_x_4);
"""
PHASES = {"first": ["one"], "second": ["two"]}


def test_shared_code_counts_for_the_phase_it_stands_in() -> None:
    source = code_size.read_source(SOURCE)
    lines = code_size.lines_of(LISTING, source, "candidate.py")
    names = code_size.by_phase(lines, code_size.phases_of(source, PHASES))
    assert names[:7] == ["before", "first", "first", "second", "second", "second", "second"]
    assert [x.function for x in lines][:6] == ["all", "one", "shared", "two", "shared", ""]


def test_waiting_that_was_moved_behind_the_end_is_no_loop() -> None:
    (code,) = sass.parse(LISTING)
    assert code_size.widest(code) == (0x10, 0x60)
    source = code_size.read_source(SOURCE)
    lines = code_size.lines_of(LISTING, source, "candidate.py")
    rows = code_size.table(lines, [x.function for x in lines], code_size.widest(code))
    shared = next(r for r in rows if r["name"] == "shared")
    assert (shared["instructions"], shared["bytes"], shared["loop"]) == (2, 32, 2)


def test_a_phase_of_another_phase_is_its_own() -> None:
    source = code_size.read_source(SOURCE)
    owner = code_size.phases_of(source, {"whole": ["all"], **PHASES})
    assert owner["inner"] == "second" and owner["all"] == "whole" and "shared" not in owner


def test_an_unknown_function_is_refused() -> None:
    with pytest.raises(ValueError, match="no function three"):
        code_size.phases_of(code_size.read_source(SOURCE), {"x": ["three"]})
