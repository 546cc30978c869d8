"""Compile three encoders with one keyword, beside plain `torch.compile`; prove that results stay the same; undo it.

    python examples/demo.py                          # everything, as `make demo` does
    python examples/demo.py llava --backend eager    # one model, and only the counts: no code is generated

Exit status 0 says that every proof held.
"""

import argparse
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import checkpoints
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from transformers.utils import logging

import hf_compile
from hf_compile.verification import largest_difference

ROUNDING = 1e-4  # float32 sums in another order differ by less, relative to the largest value
LINE = "-" * 118
WORDS = """\
What the words mean
  encoder       the part of a model that turns pixels or sound into features; only this part is compiled
  region        a kind of module inside the encoder that is compiled: one graph serves all modules of that kind
  graph         one piece of compiled code; each costs seconds when it is first needed, so fewer is better
  graph break   a line of Python at which the compiler has to stop; it cuts one graph into two
  dynamic dim   a size that may differ from call to call without a new graph
  eager         PyTorch without a compiler; its numbers are the ones to match

How hf_compile and torch.compile are compared
  Both start with empty caches and make the same calls of the encoder, each twice, on the same machine. Compile seconds
  are what the first pass took longer than the second. Graphs and graph breaks are torch's own counts. A difference is
  relative to the largest value of the output."""

Requests = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A checkpoint, what it is asked, and how many of its calls plain torch.compile is given (None: all)."""

    title: str
    inputs: str
    write: Callable[[str], Any]
    requests: Callable[[str], Requests]
    generation: dict[str, Any] = field(default_factory=dict)
    answers: str = ""
    plain_calls: int | None = None


@dataclass(frozen=True)
class Call:
    """A call that a model made of its encoder, and eager's output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass(frozen=True)
class Measured:
    """What the calls of a compiled encoder gave and cost, call by call; counts are those after the call."""

    outputs: list[Any]
    compile_seconds: list[float]
    graphs: list[int]
    graph_breaks: list[int]


def write_qwen(folder: str) -> None:
    sizes = {"depth": 8, "hidden_size": 128, "intermediate_size": 344, "num_heads": 4}
    checkpoints.write_checkpoint("qwen2_5_vl", folder, vision_config={**sizes, "fullatt_block_indexes": [3, 7]})


def write_llava(folder: str) -> None:
    sizes = {"num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
    checkpoints.write_checkpoint("llava", folder, vision_config=sizes)


def speech_requests(folder: str) -> Requests:
    processor, recordings = checkpoints.processor_for(folder), checkpoints.speech()
    return [
        dict(processor(audio=batch, sampling_rate=checkpoints.SAMPLING_RATE, return_tensors="pt"))
        for batch in (
            recordings[:1],
            recordings[1:2],
            recordings[2:4],
            recordings[4:5],
            recordings[5:6],
            recordings[6:],
        )
    ]


RANDOM = "random weights: the words mean nothing, but must stay the same"
CASES = {
    "qwen2_5_vl": Case(
        "Qwen2.5-VL: its architecture with 8 vision blocks and random weights, on real photographs",
        "7 requests with 1, 1, 2, 3, 4, 5 and 6 photographs of several sizes",
        write_qwen,
        lambda folder: checkpoints.requests("qwen2_5_vl", folder),
        {"max_new_tokens": 8},
        RANDOM,
        plain_calls=3,
    ),
    "llava": Case(
        "LLaVA: its architecture with 8 CLIP layers and random weights, on real photographs",
        "7 requests with 1, 1, 2, 3, 4, 5 and 6 photographs",
        write_llava,
        lambda folder: checkpoints.requests("llava", folder),
        {"max_new_tokens": 8},
        RANDOM,
    ),
    "whisper": Case(
        "Whisper tiny.en: the real model, on real speech",
        "6 requests with 1, 1, 2, 1, 1 and 2 recordings of 1.5 to 44 seconds",
        checkpoints.whisper_tiny_en,
        speech_requests,
        {"max_new_tokens": 32},
        "cut after 32 tokens",
    ),
}


# The steps


def generate(model: Any, case: Case, requests: Requests) -> list[torch.Tensor]:
    return [model.generate(**request, do_sample=False, **case.generation) for request in requests]


def record(encoder: nn.Module, run: Callable[[], Any]) -> tuple[list[Call], Any]:
    """Return the calls that `run` makes of the encoder, with what eager gives for them, and what `run` returns."""
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    note = encoder.register_forward_pre_hook(lambda _, *each: arguments.append(each), with_kwargs=True)
    try:
        result = run()
    finally:
        note.remove()
    with torch.no_grad():
        return [Call(args, kwargs, encoder(*args, **kwargs)) for args, kwargs in arguments], result


def repeat(encoder: nn.Module, call: Call) -> tuple[Any, float]:
    """Return what the encoder gives for a recorded call, and the seconds it took."""
    started = time.perf_counter()
    with torch.no_grad():
        output = encoder(*call.args, **call.kwargs)
    return output, time.perf_counter() - started


def measure(encoder: nn.Module, calls: Sequence[Call], *, seconds: float = float("inf")) -> Measured:
    """Make the calls twice; when that many seconds are over, the first pass ends with the call it is at."""
    counters.clear()
    outputs, first, graphs, breaks = [], [], [], []
    for call in calls:
        if sum(first) > seconds:
            break
        output, took = repeat(encoder, call)
        outputs.append(output)
        first.append(took)
        graphs.append(counters["stats"]["unique_graphs"])
        breaks.append(sum(counters["graph_break"].values()))
    again = [repeat(encoder, call)[1] for call in calls[: len(first)]]
    extra = [max(slow - fast, 0.0) for slow, fast in zip(first, again, strict=True)]
    return Measured(outputs, extra, graphs, breaks)


def difference(outputs: Sequence[Any], calls: Sequence[Call]) -> float:
    return max(largest_difference(output, call.output) for output, call in zip(outputs, calls, strict=True))


def appearance(model: nn.Module) -> dict[str, Any]:
    """Return what a compile could leave behind on a module: class, attributes, compiled call, attention."""
    return {
        name: (
            type(module),
            sorted(vars(module)),
            module._compiled_call_impl is not None,
            getattr(getattr(module, "config", None), "_attn_implementation", None),
        )
        for name, module in model.named_modules()
    }


def show(case: Case, folder: str, requests: Requests, *, backend: str, plain_seconds: float) -> list[str]:
    """Take one checkpoint through the whole story, print it, and return the proofs that failed."""
    untouched = hf_compile.from_pretrained(folder, compile_mm_encoder=False)
    path = hf_compile.find_encoders(untouched)[0].path
    calls, eager_tokens = record(untouched.get_submodule(path), lambda: generate(untouched, case, requests))

    say("> model = hf_compile.from_pretrained(folder, compile_mm_encoder=True)")
    say(f"> {case.inputs}: model.generate(...)")
    say("> print(hf_compile.status(model))\n")
    config = None if backend == "inductor" else {"backend": backend}
    torch._dynamo.reset()
    with fresh_cache():
        model = hf_compile.from_pretrained(folder, compile_mm_encoder=True, compilation_config=config)
        ours = measure(model.get_submodule(path), calls)
        tokens = generate(model, case, requests)
    graphs_in_the_end = counters["stats"]["unique_graphs"]
    status = hf_compile.status(model)
    regions = [region for encoder in status.to_dict()["encoders"] for region in encoder["regions"]]
    say(textwrap.indent(str(status), "  "))

    say("\n> the same calls beside plain torch.compile of the encoder")
    torch._dynamo.reset()
    with fresh_cache():
        plain_encoder = hf_compile.from_pretrained(folder, compile_mm_encoder=False).get_submodule(path)
        plain_encoder.compile(backend=backend)
        plain = measure(plain_encoder, calls[: case.plain_calls], seconds=plain_seconds)
    compare(ours, plain, calls)

    same_tokens = [torch.equal(got, want) for got, want in zip(tokens, eager_tokens, strict=True)]
    tokenizer = checkpoints.processor_for(folder).tokenizer
    say(f"\n> the first answers of the compiled model ({case.answers})\n")
    for request, output in list(zip(requests, tokens, strict=True))[:4]:
        prompt = request["input_ids"].shape[1] if "input_ids" in request else 0
        say(f"  {tokenizer.decode(output[0, prompt:], skip_special_tokens=True).strip()!r}")

    say("\n> hf_compile.uncompile_mm_encoder(model)")
    hf_compile.uncompile_mm_encoder(model)
    undone = [repeat(model.get_submodule(path), call)[0] for call in calls]

    say("\n> what this proves\n")
    largest = difference(ours.outputs, calls)
    one_graph_each = all(region["state"] == "compiled" and region["graphs"] == 1 for region in regions)
    nothing_eager = not any(region["eager_calls"] for region in regions)
    return prove(
        {
            "every region is compiled, as one graph, without a graph break; no call ran eager": one_graph_each
            and nothing_eager
            and ours.graphs[-1] == len(regions)
            and ours.graph_breaks[-1] == 0,
            "the first call made all graphs; no later size needed a new one": ours.graphs[0] == graphs_in_the_end,
            f"all {len(calls)} outputs equal eager's up to rounding: {largest:.1e}, of {ROUNDING:.0e}": largest
            <= ROUNDING,
            f"the generated tokens equal eager's, for all {len(requests)} requests": all(same_tokens),
            f"undone: all {len(calls)} outputs equal eager's bit for bit": difference(undone, calls) == 0.0,
            "undone: no module looks different from one that was never compiled": appearance(model)
            == appearance(untouched)
            and not hf_compile.status(model).encoders,
        }
    )


# What is printed


def say(text: str) -> None:
    print(text, flush=True)


def compare(ours: Measured, plain: Measured, calls: Sequence[Call]) -> None:
    """Print both side by side, counted over the calls that plain torch.compile was given."""
    count = len(plain.outputs)
    which = f"over all {count} calls" if count == len(calls) else f"over the first {count} of {len(calls)} calls"
    say(f"\n  {which:<30}{'hf_compile':>12}{'torch.compile':>16}")
    for name, value in {
        "graphs": lambda each: each.graphs[count - 1],
        "graph breaks": lambda each: each.graph_breaks[count - 1],
        "compile seconds": lambda each: f"{sum(each.compile_seconds[:count]):.1f}",
        "largest difference to eager": lambda each: f"{difference(each.outputs[:count], calls[:count]):.1e}",
    }.items():
        say(f"  {name:<30}{value(ours):>12}{value(plain):>16}")
    if count < len(calls):
        say(f"  (torch.compile is stopped after {count} calls, to keep this short; hf_compile goes on, and over all")
        graphs, largest = ours.graphs[-1], difference(ours.outputs, calls)
        say(f"  {len(calls)} calls it has {graphs} graphs and a difference of {largest:.1e})")


def prove(proofs: dict[str, bool]) -> list[str]:
    """Print each proof with its outcome, and return those that failed."""
    for text, holds in proofs.items():
        say(f"  [{'ok' if holds else 'FAILED'}] {text}")
    return [text for text, holds in proofs.items() if not holds]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of {', '.join(CASES)}; none given means all")
    parser.add_argument("--backend", default=os.environ.get("HF_COMPILE_BACKEND", "inductor"), help="for both sides")
    parser.add_argument("--plain-seconds", type=float, default=120, help="when to stop torch.compile (%(default)s)")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    started = time.perf_counter()
    say(WORDS)
    if options.backend == "inductor":  # probes the machine at its first compile; that is counted for neither side
        torch.compile(torch.sin)(torch.zeros(8))
    names = options.cases or list(CASES)
    failed, left_out = [], []
    for number, name in enumerate(names, 1):
        say(f"\n{LINE}\n{number} of {len(names)}. {CASES[name].title}\n{LINE}")
        with tempfile.TemporaryDirectory() as folder:
            try:
                CASES[name].write(folder)
                requests = CASES[name].requests(folder)
            except (checkpoints.RealDataUnavailable, ImportError) as missing:
                left_out.append(name)
                say(f"left out: {missing}")
                continue
            proofs = show(CASES[name], folder, requests, backend=options.backend, plain_seconds=options.plain_seconds)
            failed += [f"{name}: {text}" for text in proofs]

    say(f"\n{LINE}\n{len(names) - len(left_out)} of {len(names)} shown in {time.perf_counter() - started:.0f} seconds")
    if len(left_out) == len(names):
        failed = ["nothing could be shown"]
    say("FAILED " + "; ".join(failed) if failed else "All proofs hold.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
