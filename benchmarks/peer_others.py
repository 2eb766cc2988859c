"""The unfused sequences of others on two GPUs: a product, an all-reduce, AttnRes, each its own launch, in CUDA graphs.

Two processes, one GPU each, as NCCL and torch's symmetric memory are used; NVLink multicast is off for both. Only the
sums are compared with anything, so these are times, not judged candidates.
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
            for name, parts in _sequences(preset, m, rank, apart=m == rows[-1]):
                try:
                    times, count = _timed(parts)
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
                each = torch.tensor(times, device="cuda")
                dist.all_reduce(each, dist.ReduceOp.MAX)
                if rank == 0:
                    say(
                        what="unfused",
                        preset=preset,
                        rows=m,
                        name=name,
                        us=float(each[0]) / count,
                        least_us=float(each[1]) / count,
                        most_us=float(each[2]) / count,
                        instances=count,
                    )
    dist.barrier()
    dist.destroy_process_group()


Launch = Callable[[], Any]


class Unfused:
    """One rank's tensors of a chain, and the launches of its pieces."""

    def __init__(self, preset: str, rows: int, rank: int) -> None:
        import torch

        from targets.base import Options, find
        from targets.kimi_k3.baseline import parts
        from targets.kimi_k3.options import resolve
        from targets.kimi_k3.ranks import tensors_of
        from targets.kimi_k3.reference import KimiReference

        options = Options(preset, None, rows)
        w = find("kimi-k3-oproj-allreduce").workload(options)
        run, reference = resolve(w.target, options), KimiReference()
        tensors = {**reference.weights(w, SEED, "cuda"), **reference.inputs(w, SEED, 0, "cuda")}
        self.own = tensors_of(tensors, rank)
        self.parts, self.make = parts, parts.Maker(run.shape, torch.device("cuda", rank))
        self.layers = range(w.layers)
        hidden, self.bank_rows = int(w.dims["hidden"]), int(w.dims["bank_rows"])
        self.prefix, self.y, self.plain = self.make.wide(), self.make.wide(), self.make.wide()
        shape = (rows, self.bank_rows, hidden)
        self.bank = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")

    def mix(self, i: int, delta: Any) -> list[Launch]:
        names = ("res_norm", "res_proj", "out_norm")
        one = self.parts.Mix(*(self.own[f"weights.layers.{i}.{n}"] for n in names))
        # the mean number of sources in every instance: a kernel for each number would take a minute to compile
        sources = round(sum(min(k, self.bank_rows) for k in self.layers) / len(self.layers))
        mixed = self.parts.Mixed(self.prefix, delta, self.y, sources)
        return _listed(
            self.make.attn_res(self.parts.Banks(None, self.bank, self.prefix, 0), one, mixed)
        )

    def product(self, i: int, out: Any, how: str = "best") -> list[Launch]:
        import torch

        x, weight = self.own[f"inputs.x.{i}"], self.own[f"weights.layers.{i}.o_proj"]
        if how == "cublas":
            return [lambda: torch.mm(x, weight.t(), out=out)]
        return _listed(self.make.linear("o_proj", (x, weight, out)))


def _listed(made: Any) -> list[Launch]:
    return list(made) if isinstance(made, list) else [made]


def _sequences(
    preset: str, rows: int, rank: int, apart: bool
) -> Iterator[tuple[str, list[list[Launch]]]]:
    """(name, launches of each instance): whole sequences; `apart`: their parts too."""
    u = Unfused(preset, rows, rank)
    reduce = _reductions(u, rows, rank)
    for kind, (source, call, result) in reduce.items():
        whole = [[*u.product(i, source), call, *u.mix(i, result)] for i in u.layers]
        yield f"o_proj + {kind} + attn-res", whole
    yield (
        "o_proj + attn-res, no exchange",
        [[*u.product(i, u.plain), *u.mix(i, u.plain)] for i in u.layers],
    )
    source, call, result = reduce["nccl"]
    whole = [[*u.product(i, source, "cublas"), call, *u.mix(i, result)] for i in u.layers]
    yield "o_proj cublas + nccl + attn-res", whole
    if not apart:
        return
    yield "o_proj", [u.product(i, u.plain) for i in u.layers]
    yield "o_proj cublas", [u.product(i, u.plain, "cublas") for i in u.layers]
    for kind, (_, call, result) in reduce.items():
        yield f"{kind} + attn-res", [[call, *u.mix(i, result)] for i in u.layers]
        yield f"{kind} alone", [[call] for _ in u.layers]


Reduction = tuple[Any, Callable[[], Any], Any]
"""Where the partial goes, the call, where the sum is."""


def _reductions(u: Unfused, rows: int, rank: int) -> dict[str, Reduction]:
    """All-reduces by name, each of which has made a right sum here; says of each how far off it was."""
    import torch.distributed as dist

    plain = u.plain
    found: dict[str, Reduction] = {"nccl": (plain, lambda: dist.all_reduce(plain), plain)}
    try:
        found |= _symmetric(tuple(plain.shape), rank, plain)
    except Exception as error:  # NCCL is a baseline without it
        say(what="unfused", rows=rows, name="symmetric memory", failed=str(error)[:300])
    off = {name: _off(one) for name, one in found.items()}
    if rank == 0:
        say(what="sums", rows=rows, rel=off)
    return {name: one for name, one in found.items() if off[name] < 0.01}


def _off(one: Reduction) -> float:
    """Relative distance of a sum over both ranks from the sum in f32; the same on both ranks."""
    import torch
    import torch.distributed as dist

    source, call, result = one
    torch.manual_seed(dist.get_rank())
    source.copy_(torch.randn_like(source))
    wanted = source.float()
    dist.all_reduce(wanted)
    call()
    far = (result.float() - wanted).norm() / wanted.norm()
    dist.all_reduce(far, dist.ReduceOp.MAX)
    return float(far)


def _symmetric(shape: tuple[int, ...], rank: int, plain: Any) -> dict[str, Reduction]:
    """torch's symmetric memory. Collective; may raise."""
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


def _timed(instances: list[list[Launch]]) -> tuple[tuple[float, float, float], int]:
    """Microseconds of a graph of CHAIN steps, median, least and most of repeats, and how many instances it has."""
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
    return (median(found), min(found), max(found)), CHAIN * len(instances)
