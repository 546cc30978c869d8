"""Measure what one region call costs beside torch's own `module.compile()` of the same module.

A small layer with four tensors, two of them in a tuple, under no_grad on one thread. `module.compile()` sees one size
only and so guards constants; ours serves every size. Runs are interleaved; medians are microseconds of CPU a call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import nn

import hf_compile


class Layer(nn.Module):
    """A layer small enough that dispatch is most of its time."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(
        self, hidden: torch.Tensor, mask: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return hidden (batch, width); mask and the two positions have the same shape."""
        cos, sin = positions
        return self.norm(self.linear(hidden) * cos + sin) + mask


class Encoder(nn.Module):
    """A stack of such layers."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(
        self, pixel_values: torch.Tensor, mask: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Return the hidden states."""
        for layer in self.layers:
            pixel_values = layer(pixel_values, mask=mask, positions=(cos, sin))
        return pixel_values


def main() -> None:
    """Print, and with `--json` write, the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = tuple(torch.randn(4, 16) for _ in range(4))
    plain, stock, ours = Encoder().eval(), Encoder().eval(), Encoder().eval()
    for layer in stock.layers:
        layer.compile(backend=options.backend)
    hf_compile.compile_mm_encoder(ours, compilation_config={"backend": options.backend})
    hidden, mask, cos, sin = inputs
    ways = {"eager": plain, "module.compile()": stock, "hf_compile": ours}
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for encoder in ways.values():
            for _ in range(3):
                encoder(*inputs)
        calls = {name: encoder.layers[0] for name, encoder in ways.items()}
        for _ in range(options.rounds):
            for name, layer in calls.items():
                started = time.process_time()
                for _ in range(options.calls):
                    layer(hidden, mask=mask, positions=(cos, sin))
                times[name].append((time.process_time() - started) / options.calls * 1e6)
    medians = {name: statistics.median(each) for name, each in times.items()}
    region = hf_compile.status(ours).encoders[0].regions[0]
    assert (region.state, region.graphs) == ("compiled", 1), region
    pairs = [a - b for a, b in zip(times["hf_compile"], times["module.compile()"], strict=True)]
    medians["hf_compile above module.compile()"] = statistics.median(pairs)
    for name, median in medians.items():
        print(f"{name:36s} {median:8.1f} microseconds of CPU a call")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"torch": torch.__version__, "backend": options.backend, "microseconds": medians}, file, indent=2
            )


if __name__ == "__main__":
    main()
