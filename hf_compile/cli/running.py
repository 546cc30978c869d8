"""`hf-compile run`: a script as it is, with the encoders of the models it loads compiled."""

from __future__ import annotations

import atexit
import json
import os
import pathlib
import runpy
import sys
import weakref
from types import ModuleType, TracebackType
from typing import Annotated, Any

import typer

from ..config import CONFIG_NAME, ENV_CONFIG, ENV_SWITCH, resolve_switch

__all__ = ["run"]


def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, or with -m the module, to run.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Its own arguments, passed on untouched.")
    ] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="Compilation options as a JSON file.")] = None,
    compile_mm_encoder: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help=f"The switch. Default: {ENV_SWITCH}, else what the options say, else on.",
            show_default=False,
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module name, as in python -m.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="At the end, print to stderr what was compiled and what was not, and why.")
    ] = False,
) -> None:
    """Run a Python script with the encoders of the models it loads compiled; the script is not edited.

    Also under a launcher: accelerate launch -m hf_compile run SCRIPT, or torchrun -m hf_compile run SCRIPT.
    """
    if not module and not os.path.exists(script):
        raise typer.BadParameter(f"there is no {script!r}", param_hint="SCRIPT")
    _decide(compile_mm_encoder, config)
    from ..integrations.transformers import install, when_imported

    # Nothing of this is undone: threads and exit handlers of the script outlive its last line.
    install()
    if report:
        reports = _Reports()
        atexit.register(reports.print)
        when_imported("hf_compile.api", reports.listen)
    sys.argv = [script, *(args or ())]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(script))
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever ends the script is shown as Python shows it
        error = error.with_traceback(_of_script(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _decide(compile_mm_encoder: bool | None, config: str | None) -> None:
    """Put the switch and the options into the environment, where each door that the script uses finds them.

    Raises:
        ConfigurationError: an option or an environment variable is illegal.
    """
    if config is not None:  # the script may change the folder
        os.environ[ENV_CONFIG] = config if config.startswith("{") else os.path.abspath(config)
    if compile_mm_encoder is not None:
        os.environ[ENV_SWITCH] = "1" if compile_mm_encoder else "0"
    switch = resolve_switch()
    if os.environ.get(ENV_SWITCH, "").strip():
        return
    source = os.environ.get(ENV_CONFIG, "").strip()
    if "compile_mm_encoder" not in _read_options(source):
        os.environ[ENV_SWITCH] = "1"
        resolve_switch()
    elif not switch.enabled:
        note = f"hf-compile: compile_mm_encoder is false in {source}; nothing is compiled without --compile"
        print(note, file=sys.stderr)


def _read_options(source: str) -> Any:
    if not source:
        return {}
    if source.startswith("{"):
        return json.loads(source)
    path = pathlib.Path(source)
    return json.loads((path / CONFIG_NAME if path.is_dir() else path).read_text(encoding="utf-8"))


def _of_script(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that started the script."""
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") in ("runpy", __name__):
        traceback = traceback.tb_next
    return traceback


class _Reports:
    """Remembers how every model that is compiled in this process fared, without keeping the models alive.

    A bare encoder is the exception: its plan holds it, so it stays until the end.
    """

    def __init__(self) -> None:
        self.reports: dict[int, Any] = {}

    def listen(self, api: ModuleType) -> None:
        """Take note of every model that `api` compiles from now on."""
        api.attach_listeners.append(self.note)

    def note(self, model: Any, attached: Any) -> None:
        """Report on a model when it goes; at the latest, when Python exits."""
        number = len(self.reports)
        self.reports[number] = None
        weakref.finalize(model, self._write, number, attached)

    def _write(self, number: int, attached: Any) -> None:
        from ..report import report

        self.reports[number] = report(attached.plan, attached)

    def print(self) -> None:
        """Print all reports; with several processes each line starts with the rank."""
        text = "\n\n".join(str(report) for report in self.reports.values() if report is not None)
        text = text or "hf-compile: no model was compiled in this process"
        prefix = f"[rank {os.environ.get('RANK', '0')}] " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        print("".join(f"{prefix}{line}\n" for line in text.splitlines()), end="", file=sys.stderr, flush=True)
