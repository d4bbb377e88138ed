"""Many divisions of one device at once: what :func:`roofline.beside` says, for arrays of candidates.

Axes: K candidates, L lanes.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.scheduler.devices.demands import Demand
from services.scheduler.devices.hardware import Hardware
from services.scheduler.devices.roofline import step_parts

Floats = NDArray[np.float64]


class Candidates:
    """The lanes of one device, whose units are to be chosen.

    Args:
        demands: of each lane.
    """

    def __init__(self, hardware: Hardware, demands: Sequence[Demand]) -> None:
        self._hardware = hardware
        self._compute_U, self._bandwidth_U = np.array(hardware.compute_by_units), np.array(hardware.bandwidth_by_units)
        parts_LP = np.array([step_parts(hardware, demand) for demand in demands]).reshape(-1, 7)
        self._matrix_L, self._bytes_L, self._attention_L, self._kv_L, self._waits_L, self._streams_L, self._host_L = (
            parts_LP.T
        )

    def seconds(self, units_KL: NDArray[np.int64]) -> Floats:
        """Seconds of each lane's step in each candidate (K, L); infinite where it has no units.

        Raises:
            ValueError: a candidate has more units than the device.
        """
        if (units_KL.sum(axis=1) > self._hardware.units).any():
            raise ValueError(f"more units than the {self._hardware.units} of {self._hardware.name}")
        capacity = self._hardware.reachable_bandwidth
        moved_L = self._bytes_L + self._kv_L
        drawn_KL = moved_L / self._alone(units_KL, 1.0)
        fair_KL = _max_min_fair(capacity, drawn_KL)
        others_KL = fair_KL.sum(axis=1, keepdims=True) - fair_KL
        disturbed_KL = 1.0 + self._hardware.contention * others_KL / capacity
        with np.errstate(divide="ignore", invalid="ignore"):
            stretched_KL = np.where(fair_KL < drawn_KL, moved_L / fair_KL, 0.0)
        slowest_KL: Floats = np.maximum(self._alone(units_KL, disturbed_KL), stretched_KL)
        return slowest_KL

    def _alone(self, units_KL: NDArray[np.int64], disturbed: float | Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            slower_KL, per_byte_KL = 1.0 / self._compute_U[units_KL], disturbed / self._bandwidth_U[units_KL]
            matrix_KL = np.maximum(self._matrix_L * slower_KL, self._bytes_L * per_byte_KL)
            attention_KL = np.maximum(self._attention_L * slower_KL, self._kv_L * per_byte_KL)
        seconds_KL: Floats = np.maximum(matrix_KL + attention_KL + self._waits_L, self._streams_L) + self._host_L
        seconds_KL[units_KL == 0] = np.inf
        return seconds_KL


def _max_min_fair(capacity: float, drawn_KL: Floats) -> Floats:
    """Of each lane in each candidate, as :func:`roofline.max_min_fair`."""
    order_KL = np.argsort(drawn_KL, axis=1, kind="stable")
    parts_KL = np.empty_like(drawn_KL)
    left_K = np.full(len(drawn_KL), capacity)
    rows_K, lanes = np.arange(len(drawn_KL)), drawn_KL.shape[1]
    for place in range(lanes):
        lane_K = order_KL[:, place]
        part_K = np.minimum(drawn_KL[rows_K, lane_K], left_K / (lanes - place))
        parts_KL[rows_K, lane_K] = part_K
        left_K -= part_K
    return parts_KL
