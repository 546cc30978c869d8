"""Measure the functions that family patches name beside their originals: time, graphs, and the largest difference.

Each is compiled by Inductor and called with a small and a large input of a real size, on one thread, in interleaved
rounds; a ratio is the median of eager's time over the median of the compiled function's, so above 1 the graph pays.
The copy of the arguments that a call needs (some functions write into them) is not timed.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import json
import pkgutil
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import hf_compile_patches
import torch
import transformers

from hf_compile.compiler.attaching import Attached
from hf_compile.compiler.functions import CompiledFunctions
from hf_compile.compiler.region import Region
from hf_compile.config import CompilationConfig
from hf_compile.functions import SAMPLING, FunctionPatch, class_of
from hf_compile.plan import ModelPlan, plan_functions
from hf_compile.rewriting import rewritten


def leaves(patches: tuple[FunctionPatch, ...]) -> Iterator[FunctionPatch]:
    """Yield the functions themselves, those of returned objects too."""
    for patch in patches:
        yield from leaves(patch.returns) if patch.returns else [patch]


def shipped() -> Iterator[tuple[str, FunctionPatch]]:
    """Yield every function that this project compiles, with a name of its own."""
    for module in pkgutil.iter_modules(hf_compile_patches.__path__):
        patches = getattr(importlib.import_module(f"hf_compile_patches.{module.name}"), "FUNCTIONS", ())
        yield from ((f"{module.name}: {patch.name}", patch) for patch in leaves(patches))
    yield from ((f"sampling: {patch.name}", patch) for patch in leaves(SAMPLING))


def plain(patch: FunctionPatch) -> Callable[..., Any]:
    """Return the function that a patch compiles, as Transformers has it."""
    method = inspect.getattr_static(class_of(patch), patch.method.rpartition(".")[2])
    cut, found = patch.cut("_piece"), []
    if cut is None:
        return method
    rewritten(method, [cut], lambda _, function: found.append(function) or function)
    return found[0]


def compiled(patch: FunctionPatch, backend: Any) -> tuple[Callable[..., Any], Region]:
    """Return the same function, compiled, and its region."""
    config = CompilationConfig(backend=backend)
    how = plan_functions(transformers.ParakeetFeatureExtractor(), config).how
    functions = CompiledFunctions(how, Attached(ModelPlan("", "cpu", config, ())))
    call = functions._compiled(patch, plain(patch))
    return call, functions.regions[0][1]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normally distributed numbers, the same ones for a shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def whole(high: int, *shape: int) -> torch.Tensor:
    """Return whole numbers below `high`, the same ones for a shape."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(sum(shape)))


class Object:
    """Stands for `self`: the attributes that the code reads."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


ITSELF = Object(preemphasis=0.97, final_logit_softcapping=30.0, confidence_threshold=0.5)


def sounds(batch: int, length: int) -> dict[str, Any]:
    """Return waveforms and their lengths."""
    lengths = torch.tensor([length] + [max(1, length - 3)] * (batch - 1))[:batch]
    padded = transformers.BatchFeature({"audio_lengths": lengths})
    return {"self": ITSELF, "input_features": numbers(batch, length), "padded_inputs": padded}


def frames(batch: int, length: int) -> dict[str, Any]:
    """Return log mel frames, their mask and lengths."""
    lengths = torch.tensor([length] + [max(2, length - 3)] * (batch - 1))[:batch]
    return {
        "attention_mask": torch.arange(length)[None] < lengths[:, None],
        "input_features": numbers(batch, length, 80),
        "features_lengths": lengths,
    }


def places(batch: int, length: int) -> dict[str, Any]:
    """Return places and grids of patches."""
    count = batch * length
    sizes = {"widths": torch.full((count,), 2 + length), "heights": torch.full((count,), 2 + batch)}
    settings = {"merge": 1, "side": 8, "mode": "bicubic", "align_corners": False, "padding": "border"}
    return {"within": torch.arange(count), **sizes, **settings}


def warper(name: str, **options: Any) -> Callable[[int, int], dict[str, Any]]:
    """Return what a logits processor is called with."""
    one = getattr(transformers, name)(**options)
    return lambda batch, length: {"self": one, "input_ids": whole(9, batch, 3), "scores": numbers(batch, 40 + length)}


SAMPLER = Object(entropy_bound=2.0)

# piece -> what it is called with for a batch and a length
INPUTS = {
    "VideoProcessor": lambda batch, length: {
        "frames": 255 * numbers(batch, 3, length, 8).abs(),
        "norm_mean": torch.tensor([0.5, 0.4, 0.3]).view(1, 3, 1, 1),
        "norm_std": torch.tensor([0.2, 0.3, 0.2]).view(1, 3, 1, 1),
    },
    "__call__ > timemask": sounds,
    "_torch_extract_fbank_features > magnitudes": lambda batch, length: {
        "stft": torch.complex(numbers(batch, 257, length), numbers(batch, 257, length, seed=1))
    },
    "_torch_extract_fbank_features > mel_spec": lambda batch, length: {"mel_spec": numbers(batch, 80, length).abs()},
    "__call__ > mask": frames,
    "get_vision_interpolation_indices_and_weights": places,
    "forward > logits": lambda batch, length: {"logits": 50 * numbers(batch, length, 40), "self": ITSELF},
    "accept_canvas": lambda batch, length: {
        "self": copy.copy(SAMPLER),
        "current_canvas": whole(40, batch, length),
        "denoiser_canvas": whole(40, batch, length),
        "logits": numbers(batch, length, 40),
        "cur_step": torch.tensor(3),
    },
    "StableAndConfidentStoppingCriteria": lambda batch, length: {"logits": numbers(batch, length, 40), "self": ITSELF},
    "rescale_and_normalize": lambda batch, length: {
        "self": transformers.NemotronH_Omni_Reasoning_V3ImageProcessor(),
        "images": numbers(batch, 3, length, 2 * length),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": (0.5, 0.4, 0.3),
        "image_std": (0.2, 0.3, 0.2),
    },
    "convert_image_to_patches": lambda batch, length: {"images": numbers(batch, 3, 16 * length, 32), "patch_size": 16},
    "TopKLogitsWarper": lambda batch, length: {**warper("TopKLogitsWarper", top_k=5)(batch, length), "top_k": 5},
    "TopPLogitsWarper.__call__ > cumulative": lambda batch, length: {
        "self": Object(top_p=0.8),
        "sorted_logits": numbers(batch, 40 + length).sort().values,
    },
    "TopPLogitsWarper.__call__ > indices": lambda batch, length: {
        "self": Object(filter_value=-float("inf")),
        "scores": numbers(batch, 40 + length),
        "sorted_indices": numbers(batch, 40 + length).sort().indices,
        "sorted_indices_to_remove": numbers(batch, 40 + length) > 0,
    },
    "MinPLogitsWarper": warper("MinPLogitsWarper", min_p=0.1),
}

# the second of each is what a request of some size gives; lengths are those of INPUTS
REAL = {
    "timemask": ((1, 160_000), (8, 480_000)),
    "magnitudes": ((1, 1000), (8, 3000)),
    "mel_spec": ((1, 1000), (8, 3000)),
    "__call__ > mask": ((1, 1000), (8, 3000)),
    "get_vision": ((1, 1024), (4, 4096)),
    "logits": ((1, 256), (4, 256)),
    "accept_canvas": ((1, 256), (4, 256)),
    "Stable": ((1, 256), (4, 256)),
    "rescale": ((1, 448), (4, 896)),
    "convert_image": ((1, 28), (4, 56)),
    "VideoProcessor": ((8, 336), (32, 448)),
    "Warper": ((1, 150_000), (8, 150_000)),
}


def inputs_of(name: str, patch: FunctionPatch, batch: int, length: int, vocabulary: int = 40) -> list[Any]:
    """Return the arguments of one call."""
    make = next(make for words, make in INPUTS.items() if words in name)
    made = make(batch, length)
    return [made[argument] for argument in inspect.signature(plain(patch)).parameters if argument in made]


def main() -> None:
    """Print, and with `--json` write, a line for each function and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, patch in shipped():
        if options.only not in name:
            continue
        rows += measured(name, patch, options.rounds)
        for row in rows[-2:]:
            print(
                f"{row['function']:100s} {row['shape']:24s} eager {row['eager_ms']:9.3f} ms  compiled "
                f"{row['compiled_ms']:9.3f} ms  ratio {row['ratio']:5.2f}  graphs {row['graphs']}",
                flush=True,
            )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"torch": torch.__version__, "transformers": transformers.__version__, "rows": rows}, file, indent=1
            )
            file.write("\n")


def measured(name: str, patch: FunctionPatch, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each size of one function."""
    eager = plain(patch)
    call, region = compiled(patch, "inductor")
    rows = []
    sizes = next(sizes for words, sizes in REAL.items() if words in name)
    with torch.no_grad():
        for batch, length in sizes:
            arguments = inputs_of(name, patch, batch, length)
            tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
            for _ in range(2):
                want, got = eager(*copy.deepcopy(arguments)), call(*copy.deepcopy(arguments))
            times: dict[str, list[float]] = {"eager": [], "compiled": []}
            for _ in range(rounds):
                for way, function in (("eager", eager), ("compiled", call)):
                    given = copy.deepcopy(arguments)
                    started = time.process_time()
                    function(*given)
                    times[way].append(1000 * (time.process_time() - started))
            medians = {way: statistics.median(each) for way, each in times.items()}
            rows.append(
                {
                    "function": name,
                    "shape": ", ".join("x".join(map(str, each.shape)) for each in tensors),
                    "eager_ms": round(medians["eager"], 4),
                    "compiled_ms": round(medians["compiled"], 4),
                    "ratio": round(medians["eager"] / medians["compiled"], 3),
                    "difference": difference(got, want),
                }
            )
    for row in rows:
        row["graphs"] = region.graphs
    return rows


def scale(tensor: torch.Tensor) -> float:
    """Return the largest finite value, without its sign."""
    return float(tensor.double().abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


def difference(got: Any, want: Any) -> float:
    """Return the largest difference, relative to the largest value."""
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    return max(scale(left.double() - right.double()) / max(scale(right), 1e-9) for left, right in pairs)


if __name__ == "__main__":
    main()
