"""Say in words why a region could not be compiled: file, line, cause, remedy."""

from __future__ import annotations

import os
import re
import sysconfig

import torch

__all__ = ["explain"]

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
_FIXED = re.compile(
    r"You marked (?P<dim>.+?) as dynamic but your code specialized it to be a constant \((?P<size>\d+)\)"
)
_NOISE = re.compile(
    r"Consider annotating your code using torch\._check\*\(\)\. | *\((unhinted|Size-like symbols): .*\)"
)
_OWN = os.path.dirname(__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep


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
    fixed = _FIXED.search(text)
    if fixed is not None:
        return f"{fixed['dim']} was declared dynamic, and the code fixes it at {fixed['size']}"
    first = _NOISE.sub("", lines[0]).rstrip(" .:")
    if first.startswith("backend=") and len(lines) > 1:  # torch's wrapper around what a backend raised
        return f"{first} {lines[1]}"
    explanation = next((line.partition("Explanation:")[2].strip() for line in lines if "Explanation:" in line), "")
    return f"{first} ({explanation.rstrip('.')})" if explanation and explanation != first else first


def _where(text: str) -> str:
    """Return the innermost line of the model's code; one of torch or Python itself only when there is no other."""
    frames = [match for match in _FRAME.finditer(text) if not match["file"].startswith(_OWN)]
    frames = [match for match in frames if not _is_library(match["file"])] or frames
    if not frames:
        return ""
    file = frames[-1]["file"].replace("\\", "/")
    for root in ("/site-packages/", "/dist-packages/"):
        file = file.rpartition(root)[2]
    return f"{file}:{frames[-1]['line']} in {frames[-1]['name']}"


def _is_library(file: str) -> bool:
    """Say whether a file is torch's or Python's own; installed packages may lie below Python's folder."""
    return file.startswith(_TORCH) or (file.startswith(_PYTHON) and "-packages" not in file)


def _remedy(text: str) -> str:
    if "nvalid C++ compiler" in text or "InvalidCxxCompiler" in text or "No working C++ compiler" in text:
        return "install a C++ compiler (g++ or clang++), or pass backend='eager' to go without"
    if "Constraint" in text and "dynamic" in text:
        return "take it out of dynamic_arg_dims"
    if "data-dependent expression" in text:
        return (
            "the code branches on values that only a run can tell: write it with torch.where, or keep its class eager "
            "with ignore_torch_compile"
        )
    hints = re.findall(r"Hint: (.+)", text)
    return hints[0].strip().rstrip(".") if hints else ""
