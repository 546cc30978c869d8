"""The card of one model type."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence

from .records import Census, Encoder, Record, Run, share_inside
from .words import (
    code,
    difference_of,
    escape,
    join,
    kind_of_encoder,
    number,
    outcome_of,
    percent,
    reasons_of,
    table,
    without_indices,
)

__all__ = ["MARK", "card_of"]

MARK = "<!-- Written by `hf-compile card` from benchmarks/census.json: do not edit. -->"

# Pipeline tags of the Hub. A model of text and sound may transcribe, answer or sing; its class name does not say.
_TAGS = {
    "automatic-speech-recognition": (
        "canary cohere_asr fun_asr_nano glmasr granite_speech granite_speech_plus kyutai_speech_to_text moonshine "
        "moonshine_streaming moss_transcribe_diarize nemo_speechlm omniasr qwen3_asr speech_to_text vibevoice_asr "
        "voxtral_realtime whisper"
    ),
    "audio-text-to-text": "audioflamingo3 musicflamingo qwen2_audio voxtral",
    "robotics": "pi0",
    "text-to-audio": "musicgen musicgen_melody",
    "text-to-speech": "csm vibevoice",
    "zero-shot-image-classification": (
        "aimv2 align altclip chinese_clip clip metaclip_2 siglip siglip2 tipsv2 vision-text-dual-encoder"
    ),
}
_TAG_OF_TYPE = {model_type: tag for tag, types in _TAGS.items() for model_type in types.split()}
_TAG_OF_CLASS = {
    "ForAudioClassification": "audio-classification",
    "ForCTC": "automatic-speech-recognition",
    "ForObjectDetection": "zero-shot-object-detection",
    "ForRNNT": "automatic-speech-recognition",
    "ForRetrieval": "visual-document-retrieval",
    "ForSpeechToText": "automatic-speech-recognition",
    "ForTDT": "automatic-speech-recognition",
}
_ENOUGH_INSIDE = 0.95
_BACKENDS = {"inductor": ("Inductor",)}
_FLOAT64 = "; to float64, how far the graphs and eager are from the same calls in that precision"
_GENERATES = ("ForConditionalGeneration", "ForCausalLM", "ForVisionText2Text", "ForBlockDiffusion")


def card_of(census: Census, model_type: str) -> str:
    """Return the card of a model type as Markdown, its metadata in front."""
    from huggingface_hub import ModelCard, ModelCardData

    encoders = census.encoders(model_type)
    modalities = list(dict.fromkeys(modality for encoder in encoders for modality in encoder.modalities))
    model_class = census.models[model_type]["model_class"]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=_pipeline_tag(model_type, model_class, modalities),
        tags=["hf_compile", "torch.compile", model_type, *modalities],
    )
    several = sum(len(encoder.places) for encoder in encoders) > 1
    parts = [
        MARK,
        f"# {_capital(kind_of_encoder(modalities))} encoder{'s' * several} of {code(model_type)} under hf_compile",
        *(_summary(census, encoder) for encoder in encoders),
        _usage(model_type, model_class),
        *(part for encoder in encoders for part in _encoder(census, encoder)),
        _method(census, encoders),
    ]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, parts)) + "\n"))


def _pipeline_tag(model_type: str, model_class: str, modalities: Sequence[str]) -> str | None:
    if model_type in _TAG_OF_TYPE:
        return _TAG_OF_TYPE[model_type]
    for ending, tag in _TAG_OF_CLASS.items():
        if model_class.endswith(ending):
            return tag
    if not model_class.endswith(_GENERATES) or not {"image", "video"} & set(modalities):
        return None
    if "audio" in modalities:
        return "any-to-any"
    return "image-text-to-text" if "image" in modalities else "video-text-to-text"


# --- for the person who chooses --------------------------------------------------------------------------------------


def _summary(census: Census, encoder: Encoder) -> str:
    record = _main(census, encoder)
    name = f"The {kind_of_encoder(encoder.modalities)} encoder {code(encoder.class_name)}"
    if record is None:
        return (
            f"{name} was **not measured**: the census has no case for this class. `hf_compile` finds it in the model, "
            "and the general rules compile it; what they will do with your checkpoint `hf-compile inspect` shows."
        )
    outcome = record["outcome"]
    if outcome in ("failed", "absent", "refused"):
        verb = "is **not compiled**: it was refused" if outcome == "refused" else "could **not be measured**"
        return f"{name} {verb}, because {escape(' '.join(record['error'].split())[:400])}"
    if outcome == "wrong":
        return f"{name} must **not be compiled** with this release: {_wrong(record)}."
    called = [region for region in record["regions"] if region["state"] != "pending"]
    compiled = [region for region in called if region["state"] == "compiled"]
    eager = [region for region in called if region["state"] == "eager" or region["eager_calls"]]
    sentences: list[str] = []
    if outcome == "eager" and not compiled:
        sentences.append(f"{name} **runs eager**; the reason is under Limits.")
    elif outcome == "eager":
        slow = join(list(dict.fromkeys(code(region["class_name"]) for region in eager)))
        sentences.append(
            f"{name} is **compiled in part**: {slow} ran eager in some call or in all, which Limits explains. "
            f"{_graphs(record, compiled)}"
        )
    else:
        sentences.append(f"{name} is **compiled**. {_graphs(record, compiled)}")
        sentences += ["Limits says which calls needed them."] * (outcome == "more_graphs")
    if compiled:
        sentences += [_after_first(census.main, record), *_sizes(compiled), *_numbers(census, encoder, record)]
    if record["outside"]:
        names = without_indices(record["outside"])
        listed = join(names[:4] + [f"{len(names) - 4} more"] * (len(names) > 4))
        one = len(record["outside"]) == 1 and "*" not in listed and " " not in listed
        sentences.append(f"{_capital(listed)} {'stays' if one else 'stay'} eager beside the graphs.")
    if share_inside(record) < _ENOUGH_INSIDE:
        sentences.append(f"Inside the regions lie {_shares(record)}.")
    sentences += _variants(census, encoder)
    return " ".join(sentences)


def _wrong(record: Record) -> str:
    if not record["undone"]:
        return "undoing left something changed"
    return f"its output differs from eager by {number(record['relative_difference'])} of the largest value"


def _graphs(record: Record, compiled: Sequence[Record]) -> str:
    graphs = sum(region["graphs"] for region in compiled)
    if record["granularity"] == "encoder":
        return f"All of it is {_count(graphs, 'graph')}."
    if len(compiled) == 1:
        noun = "repeated layer" if compiled[0]["instances"] > 1 else "one kind of module"
        return f"Its {noun} is {_count(graphs, 'graph')}, however many layers a checkpoint has."
    each = "are one graph each" if graphs == len(compiled) else f"took {graphs} graphs"
    return f"Its {len(compiled)} kinds of module {each}, however many layers a checkpoint has."


def _after_first(run: Run, record: Record) -> str:
    late, calls = record["graphs_after_first_call"], run.sizes - 1
    if not late:
        made = "It was" if record["graphs"] == 1 else "All were"
        return f"{made} made in the first call, of batch 1; {calls} calls of other sizes needed no more."
    return f"{_capital(_count(late, 'graph'))} came after the first call, in {calls} calls of other sizes."


def _sizes(compiled: Sequence[Record]) -> Iterator[str]:
    """Yield what the graph that comes first is open to, if it is one for all calls."""
    first = compiled[0]
    for verdict in first["inputs"]:
        shape = verdict["reason"].partition(", shape ")[2]
        if first["graphs"] == 1 and not first["eager_calls"] and verdict["verdict"] == "dynamic" and shape:
            yield f"The first graph takes {code(verdict['name'])} of {code(shape)}, where ? is any size."
            return


def _numbers(census: Census, encoder: Encoder, record: Record) -> Iterator[str]:
    how = "Run as traced, the numbers" if census.main.backend == "eager" else "The numbers"
    if record["difference"]:
        yield f"{how} are those of eager to {number(record['relative_difference'])} of the largest value."
    else:
        yield f"{how} are those of eager, bit for bit."
    for run in census.others:
        sample = run.records.get(encoder.cases[0])
        if sample and "relative_difference" in sample and run.backend != census.main.backend:
            named = _BACKENDS.get(run.backend, (run.backend,))[0]
            most = number(sample["relative_difference"])
            yield f"Compiled by {named}, they differ by at most {most} of the largest value."


def _variants(census: Census, encoder: Encoder) -> Iterator[str]:
    """Yield which variants of the encoder fare otherwise than the first case."""
    first, *variants = ((case, outcome_of(census.main.records[case])) for case in encoder.cases)
    unlike: dict[str, list[str]] = {}
    for case, outcome in variants:
        if outcome != first[1]:
            unlike.setdefault(outcome, []).append(code(case))
    for outcome, cases in unlike.items():
        yield f"Otherwise with {join(cases)}: {outcome}."


def _usage(model_type: str, model_class: str) -> str:
    lines = [
        "## Use it",
        "",
        "```python",
        "import hf_compile",
        f"from transformers import {model_class}",
        "",
        f'checkpoint = "path/or/id-of-a-{model_type}-checkpoint"',
        f"model = hf_compile.from_pretrained(checkpoint, auto_class={model_class}, compile_mm_encoder=True)",
        "...  # use it as ever",
        "print(hf_compile.status(model))  # what was compiled, what was not, and why",
        "hf_compile.uncompile_mm_encoder(model)",
        "```",
        "",
        "Before loading, from the config alone: `hf-compile inspect path/or/id-of-the-checkpoint`.",
    ]
    return "\n".join(lines)


# --- for the person who wants to know --------------------------------------------------------------------------------


def _encoder(census: Census, encoder: Encoder) -> Iterator[str]:
    yield f"## Encoder {code(encoder.class_name)}"
    record = _main(census, encoder)
    lines = [
        f"- {code(place.path) if place.path else 'The model itself'}: {join(place.modalities)}; found because "
        f"{escape(place.found_by)}."
        for place in encoder.places
    ]
    if record is not None and record.get("class_name", encoder.class_name) != encoder.class_name:
        lines.append(f"- What was measured is the {code(record['class_name'])} in it.")
    if record is not None and record.get("regions"):
        lines += _how(record)
    yield "\n".join(lines)
    if record is None:
        return
    if record.get("regions"):
        yield f"### Regions\n\n{_regions(record)}"
        if any(region["graphs"] for region in record["regions"]):
            yield f"### Arguments\n\n{_arguments(record)}"
    yield _bullets("### Remedies", _of_all("remedies", record))
    yield _bullets("### Family patches", _of_all("patches", record))
    yield f"### Results\n\n{_results(census, encoder)}"
    yield _bullets("### Limits", _limits(census, encoder))


def _how(record: Record) -> list[str]:
    """Return what is compiled, why in that way, and what lies outside."""
    if record["granularity"] == "block":
        lines = [f"- Compiled in blocks: {escape(record['granularity_reason'])} in the tiny model."]
    else:
        lines = [f"- Compiled as a whole: {escape(record['granularity_reason'])}."]
    line = f"- Inside regions lie {_shares(record)}"
    if record["outside"]:
        line += (
            f"; outside: {', '.join(without_indices(record['outside']))}. A single layer or table gains "
            "nothing from a graph of its own; code that goes by the values of its inputs fits into none"
        )
    return [*lines, f"{line}."]


def _shares(record: Record) -> str:
    """Return the share of the parameters inside regions, in the default config and in what was measured."""
    tiny = f"{percent(record['coverage'])} of the tiny model's parameters"
    full = record.get("coverage_at_full_size")
    return f"{percent(full)} of the parameters at the size of the default config, {tiny}" if full else tiny


def _regions(record: Record) -> str:
    rows = [
        (
            code(region["class_name"]),
            region["instances"],
            region["graphs"],
            "not reached" if region["state"] == "pending" else _state(region),
        )
        for region in record["regions"]
    ]
    text = table(("class", "modules", "graphs", "state"), rows, ("modules", "graphs"))
    classes = {region["class_name"] for region in record["regions"]}
    return text + "\n\nRows of one class differ in the shapes of their weights, or in a flag." * (
        len(classes) < len(rows)
    )


def _state(region: Record) -> str:
    calls = region["eager_calls"]
    return f"compiled, {_count(calls, 'call')} eager" if calls and region["state"] == "compiled" else region["state"]


def _arguments(record: Record) -> str:
    rows = []
    for region in record["regions"]:
        for verdict in region["inputs"] if region["graphs"] else ():
            reason, _, shape = verdict["reason"].partition(", shape ")
            dims = ", ".join(map(str, verdict["dims"]))
            name = code(f"{region['class_name']}.{verdict['name']}")
            reason = escape(reason.replace("was passed for it so far", "was passed in any call"))
            rows.append((name, verdict["verdict"], dims, code(shape) if shape else "", reason))
    return table(("argument", "verdict", "dims that vary", "shape", "why"), dict.fromkeys(rows))


def _of_all(key: str, record: Record) -> list[str]:
    """Return what is said of the encoder, and of each of its regions."""
    lines = [escape(each) for each in record.get(key, ())]
    for region in record.get("regions", ()):
        lines += [f"{code(region['class_name'])}: {escape(each)}" for each in region.get(key, ())]
    return list(dict.fromkeys(lines))


def _results(census: Census, encoder: Encoder) -> str:
    rows = []
    for run, case in itertools.product((census.main, *census.others), encoder.cases):
        record = run.records.get(case)
        if record is not None:
            graphs: tuple[str | int, ...] = ("", "")
            if "graphs" in record:
                graphs = (record["graphs"], record["graphs_after_first_call"])
            undone = ("yes" if record["undone"] else "**no**") if "undone" in record else ""
            rows.append(
                (code(case), _run(run, census.main), outcome_of(record), *graphs, difference_of(record), undone)
            )
    headings = ("case", "run", "outcome", "graphs", "after the first call", "difference", "undone exactly")
    text = table(headings, rows, headings[3:5])
    notes = [
        f"{code(case)}: {escape(record['note'])}."
        for case in encoder.cases
        if (record := census.main.records[case]).get("note")
    ]
    whole = [run.records.get(encoder.cases[0]) for run in census.others if run.granularity == "encoder"]
    if any(record and record["outcome"] == "one_graph" for record in whole):
        notes.append(
            "One graph for the whole encoder returns no hidden states: a model that asks for them, as LLaVA does on "
            "every call, needs regions."
        )
    return "\n\n".join([text, *notes])


def _run(run: Run, main: Run) -> str:
    """Return what was compiled, how, and with what."""
    words = ["whole encoder" if run.granularity == "encoder" else "regions", *_BACKENDS.get(run.backend, ())]
    words += [f"Transformers {run.versions['transformers']}"]
    words += [f"torch {run.versions['torch']}"] * (run.versions["torch"] != main.versions["torch"])
    return ", ".join(words)


def _unlike(run: Run, main: Run) -> list[str]:
    """Return in what a run differs from the main one, in words; nothing for the main one itself."""
    words = ["whole encoder"] * (run.granularity != main.granularity)
    words += _BACKENDS.get(run.backend, ()) * (run.backend != main.backend)
    if run.versions["transformers"] != main.versions["transformers"]:
        words.append(f"Transformers {run.versions['transformers']}")
    return [", ".join(words)] if words else []


def _limits(census: Census, encoder: Encoder) -> list[str]:
    """Return why there is more than one graph, or why something ran eager; each reason once, with where it holds."""
    found: dict[str, list[str]] = {}
    for run, case in itertools.product((census.main, *census.others), encoder.cases):
        record = run.records.get(case)
        if record is None or record["outcome"] in ("one_graph", "absent"):
            continue
        where = " ".join([code(case), *(f"({words})" for words in _unlike(run, census.main))])
        for text in _limits_of(record):
            found.setdefault(text, []).append(where)
    return [f"{', '.join(dict.fromkeys(where))}: {text}" for text, where in found.items()]


def _limits_of(record: Record) -> Iterator[str]:
    if record["outcome"] == "wrong":
        yield f"{_wrong(record)}."
    if record.get("error"):
        yield escape(" ".join(record["error"].split())[:400])
    for region in record.get("regions", ()):
        reasons = reasons_of(region["reason"])
        if reasons:
            yield "\n".join([code(region["class_name"]), *(f"  - {reason}" for reason in reasons)])
    if record["outcome"] == "one_graph_late":
        yield "a graph is made when its module is first reached, which was not in the first call."


def _method(census: Census, encoders: Sequence[Encoder]) -> str:
    run = census.main
    cases = [case for encoder in encoders for case in encoder.cases]
    if not cases:
        return ""
    exact = any("compiled_error" in each.records.get(case, ()) for each in census.others for case in cases)
    files = ", ".join(f"[{each.file}](../benchmarks/{each.file})" for each in (run, *census.others))
    return (
        "## How this was measured\n\n"
        f"Each case is the encoder class alone: tiny, with random weights (seed {run.seed}), in float32 on the CPU, "
        f"called {run.sizes} times with inputs of different sizes, batch 1 first. Dynamo's own counter counts the "
        "graphs. A difference is the largest over all outputs of all calls, relative to the largest value of eager"
        f"{_FLOAT64 * exact}. "
        "Undone exactly means that afterwards every output, attribute, hook and key was as before. The backend "
        f'"{run.backend}"{_backend(run.backend)} '
        f"Versions: {', '.join(f'{name} {version}' for name, version in run.versions.items())}. "
        f"Every number, and the seconds, are in {files}.\n\n"
        "Again, on your machine:\n\n```\n"
        f"hf-compile census {' '.join(map(shlex.quote, cases))}\n```"
    )


def _backend(name: str) -> str:
    if name == "eager":
        return " runs the operations of a graph as they are, so it counts graphs and leaves rounding to Inductor."
    return " compiled the graphs."


def _main(census: Census, encoder: Encoder) -> Record | None:
    return census.main.records[encoder.cases[0]] if encoder.cases else None


def _bullets(heading: str, lines: Sequence[str]) -> str:
    return "\n".join([heading, "", *(f"- {line}" for line in lines)]) if lines else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _count(count: int, noun: str) -> str:
    return f"one {noun}" if count == 1 else f"{count} {noun}s"
