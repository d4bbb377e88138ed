"""Models that are often named, with the sizes that their publishers state (``config.json`` at the hub)."""

from libs.common.model_shape import ModelShape, with_adapter

QWEN3_0_6B = ModelShape(
    name="Qwen3-0.6B",
    layers=28,
    hidden=1024,
    intermediate=3072,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocabulary=151936,
    tied=True,
)
QWEN3_4B = ModelShape(
    name="Qwen3-4B",
    layers=36,
    hidden=2560,
    intermediate=9728,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=151936,
    tied=True,
)
QWEN3_32B = ModelShape(
    name="Qwen3-32B",
    layers=64,
    hidden=5120,
    intermediate=25600,
    heads=64,
    kv_heads=8,
    head_dim=128,
    vocabulary=151936,
    tied=False,
)
LLAMA_3_1_8B = ModelShape(
    name="Llama-3.1-8B",
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=128256,
    tied=False,
)
R1_DISTILL_QWEN_14B = ModelShape(
    name="DeepSeek-R1-Distill-Qwen-14B",
    layers=48,
    hidden=5120,
    intermediate=13824,
    heads=40,
    kv_heads=8,
    head_dim=128,
    vocabulary=152064,
    tied=False,
)
SMOLLM2_135M = ModelShape(
    name="SmolLM2-135M",
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocabulary=49152,
    tied=True,
)
QWEN3_30B_A3B = ModelShape(
    name="Qwen3-30B-A3B",
    layers=48,
    hidden=2048,
    intermediate=768,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocabulary=151936,
    tied=False,
    experts=128,
    experts_per_token=8,
)
LLAMA_3_1_8B_LORA = with_adapter(LLAMA_3_1_8B, rank=32)

SHAPES = {
    shape.name: shape
    for shape in (
        QWEN3_0_6B,
        QWEN3_4B,
        QWEN3_32B,
        LLAMA_3_1_8B,
        R1_DISTILL_QWEN_14B,
        SMOLLM2_135M,
        QWEN3_30B_A3B,
        LLAMA_3_1_8B_LORA,
    )
}
