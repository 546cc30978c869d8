"""Say in words why a region could not be compiled: file, line, cause, remedy."""

from __future__ import annotations

import re

__all__ = ["explain"]

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
_OWN = "hf_compile"


def explain(error: BaseException) -> str:
    """Return one sentence for an error of a compile: where it happened, the cause, and what to do."""
    text = str(error)
    cause = _cause(error, text)
    where = _where(text)
    remedy = _remedy(text)
    return "".join([f"{where}: " if where else "", cause, f"; {remedy}" if remedy else ""])


def _cause(error: BaseException, text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    first = lines[0].rstrip(".:")
    if first.startswith("backend=") and len(lines) > 1:  # torch's wrapper around what a backend raised
        return f"{first} {lines[1]}"
    explanation = next((line.partition("Explanation:")[2].strip() for line in lines if "Explanation:" in line), "")
    return f"{first} ({explanation.rstrip('.')})" if explanation and explanation != first else first


def _where(text: str) -> str:
    frames = [match for match in _FRAME.finditer(text) if f"/{_OWN}/" not in match["file"]]
    if not frames:
        return ""
    file = frames[-1]["file"].replace("\\", "/")
    for root in ("/site-packages/", "/dist-packages/"):
        file = file.rpartition(root)[2]
    return f"{file}:{frames[-1]['line']} in {frames[-1]['name']}"


def _remedy(text: str) -> str:
    if "nvalid C++ compiler" in text or "InvalidCxxCompiler" in text or "No working C++ compiler" in text:
        return "install a C++ compiler (g++ or clang++), or pass backend='eager' to go without"
    if "Constraint" in text and "dynamic" in text:
        return "a dim declared dynamic is fixed by the code; take it out of dynamic_arg_dims"
    hints = re.findall(r"Hint: (.+)", text)
    return hints[0].strip().rstrip(".") if hints else ""
