"""The built wheel, installed into a fresh environment and tried away from the checkout.

The environment borrows torch, Transformers and the rest from the running one: a line in a `.pth` file puts that
site-packages folder behind its own, without the `.pth` files in it, so an editable hf_compile there stays unseen.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LEFT_BEHIND = (".*", "__pycache__", "build", "dist", "*.egg-info")
# folder of the checkout -> its package in the wheel, and the files that have to go there
SHIPPED = {
    "hf_compile": ("hf_compile", ".py"),
    "patches": ("hf_compile_patches", ".py"),
    "model_cards": ("hf_compile_model_cards", ".md"),
}

USE = """
import json, sys
import torch
from transformers import SiglipVisionConfig, SiglipVisionModel
import hf_compile

torch.manual_seed(0)
config = SiglipVisionConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=16
)
model = SiglipVisionModel(config).eval()
images = [torch.randn(batch, 3, 32, 32) for batch in (1, 3)]
keys = list(model.state_dict())
with torch.no_grad():
    eager = [model(image).last_hidden_state for image in images]
    hf_compile.compile_mm_encoder(model, compilation_config=hf_compile.CompilationConfig(backend="eager"))
    for image, expected in zip(images, eager):
        torch.testing.assert_close(model(image).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
    report = hf_compile.status(model).to_dict()
    assert list(model.state_dict()) == keys
    hf_compile.uncompile_mm_encoder(model)
    for image, expected in zip(images, eager):
        assert torch.equal(model(image).last_hidden_state, expected)
print(json.dumps(report))
"""


def run(*command, cwd):
    """Run to the end, away from the checkout and from variables that would bring it back."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel built from it: what the sdist lacks, the wheel lacks."""
    source = tmp_path_factory.mktemp("source") / "hf_compile"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


class Fresh:
    """A virtual environment with the wheel in it, and an empty folder to work in."""

    def __init__(self, folder: pathlib.Path, wheel: pathlib.Path):
        self.folder = folder / "venv"
        self.cwd = folder / "elsewhere"
        self.cwd.mkdir()
        run(sys.executable, "-m", "venv", "--without-pip", self.folder, cwd=folder)
        scripts = "Scripts" if os.name == "nt" else "bin"
        self.python = self.folder / scripts / "python"
        self.command = self.folder / scripts / "hf-compile"
        pip = (sys.executable, "-m", "pip", "--python", self.python)
        run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
        site = run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
        outer = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        (pathlib.Path(site) / "outer.pth").write_text("\n".join(outer))

    def evaluate(self, expression: str, imports: str = ""):
        """Value of an expression there, through JSON."""
        code = f"import json\n{imports}\nprint(json.dumps({expression}))"
        return json.loads(run(self.python, "-c", code, cwd=self.cwd).splitlines()[-1])


@pytest.fixture(scope="module")
def fresh(built, tmp_path_factory):
    return Fresh(tmp_path_factory.mktemp("fresh"), built[1])


def names_below(folder: pathlib.Path, suffix: str) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob(f"*{suffix}")}


def names_in_wheel(wheel: pathlib.Path, package: str, suffix: str) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(f"{package}/") and name.endswith(suffix)]
    return {name.removeprefix(f"{package}/") for name in names}


@pytest.mark.parametrize("folder", SHIPPED)
def test_wheel_ships_every_file_of_the_folder(built, folder):
    package, suffix = SHIPPED[folder]
    expected = names_below(ROOT / folder, suffix)
    assert expected
    assert names_in_wheel(built[1], package, suffix) == expected


def test_wheel_holds_our_packages_only(built):
    with zipfile.ZipFile(built[1]) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    metadata = f"hf_compile-{PROJECT['version']}.dist-info"
    assert tops == {"hf_compile", "hf_compile_patches", "hf_compile_model_cards", metadata}


def test_sdist_ships_licence_and_folders_under_their_own_names(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "patches/__init__.py", "model_cards/README.md", "hf_compile/py.typed"} <= names


@pytest.mark.parametrize("package", ["hf_compile", "hf_compile_patches", "hf_compile_model_cards"])
def test_import_takes_the_wheel_not_the_checkout(fresh, package):
    file = pathlib.Path(fresh.evaluate(f"{package}.__file__", f"import {package}"))
    assert file.is_relative_to(fresh.folder)


def test_typed_marker_and_model_cards_are_found_as_resources(fresh):
    files = "importlib.resources.files"
    assert fresh.evaluate(f"{files}('hf_compile').joinpath('py.typed').is_file()", "import importlib.resources")
    cards = f"[card.name for card in {files}('hf_compile_model_cards').iterdir() if card.name.endswith('.md')]"
    assert set(fresh.evaluate(cards, "import importlib.resources")) == names_below(ROOT / "model_cards", ".md")


def test_metadata(fresh):
    imports = "import hf_compile, importlib.metadata as metadata"
    assert fresh.evaluate("metadata.version('hf-compile')", imports) == PROJECT["version"]
    assert fresh.evaluate("hf_compile.__version__", imports) == PROJECT["version"]
    assert fresh.evaluate("metadata.metadata('hf-compile')['License-Expression']", imports) == "Apache-2.0"


def test_family_patches_are_found_through_the_entry_point_group(fresh):
    found = fresh.evaluate(
        "{e.name: e.load().__file__ for e in entry_points(group='hf_compile.patches') if e.dist.name == 'hf-compile'}",
        "from importlib.metadata import entry_points",
    )
    assert list(found) == ["hf_compile_patches"]
    assert pathlib.Path(found["hf_compile_patches"]).is_relative_to(fresh.folder)


def test_command_and_module_answer_help(fresh):
    for command in ([fresh.command], [fresh.python, "-m", "hf_compile"]):
        assert "inspect" in run(*command, "--help", cwd=fresh.cwd)


@pytest.mark.smoke
def test_installed_wheel_compiles_and_undoes_an_encoder(fresh):
    report = json.loads(run(fresh.python, "-c", USE, cwd=fresh.cwd).splitlines()[-1])
    states = {region["state"] for encoder in report["encoders"] for region in encoder["regions"]}
    assert "compiled" in states, report
