"""What a census needs to know of an encoder: its class, options for a tiny one, and how to make inputs of many sizes.

The tables are in `tables/`. A new encoder is two lines there: a name with its class, and the recipe of its inputs.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError

__all__ = ["Case", "Draw", "build", "build_at_full_size", "cases", "draws"]

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "d_model": 32,
    "embed_dim": 32,
    "intermediate_size": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_hidden_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "depth": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "vocab_size": 64,
    "projection_dim": 32,
    "initializer_range": 0.2,  # with the usual 0.02 the layers of so small a model change their input very little
}
"""Set wherever a config class has the option and the case says nothing else."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """One call to be made: its place in the series, and where its sizes and numbers come from.

    Args:
        index: 0 for the first call, which is always the smallest: batch 1, one image, one short clip.
        random: sizes.
        generator: numbers.
    """

    index: int
    random: random.Random
    generator: torch.Generator

    def batch(self, most: int = 7) -> int:
        """Return a batch size: 1, 3, 1, 5, then any up to `most`."""
        first = (1, 3, 1, 5)
        return min(first[self.index], most) if self.index < len(first) else self.random.randint(1, most)

    def size(self, low: int, high: int, step: int = 1) -> int:
        """Return a multiple of `step` between `low` and `high`."""
        return step * self.random.randint(-(-low // step), high // step)

    def normal(self, *shape: int) -> torch.Tensor:
        """Return normally distributed numbers."""
        return torch.randn(*shape, generator=self.generator)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Return whole numbers below `high`."""
        return torch.randint(high, shape, generator=self.generator)


Recipe = Callable[[nn.Module, Draw], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """An encoder to be measured.

    Args:
        cls: folder under `transformers.models`, a dot, and the class: `"clip.CLIPVisionModel"`.
        inputs: makes the keywords of one call of the built encoder.
        config: options of its config class, beside `TINY`; a mapping for a sub-config is passed as it is.
        call: keywords that are the same in every call.
        part: module path of the encoder inside `cls`, where it cannot be built alone.
        note: what a reader of the table should know.
    """

    cls: str
    inputs: Recipe
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    call: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    part: str = ""
    note: str = ""


def cases() -> dict[str, Case]:
    """Return every case by name, in a fixed order; a variant of an encoder has a bracket: `clip[interp]`."""
    from .tables import TABLES

    found: dict[str, Case] = {}
    for table in TABLES:
        twice = found.keys() & table.keys()
        if twice:
            raise ValueError(f"named twice in the tables of the census: {', '.join(sorted(twice))}")
        found |= table
    return found


def build(case: Case, *, seed: int = 0) -> nn.Module:
    """Build the tiny encoder with random weights, in eval mode; nothing in it is left constant by initialisation.

    Raises:
        UnsupportedModelError: the installed Transformers does not have the class.
    """
    cls = _class(case)
    torch.manual_seed(seed)
    module: nn.Module = cls(_config(cls, case.config, TINY))
    if case.part:
        module = module.get_submodule(case.part)
    with torch.no_grad():
        for parameter in module.parameters():
            if (
                parameter.is_floating_point()
                and parameter.numel()
                and bool((parameter == parameter.flatten()[0]).all())
            ):
                parameter.add_(0.1 * torch.randn_like(parameter))  # a gate of 0 would hide what lies behind it
    return module.eval()


def build_at_full_size(case: Case) -> nn.Module:
    """Build the encoder on the meta device from the default config of its class, mostly that of a real checkpoint."""
    cls = _class(case)
    options = {name: value for name, value in case.config.items() if name == "config_class"}
    with torch.device("meta"):
        module: nn.Module = cls(_config(cls, options, {}))
    return module.get_submodule(case.part).eval()


def draws(case: Case, encoder: nn.Module, *, seed: int = 0, sizes: int = 8) -> Iterator[dict[str, Any]]:
    """Yield the keywords of `sizes` calls of different sizes."""
    chooser, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for index in range(sizes):
        yield {**case.inputs(encoder, Draw(index, chooser, generator)), **case.call}


def _class(case: Case) -> Any:
    folder, _, name = case.cls.partition(".")
    try:
        return getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    except (ImportError, AttributeError) as error:
        import transformers

        raise UnsupportedModelError(f"Transformers {transformers.__version__} has no {case.cls}") from error


def _config(cls: type, options: Mapping[str, Any], sizes: Mapping[str, Any]) -> Any:
    config_class: Any = options.get("config_class") or getattr(cls, "config_class", None)
    if config_class is None:  # a module below the model classes: annotated, as everything in Transformers
        hints = inspect.get_annotations(vars(cls)["__init__"], eval_str=True)
        config_class = next(hint for name, hint in hints.items() if name != "return")
    known = set(inspect.signature(config_class).parameters)
    chosen = {name: value for name, value in sizes.items() if name in known}
    given = {name: copy.deepcopy(value) for name, value in options.items() if name != "config_class"}
    config = config_class(**{**chosen, **given})
    if not hasattr(cls, "_supports_sdpa"):  # a module below the model classes chooses nothing by itself
        config._attn_implementation = "sdpa"
    return config
