"""The model cards: what a small census says is what the cards say."""

import copy
import json
import pathlib
import sys

import pytest
from huggingface_hub import ModelCard

from hf_compile.__main__ import main
from hf_compile.cards import read_census, write_cards
from hf_compile.cards.words import escape, outcome_of, reasons_of, without_indices
from hf_compile.errors import ConfigurationError, UnsupportedModelError

ROOT = pathlib.Path(__file__).parents[1]
TWO_GRAPHS = (
    "graph 1 was made for no_grad float32 hidden_states 1x40x16; "
    "graph 2 was made for no_grad float32 hidden_states 3x138x16, mask 3x138"
)
EAGER = "8 calls ran eager: transformers/models/owl/modeling_owl.py:327 in _pad: data-dependent; use torch.where"


def region(name, *, instances=1, graphs=1, state="compiled", reason="", eager_calls=0, **more):
    shape = {"name": "hidden_states", "verdict": "dynamic", "dims": [0, 1]}
    shape["reason"] = "annotated as Tensor | None; may have any size, shape ?x?x32"
    counts = {"instances": instances, "graphs": graphs, "eager_calls": eager_calls}
    return {"class_name": name, "state": state, "reason": reason, "inputs": [shape], **counts, **more}


def measured(name, cls, regions, outcome="one_graph", *, late=0, difference=0.0, **more):
    return {
        "name": name,
        "class": cls,
        "class_name": cls.partition(".")[2],
        "note": "",
        "outcome": outcome,
        "error": "",
        "graphs": sum(each["graphs"] for each in regions),
        "graphs_after_first_call": late,
        "difference": difference,
        "relative_difference": difference,
        "granularity": "block",
        "granularity_reason": "2 layers repeat",
        "coverage": 0.9947,
        "coverage_at_full_size": 0.97,
        "outside": ["norm", "layers.0.scale", "layers.1.scale"],
        "regions": regions,
        "undone": True,
        "seconds": 12.75,
        **more,
    }


def found(model_type, model_class, *encoders):
    keys = ("class_name", "path", "modalities", "found_by")
    described = [dict(zip(keys, each, strict=True)) for each in encoders]
    return {
        "model_type": model_type,
        "model_class": model_class,
        "outcome": "found",
        "error": "",
        "encoders": described,
    }


def missing(model_type, outcome, error):
    return {"model_type": model_type, "model_class": "", "outcome": outcome, "error": error}


CLIP = ("CLIPVisionModel", "model.vision_tower", ["image"], "get_encoder('image')")
EAR = ("EarModel", "model.ear", ["audio"], "its forward takes input_features and no text")
REGIONS = [region("Embeddings"), region("Layer", instances=2, remedies=["dim 0 of size 1 stays fixed"])]
CENSUS = {
    "schema_version": 1,
    "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.24.0", "hf-compile": "0.1"},
    "granularity": "auto",
    "backend": "eager",
    "seed": 0,
    "sizes": 8,
    "encoders": [
        measured("clip[interp]", "clip.CLIPVisionModel", [region("Layer", graphs=2)], "more_graphs", note="any size"),
        measured("clip", "clip.CLIPVisionModel", REGIONS),
        measured("ear", "ear.EarModel", [region("Cut", graphs=2, reason=TWO_GRAPHS)], "more_graphs", late=1),
        measured(
            "owl", "owl.OwlModel", [region("Pad", graphs=0, state="eager", reason=EAGER, eager_calls=8)], "eager"
        ),
        measured(
            "vq",
            "vq.VQModel",
            REGIONS,
            class_name="VQEncoder",
            difference=8e-7,
            coverage=0.39,
            coverage_at_full_size=None,
            patches=["vq: *why*"],
        ),
        measured("bad", "bad.BadModel", [region("Layer")], "wrong", difference=0.5),
        {"name": "late", "class": "late.LateModel", "outcome": "refused", "error": "no layer"},
        {"name": "dead", "outcome": "failed", "error": "its process ended with exit status -9"},
        measured("projector", "clip.Projector", [region("Projector")], outside=[]),
    ],
    "models": [
        found("two", "TwoForConditionalGeneration", CLIP, EAR),
        found("llava", "LlavaForConditionalGeneration", CLIP),
        found("owl-2", "OwlForCTC", ("OwlModel", "", ["video"], "its forward takes videos and no text")),
        found("vq", "VQForConditionalGeneration", ("VQModel", "model.vq", ["image", "video"], "its encode")),
        found(
            "new", "NewForConditionalGeneration", ("NewVisionModel", "model.new", ["image"], "get_encoder('image')")
        ),
        found("twin", "TwinModel", CLIP, ("CLIPVisionModel", "video_tower", ["video"], "its path")),
        found("bad", "BadModel", ("BadModel", "bad", ["image"], "its forward")),
        found("late", "LateModel", ("LateModel", "late", ["image"], "its forward")),
        found("dead", "DeadModel", ("DeadVisionModel", "dead", ["image"], "its forward")),
        missing("fuyu", "no_encoder", "FuyuForCausalLM has no separable encoder"),
        missing("timm", "failed", "UnsupportedModelError: TimmModel cannot be built: ImportError"),
    ],
}


def other(records, **options):
    return {**{key: CENSUS[key] for key in CENSUS if key != "models"}, **options, "encoders": records}


OTHERS = {
    "census_encoder.json": other([measured("clip", "clip.CLIPVisionModel", [region("All")])], granularity="encoder"),
    "census_inductor.json": other(
        [measured("clip", "clip.CLIPVisionModel", REGIONS, difference=3e-7, compiled_error=1e-7, eager_error=2e-7)],
        backend="inductor",
    ),
    "census_5.0.0.json": other(
        [{"name": "clip", "class": "clip.CLIPVisionModel", "outcome": "absent", "error": "no such class"}],
        versions={**CENSUS["versions"], "transformers": "5.0.0"},
    ),
}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "benchmarks" / "census.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CENSUS))
    return path


@pytest.fixture
def cards(source, tmp_path):
    """Texts of all files by name, without the runs beside the main one."""
    write_cards(read_census(source), tmp_path / "cards")
    return {path.name: path.read_text() for path in (tmp_path / "cards").iterdir()}


def rows_of(text, heading):
    """The cells of the first table after a heading."""
    lines = iter(text.partition(f"{heading}\n")[2].strip().splitlines())
    table = [next(lines)]
    for line in lines:
        if not line.startswith("|"):
            break
        table.append(line)
    return [[cell.strip() for cell in line.split(" | ")] for line in (each.strip("| ") for each in table[2:])]


def test_a_card_for_each_model_with_an_encoder_and_an_index(cards):
    assert sorted(cards) == [
        *("README.md", "bad.md", "dead.md", "late.md", "llava.md", "new.md", "owl-2.md", "twin.md", "two.md", "vq.md")
    ]


def test_the_same_input_gives_the_same_bytes(source, tmp_path):
    for folder in ("one", "two"):
        write_cards(read_census(source), tmp_path / folder)
    shuffled = copy.deepcopy(CENSUS)
    shuffled["encoders"].reverse()
    shuffled["models"].reverse()
    for record in shuffled["encoders"]:
        record["seconds"] = 0.5  # no card shows a time
    source.write_text(json.dumps(shuffled))
    write_cards(read_census(source), tmp_path / "three")
    one, two, three = (
        {path.name: path.read_bytes() for path in (tmp_path / each).iterdir()} for each in ("one", "two", "three")
    )
    assert one == two == three
    assert b"\r" not in b"".join(one.values())


def test_every_card_loads_as_a_model_card(cards, tmp_path):
    for name in cards.keys() - {"README.md"}:
        card = ModelCard.load(tmp_path / "cards" / name)
        assert str(card) == cards[name]
        assert card.data.library_name == "transformers"
        assert {"hf_compile", name.removesuffix(".md")} <= set(card.data.tags)
    tags = {name: ModelCard(cards[f"{name}.md"]).data.pipeline_tag for name in ("llava", "two", "owl-2", "twin")}
    assert tags == {
        "llava": "image-text-to-text",
        "two": "any-to-any",
        "owl-2": "automatic-speech-recognition",
        "twin": None,
    }


def test_a_compiled_encoder(cards):
    text = cards["llava.md"]
    assert "# Image encoder of `llava` under hf_compile" in text
    assert "`CLIPVisionModel` is **compiled**. Its 2 kinds of module are one graph each" in text
    assert "All were made in the first call, of batch 1; 7 calls of other sizes needed no more." in text
    assert "The first graph takes `hidden_states` of `?x?x32`, where ? is any size." in text
    assert "the numbers are those of eager, bit for bit" in text
    assert "`norm` and `layers.*.scale` stay eager beside the graphs." in text
    assert "Otherwise with `clip[interp]`: compiled, more than one graph." in text
    assert "from transformers import LlavaForConditionalGeneration" in text
    assert "- `model.vision_tower`: image; found because get_encoder('image')." in text
    assert "- Compiled in blocks: 2 layers repeat in the tiny model." in text
    inside = "97 % of the parameters at the size of the default config, 99.5 % of the tiny model's parameters"
    assert f"- Inside regions lie {inside}; outside: `norm`, `layers.*.scale`. A single layer or table gains" in text
    assert "### Remedies\n\n- `Layer`: dim 0 of size 1 stays fixed" in text
    assert "`clip[interp]`: any size." in text
    assert "hf-compile census clip 'clip[interp]'" in text
    assert rows_of(text, "### Regions") == [["`Embeddings`", "1", "1", "compiled"], ["`Layer`", "2", "1", "compiled"]]
    why = r"annotated as Tensor \| None; may have any size"
    assert rows_of(text, "### Arguments")[1] == ["`Layer.hidden_states`", "dynamic", "0, 1", "`?x?x32`", why]
    assert rows_of(text, "### Results")[0] == [
        *("`clip`", "regions, Transformers 5.24.0", "compiled, one graph each", "2", "0", "0", "yes")
    ]
    assert "Family patches" not in text


def test_more_than_one_graph_says_which_calls_and_what_they_lack(cards):
    text = cards["two.md"]
    assert "# Image and audio encoders of `two`" in text
    assert "Its one kind of module is 2 graphs" in text
    assert "One graph came after the first call" in text
    limits = text.partition("## Encoder `EarModel`")[2].partition("### Limits\n\n")[2]
    assert limits.splitlines()[:4] == [
        "- `ear`: `Cut`",
        "  - graph 1 was made for no_grad float32 hidden_states 1x40x16",
        "  - graph 2 was made for no_grad float32 hidden_states 3x138x16, mask 3x138",
        "  - some of these calls lack mask",
    ]


def test_an_eager_encoder_names_file_and_line(cards):
    text = cards["owl-2.md"]
    assert "The video encoder `OwlModel` **runs eager**" in text
    assert "- The model itself: video;" in text
    assert r"  - 8 calls ran eager: transformers/models/owl/modeling_owl.py:327 in \_pad: data-dependent" in text
    assert "### Arguments" not in text
    assert "graph each" not in text


def test_a_class_that_was_not_measured_is_said_to_be_so(cards):
    text = cards["new.md"]
    assert "The image encoder `NewVisionModel` was **not measured**" in text
    assert "`hf-compile inspect` shows" in text
    assert "- `model.new`: image" in text
    for heading in ("### Regions", "### Results", "### Limits", "## How this was measured"):
        assert heading not in text


def test_a_class_is_joined_by_what_was_built_and_by_the_name_of_a_dead_worker(cards):
    assert "- What was measured is the `VQEncoder` in it." in cards["vq.md"]
    assert "# Vision encoder of `vq`" in cards["vq.md"]
    assert "### Family patches\n\n- vq: \\*why\\*" in cards["vq.md"]
    assert "eager to 8e-07 of the largest value" in cards["vq.md"]
    assert "Inside the regions lie 39 % of the tiny model's parameters." in cards["vq.md"]
    assert "could **not be measured**, because its process ended with exit status -9" in cards["dead.md"]
    assert "is **not compiled**: it was refused, because no layer" in cards["late.md"]
    assert "must **not be compiled** with this release: its output differs from eager by 5e-01" in cards["bad.md"]


def test_a_class_at_two_places_has_one_section(cards):
    text = cards["twin.md"]
    assert "# Vision encoders of `twin`" in text
    assert text.count("## Encoder") == 1
    assert "- `model.vision_tower`: image;" in text
    assert "- `video_tower`: video;" in text


def test_the_runs_beside_the_main_one_are_shown_where_they_exist(source, tmp_path):
    for name, content in OTHERS.items():
        (source.parent / name).write_text(json.dumps(content))
    (path,) = write_cards(read_census(source), tmp_path / "cards", ["llava"])
    text = path.read_text()
    assert "Compiled by Inductor, they differ by at most 3e-07 of the largest value." in text
    rows = rows_of(text, "### Results")
    assert rows[3][5] == "3e-07; to float64 1e-07, eager 2e-07"
    assert [row[1:3] for row in rows[2:]] == [
        ["whole encoder, Transformers 5.24.0", "compiled, one graph each"],
        ["regions, Inductor, Transformers 5.24.0", "compiled, one graph each"],
        ["regions, Transformers 5.0.0", "not in this Transformers"],
    ]
    assert "a model that asks for them, as LLaVA does" in text
    assert "[census_5.0.0.json](../benchmarks/census_5.0.0.json)" in text


def test_the_index_has_a_row_for_each_model_and_totals(cards):
    text = cards["README.md"]
    rows = {row[0]: row[1:] for row in rows_of(text, "## Models")}
    assert list(rows) == [
        f"[{name}]({name}.md)" for name in ("bad", "dead", "late", "llava", "new", "owl-2", "twin", "two", "vq")
    ]
    graphs = "compiled, one graph each (1 of 2 cases otherwise)"
    assert rows["[llava](llava.md)"] == ["`CLIPVisionModel`", "image", "blocks", "2", "2", "97 %", graphs, "0"]
    assert rows["[two](two.md)"] == [
        *("`CLIPVisionModel`<br>`EarModel`", "image<br>audio", "blocks<br>blocks", "2<br>1", "2<br>2", "97 %<br>97 %"),
        *(f"{graphs}<br>compiled, more than one graph", "0<br>0"),
    ]
    assert rows["[new](new.md)"][6] == "not measured"
    assert "- 11 model types take media and text: 9 with an encoder of their own, 1 without, 1 not built." in text
    assert "## No separable encoder\n\n- `fuyu`: FuyuForCausalLM has no separable encoder" in text
    assert "## Not built\n\n- `timm`: TimmModel cannot be built: ImportError" in text
    assert [row[0] for row in rows_of(text, "projectors, and parts of encoders.")] == ["`projector`"]


def test_cards_of_models_that_are_gone_are_removed_and_nothing_else(source, tmp_path):
    folder = tmp_path / "cards"
    write_cards(read_census(source), folder)
    (folder / "gone.md").write_text((folder / "llava.md").read_text())
    (folder / "mine.md").write_text("# Mine\n")
    write_cards(read_census(source), folder, ["llava"])
    assert (folder / "gone.md").exists()  # only the whole set tells what is gone
    write_cards(read_census(source), folder)
    assert not (folder / "gone.md").exists()
    assert (folder / "mine.md").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lava", "no model type 'lava' in .*; did you mean llava"),
        ("zzzzzz", "there are bad, dead"),
        ("fuyu", "fuyu has no card: FuyuForCausalLM has no separable encoder"),
    ],
)
def test_an_unknown_model_type_is_a_clear_error_and_writes_nothing(source, tmp_path, name, words):
    with pytest.raises(UnsupportedModelError, match=words):
        write_cards(read_census(source), tmp_path / "cards", ["llava", name])
    assert not (tmp_path / "cards").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"there is no .*census.json; `hf-compile census --output"),
        ("{", "is no JSON"),
        ('{"schema_version": 2, "encoders": []}', "no census of schema version 1"),
        ("[]", "no census of schema version 1"),
        (json.dumps({"schema_version": 1, "encoders": []}), "lists no models"),
    ],
)
def test_a_file_that_is_no_census_is_a_clear_error(tmp_path, content, words):
    path = tmp_path / "census.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=words):
        read_census(path)


def test_the_command(source, tmp_path, monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["hf-compile", "card", *words, "--census", str(source)])
        try:
            main()
        except SystemExit as end:
            return end.code or 0, *capsys.readouterr()
        return 0, *capsys.readouterr()

    assert run("--output", str(tmp_path / "all"))[:2] == (0, f"10 files written to {tmp_path / 'all'}\n")
    assert run("two", "--output", str(tmp_path / "one"))[:2] == (0, f"written: {tmp_path / 'one' / 'two.md'}\n")
    status, out, err = run("llavva", "--output", str(tmp_path / "none"))
    assert (status, out) == (1, "")
    assert "did you mean llava" in err


def test_words():
    assert outcome_of(measured("x", "x.X", [region("A"), region("B", state="eager")], "eager")) == "partly eager"
    assert outcome_of({"outcome": "wrong", "undone": False}) == "undone incompletely"
    twice = "graph 1 was made for grad x 1x2; graph 2 was made for grad x 1x2"
    assert reasons_of(twice)[2] == "some of these calls have equal sizes: what differs is no tensor's size"
    assert reasons_of("") == []
    assert len(reasons_of("word " * 200)[0]) < 450
    assert escape("a_b _c|d *e* <f>") == r"a_b \_c\|d \*e\* \<f\>"
    assert without_indices(["a.0.b", "a.12.b", "its own parameters"]) == ["`a.*.b`", "its own parameters"]


@pytest.mark.skipif(not (ROOT / "benchmarks" / "census.json").exists(), reason="no census was committed yet")
def test_the_committed_cards_are_those_of_the_committed_census(tmp_path):
    written = write_cards(read_census(ROOT / "benchmarks" / "census.json"), tmp_path)
    committed = {path.name: path.read_text() for path in (ROOT / "model_cards").glob("*.md")}
    # the name of the source is in no card, so another folder gives the same bytes
    assert {path.name: path.read_text() for path in written} == committed
