"""A language model small enough to make and run in a test: random weights, own tokenizer, Hugging Face format."""

import random
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 512
CONTEXT = 1024

_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = (
    "the a of to and in is it you that he was for on are with as his they be at one have this from or had by hot word but "
    "what some we can out other were all there when up use your how said an each she which do their time if will way about "
    "many then them write would like so these her long make thing see him two has look more day could go come did number "
    "sound no most people my over know water than call first who may down side been now find question answer sum product "
    "Question: Answer: What is plus times minus equals"
)


def build_tiny_model(directory: Path, *, seed: int = 0) -> Path:
    """Write a Llama of about 0.46 M fp32 parameters and a byte-level BPE tokenizer of 512 ids.

    Args:
        directory: made if missing. seed: draws the weights; the tokenizer is the same for all.

    Returns:
        The directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.15,  # wide enough for distributions that are far from uniform
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    return directory


def _tokenizer() -> PreTrainedTokenizerFast:
    """Trained on fixed text, so the same every time."""
    special = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
    draw = random.Random(0)
    words = [*_TEXT.split(), *map(str, range(100))]
    lines = [" ".join(draw.choices(words, k=12)) for _ in range(400)]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(lines, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
