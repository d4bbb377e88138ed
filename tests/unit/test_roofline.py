"""Limits of the device model: what no step, alone or beside others, can do."""

import math
from functools import partial
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.model_shape import ModelShape
from services.scheduler.devices import shapes as s
from services.scheduler.devices.candidates import Candidates
from services.scheduler.devices.demands import Decoder, Demand, prefill, train
from services.scheduler.devices.hardware import A100_SXM, H100_SXM, Hardware, Work
from services.scheduler.devices.roofline import Lane, alone, beside, decode_step
from tests.device_lanes import TWO_CORES, demands, divisions, hardwares, lanes_of

SHAPE = s.LLAMA_3_1_8B
GPUS = pytest.mark.parametrize("gpu", [H100_SXM, A100_SXM], ids=lambda gpu: gpu.name)
replace = msgspec.structs.replace
devices_with_lanes = hardwares.flatmap(lambda hardware: st.tuples(st.just(hardware), lanes_of(hardware.units)))


def decode(batch: float, length: float, shape: ModelShape = SHAPE) -> Demand:
    return Decoder(shape).step(batch, batch * length)


@GPUS
@pytest.mark.parametrize("shape", [SHAPE, s.QWEN3_4B, s.R1_DISTILL_QWEN_14B], ids=lambda shape: shape.name)
def test_decode_at_batch_1_takes_as_long_as_reading_the_weights(gpu: Hardware, shape: ModelShape) -> None:
    taken = alone(gpu, decode(1, 200, shape), gpu.units) - gpu.step_overhead_s - gpu.sequence_overhead_s
    read = (shape.body_parameters + shape.head_parameters) * shape.bytes_per_weight
    assert taken == pytest.approx(read / gpu.reachable_bandwidth, rel=0.03)
    slow = replace(gpu, peak_flops=gpu.peak_flops / 10)
    assert alone(slow, decode(1, 200, shape), gpu.units) == pytest.approx(
        alone(gpu, decode(1, 200, shape), gpu.units), rel=0.01
    )


@GPUS
def test_a_large_prefill_is_bound_by_compute(gpu: Hardware) -> None:
    demand = prefill(SHAPE, 2048, sequences=4)
    taken = alone(gpu, demand, gpu.units)
    assert taken == pytest.approx(demand.all_flops / (gpu.peak_flops * gpu.prefill_share), rel=0.01)
    assert alone(replace(gpu, memory_bandwidth=gpu.memory_bandwidth * 2), demand, gpu.units) == pytest.approx(
        taken, rel=1e-6
    )


@GPUS
def test_decode_throughput_grows_to_a_knee_and_flattens(gpu: Hardware) -> None:
    rates = {batch: batch / alone(gpu, decode(batch, 500), gpu.units) for batch in (1, 8, 64, 256, 512, 1024)}
    assert list(rates.values()) == sorted(rates.values())
    assert rates[8] > 7 * rates[1]  # another sequence is nearly free
    assert rates[1024] < 1.1 * rates[512]


def test_a_mixture_at_batch_1_reads_its_active_weights_only() -> None:
    mixture = s.QWEN3_30B_A3B
    taken = alone(H100_SXM, decode(1, 200, mixture), H100_SXM.units) - H100_SXM.step_overhead_s
    active = (mixture.active_body_parameters + mixture.head_parameters) * 2
    assert taken == pytest.approx(active / H100_SXM.reachable_bandwidth, rel=0.05)
    assert alone(H100_SXM, decode(64, 200, mixture), H100_SXM.units) > 5 * taken


@given(hardwares, demands)
def test_more_units_are_never_slower(hardware: Hardware, demand: Demand) -> None:
    seconds = [alone(hardware, demand, units) for units in range(hardware.units + 1)]
    assert seconds[0] == math.inf
    assert all(more <= fewer * (1 + 1e-12) for fewer, more in pairwise(seconds))


@given(devices_with_lanes)
def test_more_units_are_never_slower_beside_others(case: tuple[Hardware, list[Lane]]) -> None:
    hardware, lanes = case
    spare = hardware.units - sum(units for _, units in lanes)
    (demand, units), *others = lanes
    paces = [beside(hardware, [(demand, units + more), *others])[0] for more in range(spare + 1)]
    assert all(after.seconds <= before.seconds * (1 + 1e-9) for before, after in pairwise(paces))


@given(devices_with_lanes)
def test_together_lanes_never_beat_the_roofline(case: tuple[Hardware, list[Lane]]) -> None:
    hardware, lanes = case
    paces = beside(hardware, lanes)
    flops = sum(demand.all_flops / pace.seconds for (demand, _), pace in zip(lanes, paces, strict=True))
    moved = sum(demand.all_bytes / pace.seconds for (demand, _), pace in zip(lanes, paces, strict=True))
    assert flops <= hardware.peak_flops * (1 + 1e-9)
    assert moved <= hardware.reachable_bandwidth * (1 + 1e-9)


@given(devices_with_lanes)
def test_nobody_is_faster_beside_others_than_alone(case: tuple[Hardware, list[Lane]]) -> None:
    hardware, lanes = case
    for (demand, units), pace in zip(lanes, beside(hardware, lanes), strict=True):
        assert pace.seconds >= alone(hardware, demand, units) * (1 - 1e-12)
        assert 0 <= pace.speed <= 1 + 1e-12
        assert (pace.seconds == math.inf) == (pace.speed == 0) == (units == 0)


@given(devices_with_lanes)
def test_one_lane_more_makes_nobody_faster(case: tuple[Hardware, list[Lane]]) -> None:
    hardware, lanes = case
    without, together = beside(hardware, lanes[:-1]), beside(hardware, lanes)
    assert all(after.seconds >= before.seconds * (1 - 1e-9) for before, after in zip(without, together, strict=False))


def test_a_paused_lane_is_not_there() -> None:
    lane, paused = (decode(64, 2000), 8), (train(SHAPE, 16384, length=2048), 0)
    assert beside(H100_SXM, [paused, lane])[1] == beside(H100_SXM, [lane])[0]


def test_a_lane_with_all_units_to_itself_keeps_its_whole_speed() -> None:
    assert beside(A100_SXM, [(decode(8, 2000), A100_SXM.units)])[0].speed == 1


def test_units_cannot_be_handed_out_twice() -> None:
    lane = (decode(8, 2000), 9)
    with pytest.raises(ValueError, match="more units than the 16 of H100 SXM"):
        beside(H100_SXM, [lane, lane])
    with pytest.raises(ValueError, match="more units than the 16 of H100 SXM"):
        Candidates(H100_SXM, [lane[0], lane[0]]).seconds(np.array([[9, 9]]))


def test_complementary_lanes_do_more_than_taking_turns() -> None:
    tail, training = decode(4, 4000), train(SHAPE, 16384, length=2048)
    paces = beside(H100_SXM, [(tail, 4), (training, 12)])
    assert sum(pace.speed for pace in paces) > 1.2


def test_lanes_that_want_the_same_gain_nothing_but_overhead() -> None:
    bare = replace(H100_SXM, step_overhead_s=0, sequence_overhead_s=0, contention=0)
    paces = beside(bare, [(decode(8, 4000), 8)] * 2)
    assert [pace.speed for pace in paces] == pytest.approx([0.5, 0.5], rel=0.01)


def test_bandwidth_is_shared_max_min_fairly() -> None:
    bare = replace(H100_SXM, contention=0)
    light, heavy = prefill(SHAPE, 512), decode(64, 4000)
    paces = beside(bare, [(heavy, 5), (light, 5), (heavy, 5)])
    assert paces[1].seconds == alone(bare, light, 5)
    assert paces[0] == paces[2]
    moved = [demand.all_bytes / pace.seconds for demand, pace in zip((heavy, light, heavy), paces, strict=True)]
    assert sum(moved) == pytest.approx(bare.reachable_bandwidth)


def test_contention_costs_what_the_constant_says() -> None:
    bare = replace(H100_SXM, step_overhead_s=0, contention=0.2)
    lane, computing, streaming = Demand(work=Work.COPY, bytes=1e9), Demand(work=Work.TRAIN, flops=1e15), decode(1, 100)
    own = alone(bare, lane, 1)
    assert beside(bare, [(lane, 1), (computing, 15)])[0].seconds == own
    others = 1 - bare.bandwidth_by_units[1] / bare.reachable_bandwidth  # together they use all of it
    assert beside(bare, [(lane, 1), (streaming, 15)])[0].seconds == pytest.approx(own * (1 + 0.2 * others))


def test_decode_step_is_one_lane_of_the_device() -> None:
    others = [(train(SHAPE, 16384, length=2048), 10)]
    pace = decode_step(H100_SXM, Decoder(SHAPE), batch=4, context=16000, units=6, others=others)
    assert pace == beside(H100_SXM, [(decode(4, 4000), 6), *others])[0]


@given(st.data(), hardwares, st.lists(demands, min_size=1, max_size=4))
def test_arrays_of_candidates_say_the_same(data: st.DataObject, hardware: Hardware, asked: list[Demand]) -> None:
    units_KL = data.draw(st.lists(divisions(hardware.units, len(asked)), min_size=1, max_size=5))
    seconds_KL = Candidates(hardware, asked).seconds(np.array(units_KL))
    expected = [[pace.seconds for pace in beside(hardware, list(zip(asked, units, strict=True)))] for units in units_KL]
    np.testing.assert_allclose(seconds_KL, expected, rtol=1e-9)


def test_a_measured_cpu_gives_its_readings_back() -> None:
    kernel, stream = Demand(work=Work.TRAIN, flops=1e12), Demand(work=Work.DECODE, bytes=1e9)
    computing, reading = partial(alone, TWO_CORES, kernel), partial(alone, TWO_CORES, stream)
    assert computing(1) - TWO_CORES.step_overhead_s == pytest.approx(1e12 / 50e9)
    assert reading(1) - TWO_CORES.step_overhead_s == pytest.approx(1e9 / 8e9)
    assert computing(1) / computing(2) == pytest.approx(1.45, rel=0.01)


def test_two_engines_on_a_core_each_do_more_than_one_on_both() -> None:
    lane = decode(1, 200, s.SMOLLM2_135M)
    paces = beside(TWO_CORES, [(lane, 1), (lane, 1)])
    assert sum(pace.speed for pace in paces) > 1.3


@pytest.mark.parametrize(
    "changed",
    [{"prefill_share": 1.2}, {"bandwidth_knee": 0.0}, {"cores_per_unit": 200}, {"serial_share": 0.9}],
    ids=lambda changed: next(iter(changed)),
)
def test_impossible_hardware_is_refused(changed: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="H100"):
        replace(H100_SXM, **changed)
