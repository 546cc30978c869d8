"""A census measures what it is given, says what went wrong, and goes on."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import sys
import time
import types

import pytest
import torch

from hf_compile import api
from hf_compile.__main__ import main
from hf_compile.census import measure as measuring
from hf_compile.census import run, tables
from hf_compile.census.cases import Case, build, cases, draws
from hf_compile.census.measure import find, measure
from hf_compile.census.run import run_census, summary

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _workers_find_this_checkout(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("COLUMNS", "120")


# ---- the tables


def written_keys(name):
    """Yield the keys of each dict in a table's source: Python keeps the last of two equal ones and says nothing."""
    source = pathlib.Path(tables.__file__).with_name(f"{name}.py").read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            yield [key.value for key in node.keys if isinstance(key, ast.Constant)]


@pytest.mark.smoke
def test_names_are_unique():
    assert len(cases()) == sum(map(len, tables.TABLES)) > 100
    assert list(cases()) == list(cases())
    assert set(tables.SAMPLE) <= cases().keys()
    assert len(set(tables.SAMPLE)) == len(tables.SAMPLE)
    for name in ("audio", "images", "masked", "others", "packed"):
        for keys in written_keys(name):
            assert len(set(keys)) == len(keys), keys


def test_a_name_in_two_tables_is_an_error(monkeypatch):
    monkeypatch.setattr(tables, "TABLES", ({"clip": cases()["clip"]}, {"clip": cases()["siglip"]}))
    with pytest.raises(ValueError, match="named twice in the tables of the census: clip"):
        cases()


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["clip", "whisper", "qwen2_vl"])
def test_draws_vary_and_repeat(name):
    case = cases()[name]
    encoder = build(case)
    first, second, other = (list(draws(case, encoder, seed=seed, sizes=4)) for seed in (0, 0, 1))
    assert len(first) == 4
    shapes = [{key: tuple(value.shape) for key, value in each.items()} for each in first]
    assert shapes[0] != shapes[1]
    for left, right in zip(first, second, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)
    assert not all(torch.equal(first[0][key], other[0][key]) for key in first[0])


@pytest.mark.smoke
def test_nothing_is_left_constant_by_initialisation():
    """A gate of 0, or attention that is uniform, would hide what lies behind it."""
    for name in ("clip", "whisper", "mllama"):
        for path, parameter in build(cases()[name]).named_parameters():
            assert parameter.numel() == 1 or parameter.unique().numel() > 1, (name, path)


# ---- one case


def two_images(encoder, draw):
    return {"pixel_values": draw.normal(draw.batch(), 3, 32, 32)}


@pytest.mark.smoke
def test_a_new_encoder_is_two_lines():
    mine = Case("siglip.SiglipVisionModel", two_images, note="mine")
    record = measure("mine", mine, sizes=3)
    assert record["error"] == ""
    assert {key: record[key] for key in ("name", "class", "note", "outcome", "undone")} == {
        "name": "mine",
        "class": "siglip.SiglipVisionModel",
        "note": "mine",
        "outcome": "one_graph",
        "undone": True,
    }


SMALL = ("clip[interp]", "whisper", "qwen2_vl")


@pytest.mark.smoke
@pytest.mark.parametrize("name", SMALL)
def test_a_record_says_what_was_measured_twice_the_same(name):
    record = measure(name, cases()[name], sizes=4)
    assert (record["outcome"], record["error"], record["undone"]) == ("one_graph", "", True)
    assert (record["graphs_after_first_call"], record["graph_breaks"]) == (0, 0)
    assert record["difference"] == record["relative_difference"] == 0.0
    assert record["graphs"] == sum(region["graphs"] for region in record["regions"])  # torch's count, and ours
    assert all(region["graphs"] == 1 for region in record["regions"])
    again = measure(name, cases()[name], sizes=4)
    assert record.pop("seconds") > 0
    assert again.pop("seconds") > 0
    assert again == record
    assert json.loads(json.dumps(record)) == record


def test_numbers_of_a_backend_that_compiles_are_compared_in_float64():
    record = measure("clip", cases()["clip"], sizes=2, backend="aot_eager")
    assert record["outcome"] == "one_graph"
    assert 0 < record["eager_error"] < 1e-5
    assert record["compiled_error"] <= 1.5 * record["eager_error"]


# ---- outcomes that are not the best


def test_another_graph_is_counted_by_both(monkeypatch):
    monkeypatch.setattr("hf_compile.plan.MASK_MAKERS", ())  # masks that hide nothing are dropped
    record = measure("idefics3", cases()["idefics3"], sizes=4)
    assert (record["outcome"], record["graphs_after_first_call"]) == ("more_graphs", 1)
    assert record["graphs"] == sum(region["graphs"] for region in record["regions"]) == 3
    (reason,) = [region["reason"] for region in record["regions"] if region["graphs"] > 1]
    assert "graph 2 was made for" in reason


def test_a_graph_with_other_numbers_is_wrong():
    def off(graph_module, example_inputs):
        return lambda *args: [value * 1.001 for value in graph_module.forward(*args)]

    record = measure("clip", cases()["clip"], sizes=2, backend=off)
    assert (record["outcome"], record["undone"]) == ("wrong", True)
    assert record["relative_difference"] > 1e-4


def test_what_undo_leaves_is_wrong(monkeypatch):
    def forgets(encoder):
        api.uncompile_mm_encoder(encoder)
        encoder.left_behind = True

    left = types.SimpleNamespace(**{**vars(api), "uncompile_mm_encoder": forgets})
    monkeypatch.setattr(measuring, "api", left)
    record = measure("clip", cases()["clip"], sizes=2)
    assert (record["outcome"], record["undone"]) == ("wrong", False)


@pytest.mark.smoke
def test_what_goes_wrong_is_a_record():
    raises = measure("raises", Case("clip.CLIPVisionModel", lambda _, draw: {"pixel_values": draw.normal(1, 3, 8, 8)}))
    assert raises["outcome"] == "failed"
    assert raises["error"].startswith("ValueError: Input image size (8*8) doesn't match model")
    for cls in ("clip.NoSuchModel", "no_such_folder.CLIPVisionModel"):
        absent = measure("absent", Case(cls, two_images))
        assert (absent["outcome"], absent["name"]) == ("absent", "absent")
        assert absent["error"].endswith(f"has no {cls}")
    no_part = measure("part", Case("clip.CLIPVisionModel", two_images, part="nowhere"))
    assert no_part["outcome"] == "failed"
    assert "nowhere" in no_part["error"]
    for record in (raises, absent, no_part):
        assert record["seconds"] >= 0
        assert "undone" not in record


def test_a_failed_case_leaves_nothing_for_the_next():
    broken = Case("clip.CLIPVisionModel", lambda encoder, draw: {"pixel_values": draw.normal(1, 3, 8 * draw.index, 8)})
    assert measure("broken", broken, sizes=3)["outcome"] == "failed"
    assert measure("clip", cases()["clip"], sizes=3)["outcome"] == "one_graph"


# ---- what is found


@pytest.mark.smoke
def test_find():
    record = find("llava")
    (encoder,) = record.pop("encoders")
    assert record == {
        "model_type": "llava",
        "model_class": "LlavaForConditionalGeneration",
        "outcome": "found",
        "error": "",
    }
    assert (encoder["path"], encoder["class_name"], encoder["modalities"]) == (
        "model.vision_tower",
        "CLIPVisionModel",
        ["image"],
    )
    assert encoder["found_by"]


@pytest.mark.smoke
def test_a_model_without_an_encoder():
    """Fuyu feeds patches to its text model through one linear layer."""
    record = find("fuyu")
    assert (record["outcome"], record["model_class"]) == ("no_encoder", "FuyuForCausalLM")
    assert record["error"]
    assert "encoders" not in record


@pytest.mark.smoke
def test_a_model_that_does_not_exist():
    record = find("no_such_model")
    assert (record["outcome"], record["model_class"]) == ("failed", "")
    assert "no_such_model" in record["error"]


# ---- many cases, in processes

WORKER = """
import os
from hf_compile.census.cases import Case
from hf_compile.census.tables import TABLES
from hf_compile.census.worker import main

def dies(encoder, draw):
    os._exit(7)

def talks(encoder, draw):
    print("{}")
    return {"pixel_values": draw.normal(draw.batch(), 3, 32, 32)}

def talks_from_below(encoder, draw):
    os.write(1, b"a library in C says hello\\n")
    return talks(encoder, draw)

for recipe in (dies, talks, talks_from_below):
    TABLES[0][recipe.__name__] = Case("clip.CLIPVisionModel", recipe)
main()
"""


@pytest.fixture
def workers(monkeypatch, tmp_path):
    """Workers that know some cases more."""
    (tmp_path / "worker.py").write_text(WORKER)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path / "worker.py"}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(run, "sys", types.SimpleNamespace(executable=str(python)))
    return tmp_path / "worker.py"


def tasks(*names):
    return [{"name": name, "sizes": 2} for name in names]


@pytest.mark.usefixtures("workers")
def test_a_worker_that_dies_costs_one_record():
    came = []
    records = run_census(tasks("dies", "talks"), jobs=1, on_record=lambda record: came.append(record["name"]))
    assert [record["name"] for record in records] == ["dies", "talks"] == came
    assert [record["outcome"] for record in records] == ["failed", "one_graph"]
    assert [record["error"] for record in records] == ["its process ended with exit status 7", ""]
    assert summary(records) == {"failed": 1, "one_graph": 1}


HANGING = """
import json, sys, time
for line in sys.stdin:
    task = json.loads(line)
    time.sleep(1000 if task["name"] == "hangs" else 0)
    print(json.dumps({"name": task["name"], "outcome": "one_graph", "error": ""}), flush=True)
"""


def test_a_worker_that_hangs_costs_one_record(monkeypatch, workers):
    """With a process that needs no torch: the time limit counts from its start."""
    workers.write_text(HANGING)
    monkeypatch.setattr(run, "_SECONDS_PER_CASE", 3)
    records = run_census(tasks("first", "hangs", "last"), jobs=1)
    assert [record["name"] for record in records] == ["first", "hangs", "last"]
    assert [record["outcome"] for record in records] == ["one_graph", "failed", "one_graph"]
    assert records[1]["error"] == "it was not done after 3 s, and its process was ended"


def test_records_come_in_the_order_of_the_tasks(monkeypatch):
    """Whichever worker is done first; and a worker is given up after some cases, since Dynamo's memory grows."""
    started, given = [], {}

    def start():
        started.append(types.SimpleNamespace(poll=lambda: None))
        return started[-1]

    def ask(worker, task):
        given.setdefault(id(worker), []).append(task["name"])
        time.sleep(0.02 if task["name"] % 5 == 0 else 0.001)
        return {"name": task["name"], "outcome": "one_graph"}

    for name, fake in (("_start", start), ("_ask", ask), ("_stop", lambda worker: None)):
        monkeypatch.setattr(run, name, fake)
    came = []
    records = run_census(
        [{"name": number} for number in range(40)], jobs=3, on_record=lambda r: came.append(r["name"])
    )
    assert [record["name"] for record in records] == list(range(40)) == sorted(came)
    assert came != sorted(came)
    assert max(map(len, given.values())) <= run._CASES_PER_WORKER
    assert len(started) >= 4


@pytest.mark.smoke
def test_no_tasks_need_no_worker():
    assert run_census([]) == []
    assert summary([]) == {}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.usefixtures("workers")
def test_what_a_library_prints_does_not_mix_with_the_answers():
    (record,) = run_census(tasks("talks_from_below"), jobs=1)
    assert (record["name"], record["outcome"]) == ("talks_from_below", "one_graph")


# ---- the command


@pytest.fixture
def command(monkeypatch, capsys):
    def call(*words):
        monkeypatch.setattr(sys, "argv", ["hf-compile", "census", *map(str, words)])
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code or 0
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.mark.smoke
def test_the_command_writes_its_records(command, tmp_path):
    output = tmp_path / "census.json"
    status, out, err = command("clip", "whisper", "--sizes", 3, "--jobs", 1, "--no-models", "--output", output)
    assert (status, err) == (0, "")
    content = json.loads(output.read_text())
    assert content.keys() == {
        "schema_version",
        "versions",
        "granularity",
        "backend",
        "seed",
        "sizes",
        "summary",
        "encoders",
    }
    assert (content["sizes"], content["backend"], content["summary"]) == (3, "eager", {"one_graph": 2})
    assert content["versions"]["torch"] == torch.__version__
    assert [record["name"] for record in content["encoders"]] == ["clip", "whisper"]
    same = measure("clip", cases()["clip"], sizes=3)  # in this process
    assert {**content["encoders"][0], "seconds": 0} == {**same, "seconds": 0}
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["clip", "whisper"]
    assert all("one_graph" in line for line in lines[:2])
    assert lines[2:] == ["encoders: 2 one graph", f"written to {output}"]
    for was, fails in (("one_graph", False), ("eager", False)):
        assert bool(compared(content["encoders"], was)) is fails
    for record in content["encoders"]:
        record["outcome"] = "more_graphs"
    assert "clip: more_graphs, was one_graph; whisper: more_graphs" in compared(content["encoders"], "one_graph")


def compared(records, was):
    """Return what `--check` says about records whose outcome was another one."""
    from hf_compile.cli.census import _compare
    from hf_compile.errors import VerificationError

    try:
        _compare(records, [{**record, "outcome": was} for record in records])
    except VerificationError as error:
        return str(error)
    return ""


@pytest.mark.smoke
def test_an_unknown_name_is_a_plain_error(command, tmp_path):
    output = tmp_path / "census.json"
    status, out, err = command("clip", "clipp", "--output", output)
    assert (status, out) == (1, "")
    assert "no encoder 'clipp' in the tables of the census" in " ".join(err.split())
    assert "Traceback" not in err
    assert not output.exists()
