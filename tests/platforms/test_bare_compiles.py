"""Every `torch.compile` of the project names its backend; those of Transformers that name none can be routed."""

from __future__ import annotations

import ast
import pathlib
import sys

import hf_compile_patches
import pytest
import torch
import transformers
from compiler.tiny import Counting
from packaging.version import Version

import hf_compile

# file -> calls of torch.compile without a backend, and those with the options of a CompileConfig, in 5.24.0
KNOWN = {
    "generation/continuous_batching/model_runner.py": (0, 2),
    "integrations/bitnet.py": (5, 0),
    "integrations/flex_attention.py": (2, 0),
    "modeling_utils.py": (0, 1),
    "models/diffusion_gemma/generation_diffusion_gemma.py": (5, 0),
    "models/vibevoice/generation_vibevoice.py": (0, 1),
}


def is_compile(node):
    return isinstance(node, ast.Attribute) and node.attr == "compile" and getattr(node.value, "id", "") == "torch"


def without_backend(file):
    """Return the lines that call (or decorate with) torch.compile and name no backend, and those with **options."""
    bare, configured = [], []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and is_compile(node.func):
            given = {keyword.arg for keyword in node.keywords}
            if "backend" not in given:
                (configured if None in given else bare).append(node.lineno)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bare += [each.lineno for each in node.decorator_list if is_compile(each)]
    return sorted(bare), sorted(configured)


def test_every_compile_of_ours_names_its_backend():
    folders = [pathlib.Path(package.__path__[0]) for package in (hf_compile, hf_compile_patches)]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert sum("torch.compile(" in file.read_text(encoding="utf-8") for file in files) >= 2
    assert {str(file): lines for file in files if any(lines := without_backend(file))} == {}


def test_the_check_can_fail(tmp_path):
    file = tmp_path / "bare.py"
    lines = ["import torch", "@torch.compile", "def f(x): ...", "g = torch.compile(f)"]
    lines += ["h = torch.compile(f, backend='eager')", "i = torch.compile(f, **options)"]
    file.write_text("\n".join(lines))
    assert without_backend(file) == ([2, 4], [6])


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="the table is that of 5.24")
def test_census_of_the_calls_in_transformers():
    """A new one is to be looked at: is it routed by `platform_backend`, or compiled when a file is imported?"""
    root = pathlib.Path(transformers.__path__[0])
    found = {}
    for file in root.rglob("*.py"):
        lines = without_backend(file)
        if any(lines):
            found[file.relative_to(root).as_posix()] = tuple(map(len, lines))
    assert found == KNOWN


def test_calls_without_a_backend_are_routed():
    inside, outside = Counting(), Counting()
    with hf_compile.platform_backend("cpu", backend=inside) as backend:
        assert backend is inside
        plain = torch.compile(lambda x: x + 1)
        assert torch.compile(lambda x: x + 2, mode="reduce-overhead", fullgraph=True)(torch.ones(2)).sum() == 6
        assert torch.compile(lambda x: x + 3, backend=outside)(torch.ones(2)).sum() == 8
    assert plain(torch.ones(2)).sum() == 4
    assert (inside.graphs, outside.graphs) == (2, 1)
    assert torch.compiler.get_default_backend() == "inductor"


def test_routes_end_in_any_order():
    torch.compiler.set_default_backend("aot_eager")
    try:
        first, second = (hf_compile.platform_backend("cpu", backend=name) for name in ("eager", "inductor"))
        first.__enter__()
        assert torch.compiler.get_default_backend().__name__ == "eager"
        second.__enter__()
        assert torch.compiler.get_default_backend() == "inductor"
        first.__exit__(None, None, None)
        assert torch.compiler.get_default_backend() == "inductor"
        second.__exit__(None, None, None)
        assert torch.compiler.get_default_backend() == "aot_eager"
    finally:
        torch.compiler.set_default_backend(None)


def test_generate_compiles_through_the_platform():
    assert transformers.CompileConfig().backend == "inductor"
    with hf_compile.platform_backend("cpu", backend="eager"):
        assert transformers.CompileConfig().backend.__name__ == "eager"
        assert transformers.CompileConfig(backend="aot_eager").backend == "aot_eager"
        assert transformers.CompileConfig().mode == "reduce-overhead"
    assert transformers.CompileConfig().backend == "inductor"


def test_an_unknown_backend_routes_nothing():
    with pytest.raises(hf_compile.BackendError), hf_compile.platform_backend(backend="nowhere"):
        pass
    assert torch.compiler.get_default_backend() == "inductor"


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="DiffusionGemma")
def test_transformers_own_compiles_go_through_the_platform(monkeypatch):
    """Five pieces of DiffusionGemma's generation, compiled bare and with a mode of Inductor's."""
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "patches"))
    from test_functions import gemma, generated, whole

    def inductor(*args, **kwargs):
        raise AssertionError("Inductor was asked")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", inductor)
    want = generated(gemma(), 2)
    model, backend = gemma(), Counting()
    with hf_compile.platform_backend(backend=backend):
        torch.manual_seed(2)
        ids = whole(200, 2, 7) + 4
        got = model.generate(
            ids, max_new_tokens=16, max_denoising_steps=3, cache_implementation="static", disable_compile=False
        ).sequences
    assert backend.graphs >= 3
    assert torch.equal(got, want)
