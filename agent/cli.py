"""`kernelgen`: the command group, settings files, and what an error becomes: one line on stderr and
an exit code.

Exit codes: 0 done, 1 a check failed or nothing better was found, 2 usage, 3 stopped with a partial
result (budget spent, or waiting), 4 the device or toolchain is missing, 130 interrupted.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any

import click

from agent.commands.common import code_of, complain, said

COMMANDS = {
    "optimize": "optimize", "resume": "optimize", "evaluate": "evaluate", "compile": "evaluate",
    "judge": "judge", "record": "judge", "targets": "listing", "runs": "listing", "show": "show",
    "review": "review", "report": "report", "serve": "serve", "export": "export",
    "mcp": "mcp", "doctor": "doctor", "bench": "bench", "lessons": "lessons",
    "trajectory": "replay", "replay": "replay",
}  # fmt: skip


class Kernelgen(click.Group):
    """Loads a command's module when it is asked for, and ends the process with our exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"agent.commands.{COMMANDS[cmd_name]}")
        found = getattr(module, cmd_name, None) or getattr(module, f"{cmd_name}_")
        return found if isinstance(found, click.Command) else None

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            result = super().main(*args, **kwargs)
        except click.UsageError as error:
            error.show()
            sys.exit(2)
        except (KeyboardInterrupt, click.Abort):
            complain("interrupted")
            sys.exit(130)
        except BrokenPipeError:
            sys.exit(1)
        except Exception as error:
            code = code_of(error)
            if code is None:
                raise
            complain(said(error))
            sys.exit(code)
        sys.exit(result if isinstance(result, int) else 0)


@click.group(
    cls=Kernelgen,
    context_settings={
        "auto_envvar_prefix": "KERNELGEN",
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "max_content_width": 100,
    },
)
@click.version_option(package_name="kernelgen", prog_name="kernelgen")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    help="Talk of the libraries, on stderr.",
)
@click.pass_context
def main(ctx: click.Context, log_level: str) -> None:
    """Write and tune GPU kernels with language models; a judge decides.

    \b
    Examples:
      kernelgen optimize --target kimi-k3-decode
      kernelgen evaluate --target kimi-k3-decode --preset tiny seed
      kernelgen runs
      kernelgen show last

    Every option can come from the environment (KERNELGEN_<COMMAND>_<OPTION>) or from
    kernelgen.toml.
    """
    from agent.config import file_defaults

    logging.basicConfig(level=log_level.upper(), stream=sys.stderr, format="%(name)s: %(message)s")
    found, _ = file_defaults(Path.cwd())
    shared = {k: v for k, v in found.items() if not isinstance(v, dict)}
    own = {k: v for k, v in found.items() if isinstance(v, dict)}
    ctx.default_map = {name: {**shared, **own.get(name, {})} for name in COMMANDS}


if __name__ == "__main__":
    main()
