"""What sub-stages ask of a device."""

import msgspec
import pytest

from libs.common.model_shape import ModelShape
from services.scheduler.devices import demands as d
from services.scheduler.devices import shapes as s
from services.scheduler.devices.hardware import Work

DENSE, MIXTURE, ADAPTED = s.LLAMA_3_1_8B, s.QWEN3_30B_A3B, s.LLAMA_3_1_8B_LORA


def fields(demand: d.Demand) -> list[float]:
    return [value for value in msgspec.structs.astuple(demand) if not isinstance(value, Work)]


@pytest.mark.parametrize("shape", [DENSE, MIXTURE, ADAPTED], ids=lambda shape: shape.name)
@pytest.mark.parametrize("tensor", [1, 4])
def test_a_decode_step_is_a_prefill_of_one_token_each(shape: ModelShape, tensor: int) -> None:
    step = d.Decoder(shape, tensor=tensor).step(24, 24 * 900)
    assert fields(step) == pytest.approx(fields(d.prefill(shape, 1, context=900, sequences=24, tensor=tensor)))


def test_decode_reads_weights_once_and_the_cache_of_every_sequence() -> None:
    one, many = d.Decoder(DENSE).step(1, 1000), d.Decoder(DENSE).step(16, 16_000)
    read = DENSE.weight_bytes - DENSE.head_parameters * DENSE.bytes_per_weight  # a look-up isn't a read of the embedding
    assert one.bytes == pytest.approx(read, rel=1e-3)
    each = 2 * DENSE.activation_bytes + 2 * 4 * DENSE.vocabulary  # written and read; logits in fp32
    assert (many.bytes - one.bytes) / 15 == pytest.approx(each)
    assert many.attention_bytes == 16 * one.attention_bytes == 16 * 1001 * DENSE.kv_bytes


def test_prefill_in_two_chunks_does_the_same_operations() -> None:
    whole, first, second = d.prefill(DENSE, 2000), d.prefill(DENSE, 1200), d.prefill(DENSE, 800, context=1200)
    assert first.attention_flops + second.attention_flops == pytest.approx(whole.attention_flops)
    assert first.flops + second.flops == pytest.approx(whole.flops, rel=1e-3)  # the logits of the first chunk are extra


def test_migration_is_the_prefill_of_what_moves() -> None:
    assert d.migration(DENSE, [700, 700, 700]) == d.prefill(DENSE, 700, sequences=3)
    uneven = d.migration(DENSE, [100, 700, 1300])
    assert uneven.flops == d.migration(DENSE, [700] * 3).flops
    assert uneven.attention_flops > d.migration(DENSE, [700] * 3).attention_flops


@pytest.mark.parametrize(("recompute", "per_parameter"), [(False, 6), (True, 8)])
def test_training_takes_six_flops_per_parameter_and_token(recompute: bool, per_parameter: int) -> None:
    demand = d.train(DENSE, 4096, length=64, recompute=recompute)
    used = DENSE.active_body_parameters + DENSE.head_parameters
    assert demand.flops == pytest.approx(per_parameter * used * 4096)
    assert demand.attention_flops < 0.01 * demand.flops


def test_training_costs_three_and_a_half_times_the_attention_of_a_forward_pass() -> None:
    forward = d.prefill(DENSE, 1024, sequences=4)
    assert d.train(DENSE, 4096, length=1024).attention_flops == pytest.approx(3.5 * forward.attention_flops)


def test_training_moves_activations_and_cache_of_every_token() -> None:
    few, more = (d.train(DENSE, tokens, length=1024, trained=1024) for tokens in (4096, 8192))
    assert (more.bytes - few.bytes) / 4096 == pytest.approx(5 * DENSE.activation_bytes)
    assert few.attention_bytes == 3 * 4096 * DENSE.kv_bytes


def test_training_scores_responses_only() -> None:
    everything, responses = d.train(DENSE, 4096, length=1024), d.train(DENSE, 4096, length=1024, trained=1024)
    assert everything.flops - responses.flops == pytest.approx(6 * 3072 * DENSE.head_parameters)
    assert everything.bytes - responses.bytes == pytest.approx(4 * 4 * 3072 * DENSE.vocabulary)  # fp32, four times


def test_training_a_mixture_takes_its_active_parameters() -> None:
    used = MIXTURE.active_body_parameters + MIXTURE.head_parameters
    assert d.train(MIXTURE, 4096, length=1024).flops == pytest.approx(6 * used * 4096)


def test_training_an_adapter_saves_weight_gradients_and_optimiser() -> None:
    full, adapter = d.train(DENSE, 4096, length=1024), d.train(ADAPTED, 4096, length=1024)
    assert adapter.flops == pytest.approx(full.flops * 4 / 6, rel=0.03)
    assert adapter.bytes < 0.7 * full.bytes
    assert d.optimise(ADAPTED).bytes == pytest.approx(d.optimise(DENSE).bytes * ADAPTED.adapter_share)


def test_tensor_parallelism_divides_the_work_and_adds_traffic() -> None:
    whole, part = d.prefill(DENSE, 1000, sequences=4), d.prefill(DENSE, 1000, sequences=4, tensor=4)
    assert [4 * part.flops, 4 * part.bytes, 4 * part.all_bytes] == pytest.approx([whole.flops, whole.bytes, whole.all_bytes])
    assert (whole.link_bytes, whole.messages) == (0, 0)
    all_reduced = 2 * DENSE.layers * 4000 * DENSE.hidden * 2
    assert part.link_bytes == pytest.approx(1.5 * all_reduced, rel=0.01)  # 2(t-1)/t of it
    assert part.messages == 2 * DENSE.layers


def test_training_waits_for_devices_forward_and_backward() -> None:
    forward, both = d.prefill(DENSE, 1024, tensor=4), d.train(DENSE, 1024, length=1024, tensor=4)
    assert both.messages == 2 * forward.messages
    assert both.link_bytes == pytest.approx(2 * forward.link_bytes, rel=0.01)
    assert d.train(DENSE, 1024, length=1024, tensor=4, recompute=True).messages == 3 * forward.messages


def test_the_optimiser_moves_thirty_bytes_a_parameter() -> None:
    assert d.optimise(DENSE, devices=8).bytes == pytest.approx(30 * DENSE.parameters / 8)


def test_more_devices_than_kv_heads_hold_copies_of_the_cache() -> None:
    cached = [d.Decoder(MIXTURE, tensor=tensor).step(1, 999).attention_bytes for tensor in (1, 2, 4, 8)]
    assert cached == [cached[0], cached[0] / 2, cached[0] / 4, cached[0] / 4]


def test_sharded_training_streams_weights_twice_and_gradients_once() -> None:
    demand = d.train(DENSE, 4096, length=1024, shards=8)
    assert demand.stream_bytes == pytest.approx(3 * DENSE.weight_bytes * 7 / 8)
    assert d.train(ADAPTED, 4096, length=1024, shards=8).stream_bytes < 0.68 * demand.stream_bytes


def test_a_weight_sync_moves_what_was_trained() -> None:
    whole, adapter = d.weight_sync(DENSE, tensor=2), d.weight_sync(ADAPTED)
    assert (whole.stream_bytes, whole.bytes) == (DENSE.weight_bytes / 2, DENSE.weight_bytes)
    assert adapter.stream_bytes == pytest.approx(2 * ADAPTED.adapter_parameters)
    assert d.weight_sync(DENSE, remote=False).stream_bytes == 0
