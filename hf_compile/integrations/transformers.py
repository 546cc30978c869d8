"""Make `from_pretrained` of the classes of Transformers understand our keywords, and undo it."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any

__all__ = ["KEYWORDS", "Installation", "install", "uninstall", "when_imported"]

KEYWORDS = ("compile_mm_encoder", "compilation_config")
"""The keywords that `from_pretrained` of a class of Transformers understands while the hook is installed."""

# Nothing is imported for the sake of a patch: a class is patched when its module is there, now or later, so that
# `hf-compile run` leaves a script the time to set what torch and Transformers read when they are imported.
_MODELS = "transformers.modeling_utils"
_AUTO_MODELS = "transformers.models.auto.modeling_auto"
_AUTO_CONFIG = ("transformers.models.auto.configuration_auto", "AutoConfig")
_AUTO_PROCESSORS = (
    ("transformers.models.auto.feature_extraction_auto", "AutoFeatureExtractor"),
    ("transformers.models.auto.image_processing_auto", "AutoImageProcessor"),
    ("transformers.models.auto.processing_auto", "AutoProcessor"),
    ("transformers.models.auto.tokenization_auto", "AutoTokenizer"),
    ("transformers.models.auto.video_processing_auto", "AutoVideoProcessor"),
)

_lock = threading.RLock()
_installed: list[Installation] = []
_undo = contextlib.ExitStack()


class Installation:
    """One call of `install`; a context manager whose end uninstalls it."""

    def uninstall(self) -> None:
        """Undo this `install`; the last one to go takes the classes back to what they were. Twice is once."""
        with _lock:
            if self in _installed:
                _installed.remove(self)
            if not _installed:
                _undo.close()

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.uninstall()


def install() -> Installation:
    """Make `from_pretrained(..., compile_mm_encoder=True, compilation_config=...)` of Transformers compile the model.

    That holds for Auto classes, concrete classes and `transformers.pipeline(..., model_kwargs={"compile_mm_encoder":
    True})`. Without the keyword a model is compiled when the environment or a config file says so, and then one
    without an encoder is left alone. Installing again is counted.

    Returns:
        A handle with `.uninstall()`, which is a context manager too.

    ```python
    >>> import hf_compile
    >>> from transformers import AutoModel
    >>> with hf_compile.install():
    ...     AutoModel.from_pretrained("no/where", compile_mm_encoder="maybe")
    Traceback (most recent call last):
    hf_compile.errors.ConfigurationError: compile_mm_encoder='maybe' is not legal; choose True or False

    ```
    """
    installation = Installation()
    with _lock:
        _installed.append(installation)
        if len(_installed) == 1:
            try:
                _patch_all()
            except BaseException:
                installation.uninstall()
                raise
    return installation


def uninstall() -> None:
    """Undo the newest `install`; without one there is nothing to undo."""
    with _lock:
        if _installed:
            _installed[-1].uninstall()


def _load(call: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    from . import loading

    return loading.load_with_keywords(call, kwargs)


def _check(call: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Refuse bad options where a pipeline starts; the keywords stay, as unused ones do."""
    if any(name in kwargs for name in KEYWORDS):
        from . import loading

        loading.check_keywords(kwargs)
    return call(**kwargs)


def _drop(call: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Keep the `model_kwargs` of a pipeline out of its tokenizer, which would write them into its files."""
    return call(**{name: value for name, value in kwargs.items() if name not in KEYWORDS})


def _patch_all() -> None:
    _undo.callback(when_imported(_MODELS, functools.partial(_patch_named, "PreTrainedModel", _load)))
    _undo.callback(when_imported(_AUTO_MODELS, _patch_auto_models))
    for replacement, places in ((_check, (_AUTO_CONFIG,)), (_drop, _AUTO_PROCESSORS)):
        for name, class_name in places:
            _undo.callback(when_imported(name, functools.partial(_patch_named, class_name, replacement)))


def _patch_auto_models(module: ModuleType) -> None:
    for found in list(vars(module).values()):
        if isinstance(found, type) and hasattr(found, "_model_mapping"):
            _patch(found, _load)


def _patch_named(class_name: str, replacement: Callable[..., Any], module: ModuleType) -> None:
    _patch(getattr(module, class_name), replacement)


def _patch(owner: type, replacement: Callable[[Callable[..., Any], dict[str, Any]], Any]) -> None:
    original = vars(owner).get("from_pretrained")
    if not isinstance(original, classmethod):
        return  # inherited from a class that is patched too
    function = original.__func__

    @functools.wraps(function)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(function, cls, *args)
        if not _installed:  # somebody patched on top of us, and holds on to this
            return call(**kwargs)
        return replacement(call, kwargs)

    ours: Any = classmethod(from_pretrained)

    def restore() -> None:
        if vars(owner).get("from_pretrained") is ours:
            owner.from_pretrained = original  # type: ignore[attr-defined]

    _undo.callback(restore)
    owner.from_pretrained = ours  # type: ignore[attr-defined]


class _Finder:
    """Finds modules as the other finders do, and calls back when one that is waited for was executed."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, Callable[[ModuleType], None]]] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(name == waited_for for waited_for, _ in self.waiting):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                with _lock:
                    for entry in [each for each in self.waiting if each[0] == name]:
                        self.forget(entry)
                        entry[1](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def wait(self, entry: tuple[str, Callable[[ModuleType], None]]) -> None:
        self.waiting.append(entry)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def forget(self, entry: tuple[str, Callable[[ModuleType], None]]) -> None:
        if entry in self.waiting:
            self.waiting.remove(entry)
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)


_finder = _Finder()


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call back with a module: at once when it is imported already, else right after its import.

    Returns:
        The undo, which stops the waiting.
    """
    entry = (name, callback)
    with _lock:
        module = sys.modules.get(name)
        if module is not None:
            callback(module)
        else:
            _finder.wait(entry)

    def forget() -> None:
        with _lock:
            _finder.forget(entry)

    return forget
