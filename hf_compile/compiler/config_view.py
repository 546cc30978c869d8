"""A view of a config that names our attention function while a graph is traced, and says the truth always else.

Only the attention modules of a region hold it, in place of their config. So a second model built from the same config
object never sees it, the eager path of the same module takes its own attention, and copies get the original back.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

from torch import nn

from ..attention import ATTENTION_NAME, RAGGED_REPLACES
from ..regions import reads_cu_seqlens
from .tracing import in_our_graph

__all__ = ["put_config_views"]


class _ConfigView:
    def __init__(self, original: Any) -> None:
        object.__setattr__(self, "original", original)

    @property
    def _attn_implementation(self) -> Any:
        implementation = self.original._attn_implementation
        return ATTENTION_NAME if in_our_graph() and implementation in RAGGED_REPLACES else implementation

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # not set yet: a copy in the making
            raise AttributeError(name)
        return getattr(self.original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.original, name, value)

    def __repr__(self) -> str:
        return repr(self.original)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return operator.getitem, ((self.original,), 0)


def put_config_views(region_module: nn.Module) -> Callable[[], None]:
    """Put a view in place of the config of every module from here down that attends in segments; return the undo."""
    changed = [
        (module, vars(module)["config"])
        for module in region_module.modules()
        if "config" in vars(module) and reads_cu_seqlens(module)
    ]
    for module, config in changed:
        vars(module)["config"] = _ConfigView(config)

    def undo() -> None:
        for module, config in changed:
            vars(module)["config"] = config

    return undo
