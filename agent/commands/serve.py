"""`serve`: runs and reviews as pages on this machine, until interrupted."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

import click

from agent.commands import common
from agent.models.base import Unavailable
from agent.review.decide import whoami
from agent.workspace import Place

HOST = "127.0.0.1"


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=8808, help="0 takes a free one.")
@click.option("--open", "launch", is_flag=True, help="Open the page in a browser.")
@common.db_option
@common.out_option
def serve(port: int, launch: bool, db: Path, out: Path | None) -> int:
    """Show runs, plots, diffs and proofs in a browser, and take decisions there.

    Listens on this machine alone; the printed address holds a token that no other user has. It works
    without a network and without scripts.

    \b
    Examples:
      kernelgen serve
      kernelgen serve --port 0 --open
    """
    _run(common.recorded(db, out)[0], port, launch)
    return 0


def _run(place: Place, port: int, launch: bool) -> None:
    """Raises Unavailable, OSError (the port is taken)."""
    try:
        import uvicorn

        from agent.serve.app import build
        from agent.serve.guard import Secrets
    except ImportError as error:
        raise Unavailable(f"pages need more: pip install 'kernelgen[serve]' ({error})") from error
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((HOST, port))
        keys = Secrets(secrets.token_urlsafe(32), bound.getsockname()[1])
        app = build(place, whoami(), keys)
        address = f"http://{HOST}:{keys.port}/?token={keys.token}"
        click.echo(address)
        common.talk().print(
            f"serving {place.db} as {whoami()}; Ctrl-C ends it", markup=False, soft_wrap=True
        )
        if launch:
            click.launch(address)
        # No access log: addresses may hold the token.
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
        uvicorn.Server(config).run(sockets=[bound])
