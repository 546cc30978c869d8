"""Outcomes, reasons and numbers in words, and the little Markdown that cards are made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "code",
    "difference_of",
    "escape",
    "join",
    "kind_of_encoder",
    "number",
    "outcome_of",
    "percent",
    "reasons_of",
    "table",
    "without_indices",
]

Record = Mapping[str, Any]

_OUTCOMES = {
    "one_graph": "compiled, one graph each",
    "one_graph_late": "compiled, one graph each, not all on the first call",
    "more_graphs": "compiled, more than one graph",
    "refused": "refused",
    "failed": "could not be measured",
    "absent": "not in this Transformers",
}
_LONGEST_REASON = 400
_SHAPED = re.compile(r"([A-Za-z_][\w.\[\]]*) \d+(?:x\d+)*(?:,|$)")
_NEXT_REASON = re.compile(r"; (?=graph \d+ was made for |\d+ calls ran eager: )")
_MARKDOWN = re.compile(r"[\\`*<>|\[\]]|(?<!\w)_|_(?!\w)")


def outcome_of(record: Record | None) -> str:
    """Return the outcome of a measurement, in words for a table."""
    if record is None:
        return "not measured"
    outcome = str(record["outcome"])
    if outcome == "eager":
        compiled = any(region["state"] == "compiled" for region in record["regions"])
        return "partly eager" if compiled else "eager"
    if outcome == "wrong":
        return "differs from eager" if record.get("undone", True) else "undone incompletely"
    return _OUTCOMES.get(outcome, outcome.replace("_", " "))


def reasons_of(text: str) -> list[str]:
    """Return the reasons of a region: the call that each graph was made for, what tells them apart, eager calls."""
    reasons = list(filter(None, _NEXT_REASON.split(" ".join(text.split()))))
    names = [set(_SHAPED.findall(reason)) for reason in reasons if reason.startswith("graph ")]
    if names and (some := set.union(*names) - set.intersection(*names)):
        reasons.append(f"some of these calls lack {join(sorted(some))}")
    elif len({reason.partition(" was made for ")[2] for reason in reasons}) < len(names):
        reasons.append("some of these calls have equal sizes: what differs is no tensor's size")
    return [
        escape(each if len(each) <= _LONGEST_REASON else f"{each[:_LONGEST_REASON].rstrip()} …") for each in reasons
    ]


def difference_of(record: Record) -> str:
    """Return the largest difference to eager, relative to the largest value; and of both to float64, where taken."""
    if "relative_difference" not in record:
        return ""
    text = number(record["relative_difference"])
    if "compiled_error" in record:
        text += f"; to float64 {number(record['compiled_error'])}, eager {number(record['eager_error'])}"
    return text


def percent(share: float) -> str:
    """Return a share as percent, with one digit at most; what is not all is never 100 %."""
    shown = f"{100 * share:.1f}".removesuffix(".0")
    return f"{'99.9' if shown == '100' and share < 1 else shown} %"


def number(value: float) -> str:
    """Return a difference with one digit, 0 as 0."""
    return f"{value:.0e}" if value else "0"


def kind_of_encoder(modalities: Iterable[str]) -> str:
    """Return "vision" for images with videos, else the modalities."""
    names = list(dict.fromkeys(modalities))
    if {"image", "video"} <= set(names):
        names = ["vision", *(name for name in names if name not in ("image", "video"))]
    return join(names)


def join(words: Sequence[str]) -> str:
    """Return "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def code(text: str) -> str:
    """Return text set as code."""
    return f"`{text}`"


def escape(text: str) -> str:
    """Return text in which nothing is Markdown."""
    return _MARKDOWN.sub(lambda match: f"\\{match[0]}", text)


def table(headings: Sequence[str], rows: Iterable[Sequence[str | int]], numbers: Iterable[str] = ()) -> str:
    """Return a table; columns named in `numbers` are set right."""
    right = set(numbers)
    lines = [headings, ["---:" if heading in right else "---" for heading in headings], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def without_indices(paths: Iterable[str]) -> list[str]:
    """Return module paths as code, with `*` for the index of a layer, each once."""
    names = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", path) for path in paths)
    return [name if " " in name else code(name) for name in names]  # "its own parameters" is no path
