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
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

CHAIN, REPEATS, SEED = 16, 15, 1


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    known = {"True": True, "False": False}
    return name, known.get(value, int(value) if value.lstrip("-").isdigit() else value)


# ---- ours


class Pair:
    """A seed of a target on two GPUs, with buffers of its own."""

    def __init__(self, device: Any, artifact: Any, workload: Any, reference: Any) -> None:
        import torch

        from sandbox.judge.dtypes import TORCH

        self.device, self.artifact, self.w, self.reference = device, artifact, workload, reference
        self.program = device.load(artifact)
        self.memory = {
            b.name: torch.zeros(b.shape, dtype=TORCH[b.dtype], device=device.device_of(b.rank))
            for b in artifact.buffers
        }
        made = {
            **reference.weights(workload, SEED, "cuda"),
            **reference.states(workload, SEED, "cuda"),
        }
        self.fill(made)
        if artifact.prepare is not None:
            self.program.bind("prepare", self.memory).launch()
        device.synchronize()
        self.step = self.program.bind("step", self.memory)

    def fill(self, tensors: Mapping[str, Any]) -> None:
        for name, value in tensors.items():
            self.memory[name].copy_(value)

    def compare(self) -> dict[str, Any]:
        """One step against the oracle: the largest relative distance, and whether ranks agree bit for bit."""
        import torch

        inputs = self.reference.inputs(self.w, SEED, 0, "cuda")
        self.fill(inputs)
        groups = ("weights", "states")
        given = {
            b.name: self.memory[b.name].to("cuda:0").clone()
            for b in self.w.buffers
            if b.group in groups
        }
        self.device.synchronize()
        self.step.launch()
        self.device.synchronize()
        ids = self.memory.get("outputs.ids")
        forced = None if ids is None else {"outputs.ids": ids.clone()}
        expected = self.reference.run(self.w, {**given, **inputs}, "oracle", forced)
        worst = 0.0
        for name, want in expected.tensors.items():
            if want.dtype.is_floating_point:
                got, want = self.memory[name].to("cuda:0").double(), want.double()
                mask = expected.masks.get(name)
                got, want = (got, want) if mask is None else (got[mask], want[mask])
                worst = max(worst, float((got - want).norm() / want.norm().clamp(min=1e-9)))
        same = all(
            torch.equal(self.memory[n].cpu(), self.memory[f"{n}@1"].cpu())
            for n in self.reference.replicated(self.w)
        )
        return {"rel": worst, "ranks_equal": same}

    def times(self) -> dict[str, Any]:
        """Microseconds of a step of a chain: recorded as graphs, and enqueued launch by launch behind the gate."""

        def chain() -> None:
            for _ in range(CHAIN):
                self.step.launch()

        chain()
        self.device.synchronize()
        queued = [self.device.time(chain) / CHAIN for _ in range(REPEATS)]
        graph = self.device.record(chain, CHAIN)
        for _ in range(3):
            graph.launch()
        self.device.synchronize()
        found = sorted(self.device.time(graph.launch) / CHAIN for _ in range(REPEATS))
        return {
            "step_us": median(found), "least_us": found[0], "most_us": found[-1], "queued_us": median(queued),
            "apart": self.device.apart(),
        }  # fmt: skip


def compile_all(options: argparse.Namespace) -> None:
    """The target's seed for each number of rows, machine code included (it is kept in KERNELGEN_CACHE)."""
    from sandbox import artifact_store
    from sandbox.compile_client import CompileClient, CompileSettings
    from sandbox.devices.cuda_toolchain import build
    from sandbox.jobs import CompileJob
    from targets.base import Options, find
    from targets.kimi_k3 import seeds

    target = find(f"kimi-k3-{options.target}")
    extra = {"mode": "peer2"} if options.target == "decode" else {}
    source = target.seed_source()
    if options.source:
        file = Path(options.source)
        source = file.read_text() if file.is_file() else seeds.source(f"kimi-k3-{options.source}")
    settings = CompileSettings(
        options.output, idle=1, jobs=1, deadline_s=280, tier="none", trust_this_code=True
    )
    with CompileClient(settings) as compiler:
        for rows in options.rows:
            w = target.workload(Options(options.preset, options.layers, rows, extra=extra))
            job = CompileJob(source, w.target, w.key, w.dims, w.buffers, tunables=dict(options.set))
            found = compiler.compile(job)
            if found.artifact is None:
                raise SystemExit(f"does not compile: {found.failure}")
            build(artifact_store.load(found.artifact))
            say(what="compiled", artifact=str(found.artifact), rows=rows, set=dict(options.set))


def workload_of(artifact: Any) -> Any:
    """The workload that an artifact was compiled for."""
    from targets.base import Options, find

    key = artifact.workload
    extra = {k[2:]: v for k, v in key.items() if k.startswith("x_")}
    options = Options(key["preset"], key["layers"], key["rows"], key["context"], extra)
    return find(artifact.target).workload(options)


def fused(options: argparse.Namespace) -> None:
    import torch

    from sandbox import artifact_store
    from sandbox.devices.base import Faulted, Refused
    from sandbox.devices.cuda_ranks import CudaRanks
    from targets.kimi_k3.reference import KimiReference

    device = CudaRanks.open(2)
    device.hang_s = 5.0
    with torch.inference_mode():
        for folder in options.artifacts:
            begin = time.perf_counter()
            artifact = artifact_store.load(Path(folder))
            w = workload_of(artifact)
            tunables = dict(artifact.tunables)
            row: dict[str, Any] = {
                "what": "fused", "target": w.target, "preset": w.options.preset, "rows": w.rows, "layers": w.layers,
                "launches": len(artifact.step.of(0).launches), "tunables": tunables,
            }  # fmt: skip
            try:
                pair = Pair(device, artifact, w, KimiReference())
                if tunables.get("paired", True) and not options.no_compare:
                    row |= pair.compare()
                row |= pair.times()
            except (Refused, Faulted) as end:
                say(**row, failed=f"{end.status}: {end.failure.message}")
                if isinstance(end, Faulted) and end.status != "infra":
                    return  # the contexts are of no further use
                continue
            row |= {
                "us": row["step_us"] / w.layers,
                "gpu": device.facts().name,
                "commit": options.commit,
            }
            say(**row, seconds=round(time.perf_counter() - begin, 2))
        for folder in options.judge:
            judged(device, Path(folder), options.output)


def judged(device: Any, folder: Path, output: Path) -> None:
    """Judge an artifact at tier screen in this process, which is not confined; the verdict goes into a file."""
    from sandbox import artifact_store
    from sandbox.jobs import JudgeJob
    from sandbox.judge import judge

    begin = time.perf_counter()
    artifact = artifact_store.load(folder)
    o = workload_of(artifact).options
    fields = {
        "preset": o.preset, "layers": o.layers, "rows": o.rows, "context": o.context, "extra": dict(o.extra),
    }  # fmt: skip
    verdict = judge.run(JudgeJob(folder, artifact.target, fields, "cuda", baselines=()), device)
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{artifact.sha256[:12]}.json").write_text(json.dumps(verdict.to_json(), indent=1))
    timing = verdict.timing.workloads[0] if verdict.timing else None
    say(
        what="judged", target=artifact.target, workload=dict(artifact.workload), status=str(verdict.status),
        failure=verdict.failure.message[:600] if verdict.failure else None, us=timing.us if timing else None,
        checked=list(verdict.checked), ranks=verdict.profile.get("ranks"),
        seconds=round(time.perf_counter() - begin, 2),
    )  # fmt: skip


# ---- others'


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


# ---- the link itself

_PING = """\
.version 8.8
.target sm_90a
.address_size 64
.visible .entry ping(.param .u64 mine, .param .u64 theirs, .param .u32 first, .param .u32 rounds)
.reqntid 32, 1, 1
{
    .reg .pred %p<5>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [mine];
    ld.param.u64 %rd2, [theirs];
    ld.param.u32 %r1, [first];
    ld.param.u32 %r2, [rounds];
    mov.u32 %r3, 1;
    mov.u32 %r6, %tid.x;
    setp.ne.u32 %p1, %r6, 0;
    @%p1 bra DONE;
    setp.eq.u32 %p2, %r1, 0;
ROUND:
    @%p2 bra WAIT;
    st.relaxed.sys.global.u32 [%rd2], %r3;
WAIT:
    mov.u32 %r5, 0;
SPIN:
    ld.relaxed.sys.global.u32 %r4, [%rd1];
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p3, %r4, %r3;
    setp.lt.and.u32 %p3, %r5, 4000000, %p3;
    @%p3 bra SPIN;
    @!%p2 bra NEXT;
    st.relaxed.sys.global.u32 [%rd2], %r3;
NEXT:
    add.u32 %r3, %r3, 1;
    setp.le.u32 %p4, %r3, %r2;
    @%p4 bra ROUND;
DONE:
    ret;
}
"""


def latency(options: argparse.Namespace) -> None:
    """A flag to the other GPU and back; graph launches on both together."""
    import torch

    from sandbox.artifact import Launch as PlanLaunch
    from sandbox.assemble import assemble
    from sandbox.devices.cuda_plan import ParamBlock
    from sandbox.devices.cuda_ranks import CudaRanks

    device = CudaRanks.open(2)
    device.hang_s = 5.0
    cubin, flags, kernels = assemble(_PING, "sm_90a").cubin, [], []
    for rank in range(2):
        flags.append(torch.zeros(32, dtype=torch.int32, device=f"cuda:{rank}"))
        with device.contexts[rank].current():
            driver = device.devices[rank].driver
            kernels.append(driver.kernel(driver.load(cubin), "ping"))
    launch = PlanLaunch("ping", (1, 1, 1), (32, 1, 1), bytes(24), (0, 8, 16, 20), ())

    def ping(rounds: int) -> None:
        for rank in range(2):
            mine, theirs = flags[rank].data_ptr(), flags[1 - rank].data_ptr()
            data = b"".join(
                v.to_bytes(n, "little")
                for v, n in ((mine, 8), (theirs, 8), (1 - rank, 4), (rounds, 4))
            )
            one = device.devices[rank]
            with device.contexts[rank].current():
                call = one.driver.call(
                    kernels[rank], launch, ParamBlock(data, (0, 8, 16, 20)), one.stream, pdl=False
                )
                one.driver.launch([call])

    for rounds in (1, 100, 1000):
        found = []
        for _ in range(REPEATS):
            for flag in flags:
                flag.zero_()
            device.synchronize()
            found.append(device.time(lambda n=rounds: ping(n)))
        ok = int(flags[0][0]) == int(flags[1][0]) == rounds
        say(
            what="ping-pong",
            rounds=rounds,
            us=median(found),
            one_way_us=median(found) / rounds / 2,
            ok=ok,
        )
    say(
        what="empty",
        us=median(device.time(lambda: None) for _ in range(REPEATS)),
        apart=device.apart(),
    )
    graph = device.record(lambda: [f.zero_() for f in flags] and None, 1)  # type: ignore[func-returns-value]
    graph.launch()
    say(
        what="graph of a memset",
        us=median(device.time(graph.launch) for _ in range(REPEATS)),
        apart=device.apart(),
    )
    begin = time.perf_counter()
    for _ in range(100):
        graph.launch()
    say(what="host, graphs of both", us=(time.perf_counter() - begin) * 1e4)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peer.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("compile", "fused", "unfused", "latency"))
    parser.add_argument("artifacts", nargs="*", help="for fused")
    parser.add_argument("-o", "--output", type=Path, default=Path("peer-store"), help="of compile")
    parser.add_argument("--target", default="oproj-allreduce")
    parser.add_argument("--preset", default="tp8-pair")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--set", type=setting, nargs="*", default=[], help="tunables, name=value")
    parser.add_argument(
        "--source", help="a candidate file, or the name of another seed, such as oproj-stack"
    )
    parser.add_argument(
        "--judge",
        nargs="*",
        default=[],
        help="artifacts that `fused` judges at the end; verdicts to -o",
    )
    parser.add_argument(
        "--no-compare", action="store_true", help="do not compare with the reference"
    )
    parser.add_argument("--commit", default="", help="is put into each row")
    options = parser.parse_args(argv)
    what = {"compile": compile_all, "fused": fused, "unfused": unfused, "latency": latency}
    what[options.what](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
