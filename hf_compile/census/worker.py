"""A process that works on the tasks on its standard input, a JSON line each, and answers each with a JSON line."""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Read tasks until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed, by Python or by a library in C, does not mix with the answers
    sys.stdout = sys.stderr
    import torch
    from transformers.utils.logging import set_verbosity

    from .cases import cases
    from .measure import find, measure

    warnings.filterwarnings("ignore")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    set_verbosity(40)  # errors
    known = cases()
    for line in sys.stdin:
        task: dict[str, Any] = json.loads(line)
        if "model_type" in task:
            record = find(**task)
        else:
            name = task.pop("name")
            record = measure(name, known[name], **task)
        print(json.dumps(record), file=answers, flush=True)


if __name__ == "__main__":
    main()
