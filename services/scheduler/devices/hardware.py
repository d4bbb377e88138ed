"""What a device can do: peaks, how much of them real kernels reach, and what a part of its units gets.

A published constant names its source; one marked *assumption* has none, and results that lean on it should be given for a
range. Data sheets: "NVIDIA H100 Tensor Core GPU" and "NVIDIA A100 Tensor Core GPU" (their bf16 peaks are with 2:4 sparsity,
twice the dense ones here; NVLink is given for both directions together, twice what is here). SM counts: the two architecture
white papers. ``docs/device-model.md`` has all of it as a table.
"""

from enum import IntEnum
from functools import cached_property
from itertools import pairwise

import msgspec


class Work(IntEnum):
    """Kinds of work, told apart by the share of the peak FLOP/s that their kernels reach."""

    PREFILL = 0
    DECODE = 1
    TRAIN = 2
    COPY = 3


class Hardware(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One device.

    Attributes:
        peak_flops: dense bf16 FLOP/s. memory_bandwidth: bytes/s. memory_bytes: capacity.
        link_bandwidth: bytes/s to other devices, each direction; on a CPU, at which new weights are read.
        cores: SMs or CPU cores. cores_per_unit: that are handed out together; what is left over works only for someone who
            has the whole device.
        prefill_share, decode_share, train_share: of peak_flops that matrix kernels reach.
        bandwidth_share: of memory_bandwidth that streaming kernels reach with all cores.
        bandwidth_knee: share of the cores at which bandwidth stops growing in proportion.
        bandwidth_at_knee: share of the reachable bandwidth that is reached there.
        serial_share: of the work of one lane, by Amdahl's law, that doesn't get faster with units; what it wastes is
            there for others.
        contention: how much longer a lane's memory accesses take (caches thrashed, rows closed) beside others that use the
            whole bandwidth; less in proportion beside others that use less.
        step_overhead_s: of every engine step or micro-batch, when the device computes nothing (host, launches, sampling).
        sequence_overhead_s: for each sequence in an engine step, likewise.
        message_latency_s: of one collective between devices, whatever its size.

    Raises:
        ValueError: a share outside 0..1, or a lane would be slower with more units.
    """

    name: str
    peak_flops: float
    memory_bandwidth: float
    memory_bytes: float
    link_bandwidth: float
    cores: int
    cores_per_unit: int
    prefill_share: float
    decode_share: float
    train_share: float
    bandwidth_share: float
    bandwidth_knee: float
    bandwidth_at_knee: float
    contention: float
    step_overhead_s: float
    sequence_overhead_s: float
    message_latency_s: float
    serial_share: float = 0.0

    def __post_init__(self) -> None:
        shares = (self.prefill_share, self.decode_share, self.train_share, self.bandwidth_share, self.bandwidth_knee)
        if not all(0 < share <= 1 for share in (*shares, self.bandwidth_at_knee)) or not 0 <= self.serial_share < 1:
            raise ValueError(f"{self.name}: shares are in (0, 1], the serial one in [0, 1)")
        if not 1 <= self.cores_per_unit <= self.cores:
            raise ValueError(f"{self.name}: {self.cores} cores in units of {self.cores_per_unit}")
        for rates in (self.compute_by_units, self.bandwidth_by_units):
            if any(more < fewer for fewer, more in pairwise(rates)):
                raise ValueError(f"{self.name}: a lane would be slower with more units")

    @property
    def units(self) -> int:
        """How many units can be handed out."""
        return self.cores // self.cores_per_unit

    @cached_property
    def reachable_flops(self) -> tuple[float, ...]:
        """FLOP/s that one lane reaches on the whole device, by :class:`Work`."""
        shares = {
            Work.PREFILL: self.prefill_share,
            Work.DECODE: self.decode_share,
            Work.TRAIN: self.train_share,
            Work.COPY: self.decode_share,
        }
        return tuple(self.peak_flops * shares[work] * self._parallel(self.units) for work in Work)

    @cached_property
    def reachable_bandwidth(self) -> float:
        """Bytes/s that all lanes together can move."""
        return self.memory_bandwidth * self.bandwidth_share

    @cached_property
    def compute_by_units(self) -> tuple[float, ...]:
        """FLOP/s of one lane on so many units (from 0 to all), as a share of what it reaches on all."""
        whole = self._parallel(self.units)
        return tuple(self._cores(units) * self._parallel(units) / whole for units in range(self.units + 1))

    @cached_property
    def bandwidth_by_units(self) -> tuple[float, ...]:
        """Bytes/s that one lane can draw, by units: to the knee in proportion, then slowly up to all."""
        knee, at_knee = self.bandwidth_knee, self.bandwidth_at_knee

        def drawn(share: float) -> float:
            if share <= knee:
                return at_knee * share / knee
            return at_knee + (1 - at_knee) * (share - knee) / (1 - knee)

        return tuple(
            self.reachable_bandwidth * drawn(self._cores(units)) * self._parallel(units) for units in range(self.units + 1)
        )

    def _cores(self, units: int) -> float:
        """The share of the cores that so many units are; all of them are the whole device."""
        return 1.0 if units == self.units else units * self.cores_per_unit / self.cores

    def _parallel(self, units: int) -> float:
        """Amdahl's speed-up on so many units, as a share of the proportional one."""
        return 1.0 / (1.0 + self.serial_share * max(units - 1, 0))


H100_SXM = Hardware(
    name="H100 SXM",
    # Data sheet: 1979 TFLOP/s sparse, 3.35 TB/s, 80 GB, NVLink 900 GB/s both ways.
    peak_flops=989.5e12,
    memory_bandwidth=3.35e12,
    memory_bytes=80e9,
    link_bandwidth=450e9,
    # The CUDA driver's guide to green contexts: compute capability 9.0 takes at least 8 SMs, in steps of 8.
    cores=132,
    cores_per_unit=8,
    # Assumption: between a large GEMM (0.7) and what prefill keeps after attention and odd shapes.
    prefill_share=0.5,
    # Assumption: as prefill, but with less attention; checked against vLLM at batches of 396 and 512.
    decode_share=0.6,
    # MosaicML llm-foundry's training benchmarks, "H100 80GB BF16": 0.36 to 0.59 of the peak, recomputation counted.
    train_share=0.45,
    # Together with the overhead these give the 6.5 ms per token at batch 1 that yobitel's InferenceBench publishes for
    # Llama-3.1-8B in vLLM 0.21: the split between the two is an assumption.
    bandwidth_share=0.85,
    step_overhead_s=1.2e-3,
    # BulletServe, issue 1: decode kernels on an H100 PCIe (114 SMs, 2.0 TB/s) gain fast up to about 40 SMs, then 10 %
    # more. 45 GB/s per SM there is 57 of 132 SMs here.
    bandwidth_knee=0.43,
    bandwidth_at_knee=0.9,
    # Assumption. Vary it from 0 to 0.3.
    contention=0.1,
    # Assumption, about what vLLM at batches of 396 and 512 leaves unexplained.
    sequence_overhead_s=10e-6,
    # Assumption: as on the A100.
    message_latency_s=7e-6,
)

A100_SXM = Hardware(
    name="A100 SXM 80 GB",
    # Data sheet: 624 TFLOP/s sparse, 2039 GB/s, 80 GB, NVLink 600 GB/s both ways.
    peak_flops=312e12,
    memory_bandwidth=2.039e12,
    memory_bytes=80e9,
    link_bandwidth=300e9,
    # The same guide: compute capability 8.x takes at least 4 SMs, in steps of 2. Six divides 108 without a rest and makes
    # about as many units as an H100 has, so that what is searched stays as large.
    cores=108,
    cores_per_unit=6,
    # Assumptions, above the H100's because its peak is easier to reach for the same memory.
    prefill_share=0.6,
    decode_share=0.65,
    # PyTorch's FSDP study with IBM: Llama 2 7B at 0.57 of the peak without recomputation. An RL batch is less regular.
    train_share=0.55,
    # gpt-fast's read-me: about 1700 GB/s at most, and 9.5 ms per token of Llama 2 7B at batch 1, of which 7.8 are weights.
    bandwidth_share=0.834,
    step_overhead_s=1.7e-3,
    # Assumption: the H100's bytes/s per SM.
    bandwidth_knee=0.4,
    bandwidth_at_knee=0.9,
    # Assumption. Vary it from 0 to 0.3.
    contention=0.1,
    sequence_overhead_s=10e-6,
    # gpt-fast's read-me: fits Llama 2 7B on 2, 4 and 8 devices (5.9, 3.9 and 3.0 ms per token).
    message_latency_s=7e-6,
)


class MeasuredCpu(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile measures of a CPU; each core is a unit.

    Attributes:
        cores: that are handed out. memory_bytes: for weights, KV cache and training state.
        core_flops: of a large bf16 GEMM on one core.
        prefill_flops, decode_flops, train_flops: reached on one core by each kind of work.
        core_bandwidth: bytes/s at which batch-1 decode reads weights on one core.
        total_bandwidth: bytes/s with one such engine on each core.
        speedup: of one lane on all cores over one core; at most the number of cores.
        weights_bandwidth: bytes/s at which an engine takes new weights in.
        step_overhead_s, sequence_overhead_s, contention: as in :class:`Hardware`.
    """

    name: str
    cores: int
    memory_bytes: float
    core_flops: float
    prefill_flops: float
    decode_flops: float
    train_flops: float
    core_bandwidth: float
    total_bandwidth: float
    speedup: float
    weights_bandwidth: float
    step_overhead_s: float
    sequence_overhead_s: float
    contention: float


def cpu(measured: MeasuredCpu) -> Hardware:
    """The device that was measured.

    The peak is the GEMM's on one core times the cores. A lane's speed-up on all cores gives the serial share by Amdahl's
    law. What several one-core engines draw together is the bandwidth; one core reaches its own part of that.

    Raises:
        ValueError: the readings contradict each other.
    """
    one = 1 / measured.cores
    drawn = min(measured.core_bandwidth / measured.total_bandwidth, 1.0)
    if not 1 <= measured.speedup <= measured.cores or drawn < one * 0.999:
        raise ValueError(f"{measured.name}: {measured.speedup} times as fast, one core draws {drawn:.2f} of the bandwidth")
    serial = (measured.cores / measured.speedup - 1) / (measured.cores - 1) if measured.cores > 1 else 0.0
    return Hardware(
        name=measured.name,
        peak_flops=measured.core_flops * measured.cores,
        memory_bandwidth=measured.total_bandwidth,
        memory_bytes=measured.memory_bytes,
        link_bandwidth=measured.weights_bandwidth,
        cores=measured.cores,
        cores_per_unit=1,
        prefill_share=measured.prefill_flops / measured.core_flops,
        decode_share=measured.decode_flops / measured.core_flops,
        train_share=measured.train_flops / measured.core_flops,
        bandwidth_share=1.0,
        bandwidth_knee=one,
        bandwidth_at_knee=drawn,
        serial_share=serial,
        contention=measured.contention,
        step_overhead_s=measured.step_overhead_s,
        sequence_overhead_s=measured.sequence_overhead_s,
        message_latency_s=0.0,
    )
