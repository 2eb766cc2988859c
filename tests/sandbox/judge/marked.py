"""A candidate with marks for tests: two phases around an all-to-all edge of a cooperative kernel. Source only."""

SOURCE = """
import cutlass
import cutlass.cute as cute
from cutlass import Int32
from kernelgen import timeline


def workspace(dims, cfg):
    return {"sync": ("i32", (64,), "zero", "persistent")}


@cute.kernel
def k(gX: cute.Tensor, gY: cute.Tensor, gS: cute.Tensor, phases, ctas: cutlass.Constexpr):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    track = timeline.track(phases, bid, tid == 0)
    base = gS[32]
    for layer in cutlass.range(2, unroll=1):
        timeline.mark(track, "scale", layer)
        i = bid * 64 + tid
        while i < cute.size(gX):
            gY[i] = gX[i] * 2.0
            i += ctas * 64
        timeline.mark(track, "edge", layer, kind="edge")
        cute.arch.sync_threads()
        if tid == 0:
            cute.arch.red(gS.iterator, Int32(1), op="add", dtype="u32", sem="release", scope="gpu")
            seen = cute.arch.load(gS.iterator, Int32, sem="acquire", scope="gpu")
            while seen - base < (layer + 1) * ctas:
                seen = cute.arch.load(gS.iterator, Int32, sem="acquire", scope="gpu")
        cute.arch.sync_threads()
    timeline.end(track)
    if tid == 0 and bid == 0:
        gS[32] = base + 2 * ctas


@cute.jit
def step(t, cfg, stream):
    k(t.inputs.x, t.outputs.y, t.workspace.sync, timeline.buffer(t, cfg), 4).launch(
        grid=(4, 1, 1), block=(64, 1, 1), stream=stream, cooperative=True, min_blocks_per_mp=1)
"""


def norm_with_marks(seed: str) -> str:
    """The example target's seed, with two phases of work."""
    marks = {
        "import cutlass.cute as cute\n": "import cutlass.cute as cute\nfrom kernelgen import timeline\n",
        "y: cute.Tensor, cfg: cutlass.Constexpr": "y: cute.Tensor, phases, cfg: cutlass.Constexpr",
        "    if row < cfg.dims.rows:\n": "    track = timeline.track(phases, bid, tid == 0)\n"
        '    timeline.mark(track, "sum", 1)\n    if row < cfg.dims.rows:\n',
        "        scale = ": '        timeline.mark(track, "scale", 1)\n        scale = ',
        "            y[row, i] = v.to(BFloat16)\n": "            y[row, i] = v.to(BFloat16)\n    timeline.end(track)\n",
        "t.outputs.y, cfg)": "t.outputs.y, timeline.buffer(t, cfg), cfg)",
    }
    for old, new in marks.items():
        assert old in seed, old
        seed = seed.replace(old, new, 1)
    return seed
