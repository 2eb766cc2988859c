"""`report`: a run as one HTML file or as Markdown."""

from __future__ import annotations

from pathlib import Path

import click

from agent.commands import common
from agent.report.html import html
from agent.report.markdown import markdown
from agent.report.views import run_view
from agent.workspace import write_bytes


@click.command()
@click.argument("run")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path, allow_dash=True),
              default=None, help="File to write.  [default: stdout]")  # fmt: skip
@click.option("--format", "kind", type=click.Choice(["html", "md"]), default=None,
              help="[default: by the name of the file, else html]")  # fmt: skip
@common.db_option
@common.json_option
def report(run: str, output: Path | None, kind: str | None, db: Path, as_json: bool) -> int:
    """Write a report of a run: plots, lineage, diffs with the proof, what was not verified.

    The HTML is one file that loads nothing. Plots need matplotlib (pip install 'kernelgen[report]').

    \b
    Examples:
      kernelgen report last -o report.html
      kernelgen report last --format md | gh pr comment --body-file -
    """
    queries = common.recorded(db)[1]
    to_stdout = output is None or str(output) == "-"
    if as_json and to_stdout:
        raise common.Usage("--json needs -o FILE: the report itself goes to stdout")
    view = run_view(queries, queries.run(run))
    named_md = output is not None and output.suffix in (".md", ".markdown")
    chosen = kind or ("md" if named_md else "html")
    text = html(view) if chosen == "html" else markdown(view)
    if output is None or to_stdout:
        click.echo(text.rstrip("\n"))
        return 0
    write_bytes(output, text.encode())
    output.chmod(0o644)
    data = {
        "run": view.run["id"],
        "file": str(output),
        "format": chosen,
        "bytes": len(text.encode()),
    }
    common.emit(as_json, data, str(output))
    return 0
