"""The command line: `inspect` in this process, `run` in real ones (on scripts that need neither torch nor models)."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from transformers import Qwen2Config

import hf_compile
from hf_compile.__main__ import main

ROOT = pathlib.Path(__file__).parents[2]
SWITCHES = ("HF_COMPILE_MM_ENCODER", "HF_COMPILE_CONFIG", "HF_COMPILE_BACKEND")


@pytest.fixture(autouse=True)
def no_ambient_switch(monkeypatch):
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "examples")]))
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a command in this process; return its exit status and what it wrote."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["hf-compile", *map(str, words)])
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code or 0
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def process(tmp_path):
    """Write a script and run it by `python -m hf_compile run`, from another folder."""

    def run(source, *words, before=(), name="script.py", script=None, **environment):
        folder = tmp_path / "scripts"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(source)
        words = [sys.executable, "-m", "hf_compile", "run", *before, script or str(folder / name), *words]
        environment = {**os.environ, **environment}
        return subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)

    return run


@pytest.fixture(scope="module")
def text_config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    Qwen2Config(**sizes, num_hidden_layers=1, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    return folder


# --- the command as a whole ------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_version_and_help(command):
    assert command("--version") == (0, f"hf-compile {hf_compile.__version__}\n", "")
    status, out, _ = command("--help")
    assert status == 0
    assert [line.split()[1] for line in out.splitlines() if line.startswith(("│ inspect", "│ run"))] == [
        "inspect",
        "run",
    ]


@pytest.mark.smoke
def test_help_is_quick_because_it_imports_little():
    code = "import sys\nfrom hf_compile.__main__ import main\nsys.argv = ['hf-compile', 'run', '--help']\n"
    code += "try:\n    main()\nfinally:\n    print(sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("bench",),
        ("run",),
        ("run", "/no/such/script.py"),
        ("run", "--no-such-option", "x.py"),
        ("inspect", "x", "--granularity", "layer"),
    ],
)
def test_wrong_usage_exits_with_2(command, words):
    status, _, err = command(*words)
    assert status == 2
    assert "Traceback" not in err


# --- inspect ---------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_inspect_as_text_and_as_json(command, checkpoint, tmp_path):
    shutil.copy(checkpoint("qwen2_5_vl") / "config.json", tmp_path)
    status, out, err = command("inspect", tmp_path)
    assert (status, err) == (0, "")
    for words in ("encoder model.visual", "Qwen2_5_VLVisionBlock: pending, planned", "cu_seqlens: dynamic dim 0"):
        assert words in out
    status, out, err = command("inspect", tmp_path, "--json", "--encoder", "model.visual", "--granularity", "encoder")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["schema_version"] == 1
    assert [encoder["granularity"] for encoder in report["encoders"]] == ["encoder"]
    assert report["encoders"][0]["found_by"] == "encoder='model.visual'"


def test_inspect_reads_a_config_file(command, checkpoint, tmp_path):
    file = tmp_path / "options.json"
    file.write_text('{"mode": 0, "compile_mm_encoder": false}')
    status, out, _ = command("inspect", checkpoint("llava"), "--config", file)
    assert status == 0
    assert "nothing of this would be compiled" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("TEXT",), "no separable vision, video or audio encoder"),
        (("LLAVA", "--encoder", "model.vision"), "no module 'model.vision'"),
        (("LLAVA", "--config", "/no/such.json"), "no compilation config at /no/such.json"),
        (("LLAVA", "--config", '{"no_such": 1}'), "unknown option 'no_such'"),
        (("/no/such/folder",), "/no/such/folder cannot be inspected"),
    ],
)
def test_errors_are_one_clear_line(command, checkpoint, text_config, words, said):
    folders = {"TEXT": text_config, "LLAVA": checkpoint("llava")}
    status, out, err = command("inspect", *(folders.get(word, word) for word in words))
    assert (status, out) == (1, "")
    assert err.startswith("hf-compile: ")
    assert said in err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1


# --- run -------------------------------------------------------------------------------------------------------------

SHOW = """
import json, os, pathlib, sys
import neighbour
loaded = sorted({"torch", "transformers"} & set(sys.modules))
names = ("HF_COMPILE_MM_ENCODER", "HF_COMPILE_CONFIG")
print(json.dumps([sys.argv, sys.path[0], __name__, __file__, loaded, [os.environ.get(name) for name in names]]))
"""


def test_a_script_finds_the_world_as_python_makes_it(process, tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "neighbour.py").write_text("")
    script = str(tmp_path / "scripts" / "script.py")
    words = ["--config", "x.json", "--help", "--", "-m", "", "--report"]
    done = process(SHOW, *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    seen = json.loads(done.stdout)
    assert seen == [[script, *words], str(tmp_path / "scripts"), "__main__", script, [], ["1", None]]
    plain = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, cwd=tmp_path)
    assert json.loads(plain.stdout)[:5] == seen[:5]


def test_a_module_is_run_as_by_python_m(process, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys\nprint(sys.argv[1:], __package__, sys.path[0])")
    done = process("", "--config", "x", before=["-m"], script="package")
    assert done.stdout == f"['--config', 'x'] package {tmp_path}\n", done.stderr


def test_the_exit_status_is_that_of_the_script(process):
    assert process("import sys; sys.exit(7)").returncode == 7
    done = process("raise SystemExit('the end')")
    assert (done.returncode, done.stderr) == (1, "the end\n")
    assert process("import os; os._exit(3)").returncode == 3


def test_a_traceback_shows_the_script_as_python_does(process, tmp_path):
    script = tmp_path / "scripts" / "script.py"
    for source in ("def f():\n    raise LookupError('found nothing')\nf()\n", "a = (\n"):
        done = process(source)
        plain = subprocess.run([sys.executable, script], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (1, plain.stderr)
    source = "import hf_compile\nraise hf_compile.ConfigurationError('of the script')\n"
    assert process(source).stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    ("before", "environment", "switch"),
    [
        ([], {}, True),
        (["--no-compile"], {}, False),
        ([], {"HF_COMPILE_MM_ENCODER": "0"}, False),
        (["--compile"], {"HF_COMPILE_MM_ENCODER": "0"}, True),
        (["--config", '{"backend": "eager"}'], {}, True),
        (["--config", '{"compile_mm_encoder": false}'], {}, False),
        (["--config", '{"compile_mm_encoder": false}', "--compile"], {}, True),
        ([], {"HF_COMPILE_CONFIG": '{"compile_mm_encoder": true}'}, True),
        (["--config", '{"mode": 3}'], {"HF_COMPILE_CONFIG": "/no/such.json"}, True),
    ],
)
def test_flag_above_environment_above_file_above_on(process, before, environment, switch):
    source = "from hf_compile.config import resolve_switch\ns = resolve_switch()\nprint(s.enabled, s.explicit)"
    done = process(source, before=before, **environment)
    assert done.stdout == f"{switch} False\n", done.stderr
    said = "compile_mm_encoder is false in" in done.stderr
    assert said is (not switch and not environment and "--no-compile" not in before)


def test_options_are_checked_before_the_script_starts(process, tmp_path):
    for before, said in (
        (["--config", "no_such.json"], "no compilation config at"),
        (["--config", '{"mode": 0}'], "contradicts"),
        (["--config", '{"recompile_limit": 0}'], "recompile_limit=0"),
    ):
        done = process("print('started')", before=before)
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr
        assert "Traceback" not in done.stderr


SCRIPT = """
import os, sys
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch
from checkpoints import requests
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2Config, Qwen2ForCausalLM

def main(folder, text):
    Qwen2ForCausalLM(Qwen2Config.from_pretrained(text)).save_pretrained(text + "/saved")
    AutoModelForCausalLM.from_pretrained(text + "/saved")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    for request in requests("llava", folder)[:3]:
        with torch.no_grad():
            model(**request)
    print("done")

main(*sys.argv[1:])
"""


@pytest.mark.smoke
def test_a_plain_script_is_compiled_and_reported(process, checkpoint, text_config):
    """The models are locals of a function, and gone when the script ends; the text model is left alone."""
    options = ["--report", "--config", '{"backend": "eager"}']
    done = process(SCRIPT, checkpoint("llava"), text_config, before=options, HF_HUB_DISABLE_PROGRESS_BARS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert done.stderr.count("encoder model.vision_tower: CLIPVisionModel") == 1
    assert "CLIPEncoderLayer: compiled" in done.stderr
    assert "Qwen2" not in done.stderr


def test_a_report_of_nothing_says_so(process):
    done = process("import sys; sys.exit(5)", before=["--report"])
    assert (done.returncode, done.stderr) == (5, "hf-compile: no model was compiled in this process\n")
