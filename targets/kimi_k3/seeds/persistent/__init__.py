"""The persistent decode kernel as one candidate file: `source()` bundles the modules of this package.

Nothing here imports CuTe DSL.
"""

from __future__ import annotations

import ast
from pathlib import Path

_HERE = Path(__file__).parent
_PARTS = {
    "decode": (
        "plan",
        "fields",
        "device",
        "setup",
        "exchange",
        "vectors",
        "mix",
        "kda_taps",
        "kda",
        "kda_half",
        "moe_fill",
        "moe_dense",
        "moe_route",
        "moe_experts",
        "moe",
        "tile_plan",
        "unit_plan",
        "tile_codes",
        "tile_rank",
        "brief",
        "units",
        "ffn",
        "mla",
        "decode",
    ),
    "latent-moe-tiles": (
        "plan",
        "fields",
        "device",
        "setup",
        "tile_plan",
        "tile_device",
        "tile_codes",
        "tile_rank",
        "tile_even",
        "tile_up",
        "tile_down",
        "tile_front",
        "tile_back",
        "tile_route",
        "tile_alone",
        "tile_moe",
        "tile_chain",
    ),
    "latent-moe": (
        "plan",
        "fields",
        "device",
        "setup",
        "exchange",
        "vectors",
        "moe_fill",
        "moe_route",
        "moe_experts",
        "moe",
        "chain",
        "moe_chain",
    ),
    "kda": (
        "plan",
        "fields",
        "device",
        "setup",
        "exchange",
        "tensor",
        "kda_taps",
        "kda",
        "kda_sizes",
        "kda_bring",
        "kda_rows",
        "chain",
        "kda_chain",
    ),
}
_SHARED = {
    "common": None,
    "router": {"order_key"},
    "latent_moe_codes": {"expand", "pair_up", "scale_word"},
    "mla_attention": {"mma_16x32"},
}
"""Modules of the plain seeds that are used here, and of which only some definitions."""
_ENTRY = {"TUNABLES", "workspace", "constants", "prepare", "step"}


def source(part: str = "decode") -> str:
    """The candidate of `kimi-k3-<part>`. Definitions are taken as written, with the comments above them."""
    names = _PARTS[part]
    files = [(_HERE.parent / f"{name}.py", only) for name, only in _SHARED.items()]
    files += [(_HERE / f"{name}.py", None) for name in names]
    imports: set[str] = set()
    sections: list[str] = []
    for path, only in files:
        tree = ast.parse(path.read_text())
        imports |= {ast.unparse(n) for n in tree.body if _outside(n)}
        last = path.stem == names[-1]
        sections.append(_section(path, tree, only, last))
    doc = ast.get_docstring(ast.parse((_HERE / f"{names[-1]}.py").read_text()), clean=False)
    return "\n\n".join([f'"""{doc}"""', "\n".join(sorted(imports)), *sections]) + "\n"


def _outside(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return not (node.module or "").startswith("targets.")
    return isinstance(node, ast.Import)


def _section(path: Path, tree: ast.Module, only: set[str] | None, last: bool) -> str:
    text = path.read_text().splitlines()
    kept = [f"# ---- {path.stem}: {(ast.get_docstring(tree) or '').splitlines()[0]}"]
    end = 0
    for node in tree.body:
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        before, end = end, node.end_lineno or start
        if isinstance(node, ast.Import | ast.ImportFrom) or node is tree.body[0]:
            continue
        names = _names(node)
        if (only is not None and not names & only) or (not last and names & _ENTRY):
            continue
        comments = [x for x in text[before : start - 1] if x.startswith("#")]
        kept += ["", *comments, *text[start - 1 : end]]
    return "\n".join(kept)


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {t.id for t in node.targets if isinstance(t, ast.Name)}
    return set()
