"""How long a step takes on some units of a device, alone and beside others (Williams et al. 2009, "Roofline").

A lane is one demand on so many units. Its compute is its own: nobody else gets its units. Memory bandwidth is shared:

* alone, each group of kernels takes the longer of its compute and its memory time; groups, waits for other devices, and
  the host's overhead follow one another;
* beside others, where the lanes would together draw more than the device has, each gets its max-min fair part, averaged
  over its step: while one waits for its host, others draw more;
* and each memory access takes longer, by ``contention`` times the share of the bandwidth that the others draw. Who is cut
  to a fair part doesn't notice: it waits longer for its part than for that.

So nobody is ever faster beside others than alone, and nobody's units or bandwidth are counted twice.
"""

from collections.abc import Sequence
from math import inf

import msgspec

from services.scheduler.devices.demands import Decoder, Demand
from services.scheduler.devices.hardware import Hardware


class Pace(msgspec.Struct, frozen=True, gc=False):
    """How a lane gets on.

    Attributes:
        seconds: for the step; infinite while it is paused.
        speed: of a lane that has the whole device to itself, the share that this one keeps, 0..1.
    """

    seconds: float
    speed: float


PAUSED = Pace(inf, 0.0)

Lane = tuple[Demand, int]
"""A demand, and on how many units it runs; 0: it is paused."""


def alone(hardware: Hardware, demand: Demand, units: int) -> float:
    """Seconds that the step takes when nobody else uses the device; infinite on no units."""
    if units <= 0:
        return inf
    return _seconds(
        step_parts(hardware, demand),
        1.0 / hardware.compute_by_units[units],
        1.0 / hardware.bandwidth_by_units[units],
    )


def beside(hardware: Hardware, lanes: Sequence[Lane]) -> list[Pace]:
    """How each lane gets on while all of them run.

    Raises:
        ValueError: they have more units than the device.
    """
    # A simulation asks this at every event: plain loops, no more passes and calls than needed.
    compute, bandwidth, capacity = hardware.compute_by_units, hardware.bandwidth_by_units, hardware.reachable_bandwidth
    given, running, drawn = 0, [], []
    for demand, units in lanes:
        if units > 0:
            given += units
            if given > hardware.units:
                raise ValueError(f"more units than the {hardware.units} of {hardware.name}")
            parts, slower, per_byte = step_parts(hardware, demand), 1.0 / compute[units], 1.0 / bandwidth[units]
            running.append((parts, slower, per_byte))
            drawn.append((parts[1] + parts[3]) / _seconds(parts, slower, per_byte))
    together = sum(drawn)
    fair = drawn
    if together > capacity:
        fair, together = max_min_fair(capacity, drawn), capacity
    whole, paces, lane = 1.0 / bandwidth[-1], [], 0
    for _, units in lanes:
        if units <= 0:
            paces.append(PAUSED)
            continue
        parts, slower, per_byte = running[lane]
        disturbed = 1.0 + hardware.contention * (together - fair[lane]) / capacity
        seconds = _seconds(parts, slower, per_byte * disturbed)
        if fair[lane] < drawn[lane]:
            seconds = max(seconds, (parts[1] + parts[3]) / fair[lane])
        paces.append(Pace(seconds, _seconds(parts, 1.0, whole) / seconds))
        lane += 1
    return paces


def decode_step(
    hardware: Hardware,
    decoder: Decoder,
    *,
    batch: float,
    context: float,
    units: int,
    others: Sequence[Lane] = (),
) -> Pace:
    """How one decode step of a lane gets on.

    Args:
        decoder: of its model; on several devices, each has the same units and the same others.
        batch: sequences that run. context: tokens that they have in the KV cache, in all.
        units: that the lane has. others: who else runs on the device.
    """
    return beside(hardware, [(decoder.step(batch, context), units), *others])[0]


Parts = tuple[float, float, float, float, float, float, float]


def step_parts(hardware: Hardware, demand: Demand) -> Parts:
    """What makes up a step: per group of kernels seconds of compute on the whole device and bytes; waits, streams, host."""
    flops, link = hardware.reachable_flops[demand.work], hardware.link_bandwidth
    return (
        demand.flops / flops,
        demand.bytes,
        demand.attention_flops / flops,
        demand.attention_bytes,
        demand.link_bytes / link + demand.messages * hardware.message_latency_s,
        demand.stream_bytes / link,
        hardware.step_overhead_s + demand.sequences * hardware.sequence_overhead_s,
    )


def _seconds(parts: Parts, slower: float, per_byte: float) -> float:
    """A step's time, computing so many times slower than on the whole device and taking ``per_byte`` seconds for a byte."""
    computing, moving, attending, reading, waits, streams, host = parts
    computing *= slower
    moving *= per_byte
    attending *= slower
    reading *= per_byte
    busy = (computing if computing > moving else moving) + (attending if attending > reading else reading) + waits
    return (busy if busy > streams else streams) + host


def max_min_fair(capacity: float, drawn: Sequence[float]) -> list[float]:
    """Each one's part of what is there (Bertsekas and Gallager 1992, section 6.5).

    Who draws little keeps it, the others get equal parts of the rest.
    """
    parts, left, waiting = [0.0] * len(drawn), capacity, len(drawn)
    for lane in sorted(range(waiting), key=drawn.__getitem__):
        fair = left / waiting
        parts[lane] = part = drawn[lane] if drawn[lane] < fair else fair
        left -= part
        waiting -= 1
    return parts
