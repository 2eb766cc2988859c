"""Planted mistakes in the exchange between two ranks: waits, epochs, mailboxes, addresses; and right variants of it."""

from __future__ import annotations

from typing import Any

from targets.base import Options
from targets.kimi_k3.planted.build import RACY, bug, good
from targets.planted import Edit, Planted

_SIZE = Options("tiny-tp2", 3, 2)
_ENDS = frozenset({"wrong", "flaky", "hang"})
"""How a broken exchange may end: with values of another step, or with a wait that nobody ends."""
_TAKE = "        while missing(r, flag, op):\n            look(address, r, op)\n    else:"
_FLAG = "    return Uint32(link.epochs[link.slot, m] + 1)\n"
_DONE = "        link.epochs[link.slot, m] = Int32(flag)\n"
_SLOT = "    number = ((Int64(link.slot) * 3 + region)"


def _bug(part: str, name: str, does: str, *edits: Edit, **more: Any) -> Planted:
    fields = {"options": _SIZE, "devices": ("cpu",), "expect": _ENDS, **more}
    return bug(part, "exchange", name, does, *edits, **fields)


def peers() -> list[Planted]:
    a, o = "allreduce-attn-res", "oproj-allreduce"
    return [
        _bug(a, "no-wait-for-flag", "what is in the mailbox is taken without waiting for it",
             (_TAKE, "        look(address, r, op)\n    else:"), expect=RACY),
        _bug(o, "no-wait-for-flag", "what is in the mailbox is taken without waiting for it",
             (_TAKE, "        look(address, r, op)\n    else:"), expect=RACY),
        _bug(a, "stale-epoch", "every step has the same number, so that what an earlier one left looks new",
             (_FLAG, "    return Uint32(1)\n")),
        _bug(a, "epoch-not-counted", "the number of the step is never raised", (_DONE, "        pass\n")),
        _bug(a, "one-buffer", "all instances share one slot: a fast rank overwrites what was not read",
             (_SLOT, "    number = ((Int64(0) * 3 + region)"),
             (_FLAG, "    return Uint32(link.epochs[link.slot, m] * 64 + link.slot + 1)\n"),
             (_DONE, "        link.epochs[link.slot, m] = link.epochs[link.slot, m] + 1\n")),
        _bug(a, "slot-shared", "all instances share one slot and one number: the first's partial is everybody's",
             (_SLOT, "    number = ((Int64(0) * 3 + region)")),
        _bug(o, "wrong-rank", "the own partial is added twice, the other rank's never",
             ("        other = 1 - link.rank\n", "        other = link.rank\n")),
        _bug(a, "wrong-region", "partials are stored where the other rank does not look",
             ("        where = (link.rank, m, i)\n", "        where = (1 - link.rank, m, i)\n")),
        _bug(a, "not-emptied", "a vector that was taken stays in the mailbox and looks like the next one",
             ("        store_words(address, tuple(Uint32(EMPTY) for _ in range(4)))\n", "        pass\n"),
             tunables={"protocol": "sentinel"}),
        _bug(a, "sum-not-returned", "of two shots the second goes nowhere: the owner of a column keeps its sum",
             ("            put(place(link.peer, link, (Int32(SUMS), m, i), op), rP, flag, op)\n",
              "            put(place(link.own, link, (Int32(SUMS), m, i), op), rP, flag, op)\n"),
             tunables={"shots": 2}),
        good(a, "sentinel", "words that are their own signal, emptied by the reader", options=_SIZE, devices=("cpu",),
             tunables={"protocol": "sentinel"}),
        good(o, "two-shot", "each rank sums half of the columns", options=_SIZE, devices=("cpu",),
             tunables={"shots": 2}),
        good(o, "weights-not-ahead", "weights come into registers, as in a product of its own", options=_SIZE,
             devices=("cpu",), tunables={"ahead": False}),
    ]  # fmt: skip
