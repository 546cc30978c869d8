"""Compile three encoders with one word each, beside plain `torch.compile`, prove that the results are the same, and undo it.

    python examples/demo.py                          # everything, as `make demo` does
    python examples/demo.py llava --backend eager    # one model, and nothing but the counts: no code is generated

Exit status 0 says that every proof held.
"""

import argparse
import os
import sys
import tempfile
import textwrap
import time
import warnings
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

ROUNDING = 1e-4  # two orders of adding up the same float32 numbers differ by less, relative to the largest of them
WORDS = """\
What the words mean
  encoder       the part of a model that turns pixels or sound into features; this part is compiled, the rest is not
  region        a kind of module inside the encoder that is compiled: one graph serves all modules of that kind
  graph         one piece of compiled code; each costs seconds when it is first needed, so fewer is better
  graph break   a line of Python at which the compiler has to stop; it cuts one graph into two
  dynamic dim   a size that may differ from call to call without a new graph
  eager         PyTorch without a compiler: slower or not, these are the numbers to match
How the two are compared
  Both start with empty caches and get the same inputs, twice. Compile seconds: what the first pass took longer than the
  second. Graphs and graph breaks: as torch counts them. Difference: relative to the largest value of the output."""


@dataclass(frozen=True)
class Case:
    """A checkpoint, and what it is asked."""

    title: str
    note: str
    write: Callable[[str], Any]
    requests: Callable[[str], list[dict[str, torch.Tensor]]]
    generation: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What calls of an encoder took and gave, call by call."""

    outputs: list[Any]
    compile_seconds: list[float]
    graphs: list[int]  # after each call
    graph_breaks: list[int]


def qwen(folder: str) -> None:
    vision = {"depth": 8, "hidden_size": 128, "intermediate_size": 344, "num_heads": 4, "fullatt_block_indexes": [3, 7]}
    checkpoints.write_checkpoint("qwen2_5_vl", folder, vision_config=vision)


def llava(folder: str) -> None:
    vision = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4}
    checkpoints.write_checkpoint("llava", folder, vision_config=vision)


def speech_requests(folder: str) -> list[dict[str, torch.Tensor]]:
    processor, clips = checkpoints.processor_for(folder), checkpoints.speech()
    batches = [[clips[index] for index in batch] for batch in ((0,), (1,), (2, 3), (4,), (5, 6, 0), (7,))]
    rate = checkpoints.SAMPLING_RATE
    return [dict(processor(audio=batch, sampling_rate=rate, return_tensors="pt")) for batch in batches]


CASES = {
    "qwen2_5_vl": Case(
        "Qwen2.5-VL, 8 vision blocks, random weights, on real photographs",
        "one to six photographs of different sizes in a call; weights are random, so the words mean nothing",
        qwen,
        lambda folder: checkpoints.requests("qwen2_5_vl", folder),
        {"max_new_tokens": 8},
    ),
    "llava": Case(
        "LLaVA with a CLIP encoder of 8 layers, random weights, on real photographs",
        "one to six photographs in a call; weights are random, so the words mean nothing",
        llava,
        lambda folder: checkpoints.requests("llava", folder),
        {"max_new_tokens": 8},
    ),
    "whisper": Case(
        "Whisper tiny.en, the real weights, on real speech",
        "one to three recordings of 1.5 to 44 seconds in a call",
        checkpoints.whisper_tiny_en,
        speech_requests,
    ),
}


# The steps of a case


def generate(model: Any, case: Case, requests: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    return [model.generate(**request, do_sample=False, **case.generation) for request in requests]


def record_calls(encoder: nn.Module, run: Callable[[], Any]) -> tuple[list[tuple[Any, Any]], Any]:
    """Return the arguments of every call that `run` makes to the encoder, and what `run` returns."""
    calls: list[tuple[Any, Any]] = []
    hook = encoder.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    try:
        return calls, run()
    finally:
        hook.remove()


def call(encoder: nn.Module, args: Any, kwargs: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    with torch.no_grad():
        output = encoder(*args, **kwargs)
    return time.perf_counter() - started, output


def measure(encoder: nn.Module, calls: Sequence[tuple[Any, Any]], *, seconds: float = float("inf")) -> Measured:
    """Make the calls twice; begin no further call of the first pass after so many seconds."""
    counters.clear()
    first: list[float] = []
    outputs, graphs, breaks = [], [], []
    for args, kwargs in calls:
        if sum(first) > seconds:
            break
        took, output = call(encoder, args, kwargs)
        first.append(took)
        outputs.append(output)
        graphs.append(counters["stats"]["unique_graphs"])
        breaks.append(sum(counters["graph_break"].values()))
    again = [call(encoder, args, kwargs)[0] for args, kwargs in calls[: len(first)]]
    return Measured(outputs, [max(a - b, 0.0) for a, b in zip(first, again)], graphs, breaks)


def appearance(model: nn.Module) -> dict[str, Any]:
    """Return what a compile could leave behind on each module: its attributes, its compiled call, its attention."""
    return {
        name: (
            type(module),
            sorted(vars(module)),
            module._compiled_call_impl is not None,
            getattr(getattr(module, "config", None), "_attn_implementation", None),
        )
        for name, module in model.named_modules()
    }


def differences(got: Sequence[Any], want: Sequence[Any]) -> float:
    return max(largest_difference(a, b) for a, b in zip(got, want))


# What is printed


def say(text: str = "", indent: str = "") -> None:
    print(textwrap.indent(text, indent), flush=True)


def say_comparison(ours: Measured, plain: Measured, eager: Sequence[Any], total: int) -> None:
    """Print both columns, counted over the calls that plain torch.compile made."""
    count = len(plain.outputs)
    rows = [
        ("graphs", ours.graphs[count - 1], plain.graphs[-1]),
        ("graph breaks", ours.graph_breaks[count - 1], plain.graph_breaks[-1]),
        ("compile seconds", *(f"{sum(each.compile_seconds[:count]):.1f}" for each in (ours, plain))),
        ("largest difference to eager", *(f"{differences(each.outputs[:count], eager):.1e}" for each in (ours, plain))),
    ]
    which = f"all {total} calls" if count == total else f"the first {count} of {total} calls"
    say(f"\n  {'over ' + which:<30}{'hf_compile':>12}{'torch.compile':>16}")
    for name, *values in rows:
        say(f"  {name:<30}{values[0]:>12}{values[1]:>16}")
    if count < total:
        say("  (torch.compile was stopped there: it still makes new graphs, and this is a demo of minutes)")


def say_answers(folder: str, tokens: Sequence[torch.Tensor], note: str) -> None:
    tokenizer = checkpoints.processor_for(folder).tokenizer
    texts = [tokenizer.decode(each[0, -64:], skip_special_tokens=True).split("assistant:")[-1].strip() for each in tokens]
    say(f"\n  what the compiled model answers ({note}):")
    for text in texts[:3]:
        say(f"    {textwrap.shorten(text, 100)!r}")


def prove(proofs: Sequence[tuple[bool, str]]) -> list[str]:
    """Print each proof with its outcome, and return those that failed."""
    for holds, text in proofs:
        say(f"  [{'ok' if holds else 'FAILED'}] {text}")
    return [text for holds, text in proofs if not holds]


def show(case: Case, folder: str, *, backend: str, plain_calls: int, plain_seconds: float) -> list[str]:
    """Take one checkpoint through the whole story, and return the proofs that failed."""
    case.write(folder)
    requests = case.requests(folder)
    eager_model = hf_compile.from_pretrained(folder, compile_mm_encoder=False)
    path = hf_compile.find_encoders(eager_model)[0].path
    calls, eager_tokens = record_calls(eager_model.get_submodule(path), lambda: generate(eager_model, case, requests))
    eager = [call(eager_model.get_submodule(path), *each)[1] for each in calls]

    say(f"  model = hf_compile.from_pretrained(folder, compile_mm_encoder=True)    # {len(calls)} calls: {case.note}\n")
    torch._dynamo.reset()
    with fresh_cache():
        model = hf_compile.from_pretrained(
            folder, compile_mm_encoder=True, compilation_config={"backend": backend} if backend != "inductor" else None
        )
        ours = measure(model.get_submodule(path), calls)
        tokens = generate(model, case, requests)
        graphs_in_the_end = counters["stats"]["unique_graphs"]
        status = hf_compile.status(model)
    say(str(status), "  ")
    regions = [region for encoder in status.to_dict()["encoders"] for region in encoder["regions"]]

    hf_compile.uncompile_mm_encoder(model)
    undone = [call(model.get_submodule(path), *each)[1] for each in calls]

    torch._dynamo.reset()
    with fresh_cache():
        plain_encoder = hf_compile.from_pretrained(folder, compile_mm_encoder=False).get_submodule(path)
        plain_encoder.compile(backend=backend)
        plain = measure(plain_encoder, calls[:plain_calls], seconds=plain_seconds)
    say_comparison(ours, plain, eager, len(calls))
    say_answers(folder, tokens, case.note.rpartition("; ")[2])

    difference = differences(ours.outputs, eager)
    return prove(
        [
            (
                all(region["state"] == "compiled" and not region["eager_calls"] for region in regions)
                and {region["graphs"] for region in regions} == {1}
                and ours.graphs[-1] == len(regions)
                and not ours.graph_breaks[-1],
                f"every region is compiled, in one graph, without a break: {len(regions)} regions, {ours.graphs[-1]} graphs",
            ),
            (
                ours.graphs[0] == graphs_in_the_end,
                "all graphs come from the first call; no other size or number of inputs needed a new one",
            ),
            (difference <= ROUNDING, f"all {len(calls)} outputs equal eager's up to rounding: {difference:.1e}"),
            (
                all(torch.equal(got, want) for got, want in zip(tokens, eager_tokens)),
                f"generate gives the same tokens as eager, for all {len(requests)} requests",
            ),
            (
                differences(undone, eager) == 0.0,
                f"after hf_compile.uncompile_mm_encoder(model), all {len(calls)} outputs equal eager's bit for bit",
            ),
            (
                appearance(model) == appearance(eager_model) and not hf_compile.status(model).encoders,
                "and no module differs from those of a model that never was compiled",
            ),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of {', '.join(CASES)}; all when none is given")
    parser.add_argument("--backend", default=os.environ.get("HF_COMPILE_BACKEND", "inductor"), help="of both compilers")
    parser.add_argument("--plain-calls", type=int, default=3, help="bounds plain torch.compile, which is slow (%(default)s)")
    parser.add_argument("--plain-seconds", type=float, default=120, help="the same, in seconds (%(default)s)")
    options = parser.parse_args(arguments)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*Tensor.item.*|.*Graph break.*")
    say(WORDS)
    names = options.cases or list(CASES)
    failed, left_out, started = [], [], time.perf_counter()
    if options.backend == "inductor":  # what it finds out about the machine at its first compile is counted for nobody
        torch.compile(torch.sin)(torch.zeros(8))
    for number, name in enumerate(names, 1):
        case = CASES[name]
        say(f"\n{number} of {len(names)}: {case.title}\n{'-' * 120}")
        try:
            with tempfile.TemporaryDirectory() as folder:
                failed += show(
                    case,
                    folder,
                    backend=options.backend,
                    plain_calls=options.plain_calls,
                    plain_seconds=options.plain_seconds,
                )
        except (checkpoints.RealDataUnavailable, ModuleNotFoundError) as missing:
            left_out.append(name)
            say(f"  left out: {missing}")
    say(f"\n{'-' * 120}\n{time.perf_counter() - started:.0f} seconds" + (f"; left out: {', '.join(left_out)}" if left_out else ""))
    if failed or len(left_out) == len(names):
        say(f"FAILED: {'; '.join(failed) or 'nothing could be shown'}")
        return 1
    say("All proofs hold.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
