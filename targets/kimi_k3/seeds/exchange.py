"""Mailboxes between two ranks: vectors of eight bf16 are stored into the other GPU's memory and are their own signal.

Two protocols. `flag`: every eight bytes hold four of data and the number of the step, so that a reader knows what is
new, and nothing is ever cleared. `sentinel`: a word 0x80000000 (-0 beside +0) is empty; the reader empties what it has
taken, the sender turns that word into zeros. A slot of a mailbox is used once in a step: who fills it again has had an
answer to something that was sent after it was read, so that two slots in a step are enough for a single buffer.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

EMPTY = 0x80000000
SUMS = 2
"""Region of a slot for what the owner of a column has summed; 0 and 1 are the ranks' own partials."""


class Link(NamedTuple):
    """What a launch knows of the exchange.

    own, peer: mailboxes u32 [slots, 3, M, vectors, words] of this rank and of the other. epochs i32 [slots, M]: how
    often each slot's row has been received. rank, slot: run-time numbers.
    """

    own: Any
    peer: Any
    epochs: Any
    rank: Int32
    slot: Int32


@dataclass(frozen=True)
class Wire:
    """Compile-time form of the exchange: rows, vectors of eight in a row, `flag` or sentinel, shots, turns of a wait
    (0: for ever), and whether the other rank takes part at all (False: the same work alone, for comparison)."""

    rows: int
    vectors: int
    flag: bool
    two_shot: bool
    spin: int
    paired: bool

    @property
    def words(self):
        return 8 if self.flag else 4


def wire_of(rows, columns, cfg):
    if columns % 16:
        raise ValueError(f"{columns} columns are no whole vectors of eight on each of two ranks")
    return Wire(
        rows, columns // 8, cfg.protocol == "flag", cfg.shots == 2, cfg.spin_limit, cfg.paired
    )


def mailbox(slots, rows, columns, cfg):
    """Workspace of an exchange with `slots` slots."""
    words = 8 if cfg.protocol == "flag" else 4
    return {
        "mail": ("u32", (slots, 3, rows, columns // 8, words), "zero", "persistent"),
        "epochs": ("i32", (slots, rows), "zero", "persistent"),
    }


def link_of(t, slot):
    return Link(t.workspace.mail, t.peers[0].workspace.mail, t.workspace.epochs, t.rank, slot)


@cute.jit
def place(box: cute.Tensor, link: Link, at: tuple, op: cutlass.Constexpr):
    """Address of the vector at = (region, row, vector) of the link's slot."""
    region, m, i = at
    number = ((Int64(link.slot) * 3 + region) * op.rows + m) * op.vectors + i
    return box.iterator.toint() + number * (4 * op.words)


@cute.jit
def store_words(address: Int64, r: tuple):
    """16 bytes, visible to the other GPU as soon as they arrive; each word whole."""
    cute.arch.inline_ptx(
        "st.relaxed.sys.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *r],
    )


@cute.jit
def load_words(address: Int64):
    return cute.arch.inline_ptx(
        "ld.relaxed.sys.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


@cute.jit
def store_pair(address: Int64, word: Uint32, flag: Uint32):
    """One word with its flag into a mailbox."""
    cute.arch.inline_ptx(
        "st.relaxed.sys.global.v2.b32 [{$r0}], {{$r1}, {$r2}};",
        read_only_args=[address, word, flag],
    )


@cute.jit
def look_pair(address: Int64):
    return cute.arch.inline_ptx(
        "ld.relaxed.sys.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Uint32] * 2,
        read_only_args=[address],
    )


@cute.jit
def take_pair(address: Int64, flag: Uint32, spin: cutlass.Constexpr):
    """The word of a pair once it has this flag; `spin` turns at most, 0: for ever."""
    word, seen = look_pair(address)
    if cutlass.const_expr(spin == 0):
        while seen != flag:
            word, seen = look_pair(address)
    else:
        turns = Int32(0)
        while seen != flag and turns < spin:
            word, seen = look_pair(address)
            turns += 1
    return word


@cute.jit
def put(address: Int64, r: cute.Tensor, flag: Uint32, op: cutlass.Constexpr):
    """r[4 words] into a mailbox."""
    if cutlass.const_expr(op.flag):
        store_words(address, (r[0], flag, r[1], flag))
        store_words(address + 16, (r[2], flag, r[3], flag))
    else:
        words = [r[e] if r[e] != Uint32(EMPTY) else Uint32(0) for e in range(4)]
        store_words(address, tuple(words))


@cute.jit
def look(address: Int64, r: cute.Tensor, op: cutlass.Constexpr):
    """r[words] = the vector's place as it is."""
    for half in cutlass.range_constexpr(op.words // 4):
        found = load_words(address + 16 * half)
        for e in cutlass.range_constexpr(4):
            r[half * 4 + e] = found[e]


@cute.jit
def missing(r: cute.Tensor, flag: Uint32, op: cutlass.Constexpr):
    """Whether some of it has not come yet."""
    wrong = Uint32(0)
    if cutlass.const_expr(op.flag):
        for e in cutlass.range_constexpr(4):
            wrong = wrong | (r[2 * e + 1] ^ flag)
    else:
        for e in cutlass.range_constexpr(4):
            wrong = wrong | (Uint32(1) if r[e] == Uint32(EMPTY) else Uint32(0))
    return wrong != Uint32(0)


@cute.jit
def take(address: Int64, r: cute.Tensor, out: cute.Tensor, flag: Uint32, op: cutlass.Constexpr):
    """out[4 words] = the vector, once it is there; r[words] is what `look` saw of it."""
    if cutlass.const_expr(op.spin == 0):
        while missing(r, flag, op):
            look(address, r, op)
    else:
        turns = Int32(0)
        while missing(r, flag, op) and turns < op.spin:
            look(address, r, op)
            turns += 1
    for e in cutlass.range_constexpr(4):
        if cutlass.const_expr(op.flag):
            out[e] = r[2 * e]
        else:
            out[e] = r[e]
    if cutlass.const_expr(not op.flag):
        store_words(address, tuple(Uint32(EMPTY) for _ in range(4)))


@cute.jit
def new_flag(link: Link, m: Int32):
    """The number that marks what is sent in this step."""
    return Uint32(link.epochs[link.slot, m] + 1)


@cute.jit
def owner(i: Int32, op: cutlass.Constexpr):
    """The rank that sums vector i of two-shot exchanges."""
    return Int32(1) if i >= op.vectors // 2 else Int32(0)


@cute.kernel
def empty_kernel(mMail: cute.Tensor, value: cutlass.Constexpr, words: cutlass.Constexpr):
    """Every word of the mailbox = value; 256 threads a CTA, four words each."""
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    i = (bid * 256 + tid) * 4
    if i < words:
        store_words(mMail.iterator.toint() + Int64(i) * 4, tuple(Uint32(value) for _ in range(4)))


@cute.jit
def empty_mail(mMail: cute.Tensor, cfg: cutlass.Constexpr, stream):
    """Before the first step; the numbers of `flag` begin with 1."""
    words = cute.size(mMail)
    value = 0 if cfg.protocol == "flag" else EMPTY
    empty_kernel(mMail, value, words).launch(
        grid=(cute.ceil_div(words, 1024), 1, 1), block=(256, 1, 1), stream=stream
    )
