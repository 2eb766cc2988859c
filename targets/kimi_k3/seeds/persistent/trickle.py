"""While a producer finds its ring full, memory brings what it will want next into L2, a stage's worth at a time.

A ring holds five microseconds of the stream, and consumers that wait for each other or for a latency take longer. What
lies in L2 then comes faster than memory could bring it. It is asked for slowly, and only while nothing else is on its
way, because an edge's loads queue behind it. Nothing is copied here: a stage comes into the ring as before.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from targets.kimi_k3.seeds.persistent.device import Ctx
from targets.kimi_k3.seeds.persistent.ring import passed, to_l2


class Lead(NamedTuple):
    """How far L2 is ahead of the ring: the next byte to ask for, the end of the piece it lies in."""

    at: Any
    end: Any


def no_lead():
    return Lead(Int64(0), Int64(0))


@cute.jit
def trickle(c: Ctx, it: Int32, lead: Lead, here: tuple, after: tuple, op: cutlass.Constexpr):
    """Waits for the slot of stage number `it`. here: where the stage begins and where its piece of memory ends; after:
    the piece that follows. At most `op.lead` stages of each piece are asked for.
    """
    at, end = lead.at, lead.end
    inside = at >= here[0] and at <= here[1]
    beyond = at >= after[0] and at <= after[1]
    if not (inside or beyond):
        at, end = here[0], here[1]
    if it >= op.stages:
        slot, parity = it % op.stages, (it // op.stages - 1) & 1
        ready = passed(c.empty + slot, parity, op.lead_pause)
        while ready == 0:
            if at == here[1] and end == here[1]:
                at, end = after[0], after[1]
            base = here[0] if end == here[1] else after[0]
            left = end - at
            if left > 0 and at - base < op.lead * op.stage:
                size = Int32(left) if left < op.stage else Int32(op.stage)
                to_l2(at, size)
                at += Int64(size)
            ready = passed(c.empty + slot, parity, op.lead_pause)
    return Lead(at, end)
