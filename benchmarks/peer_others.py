"""The unfused sequences of others on two GPUs: a product, an all-reduce, AttnRes, each its own launch, in CUDA graphs.

Two processes, one GPU each, as NCCL and torch's symmetric memory are used; NVLink multicast is off for both. Nothing
is compared with the reference here but the all-reduces with each other.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from peer_common import CHAIN, REPEATS, SEED, say


def unfused(options: argparse.Namespace) -> None:
    import torch.multiprocessing as mp

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(29500 + os.getpid() % 400))
    mp.spawn(_rank, (options.preset, tuple(options.rows)), nprocs=2)  # type: ignore[no-untyped-call]


def _rank(rank: int, preset: str, rows: Sequence[int]) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    with torch.inference_mode():
        for m in rows:
            for name, parts in _sequences(preset, m, rank):
                try:
                    us, count = _timed(parts)
                except Exception as error:  # one of many: said, and the others go on
                    if rank == 0:
                        say(
                            what="unfused",
                            preset=preset,
                            rows=m,
                            name=name,
                            failed=str(error)[:300],
                        )
                    continue
                each = torch.tensor([us], device="cuda")
                dist.all_reduce(each, dist.ReduceOp.MAX)
                if rank == 0:
                    say(
                        what="unfused",
                        preset=preset,
                        rows=m,
                        name=name,
                        us=float(each) / count,
                        instances=count,
                    )
    dist.barrier()
    dist.destroy_process_group()


Launch = Callable[[], Any]


def _sequences(preset: str, rows: int, rank: int) -> Iterator[tuple[str, list[list[Launch]]]]:
    """(name, launches of each instance): the product alone, the all-reduces alone, and whole sequences."""
    import torch
    import torch.distributed as dist

    from targets.base import Options, find
    from targets.kimi_k3.baseline import parts
    from targets.kimi_k3.options import resolve
    from targets.kimi_k3.ranks import tensors_of
    from targets.kimi_k3.reference import KimiReference

    options = Options(preset, None, rows)
    w = find("kimi-k3-oproj-allreduce").workload(options)
    run, reference = resolve(w.target, options), KimiReference()
    tensors = {**reference.weights(w, SEED, "cuda"), **reference.inputs(w, SEED, 0, "cuda")}
    own = tensors_of(tensors, rank)
    make = parts.Maker(run.shape, torch.device("cuda", rank))
    hidden, bank_rows = int(w.dims["hidden"]), int(w.dims["bank_rows"])
    prefix, y = make.wide(), make.wide()
    bank = torch.zeros(rows, bank_rows, hidden, dtype=torch.bfloat16, device="cuda")
    plain = make.wide()
    reduce: dict[str, tuple[Any, Callable[[], Any], Any]] = {
        "nccl": (plain, lambda: dist.all_reduce(plain), plain),
    }
    try:
        reduce |= _symmetric((rows, hidden), rank, plain)
    except Exception as error:  # NCCL is a baseline without it
        say(what="unfused", rows=rows, name="symmetric memory", failed=str(error)[:300])

    layers = range(w.layers)

    def mix(i: int, delta: Any) -> list[Launch]:
        banks = parts.Banks(None, bank, prefix, 0)
        layer = {n: own[f"weights.layers.{i}.{n}"] for n in ("res_norm", "res_proj", "out_norm")}
        one = parts.Mix(layer["res_norm"], layer["res_proj"], layer["out_norm"])
        # the mean number of sources in every instance: a kernel for each number would take a minute to compile
        sources = round(sum(min(k, bank_rows) for k in layers) / len(layers))
        made = make.attn_res(banks, one, parts.Mixed(prefix, delta, y, sources))
        return list(made) if isinstance(made, list) else [made]

    def product(i: int, out: Any, how: str) -> list[Launch]:
        x, weight = own[f"inputs.x.{i}"], own[f"weights.layers.{i}.o_proj"]
        if how == "cublas":
            return [lambda: torch.mm(x, weight.t(), out=out)]
        made = make.linear("o_proj", (x, weight, out))
        return list(made) if isinstance(made, list) else [made]

    yield "o_proj", [product(i, plain, "best") for i in layers]
    yield "o_proj cublas", [product(i, plain, "cublas") for i in layers]
    yield (
        "o_proj + attn-res, no exchange",
        [[*product(i, plain, "best"), *mix(i, plain)] for i in layers],
    )
    for kind, (source, call, result) in reduce.items():
        yield f"{kind} alone", [[call] for _ in layers]
        yield f"{kind} + attn-res", [[call, *mix(i, result)] for i in layers]
        yield (
            f"o_proj + {kind} + attn-res",
            [[*product(i, source, "best"), call, *mix(i, result)] for i in layers],
        )


def _symmetric(
    shape: tuple[int, int], rank: int, plain: Any
) -> dict[str, tuple[Any, Callable[[], Any], Any]]:
    """torch's symmetric memory: (where the partial goes, the call, where the sum is). Collective; may raise."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm

    group = dist.group.WORLD
    shared = symm.empty(shape, dtype=torch.bfloat16, device=torch.device("cuda", rank))
    symm.rendezvous(shared, group)
    name = group.group_name  # type: ignore[union-attr]
    ops = torch.ops.symm_mem
    one = (shared, lambda: ops.one_shot_all_reduce_out(shared, "sum", name, plain), plain)
    two = (shared, lambda: ops.two_shot_all_reduce_(shared, "sum", name), shared)
    return {"symm one-shot": one, "symm two-shot": two}


def _timed(instances: list[list[Launch]]) -> tuple[float, int]:
    """Microseconds of a graph of CHAIN steps, median of repeats, and how many instances it has."""
    import torch
    import torch.distributed as dist

    def chain(steps: int) -> None:
        for _ in range(steps):
            for launches in instances:
                for launch in launches:
                    launch()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain(2)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            chain(CHAIN)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        found = []
        for _ in range(REPEATS):
            dist.barrier()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e3)
    return median(found), CHAIN * len(instances)
