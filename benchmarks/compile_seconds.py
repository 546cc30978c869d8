"""Measure how compile time grows with depth: 2 and 32 blocks of Qwen2.5-VL's encoder at real width, empty caches.

Each measurement is a process of its own with an empty cache folder; runs of the two depths are interleaved, and the
ratio of their medians is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

import torch

import hf_compile


def measure(depth: int) -> dict[str, float]:
    """Return the compile seconds of every region after one call of a 1x16x16 grid."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel as Encoder

    config = Encoder.config_class(
        depth=depth, hidden_size=1280, num_heads=16, intermediate_size=3420, out_hidden_size=2048
    )
    model = Encoder(config).eval()
    hf_compile.compile_mm_encoder(model)
    with torch.no_grad():
        model(torch.randn(256, 3 * 2 * 14 * 14), grid_thw=torch.tensor([[1, 16, 16]]))
    regions = hf_compile.status(model).encoders[0].regions
    assert all(region.graphs == 1 for region in regions), regions
    return {region.class_name: region.compile_seconds for region in regions}


def main() -> None:
    """Print, and with `--json` write, the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, help="measure this depth in this process and print JSON")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.depth:
        print(json.dumps(measure(options.depth)))
        return
    seconds: dict[int, list[float]] = {2: [], 32: []}
    for _ in range(options.runs):
        for depth, each in seconds.items():
            with tempfile.TemporaryDirectory() as folder:
                result = subprocess.run(
                    [sys.executable, __file__, "--depth", str(depth)],
                    env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder},
                    capture_output=True,
                    text=True,
                    check=True,
                )
            each.append(sum(json.loads(result.stdout.splitlines()[-1]).values()))
    medians = {str(depth): statistics.median(each) for depth, each in seconds.items()}
    for depth, median in medians.items():
        print(f"{depth:>3} blocks: {median:6.1f} s to compile")
    ratio = medians["32"] / medians["2"]
    print(f"ratio: {ratio:.2f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "seconds": medians, "ratio": ratio}, file, indent=2)


if __name__ == "__main__":
    main()
