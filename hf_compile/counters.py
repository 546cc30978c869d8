"""Counts of what was compiled, for the whole process and, by the same class, for one model."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

__all__ = ["CompilationCounter", "compilation_counter"]

_lock = threading.Lock()


@dataclasses.dataclass
class CompilationCounter:
    """Count models, graphs and compilations.

    The names follow vLLM's counter of the same name where the meaning is the same.

    ```python
    >>> from hf_compile import compilation_counter
    >>> with compilation_counter.expect(num_graphs_seen=0):
    ...     pass

    ```
    """

    num_models_seen: int = 0
    """Models to which `compile_mm_encoder` was applied."""
    num_graphs_seen: int = 0
    """Graphs that reached a backend."""
    num_backend_compilations: int = 0
    """Graphs that a backend compiled without an error."""
    num_compile_failures: int = 0
    """Calls whose compile failed and that ran eager instead."""
    num_eager_calls: int = 0
    """Region calls that ran eager, for whatever reason."""

    def add(self, **counts: int) -> None:
        """Add to the named counts; safe from several threads."""
        with _lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def to_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return dataclasses.asdict(self)

    @contextlib.contextmanager
    def expect(self, **changes: int) -> Iterator[None]:
        """Check that the body changes the named counts by exactly these numbers.

        Raises:
            AssertionError: a count changed by another number.
            AttributeError: there is no count of that name.
        """
        before = {name: getattr(self, name) for name in changes}
        yield
        wrong = [
            f"{name}: expected a change of {change}, found {getattr(self, name) - before[name]}"
            for name, change in changes.items()
            if getattr(self, name) - before[name] != change
        ]
        if wrong:
            raise AssertionError("compilation_counter: " + "; ".join(wrong))


compilation_counter = CompilationCounter()
"""The counter of the whole process."""
