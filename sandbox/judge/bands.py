"""The noise band: how far legitimate schedules stray from the oracle, and what a candidate may therefore show.

Errors are measured on the whole tensor and on cells (a row, a head, a cache row), so that one wrong row of many shows.
Bounds are 2 x the band (4 x for the largest single error, 6 x for norm and gain) + an epsilon of the element type,
capped, so that a noisy reference cannot open the gate. Cosine is not used: it ignores scale.

The gain is how much of the error lies along the oracle: what a factor that is 1 % off leaves, and what noise leaves
only as far as its parts agree. Noise of size e also makes a norm e^2 / 2 too long, which a gain does not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from sandbox.judge.dtypes import epsilon

MIN_CELL = 64
MAX_CELLS = 1 << 20
SUM_LENGTH = 8192
FACTOR = 2.0
# One operand rounded the other way moves one element by a whole ulp of it; which ones flip is luck, and the largest of
# a few schedules underestimates the largest possible. Errors that are not single flips show in rel_l2.
FACTOR_MAX = 4.0
# Errors of a few large intermediate values are common to all elements that they feed, and move norm and gain as one, up
# or down: a few schedules are few draws of a quantity of either sign, and the largest may be small by luck. Of 1,284
# right results at full size two had gains beyond twice that; 3 x was used up to 0.78, 6 x up to 0.46. Where errors are
# independent this is far below the accepted error; where schedules drift as one, the error's own bound decides.
FACTOR_SIGNED = 6.0
SIGNED = ("norm_ratio", "gain")
SIGMAS = 2.0  # out["rel_l2"] is twice the noise, so this is four standard deviations
CAP = 16.0
QUIET = 0.01
COHERENT = 2e-4
_EPS32 = 2.0**-23


@dataclass(frozen=True)
class Errors:
    """Distance of a tensor from the oracle. All relative but max_abs, which is in the tensor's unit; `cell_*` of the
    worst cell. A norm ratio is |norm / oracle norm - 1|, a gain |<error, oracle>| / |oracle|^2."""

    rel_l2: float
    max_abs: float
    norm_ratio: float
    cell_rel_l2: float
    cell_norm_ratio: float
    gain: float = 0.0
    cell_gain: float = 0.0

    def over(self, bound: Errors) -> float:
        """Largest error in units of its bound; NaN counts as infinite."""
        worst = 0.0
        for name in NAMES:
            error, limit = getattr(self, name), getattr(bound, name)
            if not error <= limit:
                worst = max(
                    worst, error / limit if limit > 0 and math.isfinite(error) else math.inf
                )
            elif limit > 0:
                worst = max(worst, error / limit)
        return worst

    def failed(self, bound: Errors) -> tuple[str, ...]:
        """Names of the gates not met; written so that NaN fails."""
        return tuple(n for n in NAMES if not getattr(self, n) <= getattr(bound, n))


NAMES = tuple(f.name for f in fields(Errors))
ZERO = Errors(0.0, 0.0, 0.0, 0.0, 0.0)


def worst(errors: Sequence[Errors]) -> Errors:
    """Largest of each figure."""
    return Errors(*(max((getattr(e, n) for e in errors), default=0.0) for n in NAMES))


@dataclass(frozen=True)
class Cells:
    """A tensor as [cells, elements]: leading dimensions are cells while a cell keeps at least MIN_CELL elements."""

    lead: tuple[int, ...]
    size: int

    @property
    def count(self) -> int:
        return math.prod(self.lead)

    def index(self, cell: int) -> tuple[int, ...]:
        out = []
        for extent in reversed(self.lead):
            out.append(cell % extent)
            cell //= extent
        return tuple(reversed(out))


def cells_of(shape: Sequence[int]) -> Cells:
    total, lead = math.prod(shape), 0
    for k in range(1, len(shape)):
        cells = math.prod(shape[:k])
        if cells > MAX_CELLS or total // cells < MIN_CELL:
            break
        lead = k
    return Cells(tuple(shape[:lead]), total // max(1, math.prod(shape[:lead])))


@dataclass(frozen=True)
class Oracle:
    """What a tensor is compared with: the cells that hold specified elements, in fp64. Elements outside the mask are
    zero here, and `view` makes them zero in whatever is compared. `spread`: over how many elements the norm is spread,
    (sum x^2)^2 / sum x^4; of the median cell in `cell_spread`."""

    cells: Cells
    kept: torch.Tensor | None
    mask: torch.Tensor | None
    values: torch.Tensor
    scale: torch.Tensor
    largest: float
    elements: int
    spread: float = 1.0
    cell_spread: float = 1.0

    def view(self, t: torch.Tensor) -> torch.Tensor:
        """[kept cells, elements] in fp64 of a tensor of the oracle's shape."""
        flat = t.reshape(self.cells.count, self.cells.size)
        flat = (flat if self.kept is None else flat[self.kept]).to(torch.float64)
        return flat if self.mask is None else torch.where(self.mask, flat, 0.0)

    def cell(self, row: int) -> tuple[int, ...]:
        """Leading index of a row of `view`."""
        return self.cells.index(row if self.kept is None else int(self.kept[row]))


def oracle(t: torch.Tensor, mask: torch.Tensor | None) -> Oracle:
    """`t`: the expected tensor, any float dtype. `mask`: True where it is specified; None = everywhere."""
    cells = cells_of(t.shape)
    kept = inside = None
    elements = t.numel()
    if mask is not None:
        flat = mask.reshape(cells.count, cells.size)
        kept = flat.any(1).nonzero().flatten()
        inside = flat[kept]
        elements = int(inside.sum())
    bare = Oracle(cells, kept, inside, t, t, 0.0, elements)
    values = bare.view(t)
    rms = math.sqrt(float(values.square().sum()) / max(1, elements))
    quiet = QUIET * rms * math.sqrt(cells.size)
    scale = values.norm(dim=1).clamp(min=quiet) if values.numel() else values.new_zeros(0)
    largest = float(values.abs().max()) if values.numel() else 0.0
    return Oracle(
        cells, kept, inside, values, scale, largest, elements,
        _spread(values.flatten()).item() if values.numel() else 1.0,
        _spread(values).median().item() if values.numel() else 1.0,
    )  # fmt: skip


def _spread(values: torch.Tensor) -> torch.Tensor:
    squares = values.square()
    return (squares.sum(-1).square() / squares.square().sum(-1)).nan_to_num(1.0).clamp(min=1.0)


def measure(o: Oracle, t: torch.Tensor) -> Errors:
    """Distance of `t` from the oracle. Not finite if `t` is not."""
    if not o.values.numel():
        return ZERO
    got = o.view(t)
    apart = got - o.values
    norm, off = o.values.norm(), apart.norm()
    cell_off = apart.norm(dim=1)
    cell_norm = (got.norm(dim=1) - o.values.norm(dim=1)).abs()
    along = (apart * o.values).sum(1)
    figures = torch.stack([
        _ratio(off, norm), apart.abs().max(), _ratio((got.norm() - norm).abs(), norm),
        _ratio(cell_off, o.scale).max(), _ratio(cell_norm, o.scale).max(),
        _ratio(along.sum().abs(), norm.square()), _ratio(along.abs(), o.scale.square()).max(),
    ])  # fmt: skip
    return Errors(*figures.tolist())


def _ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a / b with 0 / 0 = 0 and x / 0 = infinity; NaN stays NaN."""
    return torch.where((a == 0) & (b == 0), torch.zeros_like(a), a / b)


def floor_of(o: Oracle, dtype: str) -> Errors:
    """The epsilon of each gate: rounding of the output type and of fp32 sums, on average over the elements."""
    spacing = epsilon(dtype)
    sums = 8 * _EPS32 * math.sqrt(SUM_LENGTH)
    relative = spacing / math.sqrt(12) + sums
    whole = 4 * spacing / math.sqrt(12 * max(1, o.elements)) + COHERENT
    cell = 4 * spacing / math.sqrt(12 * max(1, min(o.cells.size, o.elements))) + COHERENT
    # A cell's error spreads around the tensor's: more of them, a longer tail.
    return Errors(
        relative, (spacing + sums) * o.largest, whole, 1.5 * relative, 1.5 * cell, whole, 1.5 * cell
    )


def bound(band: Errors, o: Oracle, dtype: str, stages: int) -> Errors:
    """What is accepted of a tensor. `stages`: reduction stages in sequence that let noise grow (layers).

    The cap is in units of what one bf16 rounding costs, whatever the tensor's own type: states in fp32 are made from
    operands in bf16.
    """
    least, working = floor_of(o, dtype), floor_of(o, "bf16")

    def room(name: str, factor: float) -> float:
        unit = "rel_l2" if name.endswith(SIGNED) else name
        roof: float = CAP * max(1, stages) * max(getattr(least, unit), getattr(working, unit))
        return min(factor * float(getattr(band, name)) + float(getattr(least, name)), roof)

    out = {n: room(n, FACTOR_MAX if n == "max_abs" else FACTOR) for n in NAMES}
    for prefix, spread in (("", o.spread), ("cell_", o.cell_spread)):
        size = out[f"{prefix}rel_l2"]
        for name in (prefix + n for n in SIGNED):
            # Independent errors move a norm or a gain by size / sqrt(spread); few schedules may all have moved it less.
            out[name] = max(room(name, FACTOR_SIGNED), SIGMAS / math.sqrt(spread) * size)
    return Errors(**out)
