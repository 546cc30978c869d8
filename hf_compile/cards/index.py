"""The index of the cards: every model type that takes media, and what became of it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable

from .card import MARK
from .records import Census, Encoder, Record, share_inside
from .words import code, difference_of, escape, join, number, outcome_of, percent, table

__all__ = ["index_of"]


def index_of(census: Census) -> str:
    """Return the index as Markdown: totals, a row for each model type, and what has no card."""
    parts = [
        MARK,
        "# Model cards",
        _totals(census),
        "## Models\n\n" + _models(census),
        *_without(census),
        *_unused(census),
    ]
    return "\n\n".join(parts) + "\n"


def _totals(census: Census) -> str:
    run = census.main
    outcomes: collections.Counter[str] = collections.Counter()
    for model_type in census.model_types():
        outcomes.update(_outcome(census, encoder) for encoder in census.encoders(model_type))
    reasons = collections.Counter(record["outcome"] for record in census.without_encoder())
    cases = collections.Counter(outcome_of(record) for record in run.records.values())
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return "\n".join(
        [
            f"What `hf_compile` does with the models of Transformers {run.versions['transformers']} that take images, "
            "video or sound. A card says how a model's encoder was compiled, with how many graphs, and what stays "
            "eager.",
            "",
            f"- {len(census.models)} model types take media and text: {len(census.model_types())} with an encoder "
            f"of their own, {reasons['no_encoder']} without, {reasons.total() - reasons['no_encoder']} not built.",
            f"- {outcomes.total()} encoders in these models: {_counted(outcomes)}.",
            f"- {len(run.records)} cases measured: {_counted(cases)}.",
            "",
            f"Each case is a tiny encoder, called {run.sizes} times with inputs of different sizes, compared with "
            "eager, and undone. Graphs are those after the last call; a difference is relative to the largest value "
            "of eager; inside is the share of the parameters that lie inside regions at the size of the default "
            f"config. Versions: {versions}. Again: `hf-compile census`, then `make cards`.",
        ]
    )


def _counted(counts: collections.Counter[str]) -> str:
    return "; ".join(f"{count} {words}" for words, count in sorted(counts.items(), key=lambda item: (-item[1], item)))


def _models(census: Census) -> str:
    headings = (
        *("model type", "encoders", "takes", "compiled in", "regions", "graphs", "inside", "outcome", "difference"),
    )
    rows = []
    for model_type in census.model_types():
        encoders = census.encoders(model_type)
        records = [census.main.records[encoder.cases[0]] if encoder.cases else {} for encoder in encoders]
        rows.append(
            (
                f"[{model_type}]({model_type}.md)",
                _lines(code(encoder.class_name) for encoder in encoders),
                _lines(join(encoder.modalities) for encoder in encoders),
                _lines(_granularity(record) for record in records),
                _lines(_regions(record) for record in records),
                _lines(str(record.get("graphs", "")) for record in records),
                _lines(percent(share_inside(record)) if "coverage" in record else "" for record in records),
                _lines(_outcome(census, encoder) for encoder in encoders),
                _lines(map(_difference(census), encoders)),
            )
        )
    return table(headings, rows, ("regions", "graphs", "inside"))


def _granularity(record: Record) -> str:
    return {"block": "blocks", "encoder": "one piece"}.get(record.get("granularity", ""), "")


def _regions(record: Record) -> str:
    if "regions" not in record:
        return ""
    return str(sum(region["state"] != "pending" for region in record["regions"]))


def _outcome(census: Census, encoder: Encoder) -> str:
    """Return the outcome of the first case, and which variants fare otherwise."""
    if not encoder.cases:
        return outcome_of(None)
    first, *variants = (outcome_of(census.main.records[case]) for case in encoder.cases)
    others = len([each for each in variants if each != first])
    return first + (f" ({others} of {len(encoder.cases)} cases otherwise)" if others else "")


def _difference(census: Census) -> Callable[[Encoder], str]:
    def largest(encoder: Encoder) -> str:
        records = (census.main.records[case] for case in encoder.cases)
        found = [record["relative_difference"] for record in records if "relative_difference" in record]
        return number(max(found)) if found else ""

    return largest


def _lines(cells: Iterable[str]) -> str:
    shown = list(cells)
    return "<br>".join(cell or "-" for cell in shown) if any(shown) else ""


def _without(census: Census) -> list[str]:
    rows: dict[str, list[str]] = {"No separable encoder": [], "Not built": []}
    for record in census.without_encoder():
        heading = "No separable encoder" if record["outcome"] == "no_encoder" else "Not built"
        reason = " ".join(record["error"].removeprefix("UnsupportedModelError: ").split())
        rows[heading].append(f"- {code(record['model_type'])}: {escape(reason)}")
    return [f"## {heading}\n\n" + "\n".join(lines) for heading, lines in rows.items() if lines]


def _unused(census: Census) -> list[str]:
    records = census.unused()
    if not records:
        return []
    rows = [
        (
            code(record["name"]),
            code(record["class"]) if record.get("class") else "",
            _regions(record),
            record.get("graphs", ""),
            outcome_of(record),
            difference_of(record),
        )
        for record in records
    ]
    headings = ("case", "class", "regions", "graphs", "outcome", "difference")
    return [
        "## Measured without a card\n\nEncoders of models that take no text, other sizes of a family, projectors, and "
        "parts of encoders.\n\n" + table(headings, rows, ("regions", "graphs"))
    ]
