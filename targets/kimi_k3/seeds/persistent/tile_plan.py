"""Sizes of the tile kernel (a chain of FFNs for 1 to 8 tokens): tiles of weight rows, ring stages, shared memory.

Plain Python, computed while compiling. No CuTe DSL.
"""

from dataclasses import dataclass

from targets.kimi_k3.seeds.persistent.stages import SHARED_MEMORY, STRIDE, CodeRows, most

SHIFT = 64
"""Bytes between the even and the odd rows of a tile, so that neighbouring rows lie in different banks."""
STAGE = 28672
"""Bytes of weights of a full stage of bf16 rows."""
CODE_TILE = 8
"""Rows of w1, and as many of w3, in a stage: sixteen rows of an MMA."""


@dataclass(frozen=True)
class Tile:
    """A bf16 matrix with rows of `k` columns, `height` (8 or 16) rows at a time.

    A stage has all rows of a tile and some of their columns; a warp has two steps of 32 columns of every 64 * active,
    the same ones whatever the height, so that tiles of both heights take the same registers of x.
    """

    k: int
    warps: int
    height: int

    @property
    def active(self):
        """Warps that take part."""
        return max(a for a in range(1, self.warps + 1) if self.k // 64 % a == 0)

    @property
    def spans(self):
        """How many times 64 * active columns a row has: a warp has eight registers of x for each."""
        return self.k // 64 // self.active

    @property
    def wide(self):
        """Spans in a stage: two of them if it holds no more bytes than one of sixteen rows by 896 columns."""
        fits = 256 * self.active * self.height <= STAGE
        return 2 if fits and self.height == 8 and self.spans % 2 == 0 else 1

    @property
    def slices(self):
        """Stages of a tile."""
        return self.spans // self.wide

    @property
    def piece(self):
        """Bytes of one row in a stage."""
        return 128 * self.active * self.wide

    @property
    def block(self):
        """Bytes from the even rows to the odd ones."""
        return self.height // 2 * self.piece + SHIFT

    @property
    def bytes(self):
        return self.block + self.height // 2 * self.piece


@dataclass(frozen=True)
class TileOp:
    """Everything the kernel knows when it is compiled. `d` is cfg.dims."""

    d: object
    ctas: int
    warps: int
    wanted: int
    spin: int
    early: int = 0
    """CTAs that may be missing when boxes are looked into that say themselves what is there."""
    in_flight: int = 0
    """Stages that may be on their way at once, 0: the whole ring (`ring.stage_free` says why)."""
    ahead: int = 0
    """Chunks of w2 of a warp's first expert that are made operands before h is there, for a single token."""
    packed: bool = False
    """Whether codes are read from copies that `tile_pack` made."""

    @property
    def threads(self):
        return self.warps * 32

    @property
    def stride(self):
        """Floats between rows of partial sums: one a warp, odd against bank conflicts."""
        return max(STRIDE, self.warps | 1)

    @property
    def tokens(self):
        return self.d.rows

    @property
    def alone(self):
        """One token: its vectors pass through shared memory, a warp of its own routes it."""
        return self.d.rows == 1

    @property
    def block(self):
        """Threads of a CTA: consumers, a producer warp, for one token a routing warp."""
        return self.threads + (64 if self.alone else 32)

    @property
    def vector_words(self):
        """Shared memory for the vectors of a single token: x, or hs and the latent, or h of all its experts, or z."""
        d = self.d
        found = max(d.hidden, d.shared_dim + d.latent, d.topk * d.expert_dim)
        return found // 2 if self.alone else 4

    @property
    def fenced(self):
        """Whether edges order what was written before; else a value says itself that it is there."""
        return self.d.rows > 1

    def tile(self, k, height):
        return Tile(k, self.warps, height)

    @property
    def front_rows(self):
        d, g = self.d, self.ctas
        return most(d.latent_rows, g) + 2 * most(d.shared_dim, g)

    @property
    def shared_rows(self):
        d, g = self.d, self.ctas
        return most(d.hidden_local, g) + most(d.hidden - d.hidden_local, g)

    # ---- experts

    @property
    def up(self):
        """w1 and w3."""
        return CodeRows(self.d.latent, 0, 2)

    @property
    def up_block(self):
        return CODE_TILE * self.up.code_bytes + SHIFT

    @property
    def up_scales(self):
        """Where the scales of w1 begin in a stage; those of w3 follow."""
        return -(-(self.up_block + CODE_TILE * self.up.code_bytes) // 128) * 128

    @property
    def up_bytes(self):
        return self.up_scales + 2 * CODE_TILE * self.up.scale_bytes

    @property
    def up_units(self):
        """Stages that an expert's w1 and w3 make."""
        return self.d.expert_dim // CODE_TILE

    @property
    def up_active(self):
        """Warps that share the columns of w1 and w3, 128 at a time."""
        chunks = self.d.latent // 128
        return max(a for a in range(1, self.warps + 1) if chunks % a == 0)

    @property
    def up_chunks(self):
        """Times 128 columns that a warp has."""
        return self.d.latent // 128 // self.up_active

    @property
    def down(self):
        """w2."""
        return CodeRows(self.d.expert_dim, 0, 1)

    @property
    def down_rows(self):
        return most(self.d.latent, self.ctas, self.down.unit)

    @property
    def down_piece(self):
        """Bytes of the CTA's rows of one expert: codes, then scales."""
        return self.down_rows * (self.down.code_bytes + self.down.scale_bytes)

    @property
    def down_slots(self):
        """Experts whose w2 rows share a stage."""
        return max(1, min(self.touched, self.stage // self.down_piece))

    @property
    def down_tiles(self):
        return -(-self.down_rows // 16)

    @property
    def down_chunks(self):
        """Times 128 columns of w2."""
        return -(-self.d.expert_dim // 128)

    @property
    def down_share(self):
        """Warps that share the experts of one tile of w2 rows."""
        return self.warps // self.down_tiles

    @property
    def touched(self):
        """The most experts that the tokens can ask for."""
        return min(self.d.experts, self.d.topk * self.tokens)

    @property
    def pairs(self):
        """Tokens times experts of a token."""
        return self.d.topk * self.tokens

    @property
    def held(self):
        """Stages times tokens of w1 and w3 whose sums wait in shared memory."""
        if self.tokens == 1:
            return most(self.d.topk * self.up_units, self.ctas)
        return max(self.tokens, 24)

    # ---- memory

    @property
    def stage(self):
        """Bytes of a ring stage."""
        d = self.d
        found = [self.tile(k, h).bytes for k, h in
                 ((d.hidden, 8), (d.shared_dim, 16), (d.latent, 8))]  # fmt: skip
        return -(-max(*found, self.up_bytes, self.down_piece) // 128) * 128

    @property
    def part_slots(self):
        """Sums of `warps` numbers that one phase leaves in shared memory; keys of the top-k lie there too."""
        d, t = self.d, self.tokens
        rows = max(
            most(d.router_rows, self.ctas), self.front_rows, self.shared_rows, 16 * self.down_tiles
        )
        return max(rows * t, 16 * self.held, -(-t * d.experts // self.stride))

    @property
    def stages(self):
        """Of the ring: as many as wanted, or as fit."""
        d = self.d
        lists = (
            self.touched * (8 + 8 * self.tokens) + 2 * self.tokens * d.experts + 4 * self.held + 256
        )
        small = (
            self.part_slots * self.stride * 4
            + d.layers * 8 * 32
            + lists
            + self.tokens * (self.stride + 16) * 4
        )
        small += most(d.hidden_local, self.ctas) * self.tokens * 4 + 512 + 4 * self.vector_words
        small += 8 * d.experts + 128 if self.alone else 0
        fit = (SHARED_MEMORY - 1024 - small) // self.stage
        return max(2, min(self.wanted or 7, fit))

    @property
    def boxes(self):
        """Name -> (bytes into an instance's record, bytes of an element, elements): what CTAs send each other."""
        d, t, found, at = self.d, self.tokens, {}, 0
        wanted = [
            ("logits", 4, t * d.router_rows), ("latent", 2, t * d.latent_rows), ("hs", 2, t * d.shared_dim),
            ("z", 2, t * d.latent), ("x", 2, t * d.hidden), ("h", 2, t * d.topk * d.expert_dim),
        ]  # fmt: skip
        for name, size, n in wanted:
            found[name] = (at, size, n)
            at += -(-size * n // 128) * 128
        return found

    @property
    def record(self):
        """Bytes of one instance's boxes."""
        start, size, n = self.boxes["h"]
        return start + -(-size * n // 128) * 128

    @property
    def emptied(self):
        """Bytes of a record that say themselves whether they are there."""
        return self.record

    @property
    def mail_words(self):
        """Two sets of records, used by turns: what one step uses, the step before has emptied."""
        return (1 if self.fenced else 2) * self.d.layers * self.record // 4


def refuse_others_tiles(dims):
    """Raises ValueError for a workload that this kernel does not compute."""
    if dims.rows > 8:
        raise ValueError("the tile kernel is for 1 to 8 rows")
    if dims.experts_format != "mxfp4":
        raise ValueError(f"the tile kernel is for MXFP4, not {dims.experts_format}")
    if Tile(dims.shared_dim, 14, 16).slices > 1:
        raise ValueError(
            "the tile kernel takes rows of the shared expert that are whole in a stage"
        )
    if dims.expert_dim % 64 or dims.latent % 128 or dims.hidden % 64 or dims.shared_dim % 64:
        raise ValueError("the tile kernel takes whole 64 columns, and whole 128 of the latent")
