"""The exchange between two GPUs: our fused kernels, the same without an exchange, and the unfused sequences of others.

    python benchmarks/peer.py compile -o DIR [--target T] [--preset P] [--rows 1 8] [--set NAME=VALUE ...]   (no GPU)
    python benchmarks/peer.py fused DIR... [--judge DIR...]                       (artifacts, as `compile` wrote them)
    python benchmarks/peer.py unfused [--preset tp8-pair] [--rows 1 2 4 8]        (two processes, one GPU each)
    python benchmarks/peer.py latency                                             (peer access, flags, graph launches)

One JSON object a line on stdout. Needs two GPUs with peer access. `fused` compares a step
with the reference and times chains of recorded steps on both GPUs from one gate: microseconds per instance of the
slowest rank. With `--set paired=False` the same kernels run without the other rank (results are then not compared).
`unfused` is a product, an all-reduce by NCCL or by torch's symmetric memory (without multicast), and AttnRes, each its
own launch, as one CUDA graph per process. `--judge` judges at tier screen without a server; else use `kernelgen judge`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import peer_link
import peer_others
import peer_ours


def setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    known = {"True": True, "False": False}
    return name, known.get(value, int(value) if value.lstrip("-").isdigit() else value)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peer.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("compile", "fused", "unfused", "latency"))
    parser.add_argument("artifacts", nargs="*", help="for fused")
    parser.add_argument("-o", "--output", type=Path, default=Path("peer-store"), help="of compile")
    parser.add_argument("--target", default="oproj-allreduce")
    parser.add_argument("--preset", default="tp8-pair")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--one", action="store_true", help="decode as one rank alone, on one GPU")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--set", type=setting, nargs="*", default=[], help="tunables, name=value")
    parser.add_argument(
        "--source",
        help="a candidate file, the name of another seed, such as oproj-stack, or persistent",
    )
    parser.add_argument(
        "--judge",
        nargs="*",
        default=[],
        help="artifacts that `fused` judges at the end; verdicts to -o",
    )
    parser.add_argument(
        "--baselines", nargs="*", default=[], help="of the judgements, such as nccl"
    )
    parser.add_argument(
        "--no-compare", action="store_true", help="do not compare with the reference"
    )
    parser.add_argument(
        "--repeat",
        type=int,
        nargs="*",
        default=[],
        help="steps of chains that must leave the same bits",
    )
    parser.add_argument("--commit", default="", help="is put into each row")
    options = parser.parse_args(argv)
    what = {
        "compile": peer_ours.compile_all,
        "fused": peer_ours.fused,
        "unfused": peer_others.unfused,
        "latency": peer_link.latency,
    }
    what[options.what](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
