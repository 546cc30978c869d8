"""Load a model with its vision encoder compiled, ask it about photographs, see what was compiled, and undo it.

    python examples/quick_start.py [FOLDER_OR_ID]

Without an argument a tiny LLaVA with random weights is written first; its answers mean nothing.
"""

import sys
import tempfile
from typing import Any

import checkpoints
import PIL.Image
from transformers import AutoProcessor

import hf_compile


def ask(model: Any, processor: Any, photograph: PIL.Image.Image) -> str:
    content = [{"type": "image", "image": photograph}, {"type": "text", "text": "what is in this picture ?"}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    ).to(model.device)
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    answer: str = processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = sys.argv[1] if len(sys.argv) > 1 else checkpoints.write_checkpoint("llava", folder)
        processor = AutoProcessor.from_pretrained(source)
        model = hf_compile.from_pretrained(source, compile_mm_encoder=True)  # the one line

    photographs = checkpoints.photographs()[:4]
    answers = [ask(model, processor, photograph) for photograph in photographs]  # the first call compiles
    for photograph, answer in zip(photographs, answers, strict=True):
        print(f"{photograph.width} x {photograph.height}: {answer!r}")
    print(f"\n{hf_compile.status(model)}")

    hf_compile.uncompile_mm_encoder(model)
    print(f"\nundone: {hf_compile.status(model)}")


if __name__ == "__main__":
    main()
