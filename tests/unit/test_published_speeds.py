"""The device model against published measurements.

Those marked *fitted* had a say in a constant of ``hardware.py``; the others hadn't. Tolerances are wide: engines, lengths
and clocks differ, and what matters to a schedule is the ratio between kinds of work.
"""

from functools import partial

import msgspec
import pytest

from libs.common.model_shape import ModelShape, with_adapter
from services.scheduler.devices import shapes as s
from services.scheduler.devices.demands import Decoder, prefill, train
from services.scheduler.devices.hardware import A100_SXM, H100_SXM, Hardware
from services.scheduler.devices.roofline import alone

replace = msgspec.structs.replace
LLAMA_2_7B = replace(s.LLAMA_3_1_8B, name="Llama-2-7B", intermediate=11008, kv_heads=32, vocabulary=32000)
QWEN3_8B = replace(s.QWEN3_4B, name="Qwen3-8B", hidden=4096, intermediate=12288, tied=False)
MPT_7B = replace(LLAMA_2_7B, name="MPT-7B", vocabulary=50368, tied=True)
A100_40GB = replace(A100_SXM, name="A100 SXM 40 GB", memory_bandwidth=1.555e12)


def decode_rate(hardware: Hardware, shape: ModelShape, batch: float, length: float, *, tensor: int = 1) -> float:
    return batch / alone(hardware, Decoder(shape, tensor=tensor).step(batch, batch * length), hardware.units)


def train_rate(hardware: Hardware, shape: ModelShape, sequences: int, length: int, *, recompute: bool = False) -> float:
    tokens = sequences * length
    demand = train(shape, tokens, length=length, recompute=recompute, shards=8)
    return tokens / alone(hardware, demand, hardware.units)


@pytest.mark.parametrize(
    ("predicted", "published", "tolerance"),
    [
        # yobitel InferenceBench, vLLM 0.21: 6.48 ms per token, 6.59 at concurrency 4. The first is fitted.
        pytest.param(decode_rate(H100_SXM, s.LLAMA_3_1_8B, 1, 300), 1 / 6.48e-3, 0.03, id="H100 8B batch 1 (fitted)"),
        pytest.param(decode_rate(H100_SXM, s.LLAMA_3_1_8B, 4, 300), 4 / 6.59e-3, 0.1, id="H100 8B batch 4"),
        # J. Musgrave, vLLM 0.23 on an A100 40 GB: about 75 tokens/s after prompts of 1024.
        pytest.param(decode_rate(A100_40GB, s.LLAMA_3_1_8B, 1, 1088), 75, 0.1, id="A100 40 GB 8B batch 1"),
        # silybench, capacity.csv, vLLM 0.30, Qwen3-8B bf16: 128+1024 tokens at 396 users, 2048+2048 at 40.
        pytest.param(decode_rate(H100_SXM, QWEN3_8B, 396, 640), 13322, 0.2, id="H100 8B batch 396 (fitted)"),
        pytest.param(decode_rate(H100_SXM, QWEN3_8B, 40, 3072), 2815, 0.2, id="H100 8B batch 40, long"),
        # gpt-fast's read-me, Llama 2 7B on A100 80 GB (fitted: bandwidth, overhead and latency of a message).
        pytest.param(decode_rate(A100_SXM, LLAMA_2_7B, 1, 100), 104.9, 0.03, id="A100 7B (fitted)"),
        pytest.param(decode_rate(A100_SXM, LLAMA_2_7B, 1, 100, tensor=2), 168.84, 0.06, id="2 A100 7B (fitted)"),
        pytest.param(decode_rate(A100_SXM, LLAMA_2_7B, 1, 100, tensor=4), 254.02, 0.06, id="4 A100 7B (fitted)"),
        pytest.param(decode_rate(A100_SXM, LLAMA_2_7B, 1, 100, tensor=8), 328.43, 0.06, id="8 A100 7B (fitted)"),
        # PyTorch and IBM, FSDP on 128 A100: 3700 tokens/s per device.
        pytest.param(train_rate(A100_SXM, LLAMA_2_7B, 2, 4096), 3700, 0.2, id="A100 7B training (fitted)"),
        # MosaicML llm-foundry's training benchmarks, "H100 80GB BF16", 8 devices.
        pytest.param(train_rate(H100_SXM, MPT_7B, 6, 2048), 10643, 0.2, id="H100 7B training (fitted)"),
        pytest.param(train_rate(H100_SXM, MPT_7B, 16, 4096, recompute=True), 8611, 0.2, id="H100 7B recomputing (fitted)"),
    ],
)
def test_rates(predicted: float, published: float, tolerance: float) -> None:
    assert predicted == pytest.approx(published, rel=tolerance)


def test_wide_decode_with_its_prefills() -> None:
    # silybench as above (fitted), 128+128 tokens at 512 users: each step, four sequences end and four begin.
    step = Decoder(QWEN3_8B).step(512, 512 * 192)
    seconds = alone(H100_SXM, step, H100_SXM.units) + alone(H100_SXM, prefill(QWEN3_8B, 128, sequences=4), H100_SXM.units)
    assert 512 / seconds == pytest.approx(14540, rel=0.2)


def test_training_an_adapter_against_training_the_model() -> None:
    # NVIDIA NeMo 24.12, fine-tuning of Llama 2 7B on 8 H100: 24824 tokens/s with LoRA, 16891 without (both in FP8).
    seconds = partial(alone, H100_SXM, units=H100_SXM.units)
    whole = seconds(train(LLAMA_2_7B, 4096, length=1024))
    adapter = seconds(train(with_adapter(LLAMA_2_7B, rank=32), 4096, length=1024))
    assert whole / adapter == pytest.approx(24824 / 16891, rel=0.1)
