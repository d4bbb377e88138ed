"""The last that was heard of each (instance, job): bounded, and never more than a hint, because reports may be lost."""

from collections.abc import Mapping

from libs.common import messages as m
from services.scheduler.view import Activity

WINDOWS = 16

_IDLE = Activity(m.SubStage.IDLE, (), 0.0)


class Telemetry:
    """What instances do for jobs, as far as their reports arrived."""

    def __init__(self) -> None:
        self._activity: dict[tuple[str, str], Activity] = {}

    def note(self, report: m.SubStageEntered | m.RolloutWindow | m.TrainerWindow, steady_s: float) -> None:
        """Take a report in; only the last windows are kept."""
        key = report.sender, report.job_uid
        before = self._activity.get(key, _IDLE)
        if isinstance(report, m.SubStageEntered):
            self._activity[key] = Activity(report.sub_stage, before.windows, steady_s)
        else:
            windows = (*before.windows[1 - WINDOWS :], report)
            self._activity[key] = Activity(before.sub_stage, windows, steady_s)

    def forget(self, *, instance: str | None = None, job_uid: str | None = None) -> None:
        """Drop what concerns an instance or a job that is gone."""
        gone = [key for key in self._activity if key[0] == instance or key[1] == job_uid]
        for key in gone:
            del self._activity[key]

    def snapshot(self) -> Mapping[tuple[str, str], Activity]:
        """Everything known, as it is now."""
        return dict(self._activity)


def does_work(report: m.SubStageEntered | m.RolloutWindow | m.TrainerWindow) -> bool:
    """Whether a report tells of tokens that were processed."""
    match report:
        case m.RolloutWindow(tokens_prefill=prefill, tokens_decode=decode):
            return prefill + decode > 0
        case m.TrainerWindow(tokens=tokens):
            return tokens > 0
        case _:
            return False
