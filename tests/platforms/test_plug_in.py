"""Plug-ins as packages, installed by pip and found through their entry points by a process of their own."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import transformers
from packaging.version import Version

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "acme_platform"

PYPROJECT = """
[build-system]
requires = ["setuptools>=69"]
build-backend = "setuptools.build_meta"
[project]
name = "vendor"
version = "0.1"
[project.entry-points."hf_compile.platforms"]
vendor = "vendor:{name}"
[tool.setuptools]
py-modules = ["vendor"]
"""

VENDOR = """
from hf_compile import Platform
nothing = None
class Clash(Platform):
    name = "cuda"
    device_type = "vendor"
class NoBackend(Platform):
    name = "vendor"
    device_type = "cpu"
    simple_compile_backend = None
class NoDynamic(Platform):
    name = "vendor"
    device_type = "cpu"
    simple_compile_backend = "eager"
    supports_dynamic_compile = False
"""

PROGRAM = """
import hf_compile, torch, transformers
size = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, image_size=32, patch_size=8)
model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(num_hidden_layers=2, **size)).eval()
hf_compile.compile_mm_encoder(model)
with torch.no_grad():
    model(torch.rand(2, 3, 32, 32))
print(hf_compile.status(model))
"""


def installed(source, folder):
    """Install a package from a copy of its source; return the folder that goes onto the path."""
    shutil.copytree(source, folder / "source")
    words = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(folder / "site")]
    subprocess.run([sys.executable, "-m", "pip", *words, str(folder / "source")], check=True, timeout=300)
    return folder / "site"


def python(*words, site):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    for name in ("HF_COMPILE_BACKEND", "HF_COMPILE_CONFIG", "HF_COMPILE_MM_ENCODER"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, env=environment, timeout=300
    )


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="ParakeetFeatureExtractor's patch")
def test_the_example(tmp_path):
    """Its own backend compiles the encoder and the functions of a processor, and without its runtime nothing."""
    site = installed(EXAMPLE, tmp_path)
    done = python(EXAMPLE / "run.py", site=site)
    assert done.returncode == 0, done.stderr
    assert "CLIPVisionModel on acme, backend acme" in done.stdout
    assert "the accelerator's backend compiled 6 graphs" in done.stdout
    done = python("-c", "import hf_compile; print(hf_compile.current_platform('cpu'))", site=site)
    assert done.stdout.strip() == "Platform 'cpu' (device type 'cpu', backend 'inductor')"


@pytest.mark.parametrize(
    ("name", "returncode", "words"),
    [
        ("nothing", 1, "entry point 'vendor' (vendor:nothing): None is no subclass of hf_compile.Platform"),
        ("Clash", 1, "the platform name 'cuda' is taken by hf_compile.platforms.builtin.Cuda"),
        ("NoBackend", 1, "platform vendor: this platform names no backend (simple_compile_backend=None)"),
        ("NoDynamic", 0, "calls ran eager: platform vendor compiles no graph that serves many sizes"),
    ],
)
def test_what_a_vendor_may_get_wrong(tmp_path, name, returncode, words):
    source = tmp_path / "vendor"
    source.mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT.format(name=name))
    (source / "vendor.py").write_text(VENDOR)
    done = python("-c", PROGRAM, site=installed(source, tmp_path))
    assert done.returncode == returncode, done.stderr
    assert words in " ".join((done.stdout + done.stderr).split())
