"""A progress bar for compiles that take long, with the switches of Transformers' own bars."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from transformers.utils import logging

__all__ = ["progress_bar"]

SHOWN_AFTER_SECONDS = 2.0


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[None]:
    """Show a bar that counts seconds once the body has run for 2 s."""
    if not (logging.is_progress_bar_enabled() and _is_watched()):
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_tick, args=(description, done), name="hf_compile-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _is_watched() -> bool:
    """Say whether somebody sees the bar: in a terminal or a notebook, not in a log file."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _tick(description: str, done: threading.Event) -> None:
    if done.wait(SHOWN_AFTER_SECONDS):
        return
    started = time.monotonic() - SHOWN_AFTER_SECONDS
    with logging.tqdm(desc=description, unit="s", bar_format="{desc}: {n:.0f} s", leave=False) as bar:
        while True:
            bar.n = time.monotonic() - started
            bar.refresh()
            if done.wait(1.0):
                return
