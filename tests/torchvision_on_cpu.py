"""Tests only: import a torchvision whose C extension does not load, as next to a CPU build of torch.

The transforms that the processors of Transformers use are plain Python; what fails is the import, because torchvision
describes operators (nms, roi_align, ...) that its C extension should have defined. Here they are defined with a
placeholder schema; calling one still fails. Users have a torch and a torchvision that match, and need none of this.

    pip install --no-deps --target .torchvision torchvision==0.28.0
"""

import importlib
import importlib.util
import os
import pathlib
import re
import sys

import torch

_libraries: list[torch.library.Library] = []  # operators live as long as their library


def enable_torchvision() -> bool:
    """Make torchvision importable, from $HF_COMPILE_TORCHVISION or <repository>/.torchvision, and say whether it is.

    Call it before Transformers is imported, which asks for torchvision once and remembers the answer.
    """
    if importlib.util.find_spec("torchvision") is None:
        default = pathlib.Path(__file__).parents[1] / ".torchvision"
        folder = pathlib.Path(os.environ.get("HF_COMPILE_TORCHVISION") or default)
        if not (folder / "torchvision").is_dir():
            return False
        sys.path.append(str(folder))  # last: it hides nothing that is installed
        importlib.invalidate_caches()
    if not _import_torchvision():
        _define_operators()
        if not _import_torchvision():
            return False
    _forget_what_transformers_asked()
    return True


def _import_torchvision() -> bool:
    try:
        importlib.import_module("torchvision.transforms.v2")
    except (ImportError, OSError, RuntimeError):  # RuntimeError: operator torchvision::nms does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        return False
    return True


def _define_operators() -> None:
    """Define every operator that torchvision's meta registrations name."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    source = (pathlib.Path(spec.origin).parent / "_meta_registrations.py").read_text()
    library = torch.library.Library("torchvision", "FRAGMENT")
    _libraries.append(library)
    for name in sorted(set(re.findall(r'(?:register_meta|register_fake)\(\s*"(?:torchvision::)?(\w+)"', source))):
        library.define(f"{name}(Tensor input) -> Tensor")


def _forget_what_transformers_asked() -> None:
    asked = sys.modules.get("transformers.utils.import_utils")
    for name, function in vars(asked).items() if asked else ():
        if name == "_is_package_available" or (name.startswith("is_torchvision") and name.endswith("_available")):
            getattr(function, "cache_clear", lambda: None)()
