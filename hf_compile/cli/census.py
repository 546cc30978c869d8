"""`hf-compile census`: every encoder of the installed Transformers, compiled and compared."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import ConfigurationError, VerificationError

__all__ = ["census"]

_BEST_FIRST = ("one_graph", "one_graph_late", "more_graphs", "eager", "refused", "wrong", "failed")
RANKS = {outcome: rank for rank, outcome in enumerate(_BEST_FIRST)}


def census(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Encoders of the tables; all when none is named.")
    ] = None,
    granularity: Annotated[
        Literal["auto", "block", "encoder"], typer.Option(help="As in CompilationConfig.")
    ] = "auto",
    backend: Annotated[str, typer.Option(help='"eager" counts graphs; "inductor" compiles.')] = "eager",
    seed: Annotated[int, typer.Option(help="For the weights, the sizes and the numbers.")] = 0,
    sizes: Annotated[int, typer.Option(min=2, help="Calls of different size for each encoder.")] = 8,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that measure side by side.")] = 2,
    models: Annotated[bool, typer.Option(help="Also list what is found in every model that takes media.")] = True,
    sample: Annotated[
        bool, typer.Option("--sample", help="Only the sample that stands for all, for Inductor.")
    ] = False,
    check: Annotated[
        Path | None, typer.Option(help="Fail where an encoder does worse than in this earlier JSON file.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write all records to this JSON file.")] = None,
) -> None:
    """Build a tiny model of every encoder, compile it, call it with many sizes, compare with eager, and undo it."""
    from ..census.cases import cases
    from ..census.run import SCHEMA_VERSION, run_census, summary, versions
    from ..census.tables import SAMPLE

    known = list(cases())
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ConfigurationError(
            f"no encoder {unknown[0]!r} in the tables of the census; there are {', '.join(known)}"
        )
    if names and sample:
        raise ConfigurationError("--sample names the encoders already: leave out the names, or --sample")
    names = names or (list(SAMPLE) if sample else known)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    options: dict[str, Any] = {"granularity": granularity, "backend": backend, "seed": seed, "sizes": sizes}
    records = run_census([{"name": name, **options} for name in names], jobs=jobs, on_record=_say)
    content = {"schema_version": SCHEMA_VERSION, "versions": versions(), **options, "summary": summary(records)}
    content["encoders"] = records
    typer.echo(f"encoders: {_words(content['summary'])}")
    if models and names == known:
        from ..census.models import media_models

        found = run_census([{"model_type": model_type} for model_type, _, _ in media_models()], jobs=jobs)
        content |= {"models_summary": summary(found), "models": found}
        typer.echo(f"models: {_words(content['models_summary'])}")
    if output is not None:
        output.write_text(json.dumps(content, indent=1) + "\n")
        typer.echo(f"written to {output}")
    if check is not None:
        _compare(records, json.loads(check.read_text())["encoders"])


def _compare(records: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """Raise a plain error that names every encoder whose outcome was better before."""
    was = {record["name"]: record["outcome"] for record in before}
    worse = [
        f"{record['name']}: {record['outcome']}, was {was[record['name']]}"
        for record in records
        if record["outcome"] in RANKS and RANKS[record["outcome"]] > RANKS.get(was.get(record["name"], ""), len(RANKS))
    ]
    if worse:
        raise VerificationError("worse than before: " + "; ".join(worse))


def _say(record: dict[str, Any]) -> None:
    called = [region for region in record.get("regions", ()) if region["state"] != "pending"]
    graphs = ", ".join(f"{region['class_name']} {region['graphs']}" for region in called)
    difference = f"difference {record['relative_difference']:.0e}" if "relative_difference" in record else ""
    reasons = "; ".join(region["reason"] for region in called if region["reason"]) or record.get("error", "")
    typer.echo("  ".join(filter(None, (record["name"], record["outcome"], graphs, difference, reasons[:200]))))


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in counts.items())
