"""Part of MLA: the names of its weights, for those who hold layers and not the kernels."""

from targets.kimi_k3.seeds.mla_layout import mla_weights

__all__ = ["mla_weights"]
