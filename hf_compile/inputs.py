"""Make small inputs for an encoder from its config, to check what only a call can tell."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .signature import unwrapped_forward

__all__ = ["leaf_tensors", "make_inputs", "observe_ranks"]


def make_inputs(encoder: nn.Module) -> dict[str, torch.Tensor] | None:
    """Return keyword inputs for one call of batch 1, or None when the config does not tell how to make them.

    `pixel_values` is (1, channels, height, width); packed encoders get patches (8 * 8, channels * frames * patch ** 2)
    and `grid_thw` (1, 3); `input_features` is (1, mel bins, frames); `input_values` is (1, samples).
    """
    config = getattr(encoder, "config", None)
    parameter = next(encoder.parameters(), None)
    if config is None or parameter is None or parameter.device.type == "meta":
        return None
    names = list(inspect.signature(unwrapped_forward(encoder)).parameters)[1:]

    def read(*attributes: str) -> Any:
        return next((getattr(config, name) for name in attributes if getattr(config, name, None) is not None), None)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)

    channels = read("num_channels", "in_channels", "in_chans")
    size, patch = read("image_size"), read("patch_size")
    mel_bins, positions = read("num_mel_bins", "feature_size"), read("max_source_positions")
    if "grid_thw" in names and channels and isinstance(patch, int):
        frames = read("temporal_patch_size") or 1
        grid = torch.tensor([[1, 8, 8]], device=parameter.device)
        return {names[0]: zeros(64, channels * frames * patch**2), "grid_thw": grid}
    if "pixel_values" in names and channels and size:
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": zeros(1, channels, height, width)}
    if "input_features" in names and mel_bins:
        return {"input_features": zeros(1, mel_bins, 2 * (positions or 100))}
    if "input_values" in names:
        return {"input_values": zeros(1, 16000)}
    return None


def observe_ranks(
    encoder: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    regions: Iterable[tuple[str, Mapping[str, nn.Module], tuple[str, ...]]],
) -> dict[tuple[str, str], int]:
    """Return (region class, argument) -> number of dims, seen in one eager call; of a container, the smallest.

    An encoder that rejects the made-up input gives what was seen until then.
    """
    ranks: dict[tuple[str, str], int] = {}
    handles = []

    def watch(class_name: str, module: nn.Module, arguments: tuple[str, ...]) -> None:
        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for name, value in {**dict(zip(arguments, args, strict=False)), **kwargs}.items():
                seen = [tensor.dim() for tensor in _tensors(value)]
                if seen:
                    ranks[class_name, name] = min(seen)

        handles.append(module.register_forward_pre_hook(record, with_kwargs=True))

    training = [module for module in encoder.modules() if module.training]
    try:
        for class_name, modules, arguments in regions:
            watch(class_name, next(iter(modules.values())), arguments)
        encoder.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # what is compiled already is not called
            encoder(**inputs)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError):
        return ranks  # the input was a guess; the first real call checks what is missing here
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True
    return ranks


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(member)


def leaf_tensors(
    arguments: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return name -> plain tensor of a call, containers looked into."""
    found: dict[str, torch.Tensor] = {}

    def walk(name: str, value: Any) -> None:
        if type(value) is torch.Tensor:
            found[name] = value
        elif isinstance(value, (tuple, list)):
            for index, member in enumerate(value):
                walk(f"{name}[{index}]", member)
        elif isinstance(value, Mapping):
            for key, member in value.items():
                walk(f"{name}[{key}]", member)

    for position, value in enumerate(args):
        walk(arguments[position] if position < len(arguments) else f"args[{position}]", value)
    for name, value in kwargs.items():
        walk(name, value)
    return found
