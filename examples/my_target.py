"""An own target in one file: RMSNorm of rows. `kernelgen evaluate --target examples/my_target.py:RmsNorm FILE`.

This file is trusted code: it runs in the judge, unlike candidates.
"""

from pathlib import Path

import torch

from sandbox.artifact import Buffer
from targets.base import Floor, Options, UnknownOption, Workload
from targets.reference import Expected

HIDDEN = {"tiny": 512, "large": 7168}


class RmsNorm:
    name = "rms-norm"
    summary = "y = x * rsqrt(mean(x^2) + 1e-5) * w, bf16 rows"
    presets = tuple(HIDDEN)
    reference = f"{Path(__file__).resolve()}:RmsNormReference"

    def seed_source(self) -> str:
        return Path(__file__).with_name("my_seed.py").read_text()

    def workload(self, o: Options) -> Workload:
        if o.preset not in HIDDEN:
            raise UnknownOption(f"no preset {o.preset!r}; there are {', '.join(HIDDEN)}")
        shape = (o.rows, HIDDEN[o.preset])
        x, y = Buffer("inputs.x", "bf16", shape), Buffer("outputs.y", "bf16", shape)
        w = Buffer("weights.w", "bf16", shape[1:])
        dims = {"rows": o.rows, "hidden": shape[1], "eps": 1e-5}
        floor = Floor(read_bytes=x.nbytes + w.nbytes, write_bytes=y.nbytes)
        return Workload(
            self.name,
            o,
            1,
            o.rows,
            context=1,
            q=1,
            ranks=1,
            dims=dims,
            buffers=(x, w, y),
            floor=floor,
        )


class RmsNormReference:
    schedules = ("f32", "reversed", "halves")

    def weights(self, w, seed, device):
        return {"weights.w": draw((w.dims["hidden"],), seed, device)}

    def states(self, w, seed, device):
        return {}

    def inputs(self, w, seed, step, device):
        return {"inputs.x": draw((w.rows, w.dims["hidden"]), 65537 * seed + step + 1, device)}

    def distributions(self, w):
        return ("large", "small")

    def disturb(self, w, name, seed, tensors):
        return {**tensors, "inputs.x": tensors["inputs.x"] * {"large": 100.0, "small": 0.001}[name]}

    def run(self, w, tensors, schedule, forced=None):
        x = tensors["inputs.x"].to(torch.float64 if schedule == "oracle" else torch.float32)
        squares = x.square().flip(-1) if schedule == "reversed" else x.square()
        total = sum(
            p.sum(-1, keepdim=True) for p in squares.chunk(2 if schedule == "halves" else 1, -1)
        )
        y = x * torch.rsqrt(total / x.shape[-1] + w.dims["eps"]) * tensors["weights.w"].to(x.dtype)
        return Expected({"outputs.y": y.bfloat16()})


def draw(shape, seed, device):
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.randn(shape, generator=generator).bfloat16().to(device)
