"""`hf-compile card`: what the census measured, as a model card for each model type."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["card"]


def card(
    model_types: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL_TYPE]...", help="Such as qwen2_5_vl; all, and the index, when none is named."),
    ] = None,
    census: Annotated[Path, typer.Option(metavar="FILE", help="What `hf-compile census --output` wrote.")] = Path(
        "benchmarks/census.json"
    ),
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the cards.")] = Path("model_cards"),
) -> None:
    """Write model cards from the results of a census; nothing is measured, and no model is built."""
    from ..cards import read_census, write_cards

    written = write_cards(read_census(census), output, model_types or ())
    typer.echo(f"{len(written)} files written to {output}" if len(written) > 1 else f"written: {written[0]}")
