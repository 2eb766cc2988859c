"""Baseline `compile`: the torch operations of `graph`, each piece of a layer through `torch.compile`, then one graph.

Equal layers share a compiled piece. CUDA graphs are left to the judge, who captures every baseline alike. It needs a
GPU. KERNELGEN_COMPILE_MODE chooses another mode than the default (`benchmarks/compile_modes.py` compares them), and
KERNELGEN_COMPILE_THREADS how many processes compile, where there is a place for them. Rows name the mode in a note.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from targets.base import Workload
from targets.kimi_k3.baseline.graph import Calls, TorchGraphBaseline
from targets.reference import Tensors

MODE = "default"
VARIANTS = 64
"""Versions of one piece that may be kept: row counts, contexts and bank sizes differ between workloads."""


class CompiledBaseline(TorchGraphBaseline):
    name = "compile"

    def prepare(self, w: Workload, tensors: Tensors) -> None:
        """Raises RuntimeError without a GPU: compiled for the host it would be no baseline."""
        if not next(iter(tensors.values())).is_cuda:
            raise RuntimeError("torch.compile is timed on a GPU only")
        mode = os.environ.get("KERNELGEN_COMPILE_MODE", MODE)
        self.calls = compiled(mode)
        self.notes = (f"mode: {mode}",)
        super().prepare(w, {name: alone(t) for name, t in tensors.items()})


def alone(t: Tensor) -> Tensor:
    """The same memory as a tensor with a storage of its own: functionalisation refuses to write into one of several
    inputs that share a storage under different dtypes, as the judge's do."""
    try:
        return torch.from_dlpack(t)
    except (BufferError, RuntimeError):  # a dtype that DLPack does not know
        return t


def compiled(mode: str) -> Calls:
    """Every piece compiled, when it is first called, for the shapes that it meets."""
    dynamo: Any = importlib.import_module("torch._dynamo")
    inductor: Any = importlib.import_module("torch._inductor.config")
    # no pool of processes unless asked for: the judge's box has no place for one
    inductor.compile_threads = int(os.environ.get("KERNELGEN_COMPILE_THREADS", "1"))
    dynamo.config.recompile_limit = VARIANTS
    eager = Calls()
    return Calls(**{
        f.name: torch.compile(getattr(eager, f.name), mode=mode, dynamic=False) for f in fields(Calls)
    })  # fmt: skip
