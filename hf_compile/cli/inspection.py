"""`hf-compile inspect`: what would be compiled, and how."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated, Any, Literal

import typer

from ..config import resolve_switch
from ..errors import HfCompileError, UnsupportedModelError

__all__ = ["inspect"]


def inspect(
    path_or_id: Annotated[
        str, typer.Argument(metavar="PATH_OR_ID", help="A folder with a config.json, or a repository id.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    encoder: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE", help="Module path of the encoder, instead of the search; may be repeated."),
    ] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="Compilation options as a JSON file.")] = None,
    granularity: Annotated[
        Literal["auto", "block", "encoder"] | None,
        typer.Option(help="Compile the repeated blocks, or the whole encoder as one graph."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the repository.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that comes with the checkpoint.")
    ] = False,
) -> None:
    """Show what would be compiled: encoders, regions, and every tensor input. Reads the config, no weights."""
    options = resolve_switch(None, config).config
    if granularity is not None:
        options = dataclasses.replace(options, granularity=granularity)
    hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code or None}
    from ..integrations.loading import inspect_mm_encoder

    try:
        report = inspect_mm_encoder(
            path_or_id,
            compilation_config=options,
            encoder=encoder or None,
            **{name: value for name, value in hub.items() if value is not None},
        )
    except HfCompileError:
        raise
    except (OSError, ValueError, ImportError) as error:  # such as a folder that is not there, or an unknown model type
        raise UnsupportedModelError(f"{path_or_id} cannot be inspected: {error}") from error
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 120).print(report)
