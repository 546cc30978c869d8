"""Measure many cases in worker processes; a worker that dies or hangs costs one record, which says so."""

from __future__ import annotations

import collections
import json
import platform
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["SCHEMA_VERSION", "run_census", "summary"]

SCHEMA_VERSION = 1
_CASES_PER_WORKER = 12  # Dynamo's memory grows with every graph
_SECONDS_PER_CASE = 900


def run_census(
    tasks: Iterable[Mapping[str, Any]], *, jobs: int = 2, on_record: Callable[[dict[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """Return one record for each task, in the order of the tasks.

    Args:
        tasks: a case by `name`, with the options of `measure`; or a model by `model_type`.
        jobs: worker processes; each uses one thread.
        on_record: called with each record as it comes.
    """
    waiting: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
    listed = [dict(task) for task in tasks]
    for item in enumerate(listed):
        waiting.put(item)
    records: dict[int, dict[str, Any]] = {}

    def serve() -> None:
        worker, done = None, 0
        try:
            while True:
                try:
                    index, task = waiting.get_nowait()
                except queue.Empty:
                    return
                if worker is None or done == _CASES_PER_WORKER or worker.poll() is not None:
                    _stop(worker)
                    worker, done = _start(), 0
                records[index] = _ask(worker, task)
                done += 1
                if on_record is not None:
                    on_record(records[index])
        finally:
            _stop(worker)

    threads = [threading.Thread(target=serve) for _ in range(min(jobs, len(listed)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [records[index] for index in range(len(listed))]


def summary(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return outcome -> how many records have it."""
    return dict(sorted(collections.Counter(record["outcome"] for record in records).items()))


def versions() -> dict[str, str]:
    """Return what the results depend on."""
    from importlib.metadata import version

    found = {name: version(name) for name in ("torch", "transformers", "hf-compile")}
    return {"python": platform.python_version(), **found}


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hf_compile.census.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _ask(worker: subprocess.Popen[str], task: Mapping[str, Any]) -> dict[str, Any]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    started = time.monotonic()
    alarm = threading.Timer(_SECONDS_PER_CASE, worker.kill)
    alarm.start()
    try:
        print(json.dumps(task), file=worker.stdin, flush=True)
        answer = worker.stdout.readline()
    except BrokenPipeError:
        answer = ""
    finally:
        alarm.cancel()
    if answer:
        record: dict[str, Any] = json.loads(answer)
        return record
    worker.wait()
    name = {key: task[key] for key in ("name", "model_type") if key in task}
    error = f"its process ended with exit status {worker.returncode}"
    if time.monotonic() - started >= _SECONDS_PER_CASE:
        error = f"it was not done after {_SECONDS_PER_CASE} s, and its process was ended"
    return {**name, "outcome": "failed", "error": error}


def _stop(worker: subprocess.Popen[str] | None) -> None:
    if worker is None:
        return
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.close()  # the worker ends with its input
    worker.wait()
    worker.stdout.close()
