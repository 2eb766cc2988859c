"""All of it from one line: a cluster, a pool on it, and compilers and judges for the loop.

The only door for the agent's side. Ray is imported here and only when workers on it were asked for.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.workers.address import BadAddress, Farm, parse
from sandbox.workers.clients import Desk, PoolCompiler, PoolJudge
from sandbox.workers.places import Post
from sandbox.workers.pool import Pool
from sandbox.workers.results import Results
from sandbox.workers.roster import Closed, NoWorker, Times
from sandbox.workers.station import Setup
from sandbox.workers.transport import Cluster, Lost

__all__ = ["BadAddress", "Crew", "Farm", "Orders", "Unusable", "hire", "parse"]


class Unusable(RuntimeError):
    """The workers asked for cannot be had; the message says why."""


@dataclass(frozen=True)
class Orders:
    """What the workers are to do. `root`: the folder for results and artifacts; `scope`: the run; `kinds`: kinds of
    device, () for the only one there is, or with `every_kind` for all there are; `extra`: for the judge's server.
    """

    device: str
    root: Path
    scope: str
    arch: str = ""
    kinds: tuple[str, ...] = ()
    tier: str | None = None
    trust_this_code: bool = False
    deadline_s: float = 120.0
    every_kind: bool = False
    extra: tuple[str, ...] = ()

    def setup(self, post: Post) -> Setup:
        arch = self.arch or "sm_90a"
        return Setup(
            post.role, device=self.device, arch=arch, tier=self.tier, trust_this_code=self.trust_this_code,
            deadline_s=self.deadline_s, extra=self.extra,
        )  # fmt: skip

    @property
    def jail(self) -> Mapping[str, Any]:
        return {"tier": self.tier, "trust": self.trust_this_code, "deadline_s": self.deadline_s}


@dataclass(frozen=True)
class Crew:
    """Workers that answer. `kinds`: the facts of each kind of device, the kinds that were asked for alone."""

    pool: Pool
    desk: Desk
    kinds: Mapping[str, Mapping[str, Any]]

    def compiler(self) -> PoolCompiler:
        return PoolCompiler(self.desk)

    def judge(self, kind: str) -> PoolJudge:
        return PoolJudge(self.desk, kind)

    def fresh_judge(self, kind: str) -> PoolJudge:
        return PoolJudge(self.desk, kind, fresh=True, owner=False)

    def describe(self) -> str:
        return self.pool.roster.describe()

    def roll(self) -> list[dict[str, Any]]:
        """Every worker there is or was: name, role, state, kind of device, jobs done, and what is wrong with it."""
        roster = self.pool.roster
        with roster.changed:
            return [
                {
                    "name": m.name,
                    "role": m.post.role,
                    "state": m.state,
                    "kind": m.kind,
                    "done": m.done,
                    "why": m.why,
                }
                for m in roster.members
            ]

    def close(self) -> None:
        self.pool.close()


def hire(
    farm: Farm, orders: Orders, cluster: Cluster | None = None, times: Times | None = None
) -> Crew:
    """Workers of every kind asked for, ready to work. Raises Unusable; nothing is left running then."""
    farm = _sized(farm, orders.device)
    made = cluster or _ray(farm, orders.device)
    pool = Pool(made, farm, orders.setup, times)
    try:
        pool.start()
        kinds = _kinds(pool, orders)
    except (NoWorker, Closed, Lost, OSError) as error:
        pool.close()
        raise Unusable(str(error)) from error
    except BaseException:
        pool.close()
        raise
    desk = Desk(
        pool, Results(orders.root / "results"), orders.root / "artifacts", orders.scope, orders.jail
    )
    return Crew(pool, desk, kinds)


def _kinds(pool: Pool, orders: Orders) -> dict[str, Mapping[str, Any]]:
    """Which kinds of device will judge. With none named, every worker is heard first, and there must be one kind."""
    pool.settle("compile", ())
    pool.settle("judge", orders.kinds or None)
    found = pool.kinds()
    if orders.kinds:
        missing = [k for k in orders.kinds if k not in found]
        if missing:
            raise NoWorker(
                f"no worker has a {', '.join(missing)}; there are {', '.join(sorted(found))}"
            )
        return {k: found[k] for k in orders.kinds}
    if orders.arch:
        found = {
            k: f for k, f in found.items() if f.get("arch") == orders.arch or f.get("kind") == "cpu"
        }
        if not found:
            raise NoWorker(f"no worker has a device of architecture {orders.arch}")
    if len(found) > 1 and not orders.every_kind:
        raise NoWorker(
            f"the workers have devices of several kinds, choose with --kind: {', '.join(sorted(found))}"
        )
    return found


def _sized(farm: Farm, device: str) -> Farm:
    """A cluster of our own gets the counts that it is to have; on cuda it has as many judges as GPUs."""
    if farm.address:
        return farm
    cores = os.cpu_count() or 1
    judges = farm.judges or (cores if device == "cpu" else None)
    return dataclasses.replace(farm, judges=judges, compilers=farm.compilers or max(1, cores // 4))


def _ray(farm: Farm, device: str) -> Cluster:
    from sandbox.workers.ray_cluster import NoRay, RayCluster

    try:
        if farm.address:
            return RayCluster(farm)
        if device == "cuda":
            return RayCluster(farm, cpus=max(os.cpu_count() or 1, 2), gpus=_gpus())
        return RayCluster(farm, cpus=(farm.judges or 1) + (farm.compilers or 1))
    except NoRay as error:
        raise Unusable(str(error)) from error


def _gpus() -> int | None:
    """GPUs that this machine shows to us; None lets Ray count."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else len([v for v in visible.split(",") if v.strip()])
