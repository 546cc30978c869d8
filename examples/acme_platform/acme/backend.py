"""The backend: takes each graph that torch has captured and returns what runs it."""

from collections.abc import Callable
from typing import Any

import torch

from . import runtime


def compile_graph(graph_module: torch.fx.GraphModule, example_inputs: list[Any], **options: Any) -> Callable[..., Any]:
    """Compile a graph. This one counts it and runs its operations as they are; sizes may vary from call to call.

    Args:
        graph_module: the operations.
        example_inputs: tensors without data, and integers where a size varies.
        options: the `options` of the platform and of `CompilationConfig`.
    """
    operations = sum(node.op in ("call_function", "call_method", "call_module") for node in graph_module.graph.nodes)
    runtime.graphs.append(f"{operations} operations, options {options or 'none'}")
    return graph_module.forward
