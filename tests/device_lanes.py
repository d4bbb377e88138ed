"""Devices and lanes for tests of the device model."""

from hypothesis import strategies as st

from services.scheduler.devices.demands import Decoder, optimise, prefill, train, weight_sync
from services.scheduler.devices.hardware import A100_SXM, H100_SXM, MeasuredCpu, cpu
from services.scheduler.devices.roofline import Lane
from services.scheduler.devices.shapes import SHAPES

TWO_CORES = cpu(
    MeasuredCpu(
        name="2 cores",
        cores=2,
        memory_bytes=24e9,
        core_flops=100e9,
        prefill_flops=60e9,
        decode_flops=60e9,
        train_flops=50e9,
        core_bandwidth=8e9,
        total_bandwidth=15e9,
        speedup=1.45,
        weights_bandwidth=1e9,
        step_overhead_s=2e-3,
        sequence_overhead_s=50e-6,
        contention=0.05,
    )
)

hardwares = st.sampled_from([H100_SXM, A100_SXM, TWO_CORES])
shapes = st.sampled_from(list(SHAPES.values()))
batches = st.integers(1, 512)
lengths = st.integers(1, 8192)
demands = st.one_of(
    st.builds(lambda shape, batch, length: Decoder(shape).step(batch, batch * length), shapes, batches, lengths),
    st.builds(lambda shape, batch, length: prefill(shape, length, sequences=batch), shapes, batches, lengths),
    st.builds(lambda shape, length: train(shape, 16384, length=length, shards=8), shapes, lengths),
    st.builds(optimise, shapes),
    st.builds(weight_sync, shapes),
)


@st.composite
def divisions(draw: st.DrawFn, units: int, lanes: int) -> list[int]:
    """Units of each lane, together at most what the device has; some may be paused."""
    left, given = units, []
    for _ in range(lanes):
        given.append(draw(st.integers(0, left)))
        left -= given[-1]
    return draw(st.permutations(given))


@st.composite
def lanes_of(draw: st.DrawFn, units: int) -> list[Lane]:
    """One to four lanes."""
    asked = draw(st.lists(demands, min_size=1, max_size=4))
    return list(zip(asked, draw(divisions(units, len(asked))), strict=True))
