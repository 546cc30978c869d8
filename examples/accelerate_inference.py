"""Ask a vision-language model about photographs, the questions split between processes.

    accelerate launch examples/accelerate_inference.py [FOLDER_OR_ID]

A script of plain Transformers and Accelerate: nothing in it knows whether a launcher in front of it changes how the
model runs. Without an argument it writes a tiny LLaVA with random weights; its answers mean nothing.
"""

import sys
import tempfile

import checkpoints
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from transformers import AutoModelForImageTextToText, AutoProcessor

# Which photographs each question is about.
QUESTIONS = [
    ("what is in this picture ?", [0]),
    ("and in this one ?", [1]),
    ("what do they have in common ?", [2, 3, 4]),
    ("which is larger ?", [5, 6]),
    ("describe it in a few words .", [7]),
]


def tiny_checkpoint(accelerator: Accelerator, folder: str) -> str:
    """Let the main process write a checkpoint, and return its folder to all of them."""
    if accelerator.is_main_process:
        checkpoints.write_checkpoint("llava", folder)
    shared: str = broadcast_object_list([folder])[0]
    return shared


def main() -> None:
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    with tempfile.TemporaryDirectory() as folder:
        source = sys.argv[1] if len(sys.argv) > 1 else tiny_checkpoint(accelerator, folder)
        processor = AutoProcessor.from_pretrained(source)
        model = AutoModelForImageTextToText.from_pretrained(source).to(accelerator.device)
        accelerator.wait_for_everyone()  # before the folder goes
    photographs = checkpoints.photographs()

    answers = []
    with accelerator.split_between_processes(QUESTIONS) as mine:
        for question, indices in mine:
            images = [photographs[index] for index in indices]
            content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": question}]
            inputs = processor.apply_chat_template(
                [{"role": "user", "content": content}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            ).to(accelerator.device)
            tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
            answer = processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            answers.append(f"process {accelerator.process_index}, {len(images)} photograph(s), {question} {answer!r}")

    answers = gather_object(answers)  # of all processes, in the order of the questions
    accelerator.print(f"{len(answers)} answers of {accelerator.num_processes} process(es)", *answers, sep="\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
