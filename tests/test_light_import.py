"""`import hf_compile` is light: no Dynamo, no modeling file. Each check runs in a fresh interpreter."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
HEAVY = re.compile(r"torch\._(dynamo|inductor)(\..*)?|transformers\.models\..*\.modeling_\w+")


def heavy_modules_after(statements: str) -> list[str]:
    """Modules matching HEAVY that a fresh interpreter holds after the statements."""
    code = f"import json, sys\n{statements}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [name for name in json.loads(done.stdout.splitlines()[-1]) if HEAVY.fullmatch(name)]


@pytest.mark.smoke
def test_import_loads_neither_dynamo_nor_a_modeling_file():
    assert heavy_modules_after("import hf_compile") == []


@pytest.mark.smoke
def test_help_loads_neither_dynamo_nor_a_modeling_file():
    call = "from hf_compile.__main__ import main\nsys.argv = ['hf-compile', '--help']\n"
    assert heavy_modules_after(f"{call}try:\n    main()\nexcept SystemExit as end:\n    assert not end.code") == []


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch; torch.compile(lambda x: x, backend='eager')", "torch._dynamo"),
        ("from transformers import SiglipVisionModel", "transformers.models.siglip.modeling_siglip"),
    ],
)
def test_the_check_can_fail(statement, found):
    assert found in heavy_modules_after(statement)


def test_torch_alone_is_not_what_the_check_sees():
    assert heavy_modules_after("import torch, transformers, accelerate") == []
