"""`python -m hf_compile` and the command `hf-compile`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; errors of hf_compile end in one clear line and exit status 1."""
    from .cli import app
    from .errors import HfCompileError

    try:
        app(prog_name="hf-compile")
    except HfCompileError as error:
        print(f"hf-compile: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
