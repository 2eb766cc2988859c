"""Sizes of what KDA of several tokens brings besides weights (`kda_bring`): states in stages of the ring, taps.

Plain Python, computed while compiling. No CuTe DSL.
"""

HEAD = 128
ROW = 4 * HEAD
"""Bytes of a row of a state."""


def channels_of(op):
    """Channels of a CTA: q, k and its own of v."""
    return 2 * HEAD + op.state_rows


def window(op):
    """Channels of v that are copied: whole 16 bytes around this CTA's own."""
    return min(HEAD, -(-(op.state_rows + 7) // 8) * 8)


def pitch_of(op):
    """Channels of a tap in shared memory."""
    return 2 * HEAD + window(op)


def state_stages(op):
    """(rows of a token in a stage, stages a token is cut into, tokens of a stage, stages)."""
    rows, cuts, tokens = op.state_rows, 1, 1
    if rows * ROW <= op.stage:
        tokens = min(op.d.rows, op.stage // (rows * ROW))
    else:
        rows = op.stage // (4 * ROW) * 4
        cuts = -(-op.state_rows // rows)
    return rows, cuts, tokens, -(-op.d.rows // tokens) * cuts
