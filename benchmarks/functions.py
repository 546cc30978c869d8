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
import pathlib
import pkgutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from torchvision_on_cpu import enable_torchvision

enable_torchvision()  # before Transformers is imported: some processors need it

import hf_compile_patches  # noqa: E402
import transformers  # noqa: E402

from hf_compile.compiler.attaching import Attached  # noqa: E402
from hf_compile.compiler.functions import CompiledFunctions  # noqa: E402
from hf_compile.compiler.region import Region  # noqa: E402
from hf_compile.config import CompilationConfig  # noqa: E402
from hf_compile.functions import SAMPLING, FunctionPatch, class_of  # noqa: E402
from hf_compile.plan import ModelPlan, plan_functions  # noqa: E402
from hf_compile.rewriting import rewritten  # noqa: E402


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


def patchify(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Cut pixels (2, 3, 28 height, 28 width) into rows of patches, as the processor of Qwen2-VL does."""
    grid = pixels.view(1, 2, 3, height, 2, 14, width, 2, 14).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return grid.reshape(4 * height * width, 3 * 2 * 14 * 14)


def tiles(images: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Cut images (n, 3, 364 rows, 364 columns) into tiles, as the processor of Idefics3 does."""
    count = images.shape[0]
    cut = images.reshape(count, 3, rows, 364, columns, 364).permute(0, 2, 4, 1, 3, 5)
    return cut.reshape(count, rows * columns, 3, 364, 364)


LEFT_ALONE = {
    "left alone: cutting pixels into patches (Qwen2-VL)": (
        patchify,
        ((numbers(2, 3, 448, 448), 16, 16), (numbers(2, 3, 896, 1344), 32, 48)),
    ),
    "left alone: cutting images into tiles (Idefics3)": (
        tiles,
        ((numbers(1, 3, 1456, 1456), 4, 4), (numbers(4, 3, 1456, 1092), 4, 3)),
    ),
}
"""Looked at, and not patched: one copy each, and a small part of what their processors do."""

SAMPLER = Object(entropy_bound=2.0)
VOCABULARY = 32_768

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
    "_torch_extract_fbank_features > log_spec": lambda batch, length: {
        "mel_spec": numbers(batch, 80, length).abs(),
        "waveform": numbers(batch, 160 * length),
    },
    "__call__ > mask": frames,
    "get_vision_interpolation_indices_and_weights": places,
    "forward > logits": lambda batch, length: {"logits": 50 * numbers(batch, length, VOCABULARY), "self": ITSELF},
    "accept_canvas": lambda batch, length: {
        "self": copy.copy(SAMPLER),
        "current_canvas": whole(VOCABULARY, batch, length),
        "denoiser_canvas": whole(VOCABULARY, batch, length),
        "logits": numbers(batch, length, VOCABULARY),
        "cur_step": torch.tensor(3),
    },
    "StableAndConfidentStoppingCriteria": lambda batch, length: {
        "logits": numbers(batch, length, VOCABULARY),
        "self": ITSELF,
    },
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
    "log_spec": ((1, 3000), (8, 3000)),
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


def inputs_of(name: str, patch: FunctionPatch, batch: int, length: int) -> list[Any]:
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
        rows += said(measured(name, patch, options.rounds))
    for name, (function, calls) in LEFT_ALONE.items():
        if options.only in name:
            call = torch.compile(function, backend="inductor", dynamic=True)
            rows += said(timed(name, function, call, calls, options.rounds))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"torch": torch.__version__, "transformers": transformers.__version__, "rows": rows}, file, indent=1
            )
            file.write("\n")


def said(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print rows and return them."""
    for row in rows:
        print(
            f"{row['function']:100s} {row['shape']:24s} eager {row['eager_ms']:9.3f} ms  compiled "
            f"{row['compiled_ms']:9.3f} ms  ratio {row['ratio']:5.2f}",
            flush=True,
        )
    return rows


def measured(name: str, patch: FunctionPatch, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each size of one function."""
    call, region = compiled(patch, "inductor")
    sizes = next(sizes for words, sizes in REAL.items() if words in name)
    rows = timed(name, plain(patch), call, [inputs_of(name, patch, *size) for size in sizes], rounds)
    return [{**row, "graphs": region.graphs} for row in rows]


def timed(
    name: str, eager: Callable[..., Any], call: Callable[..., Any], calls: Iterable[Any], rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each call, of CPU time in interleaved rounds."""
    rows = []
    with torch.no_grad():
        for arguments in calls:
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
