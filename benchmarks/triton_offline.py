"""Compiles the Triton kernels of baseline `mix` for an H200 where there is no GPU: do they compile, do they spill?

    python benchmarks/triton_offline.py --preset tp8 --rows 1,8,64 --context 8192

Needs the triton package alone. Nothing runs and no number here is a time. `warm` fills Triton's cache for a tuner, one
process a variant.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from targets.base import Options, find
from targets.kimi_k3.baseline import mix, parts, tiles
from targets.kimi_k3.baseline.tiles import Tile
from targets.kimi_k3.reference import DTYPES

ARCH = 90


class NoDevice:
    """What Triton asks of a driver before it compiles, answered for one H200."""

    def get_current_target(self) -> Any:
        compiler: Any = __import__("triton.backends.compiler", fromlist=["GPUTarget"])
        return compiler.GPUTarget("cuda", ARCH, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Compiling(parts.Maker):
    """A maker whose launches are compiled and never run. `only`: just those with this very tile."""

    only: Tile | None = None
    pdl_asked = True
    every_way = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.pdl = self.pdl_asked
        self.made: dict[Any, dict[str, Any]] = {}

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], t: Tile, **constants: Any
    ) -> Callable[[], None]:
        key = (kernel.__name__, t, tuple(sorted(constants.items())))
        if key not in self.made and (self.only is None or t is self.only):
            options: dict[str, Any] = {"num_warps": t.warps, "num_stages": t.stages}
            if self.pdl:
                options["launch_pdl"] = True
            found = kernel.warmup(*args, grid=grid, **constants, PDL=self.pdl, **options)
            self.made[key] = {
                "kernel": kernel.__name__,
                "grid": grid,
                "tile": str(t),
                "ptx": found.asm["ptx"],
            }
            self.made[key]["shared"] = found.metadata.shared
        return lambda: None


def compiled(o: Options, target: str, only: Tile | None = None) -> list[dict[str, Any]]:
    """Every kernel of one workload, or those with the tile `only`. Raises what Triton raises."""
    driver: Any = __import__("triton.runtime.driver", fromlist=["driver"]).driver
    driver.set_active(NoDevice())
    w = find(target).workload(o)
    t = {b.name: torch.empty(b.shape, dtype=DTYPES[b.dtype], device="meta") for b in w.buffers}
    makers: list[Compiling] = []

    class One(Compiling):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            makers.append(self)

    One.only = only
    before = parts.Maker
    parts.Maker = One  # type: ignore[misc]
    try:
        mix.MixBaseline().prepare(w, t)
    finally:
        parts.Maker = before  # type: ignore[misc]
    return [found for m in makers for found in m.made.values()]


def warm(asked: tuple[Options, str, str, int, Tile]) -> str:
    """Compile what one tile at one place changes; the error's text, or nothing."""
    o, target, place, mp, tile = asked
    tiles.MEASURED[place, mp] = tile
    try:
        compiled(o, target, tile)
    except (
        Exception
    ) as error:  # a tile that Triton refuses is no choice: the tuner meets the same error
        return f"{place} {tile}: {type(error).__name__} {str(error)[:120]}"
    return ""


def resources(ptx: str) -> dict[str, int]:
    """Registers a thread and spilled bytes, as Triton's own ptxas counts them."""
    triton: Any = __import__("triton")
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(ptxas), "-v", f"-arch=sm_{ARCH}a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.findall(r"Used (\d+) registers", said)[0]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", said))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--target", default="kimi-k3-decode")
    option("--preset", default="tp8")
    option("--layers", type=int)
    option("--rows", default="1,8")
    option("--context", type=int)
    a = parser.parse_args()
    for rows in map(int, a.rows.split(",")):
        for found in compiled(Options(a.preset, a.layers, rows, a.context), a.target):
            ptx = found.pop("ptx")
            print(json.dumps({"m": rows, **found, **resources(ptx)}), flush=True)


if __name__ == "__main__":
    main()
