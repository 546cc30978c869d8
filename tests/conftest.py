"""What every test needs: nothing is fetched while tests run, and `examples/` can be imported."""

import functools
import os
import pathlib
import sys

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before Transformers is imported
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import torch
from torchvision_on_cpu import enable_torchvision

enable_torchvision()  # before Transformers is imported

from transformers.utils import logging  # noqa: E402

logging.disable_progress_bar()
torch.set_num_threads(1)  # the models are tiny: a second thread costs more than it brings


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Return the folder of a family's toy checkpoint, written once."""
    from checkpoints import write_checkpoint

    return functools.cache(lambda name: write_checkpoint(name, tmp_path_factory.mktemp(name) / "checkpoint"))
