"""`accelerate launch` and `torchrun` with `-m hf_compile run`: two real ranks that feed different image sizes."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# A plain script: it loads, generates, and knows nothing of a compiler until it asks how it went.
SCRIPT = """
import json, pathlib, sys
import torch
from accelerate import Accelerator
from checkpoints import requests
from transformers import AutoModelForImageTextToText

folder, out = sys.argv[1:]
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
model = AutoModelForImageTextToText.from_pretrained(folder).eval()
mine = requests("qwen2_5_vl", folder)[rank:6:2]

def generate():
    return [model.generate(**request, max_new_tokens=3, do_sample=False).tolist() for request in mine]

def features():
    with torch.no_grad():
        return [model.model.visual(r["pixel_values"], r["image_grid_thw"]).pooler_output for r in mine]

tokens, compiled = generate(), features()
sizes = accelerator.gather(torch.tensor([[len(request["pixel_values"]) for request in mine]])).tolist()

import hf_compile

status = hf_compile.status(model).to_dict()
hf_compile.uncompile_mm_encoder(model)
difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(compiled, features()))
result = {"ranks": accelerator.num_processes, "sizes": sizes, "status": status, "difference": difference,
          "same_tokens": generate() == tokens}
pathlib.Path(out, f"rank{rank}.json").write_text(json.dumps(result))
accelerator.end_training()
"""
LAUNCHERS = {
    "accelerate": [
        *(
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes=2",
            "--num_machines=1",
            "--main_process_port=PORT",
        ),
        *("--mixed_precision=no", "--dynamo_backend=no"),
    ],
    "torchrun": ["torch.distributed.run", "--nproc_per_node=2", "--master_port=PORT"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_rank_compiles_one_graph_per_region_class(launcher, checkpoint, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    words = [sys.executable, "-m", *(word.replace("PORT", port) for word in LAUNCHERS[launcher])]
    words += ["-m", "hf_compile", "run", "--report", str(script), str(checkpoint("qwen2_5_vl")), str(tmp_path)]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_COMPILE")},
        "ACCELERATE_USE_CPU": "true",  # else accelerate looks for two GPUs
        "HF_COMPILE_BACKEND": "eager",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
    }
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    results = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("rank*.json"))]
    assert [result["ranks"] for result in results] == [2, 2]
    first, second = results[0]["sizes"]
    assert results[1]["sizes"] == [first, second]
    assert len(set(first) | set(second)) == 6  # no size twice, on one rank or on both
    for rank, result in enumerate(results):
        (encoder,) = result["status"]["encoders"]
        assert [(r["class_name"], r["state"], r["graphs"], r["eager_calls"]) for r in encoder["regions"]] == [
            ("Qwen2_5_VisionPatchEmbed", "compiled", 1, 0),
            ("Qwen2_5_VLVisionBlock", "compiled", 1, 0),
            ("Qwen2_5_VLPatchMerger", "compiled", 1, 0),
        ]
        assert result["same_tokens"]
        assert result["difference"] <= 1e-5
        assert f"[rank {rank}] Qwen2_5_VLVisionBlock: compiled" in done.stderr
