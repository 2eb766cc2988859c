"""Sizes of the decode step for several tokens: both kinds of boxes in one mail, one ring, shared memory.

`ManyTiles` are the sizes of all products (tiles of weight rows, as the tile kernel has them) and of the experts,
`ManyOp` those of what is done between them (AttnRes, KDA, MLA). Plain Python, computed while compiling. No CuTe DSL.
"""

from dataclasses import dataclass

from targets.kimi_k3.seeds.persistent.fields import COUNT, MOE, REMOTE
from targets.kimi_k3.seeds.persistent.kda_sizes import channels_of, pitch_of
from targets.kimi_k3.seeds.persistent.plan import Op, ctas_of, refuse_others
from targets.kimi_k3.seeds.persistent.stages import SHARED_MEMORY, STRIDE, TileRows, most
from targets.kimi_k3.seeds.persistent.tile_plan import TileOp, refuse_others_tiles

TILE_COUNT = len(MOE) + len(REMOTE) + 3
"""Fields of `tile_device`."""
SLOTS = 128
"""Bytes of the pool that state slots have for themselves; MLA's scratch begins behind them."""


@dataclass(frozen=True)
class ManyTiles(TileOp):
    """The tile kernel's sizes in a ring of `wanted` stages that has room for everything that passes it."""

    @property
    def stride(self):
        """Odd, and no more than warps: rows of sums are what takes most room beside the ring."""
        return self.warps | 1

    @property
    def stages(self):
        return self.wanted

    @property
    def stage(self):
        """Of bf16 tiles, a unit or a piece of experts, eight rows of the cache; a state's rows are cut."""
        d = self.d
        found = [TileOp.stage.fget(self)]
        found += [self.tile(d.kda_dim, 8).bytes] if "K" in d.attn else []
        if "M" in d.attn:
            found += [self.tile(k, 8).bytes for k in (d.q_lora, d.kv_lora, d.mla_dim)]
            found.append(16 * d.kv_dim)
        found += [self.tile(d.dense_dim, 8).bytes] if "D" in d.ffn else []
        return -(-max(found) // 128) * 128

    @property
    def part_slots(self):
        """Rows of a product times tokens."""
        d, g = self.d, self.ctas
        rows = [most(d.hidden, g)]
        rows += [most(d.in_proj_rows, g)] if "K" in d.attn else []
        rows += [2 * most(d.dense_dim, g)] if "D" in d.ffn else []
        if "M" in d.attn:
            rows += [most(d.a_proj_rows, g), most(d.mla_heads * (d.qk_nope + d.qk_rope), g)]
            rows.append(most(d.v_dim, max(1, g // max(d.kda_heads, d.mla_heads))))
        scores = -(-16 * (d.page + 4) // self.stride) if "M" in d.attn else 0
        return max(TileOp.part_slots.fget(self), max(rows) * self.tokens, scores)


@dataclass(frozen=True)
class ManyOp(Op):
    """`Op` for two to eight tokens; `tiles_op` has what the products want to know. packed: codes come from copies that
    `tile_pack` made."""

    packed: bool = False

    def __post_init__(self):
        heads = max(self.d.kda_heads, self.d.mla_heads)
        if heads > self.ctas:
            raise ValueError(f"each of {heads} heads has a CTA or more, {self.ctas} are too few")
        if "E" in self.d.ffn and self.d.latent // self.tiles_op.down.unit < self.ctas:
            raise ValueError(f"{self.ctas} CTAs are more than w2 has units of rows")
        if self.d.rows > self.ctas:
            raise ValueError(
                f"each of {self.d.rows} tokens has a CTA or more, {self.ctas} are too few"
            )
        if "M" in self.d.attn and self.cache_stages > self.stages:
            raise ValueError(
                f"a page of the cache takes {self.cache_stages} stages of {self.stages}"
            )

    @property
    def tiles_op(self):
        return ManyTiles(
            self.d,
            self.ctas,
            self.warps,
            self.stages,
            self.spin,
            in_flight=self.in_flight,
            packed=self.packed,
        )

    @property
    def block(self):
        """Threads of a CTA: consumers, a producer warp, one that brings taps."""
        return self.threads + 64

    @property
    def part_rows(self):
        """In rows of `STRIDE`."""
        return -(-self.tiles_op.part_slots * self.tiles_op.stride // STRIDE)

    @property
    def boxes(self):
        """As `Op.boxes`, by token; experts have theirs behind all of these (`tiles_at`)."""
        d, found, at = self.d, {}, 0
        wanted = [("attn", 2, d.hidden), ("x", 2, d.hidden)]
        if "K" in d.attn:
            wanted += [
                ("proj", 2, 4 * d.kda_dim + d.f_rank + d.kda_heads), ("o", 4, d.kda_dim),
                ("sq", 4, d.kda_heads * self.slices * -(-self.state_rows // 4)),
            ]  # fmt: skip
        if "M" in d.attn:
            h = d.mla_heads
            wanted += [
                ("a", 2, d.a_proj_rows), ("q", 2, h * (d.qk_nope + d.qk_rope)), ("query", 2, h * d.kv_dim),
                ("lat", 2, h * d.kv_lora), ("out", 2, d.mla_dim),
            ]  # fmt: skip
        wanted += [("delta", 2, d.hidden_local)] if "E" in d.ffn else []
        wanted += [("hidden", 2, d.dense_dim), ("dense", 2, d.hidden)] if "D" in d.ffn else []
        sized = [(name, size, d.rows * self.pitch(n)) for name, size, n in wanted]
        if "M" in d.attn:
            each = self.pieces * d.mla_heads
            sized += [("stats", 4, 2 * each), ("sums", 4, d.kv_lora * each)]
        for name, size, n in sized:
            found[name] = (at, size, n)
            at += 2 * self.box_bytes(size, n)
        return found

    @property
    def pieces(self):
        """The most stretches that pages make: a CTA's ends where a request ends, so there are M - 1 more than CTAs."""
        return self.ctas + self.d.rows - 1

    @property
    def tiles_at(self):
        """Bytes into the mail where the records of the experts begin."""
        return -(-4 * Op.mail_words.fget(self) // 128) * 128

    @property
    def mail_words(self):
        more = self.tiles_op.mail_words if "E" in self.d.ffn else 0
        return self.tiles_at // 4 + more

    @property
    def pool(self):
        d, t = self.d, self.d.rows
        found = [4 * TileRows.TOKENS * (1 + d.kda_heads)]
        found += [SLOTS + 2 * t * d.experts] if "E" in d.ffn else []
        if "K" in d.attn:
            found.append(4 * TileRows.TOKENS * (1 + 3 * d.head_dim + self.state_rows))
        if "M" in d.attn:
            columns = most(d.kv_lora // 8, self.slices)
            found.append(SLOTS + self.heads_bytes + 32 * max(1, self.threads // columns) * columns)
            attend = self.new_bytes + 4 * d.mla_heads * self.query_words + 32 * (d.page + 8) + 192
            found.append(SLOTS + attend)
            found.append(SLOTS + self.weights_bytes + 16 * self.join_groups * self.join_items)
        return -(-max(found) // 16) * 16

    @property
    def heads_bytes(self):
        """The tokens' queries of a head before W_UK."""
        return -(-2 * self.d.rows * (self.d.qk_nope + self.d.qk_rope) // 128) * 128

    @property
    def weights_bytes(self):
        """Weights of all pieces of all tokens."""
        return -(-4 * self.d.rows * self.ctas // 16) * 16

    @property
    def join_items(self):
        """Vectors of four columns of the latent sum that a CTA joins, of all tokens."""
        return most(self.d.kv_lora // 4, self.slices) * self.d.rows

    @property
    def join_groups(self):
        """Threads that share the pieces of an item."""
        return max(1, self.threads // self.join_items)

    @property
    def used(self):
        """Bytes of shared memory of a CTA: what `open_cta`, `tiles_of`, `requests_of` and `open_rows` allocate."""
        d, top, t = self.d, self.tiles_op, self.d.rows
        local = -(-d.hidden_local // self.ctas)
        sizes = [
            self.stages * self.stage, 8 * (2 * self.stages + 1), 4 * STRIDE * self.part_rows,
            4 * STRIDE * self.reductions, 8 * d.layers * COUNT, 4 * d.topk, 4 * d.topk, 4 * local, self.pool, 32,
        ]  # fmt: skip
        sizes += [
            4 * t * top.stride, 8 * d.layers * TILE_COUNT, 4 * local * t, 4 * top.touched, 4 * top.touched,
            4 * top.touched * t, 4 * top.touched * t, 16, 4 * top.held, 4 * -(-d.experts // 32),
            4 * top.pairs, 4 * top.pairs,
        ]  # fmt: skip
        sizes += [4 * t, 4 * (t + 1), 4 * t] if "M" in d.attn else []
        sizes += [16, 6 * t * pitch_of(self), 16 * channels_of(self)] if "K" in d.attn else []
        return sum(-(-x // 16) * 16 for x in sizes)


def many_shape(dims, cfg, packed=False):
    """Raises ValueError for what this kernel does not compute."""
    if dims.rows < 2:
        raise ValueError("this persistent kernel is for two to eight rows")
    refuse_others(dims, 8)
    refuse_others_tiles(dims)
    if dims.gpus > 1:
        raise ValueError("this persistent kernel runs on one GPU")
    if "D" in dims.ffn and dims.dense_dim % 64:
        raise ValueError("this persistent kernel takes whole 64 columns of the dense FFN")
    ctas = ctas_of(dims, cfg)
    stage = ManyTiles(dims, ctas, cfg.consumer_warps, 2, 0).stage
    for stages in (cfg.ring_stages,) if cfg.ring_stages else (7, 6, 5, 4, 3, 2):
        op = ManyOp(
            dims, ctas, cfg.consumer_warps, stage, stages, cfg.spin_limit, tiled=True, in_flight=cfg.in_flight,
            jitter=cfg.jitter, bank=False, packed=packed,
        )  # fmt: skip
        if op.used <= SHARED_MEMORY:
            return op
    raise ValueError(f"{op.used} bytes of shared memory: fewer layers or stages of the ring")
