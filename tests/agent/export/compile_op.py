"""`python compile_op.py TREE MODULE`: compile an exported op with the DSL, with vLLM's own warm-up classes.

What those import of the rest of vLLM (which needs a build) is replaced by the least that works. Trusted code only.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any


def fake(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module
    return module


def package(name: str, folder: Path) -> None:
    module = fake(name)
    module.__path__ = [str(folder)]


def main() -> None:
    os.environ |= {
        "CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        "CUTE_DSL_DUMP_DIR": tempfile.mkdtemp(),
    }  # fmt: skip
    root, name = Path(sys.argv[1]), sys.argv[2]
    for dotted in (
        "vllm", "vllm.model_executor", "vllm.model_executor.warmup", "vllm.models", "vllm.models.kimi_k3",
        "vllm.models.kimi_k3.nvidia", "vllm.models.kimi_k3.nvidia.ops", "vllm.models.kimi_k3.nvidia.ops.cute_dsl",
        "vllm.utils", "vllm.model_executor.layers",
    ):  # fmt: skip
        package(dotted, root / dotted.replace(".", "/"))
    sys.modules["vllm"].envs = fake("vllm.envs", VLLM_BATCH_INVARIANT=False)  # type: ignore[attr-defined]
    fake("vllm.logger", init_logger=logging.getLogger)
    fake("vllm.platforms", current_platform=types.SimpleNamespace(is_cuda=lambda: False))
    fake("vllm.utils.import_utils", has_cutedsl=lambda: True)
    fake("vllm.model_executor.layers.linear", UnquantizedLinearMethod=object)
    fake("vllm.tracing", instrument=lambda *a, **k: lambda f: f)
    fake("vllm.utils.async_utils")
    op = importlib.import_module(f"vllm.models.kimi_k3.nvidia.ops.cute_dsl.{name}.op")
    import cutlass.cute as cute
    from cuda.bindings.driver import CUstream

    keys = op.KERNEL.get_warmup_keys()
    entries = 0
    for key in keys:
        compiled = cute.compile(
            op.KERNEL.kernel(key), *op.KERNEL.warmup_inputs(key), CUstream(0), no_jit_engine=True
        )  # fmt: skip
        entries += compiled.artifacts.PTX.count(".entry")
    assert not op.is_supported()
    print(json.dumps({"keys": len(keys), "entries": entries}))


if __name__ == "__main__":
    main()
