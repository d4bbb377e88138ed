"""The peer's side of ``benchmarks.peer_trl``: the job in TRL's ``GRPOTrainer``, run by the Python of TRL's own environment.

Stock TRL. What differs from its defaults is the job (16 prompts x 4, learning rate, length) or makes it faster on a CPU:
bf16 autocast, the whole generation in one batch, no recomputation of activations. One JSON line a step goes to stdout.
"""

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

COMPLETIONS = 64
GROUP = 4
NUMBER = re.compile(r"-?\d+")


class Tell(TrainerCallback):  # type: ignore[misc]
    """Prints a line at the end of every step, after TRL's own bookkeeping of it."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: object,
    ) -> None:
        """The step's wall-clock time, the tokens of prompts and completions so far, and the completions' lengths."""
        if logs and "num_tokens" in logs:
            line = {
                "step": state.global_step,
                "time": time.time(),
                "tokens": logs["num_tokens"],
                "length_min": logs["completions/min_length"],
                "length_max": logs["completions/max_length"],
            }
            print(json.dumps(line), flush=True)


def last_number(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """1 where the last number is the answer, else 0."""
    found = [NUMBER.findall(completion[0]["content"]) for completion in completions]
    return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer, strict=True)]


def settings(arguments: argparse.Namespace, folder: str) -> Any:
    """TRL's settings for the job."""
    return GRPOConfig(
        output_dir=folder,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=COMPLETIONS // arguments.micro_batch,
        num_generations=GROUP,
        max_completion_length=arguments.new_tokens,
        temperature=1.0,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        bf16=True,
        use_cpu=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=arguments.seed,
    )


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    data = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=arguments.model,
            reward_funcs=last_number,
            args=settings(arguments, folder),
            train_dataset=Dataset.from_list(data),
            callbacks=[Tell()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


if __name__ == "__main__":
    main()
