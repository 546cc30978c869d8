"""Model cards: what a census measured, one Markdown file a model type; nothing here runs a model."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from ..errors import UnsupportedModelError
from .card import MARK, card_of
from .index import index_of
from .records import Census, read_census

__all__ = ["Census", "card_of", "index_of", "read_census", "write_cards"]


def write_cards(census: Census, output: Path, model_types: Sequence[str] = ()) -> list[Path]:
    """Write a card for each model type; for all of them also the index, and remove the cards of models that are gone.

    Args:
        census: what `read_census` returned.
        output: folder of the cards; made when missing.
        model_types: which; all in which an encoder was found when none is named.

    Returns:
        The files, in the order of their names.

    Raises:
        UnsupportedModelError: a model type is not in the census, or no encoder was found in it.
    """
    for model_type in model_types:
        _check(census, model_type)
    texts = {
        output / f"{model_type}.md": card_of(census, model_type)
        for model_type in sorted(set(model_types) or census.model_types())
    }
    if not model_types:
        texts[output / "README.md"] = index_of(census)
    output.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8", newline="\n")
    if not model_types:
        for path in output.glob("*.md"):
            if path not in texts and MARK in path.read_text(encoding="utf-8"):
                path.unlink()
    return sorted(texts)


def _check(census: Census, model_type: str) -> None:
    known = census.model_types()
    if model_type in known:
        return
    for record in census.without_encoder():
        if record["model_type"] == model_type:
            raise UnsupportedModelError(f"{model_type} has no card: {record['error']}")
    close = [name for name in known if model_type.lower() in name.lower()][:5]
    close = difflib.get_close_matches(model_type, known, n=5) or close
    hint = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(known)}"
    raise UnsupportedModelError(f"no model type {model_type!r} in {census.source}; {hint}")
