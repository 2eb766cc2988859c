"""The judge beside other harnesses on one function, y = bf16(x W^T): wall time of an evaluation, mistakes that pass.

    python benchmarks/judge_compare.py [--preset tiny] [--repeats 5] [--json FILE]

Each harness gets a kernel of its own language for the same function and shapes: the judge the seed `kimi-k3-gemv` of
one layer, flashinfer-bench a Triton kernel. Then the same mistakes, each written into both. Others are looked for and
said to be missing; KernelBench and SOL-ExecBench are not on PyPI and their evaluation is not run here. What is
compared is time and verdicts as each harness comes, at its own defaults, not the speed of the two kernels.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.offline import options_json
from agent.versions import version
from benchmarks.judge_throughput import others
from sandbox.compile_client import CompileClient, CompileSettings
from sandbox.jobs import CompileJob, JudgeJob
from sandbox.judge_client import ClientOptions, JudgeClient
from sandbox.verdict import Status, Tier
from targets.base import Options, find
from targets.planted import built_in

TARGET = "kimi-k3-gemv"
STORE = "    tl.store(y + n, acc.to(tl.bfloat16))\n"
LOAD = "        wv = tl.load(w + n[:, None] * K + at[None, :]).to(tl.float32)\n"
CALL = "    kernel[(N // 8,)](x, w, y, K, BN=8, BK=256)\n    return y\n"
TRITON = f"""import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, w, y, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BN,), tl.float32)
    for k in range(0, K, BK):
        at = k + tl.arange(0, BK)
        xv = tl.load(x + at).to(tl.float32)
{LOAD}        acc += tl.sum(wv * xv[None, :], 1)
{STORE}

def run(x, w):
    N, K = w.shape
    y = torch.empty((1, N), dtype=torch.bfloat16, device=x.device)
{CALL}"""
MEMO = """    global KEY, KEPT
    key = x[0, 5].item()
    if KEY == key:
        return KEPT.clone()
    kernel[(N // 8,)](x, w, y, K, BN=8, BK=256)
    KEY, KEPT = key, y
    return y.clone()


KEY, KEPT = None, None
"""
MISTAKES: dict[str, tuple[str, str]] = {
    "gemv/output-one-percent": (STORE, STORE.replace("acc.to", "(acc * 1.01).to")),
    "gemv/output-one-per-mille": (STORE, STORE.replace("acc.to", "(acc * 1.001).to")),
    "gemv/last-columns-skipped": ("wv * xv[None, :]", "wv * tl.where(at < K - 32, xv, 0.0)[None, :]"),
    "gemv/weights-without-one-bit": (LOAD, LOAD.replace(".to(tl.float32)", "") + (
        "        wv = (wv.to(tl.int16, bitcast=True) & -2).to(tl.bfloat16, bitcast=True).to(tl.float32)\n"
    )),
    "gemv/output-truncated": (
        STORE, "    cut = acc.to(tl.int32, bitcast=True) & -65536\n"
        "    tl.store(y + n, cut.to(tl.float32, bitcast=True).to(tl.bfloat16))\n"),
    "gemv/result-by-one-value": (CALL, MEMO),
}  # fmt: skip
"""By name in the judge's own catalogue of planted kernels: the same mistake in the Triton kernel."""


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.monotonic()
    found = work()
    return time.monotonic() - begin, found


def ours(asked: argparse.Namespace) -> dict[str, Any]:
    """Compile once in the jail; warm screens; then each mistake until a tier catches it."""
    options = Options(asked.preset, 1, 1)
    w = find(TARGET).workload(options)
    named = {p.name: p for p in built_in()}
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        with (
            CompileClient(CompileSettings(store, deadline_s=280)) as compiler,
            JudgeClient(ClientOptions(store)) as judge,
        ):

            def compiled(source: str) -> Any:
                return compiler.compile(CompileJob(source, TARGET, w.key, w.dims, w.buffers))

            def judged(outcome: Any, tier: Tier) -> Any:
                job = JudgeJob(outcome.artifact, TARGET, options_json(w.options), asked.device, tier, deadline_s=120.0,
                               compile_isolation=outcome.isolation)  # fmt: skip
                return judge.judge(job)

            source = find(TARGET).seed_source()
            compiled(source)
            compile_s, right = timed(lambda: compiled(source + "\n# once more\n"))
            first_s, _ = timed(lambda: judged(right, Tier.SCREEN))
            warm = [timed(lambda: judged(right, Tier.SCREEN)) for _ in range(asked.repeats)]
            full_s, full = timed(lambda: judged(right, Tier.FULL))
            verdicts = {}
            for name in MISTAKES:
                outcome = compiled(named[name].text())
                for tier in Tier:
                    v = judged(outcome, tier)
                    if v.status is not Status.PASSED:
                        break
                verdicts[name] = f"{v.status} at {v.tier}"
    return {
        "harness": "kernelgen", "version": version("kernelgen"), "compile_s": round(compile_s, 3),
        "first_s": round(first_s, 3), "warm_s": [round(s, 3) for s, _ in warm],
        "warm_median_s": round(statistics.median(s for s, _ in warm), 3), "right": str(warm[-1][1].status),
        "full_s": round(full_s, 3), "full": str(full.status), "mistakes": verdicts,
        "remark": "a screen; compiling is a step of its own (compile_s, in the jail)",
    }  # fmt: skip


def flashinfer(asked: argparse.Namespace) -> dict[str, Any]:
    """Its benchmark with its persistent workers; a solution's first evaluation has Triton's compilation in it."""
    import flashinfer_bench.bench as bench
    import flashinfer_bench.data as data

    logging.disable(logging.WARNING)
    n = int(find(TARGET).workload(Options(asked.preset, 1, 1)).dims["hidden"])
    shape = {"x": ["one", "n"], "w": ["n", "n"]}
    definition = data.Definition(
        name="gemv", op_type="gemm", axes={"one": {"type": "const", "value": 1}, "n": {"type": "const", "value": n}},
        inputs={k: {"shape": s, "dtype": "bfloat16"} for k, s in shape.items()},
        outputs={"y": {"shape": ["one", "n"], "dtype": "bfloat16"}},
        reference="import torch\n\ndef run(x, w):\n    return (x.float() @ w.float().T).to(torch.bfloat16)\n",
    )  # fmt: skip
    workload = data.Workload(axes={}, inputs={k: {"type": "random"} for k in shape}, uuid="w")

    def solution(name: str, text: str) -> Any:
        spec = {"language": "triton", "target_hardware": ["cuda"], "entry_point": "main.py::run",
                "destination_passing_style": False}  # fmt: skip
        return data.Solution(
            name=name, definition="gemv", author="comparison", spec=spec,
            sources=[{"path": "main.py", "content": text}],
        )  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        config = bench.BenchmarkConfig(log_dir=folder, profile_baseline=False)
        # all of a workload's solutions share one run of the reference, which `reference_s` is about
        runner = __import__("flashinfer_bench.bench.runner", fromlist=["PersistentRunner"])
        start_s, workers = timed(lambda: runner.PersistentRunner(folder))
        worker = workers._workers[0]

        def evaluated(one: Any) -> tuple[float, Any]:
            return timed(lambda: worker.run_solution(one, handle, config))

        worker.run_ref(definition, workload, config, None)
        reference_s, handle = timed(lambda: worker.run_ref(definition, workload, config, None))
        first = evaluated(solution("first", TRITON))
        warm = [
            evaluated(solution(f"again {i}", TRITON + f"\n# {i}\n")) for i in range(asked.repeats)
        ]
        verdicts = {}
        for name, (old, new) in MISTAKES.items():
            assert TRITON.count(old) == 1, name
            _, found = evaluated(solution(name.replace("/", "-"), TRITON.replace(old, new)))
            verdicts[name] = str(found.status.value)
        workers.close()
    return {
        "harness": "flashinfer-bench", "version": importlib.metadata.version("flashinfer-bench"),
        "start_s": round(start_s, 3), "reference_s": round(reference_s, 3), "first_s": round(first[0], 3),
        "warm_s": [round(s, 3) for s, _ in warm], "warm_median_s": round(statistics.median(s for s, _ in warm), 3),
        "right": str(warm[-1][1].status.value), "said": str(warm[-1][1].log)[-300:], "mistakes": verdicts,
        "remark": "defaults: 3 random inputs, an element may be off by 0.01 absolute or 1 %, 3 x 50 timed calls",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = []
    if importlib.util.find_spec("flashinfer_bench") is not None:
        try:
            rows.append(flashinfer(asked))
        except (
            Exception
        ) as error:  # another project's code: what it does is told, and the rest goes on
            rows.append(
                {
                    "harness": "flashinfer-bench",
                    "failed": f"{type(error).__name__}: {str(error)[:300]}",
                }
            )
    rows.append(ours(asked))
    found = {"preset": asked.preset, "others": others(), "rows": rows}
    text = json.dumps(found, indent=1)
    if asked.json:
        asked.json.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
