"""Which sub-stage an engine step is: by how much work it does, on bands calibrated for the device.

The paper's bands (``[0,128)`` tail, ``[128,1024)`` wide, ``>=1024`` prefill tokens a step) are an H100's; the knees of a CPU
core's throughput curve lie far lower. A step that prefills at all is latency-bound by the prefill, so that decides first.
"""

import msgspec

from libs.common.messages import SubStage
from services.rollout.engine import StepReport


class Bands(msgspec.Struct, frozen=True):
    """Borders in tokens per engine step.

    Attributes:
        prefill_from: a step that computes at least so many prompt tokens is prefill.
        wide_from: a step that decodes at least so many sequences is wide decode; fewer is the tail.
    """

    prefill_from: int = 64
    wide_from: int = 8


def label(report: StepReport, bands: Bands) -> SubStage:
    """The sub-stage of one engine step."""
    if report.prefill_tokens >= bands.prefill_from:
        return SubStage.PREFILL
    if report.decode_tokens >= bands.wide_from:
        return SubStage.WIDE_DECODE
    return SubStage.TAIL_DECODE
