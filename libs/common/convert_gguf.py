"""Turns a GGUF file into a model directory in Hugging Face format: ``python -m libs.common.convert_gguf FILE DIRECTORY``.

A process of its own, because it needs torch for a few seconds, which none of those who ask for a model may load.
"""

import sys
from pathlib import Path


def convert(gguf: Path, directory: Path) -> None:
    """Write config, tokenizer, chat template and bf16 safetensors into an existing directory.

    A model that was read from a GGUF file refuses to be saved, because it counts as quantised although its weights were
    expanded: so its state goes into a plain model of the same configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    config = read.config
    del config.quantization_config
    config.dtype = torch.bfloat16
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
