"""`lessons`: what was tried before, over all runs of the record, by target, device and technique."""

from __future__ import annotations

from pathlib import Path

import click

from agent.commands import common
from agent.lessons import TECHNIQUES, search
from agent.views import clean


@click.command()
@click.option("--target", default="", help="Targets with this in their name.")
@click.option(
    "--on", "device", default="", metavar="DEVICE", help="A device, such as cpu, cuda or H200."
)
@click.option(
    "--technique", default="", type=click.Choice(["", *TECHNIQUES]), help="What was tried."
)
@click.option("--limit", default=40, type=click.IntRange(1), help="At most so many, the newest.")
@common.db_option
@common.json_option
def lessons(target: str, device: str, technique: str, limit: int, db: Path, as_json: bool) -> int:
    """What earlier candidates showed: what, where, effect with interval, device, why. Newest first.

    \b
    Examples:
      kernelgen lessons
      kernelgen lessons --target kimi-k3-kda --technique edges
    """
    queries = common.recorded(db)[1]
    found = search(queries, target, device, technique)[:limit]
    lines = [
        f"{r['run']} round {r['round']}, {r['target']}: {clean(str(r['text']))}" for r in found
    ]
    common.emit(as_json, {"lessons": found}, "\n".join(lines) or "no lessons")
    return 0
