"""The command line: words in, words out; what is heavy is imported by the handlers."""

from __future__ import annotations

from typing import Annotated

import typer

from .cards import card
from .census import census
from .inspection import inspect
from .running import run

__all__ = ["app"]

app = typer.Typer(
    help="Compile the vision, video and audio encoders of Transformers models.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from hf_compile import __version__

        typer.echo(f"hf-compile {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(inspect)
app.command()(census)
app.command()(card)
# What follows SCRIPT belongs to the script, also what looks like an option of ours.
app.command(context_settings={"allow_interspersed_args": False})(run)
