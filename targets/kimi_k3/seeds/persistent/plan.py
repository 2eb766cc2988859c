"""Sizes of the persistent kernels for whole rows or packed tiles: boxes, shared memory, shares of the work.

Plain Python, computed while compiling; the validator of the schedule reads the same objects. No CuTe DSL.
"""

from dataclasses import dataclass

from targets.kimi_k3.seeds.persistent.stages import STRIDE, CodeRows, Rows, TileRows, most

MLA_HEADS = 16
"""Of a rank: a product of tensor cores has so many rows, and no CTA makes two for one page."""


@dataclass(frozen=True)
class Op:
    """Everything the kernel knows when it is compiled. `d` is cfg.dims.

    tiled: weights pass in packed tiles (`tensor`), for one token to eight, else in whole rows for one. in_flight: how
    many stages may be on their way at once, 0 for the whole ring.
    jitter: delays of up to so many ns (a power of two) before some arrivals, to look for hangs; 0 but in soaks.
    hungry: while fewer stages than this are on their way or wait for the consumers, `in_flight` does not hold.
    burst: as `in_flight`, of what consumers are at while they wait for no edge: a layer's first matrix behind what the
    ring holds of it, experts' units; 0: as `in_flight`.
    idle: while MLA waits, memory brings o_proj (1), and the front of the FFN too (2), into L2, a little at a time.
    couples: pairs of rows in hand where a stage has many; then, where it has two, it is given back before its product.
    missing: CTAs that may not have hinted yet when boxes are looked into (the tunable is of 132, rounded down): what is
    in a box says so itself, and nobody gets a layer ahead of another, since each half of a layer takes columns that
    every CTA makes. kept: the prefix, and the bank's rows if `bank` and there is room, stay in shared memory.
    Of MLA: narrow: CTAs send their pages' attention as it is, in f16 (a latent beyond 65504 would not fit), else its
    sums in f32. spread: eight lanes share a column of sums over groups of threads, else one thread has it. brisk:
    scores in two chains of products, a barrier less a page.
    """

    d: object
    ctas: int
    warps: int
    stage: int
    stages: int
    spin: int
    tiled: bool = False
    in_flight: int = 0
    jitter: int = 0
    missing: int = 0
    kept: bool = False
    hungry: int = 0
    couples: int = 1
    idle: int = 0
    bank: bool = True
    burst: int = 0
    narrow: bool = False
    spread: bool = False
    brisk: bool = False

    def __post_init__(self):
        channels = 2 * self.d.head_dim + self.state_rows if "K" in self.d.attn else 0
        if not self.tiled and self.threads < channels:
            raise ValueError(
                f"KDA of one token has a thread for each of {channels} channels, {self.warps} warps are too few"
            )

        heads = max(self.d.kda_heads, self.d.mla_heads) if self.d.attn else 0
        if not self.tiled and heads > self.ctas:
            raise ValueError(f"each of {heads} heads has a CTA or more, {self.ctas} are too few")
        if "E" in self.d.ffn and not self.tiled:
            piece = self.down_rows * (self.down.code_bytes + self.down.scale_bytes)
            if piece > self.stage:
                raise ValueError(f"w2 of one expert is {piece} bytes a CTA, a stage {self.stage}")

    def rows(self, k, pair=False):
        return Rows(k, self.warps, self.stage, pair)

    def tiles(self, k):
        return TileRows(k, self.warps, self.stage)

    @property
    def threads(self):
        return self.warps * 32

    @property
    def wide(self):
        return self.rows(self.d.hidden)

    @property
    def up(self):
        """w1 and w3, as pairs of rows."""
        return CodeRows(self.d.latent, self.stage, 2)

    @property
    def down(self):
        """w2: the CTA's rows of one expert are one piece."""
        return CodeRows(self.d.expert_dim, self.stage, 1)

    @property
    def down_rows(self):
        return most(self.d.latent, self.ctas, self.down.unit)

    @property
    def down_slots(self):
        """Experts whose w2 rows share a stage."""
        piece = self.down_rows * (self.down.code_bytes + self.down.scale_bytes)
        return max(1, min(self.d.topk, self.stage // piece))

    @property
    def slices(self):
        """CTAs to a head of KDA, and of MLA."""
        return max(1, self.ctas // max(self.d.kda_heads, self.d.mla_heads))

    @property
    def state_rows(self):
        return most(self.d.head_dim, self.slices)

    @property
    def boxes(self):
        """Name -> (bytes into the mail, bytes of an element, elements): what CTAs send each other, twice, by turns."""
        d, found, at = self.d, {}, 0
        wanted = [("attn", 2, d.hidden)] if d.attn else []
        if "K" in d.attn:
            wanted += [("proj", 2, 4 * d.kda_dim + d.f_rank + d.kda_heads), ("o", 4, d.kda_dim)]
        if "K" in d.attn and self.tiled:
            wanted.append(("sq", 4, d.kda_heads * self.slices * -(-self.state_rows // 4)))
        if "M" in d.attn:
            h = d.mla_heads
            wanted += [
                ("a", 2, d.a_proj_rows), ("q", 2, h * (d.qk_nope + d.qk_rope)), ("query", 2, h * d.kv_dim),
                ("stats", 4, self.ctas * h * 2), ("sums", self.sums_size, self.ctas * h * d.kv_lora),
                ("lat", 2, h * d.kv_lora), ("out", 2, d.mla_dim),
            ]  # fmt: skip
        if "E" in d.ffn:
            wanted += [
                ("logits", 4, d.router_rows), ("latent", 2, d.latent_rows), ("hs", 2, d.shared_dim),
                ("h", 2, d.topk * d.expert_dim), ("z", 2, d.latent), ("delta", 2, d.hidden_local),
            ]  # fmt: skip
        for name, size, n in wanted:
            n = d.rows * self.pitch(n) if self.tiled else n
            found[name] = (at, size, n)
            at += 2 * self.box_bytes(size, n)
        return found

    @staticmethod
    def pitch(n):
        """Elements between two tokens' parts of a box of `n` each; a token's part starts at 128 bytes or more."""
        return -(-n // 64) * 64

    @staticmethod
    def box_bytes(size, n):
        return -(-size * n // 128) * 128

    @property
    def sums_size(self):
        """Bytes of an element of MLA's sums."""
        return 2 if self.narrow else 4

    @property
    def fresh_at(self):
        """Bytes into the mail, behind the boxes: the newest q, k and v of every KDA (`kda_taps`)."""
        return sum(2 * self.box_bytes(size, n) for _, size, n in self.boxes.values())

    @property
    def fresh_bytes(self):
        """Of a layer."""
        return 6 * self.d.rows * self.d.kda_dim if "K" in self.d.attn else 0

    @property
    def mail_words(self):
        return max(32, (self.fresh_at + len(self.d.attn) * self.fresh_bytes) // 4)

    @property
    def part_rows(self):
        """The most partial sums that one phase leaves in shared memory."""
        d, g = self.d, self.ctas
        front = most(d.router_rows, g) + most(d.latent_rows, g) + 2 * most(d.shared_dim, g)
        found = [
            most(d.hidden, g) + most(d.hidden_local, g), front, 2 * most(d.topk * d.expert_dim, g, self.up.unit),
        ]  # fmt: skip
        found += [most(d.in_proj_rows, g)] if "K" in d.attn else []
        found += [2 * most(d.dense_dim, g)] if "D" in d.ffn else []
        found += [
            most(n, g) for n in (d.a_proj_rows, d.mla_heads * (d.qk_nope + d.qk_rope)) if "M" in d.attn
        ]  # fmt: skip
        scores = -(-16 * (d.page + 4) // STRIDE) if "M" in d.attn else 0
        if self.tiled:
            return -(-(self.sums_at + TileRows.TOKENS * max(found)) // STRIDE)
        return max(*found, scores)

    @property
    def sums_at(self):
        """Floats before the sums of tiles: two tiles' partial sums of all warps."""
        return 2 * self.warps * TileRows.ROWS * TileRows.TOKENS

    @property
    def pool(self):
        """Bytes of scratch in shared memory, shared by the phases."""
        d = self.d
        kda = 4 * 4 * d.head_dim
        choice = 4 * 36 + 8 * d.experts
        down = 2 * d.topk * d.expert_dim + 4 * d.topk * self.down_rows
        columns = most(d.kv_lora // 8, self.slices)
        absorb = self.new_bytes + self.head_bytes + 32 * (self.threads // columns) * columns
        attend = self.new_bytes + 4 * d.mla_heads * self.query_words + 32 * (d.page + 8) + 192
        columns = most(d.kv_lora // 4, self.slices)
        join = 4 * self.ctas + 16 + 16 * (self.threads // columns) * columns
        if self.tiled:
            kda = 4 * TileRows.TOKENS * (1 + 3 * d.head_dim + self.state_rows)
        found = [kda, choice, down, 2 * d.latent] + (
            [absorb, attend, join] if "M" in d.attn else []
        )
        return -(-max(found) // 16) * 16

    @property
    def new_bytes(self):
        """The new token's cache row, first in the pool while MLA needs it."""
        return -(-2 * self.d.kv_dim // 128) * 128

    @property
    def reductions(self):
        """Sums over a CTA that are open at a time: of AttnRes, two a source and one more."""
        return 2 * self.d.bank_rows + 4

    @property
    def bank_kept(self):
        """Whether the bank's rows stay in shared memory: few do."""
        return self.kept and self.bank and 2 * self.d.bank_rows * self.d.hidden <= 32768

    @property
    def bank_held(self):
        """Whether they are read once in a half, before its edge, and stay in registers over it: two at most."""
        return not self.bank_kept and self.d.bank_rows <= 2

    @property
    def kept_words(self):
        """Words of the prefix and of the bank that stay in shared memory, each thread's for itself."""
        rows = 1 + (self.d.bank_rows if self.bank_kept else 0)
        return rows * self.kept_row if self.kept else 0

    @property
    def kept_row(self):
        return 4 * self.wide.per * self.threads

    @property
    def head_bytes(self):
        """The query of a head before W_UK, behind the new row."""
        return -(-2 * (self.d.qk_nope + self.d.qk_rope) // 128) * 128

    @property
    def cache_rows(self):
        """Tokens a stage, whole octets."""
        return min(self.d.page, self.stage // (2 * self.d.kv_dim) // 8 * 8)

    @property
    def cache_stages(self):
        """Stages of a page; all of them stay in the ring while the page is used."""
        return -(-self.d.page // self.cache_rows)

    @property
    def query_words(self):
        """Words between queries of two heads in shared memory."""
        words = self.d.kv_dim // 2
        return words + (16 - words % 32) % 32

    @property
    def value_warps(self):
        """Warps that share the latent columns of P C, sixteen or more each."""
        n = 1
        while 2 * n <= self.warps and self.d.kv_lora % (32 * n) == 0:
            n *= 2
        return n

    @property
    def value_each(self):
        return self.d.kv_lora // self.value_warps // 8


def ctas_of(dims, cfg):
    """The tunable, or one CTA an SM, as long as each has 32 rows of a matrix of `hidden` rows."""
    return cfg.ctas or max(1, min(cfg.sms, dims.hidden // 32))


def refuse_others(dims, rows=1):
    """Raises ValueError for a workload that these kernels do not compute; `rows`: the most tokens."""
    if dims.rows > rows or (dims.rows > 1 and dims.q > 1):
        one = "one row" if rows == 1 else f"up to {rows} rows of different requests"
        raise ValueError(f"the persistent kernel is for {one}")
    if "M" in dims.attn and dims.mla_heads > MLA_HEADS:
        raise ValueError(
            f"the persistent kernel attends with up to {MLA_HEADS} heads of MLA, not {dims.mla_heads}"
        )
    given = (dims.kv, dims.experts_format, dims.taps)
    if given != ("bf16", "mxfp4", ""):
        raise ValueError(
            f"the persistent kernel is for bf16 caches, MXFP4 and no taps, not {given}"
        )
