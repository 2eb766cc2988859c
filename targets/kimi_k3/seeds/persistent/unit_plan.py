"""Sizes of the decode step whose routed experts are units of tiles and are chosen by a warp of their own.

Plain Python, computed while compiling. No CuTe DSL.
"""

from dataclasses import dataclass

from targets.kimi_k3.seeds.persistent.plan import Op
from targets.kimi_k3.seeds.persistent.stages import STRIDE, most, one_in_hand
from targets.kimi_k3.seeds.persistent.tile_plan import TileOp, refuse_others_tiles


@dataclass(frozen=True)
class Units(TileOp):
    """The tile kernel's sizes in a ring whose stages somebody else chose."""

    ring: int = 0

    @property
    def stage(self):
        return self.ring

    @property
    def up_half(self):
        """Warps have whole 128 columns here, or none."""
        return False


@dataclass(frozen=True)
class DecodeOp(Op):
    """`Op` of the decode step. units: experts as `units` has them, else as `moe_experts`. shared_first: with them, both
    halves of the shared expert come before the experts, else the second between theirs. router_first: with them, the
    router's rows are a matrix of their own before the latent's, so that the choice is known earlier. twos: stages of
    two wide rows that a warp sums up together. packed: codes of the units come from copies that `tile_pack` made. dots:
    sums of AttnRes are made by who makes the columns (`dots`). hold: a half's first stage is held before its edge."""

    units: bool = False
    shared_first: bool = False
    router_first: bool = False
    twos: int = 1
    packed: bool = False
    dots: bool = False
    hold: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.dots and not (self.bank_held and self.d.gpus == 1):
            raise ValueError("dots: for rows of the bank that are held in registers, on one GPU")
        if self.units and "E" in self.d.ffn:
            refuse_others_tiles(self.d)
            if self.tile.up_bytes > self.stage:
                raise ValueError(
                    f"a unit of experts is {self.tile.up_bytes} bytes, a stage {self.stage}"
                )

    @property
    def held(self):
        """Whether the first stage of a half is held in registers before its edge: where all have two wide rows."""
        return self.hold and self.twos > 1 and self.couples > 1 and one_in_hand(self.wide, self)

    @property
    def dot_columns(self):
        """The most columns that a CTA makes in half a layer, with those that only other ranks make dealt out, too."""
        d = self.d
        ffn = most(d.hidden_local, self.ctas) + most(d.hidden - d.hidden_local, self.ctas)
        return max(most(d.hidden, self.ctas), ffn)

    @property
    def dot_warps(self):
        """Warps that post sums of columns."""
        return min(self.warps, -(-self.dot_columns // 32))

    @property
    def dot_entries(self):
        """Of box dots for half a layer."""
        return self.ctas * self.dot_warps

    @property
    def boxes(self):
        found = Op.boxes.fget(self)
        if self.dots:
            end = sum(2 * self.box_bytes(size, n) for _, size, n in found.values())
            found["dots"] = (end, 4, 2 * 8 * self.dot_entries)
        return found

    @property
    def plain_reductions(self):
        return Op.reductions.fget(self)

    @property
    def reductions(self):
        more = -(-(8 * self.warps + 4 + self.dot_columns) // STRIDE) if self.dots else 0
        return self.plain_reductions + more

    @property
    def fronts(self):
        """Parts of the front of an FFN: router and latent, the shared expert's first half."""
        return 3 if self.router_first else 2

    @property
    def tile(self):
        return Units(
            self.d, self.ctas, self.warps, 0, self.spin, packed=self.packed, ring=self.stage
        )

    @property
    def block(self):
        """Threads of a CTA: consumers, a producer warp, with units a warp that chooses experts."""
        return self.threads + (64 if self.units else 32)

    @property
    def part_rows(self):
        rows = Op.part_rows.fget(self)
        if not self.units or "E" not in self.d.ffn:
            return rows
        return max(rows, 16 * self.tile.held, 16 * self.tile.down_tiles)

    def groups_of(self, each):
        """(vectors, groups, floats from one group's sums to the next's) where a thread has `each` of a CTA's columns of
        the latent. With `spread` eight rows of sums are in different banks."""
        vectors = most(self.d.kv_lora // each, self.slices)
        return vectors, self.threads // vectors, each * vectors + (4 if self.spread else 0)

    def sums_bytes(self, each):
        _, groups, pitch = self.groups_of(each)
        return 4 * groups * pitch

    @property
    def choice_at(self):
        """Where in the pool the choosing warp's scratch is: behind the latent, which is there at the same time."""
        return -(-2 * self.d.latent // 128) * 128

    @property
    def pool(self):
        size = Op.pool.fget(self)
        if "M" in self.d.attn:
            join = 4 * self.ctas + 16 + self.sums_bytes(8 if self.narrow else 4)
            size = max(size, join, self.new_bytes + self.head_bytes + self.sums_bytes(8))
        if not self.units or "E" not in self.d.ffn:
            return size
        return -(-max(size, self.choice_at + 128 + 10 * self.d.experts) // 16) * 16


def ring_stage(dims, ctas, warps, wanted, units):
    """Bytes of a stage: as many as wanted, or as a unit of experts takes."""
    if not units or "E" not in dims.ffn:
        return wanted
    return max(wanted, -(-TileOp(dims, ctas, warps, 0, 0).up_bytes // 128) * 128)
