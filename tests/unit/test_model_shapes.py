"""Model shapes against what their model cards publish."""

import json
from pathlib import Path

import msgspec
import pytest

from libs.common.errors import ModelError
from libs.common.model_shape import ModelShape, read_shape, shape_of, with_adapter
from services.scheduler.devices import shapes as s


@pytest.mark.parametrize(
    ("shape", "billions", "without_embedding"),
    [
        # As the model cards count them; Llama's and SmolLM2's cards give only the first.
        (s.QWEN3_0_6B, 0.6, 0.44),
        (s.QWEN3_4B, 4.0, 3.6),
        (s.QWEN3_32B, 32.8, 31.2),
        (s.QWEN3_30B_A3B, 30.5, 29.9),
        (s.LLAMA_3_1_8B, 8.03, None),
        (s.R1_DISTILL_QWEN_14B, 14.77, 13.2),
        (s.SMOLLM2_135M, 0.1345, None),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_parameters_are_the_published_ones(shape: ModelShape, billions: float, without_embedding: float | None) -> None:
    assert shape.parameters == pytest.approx(billions * 1e9, rel=0.01)
    if without_embedding:
        assert shape.body_parameters == pytest.approx(without_embedding * 1e9, rel=0.015)


def test_a_mixture_activates_what_its_card_says() -> None:
    assert s.QWEN3_30B_A3B.active_parameters == pytest.approx(3.3e9, rel=0.02)
    assert s.QWEN3_4B.active_parameters == s.QWEN3_4B.parameters


def test_kv_cache_of_llama_takes_128_kib_a_token() -> None:
    assert s.LLAMA_3_1_8B.kv_bytes == 128 * 1024


def test_a_mixture_reads_active_experts_for_one_token_and_all_for_many() -> None:
    shape = s.QWEN3_30B_A3B
    touched = [shape.touched_parameters(tokens) for tokens in (1, 2, 16, 64, 10_000)]
    assert touched[0] == pytest.approx(shape.active_body_parameters)
    assert touched == sorted(set(touched))
    assert touched[-1] == pytest.approx(shape.body_parameters)


def test_an_adapter_has_the_parameters_that_peft_reports() -> None:
    adapted = with_adapter(s.LLAMA_3_1_8B, rank=16)  # "all-linear" on Llama-3.1-8B
    assert adapted.adapter_parameters == pytest.approx(41_943_040)
    assert adapted.trained_parameters == adapted.adapter_parameters
    assert adapted.weight_bytes == s.LLAMA_3_1_8B.weight_bytes


def test_training_state_of_an_adapter_is_little_more_than_the_weights() -> None:
    assert s.LLAMA_3_1_8B.training_bytes == pytest.approx(18 * s.LLAMA_3_1_8B.parameters)
    assert s.LLAMA_3_1_8B_LORA.training_bytes < 1.1 * s.LLAMA_3_1_8B.weight_bytes


def test_a_published_config_gives_the_shape() -> None:
    llama = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    }
    mixture = {
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    }
    assert shape_of(llama, name="Llama-3.1-8B") == s.LLAMA_3_1_8B
    assert shape_of(mixture, name="Qwen3-30B-A3B") == s.QWEN3_30B_A3B
    with pytest.raises(KeyError, match="vocab_size"):
        shape_of({key: value for key, value in llama.items() if key != "vocab_size"}, name="broken")


def test_the_key_is_of_what_decides_the_speed() -> None:
    llama = s.LLAMA_3_1_8B
    same = msgspec.structs.replace(llama, name="another name", bytes_per_weight=4.0, bytes_per_value=4.0)
    assert same.key == llama.key
    assert len({shape.key for shape in s.SHAPES.values()}) == len(s.SHAPES)  # the LoRA of a model included


def test_a_directory_gives_the_shape_in_a_dtype(tmp_path: Path) -> None:
    config = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_hidden_layers": 30}
    config |= {"num_key_value_heads": 3, "tie_word_embeddings": True, "vocab_size": 49152}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path, dtype="bfloat16", name="SmolLM2-135M") == s.SMOLLM2_135M
    full = read_shape(tmp_path, dtype="float32")
    assert (full.key, full.kv_bytes) == (s.SMOLLM2_135M.key, 2 * s.SMOLLM2_135M.kv_bytes)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, "can't be read"),
        ("{", "doesn't describe"),
        ("[]", "doesn't describe"),
        ('{"hidden_size": 576, "num_attention_heads": 0}', "doesn't describe|is missing"),
        ('{"n_embd": 768}', "hidden_size is missing"),
    ],
)
def test_a_directory_of_another_kind_is_one_clear_line(tmp_path: Path, config: str | None, expected: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=expected) as raised:
        read_shape(tmp_path, dtype="bfloat16")
    assert "\n" not in str(raised.value)
