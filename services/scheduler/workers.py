"""Who is there: the presence of worker instances, and the devices that they make up."""

from libs.common import messages as m
from services.scheduler.view import DeviceView, WorkerView


class Workers:
    """Announced instances, each with the steady time at which it was last heard."""

    def __init__(self) -> None:
        self._presence: dict[str, m.Worker] = {}
        self._heard_s: dict[str, float] = {}

    def seen(self, worker: m.Worker, steady_s: float) -> bool:
        """Note presence; whether it changes what can be decided."""
        before = self._presence.get(worker.sender)
        self._presence[worker.sender], self._heard_s[worker.sender] = worker, steady_s
        return before is None or _capabilities(before) != _capabilities(worker)

    def left(self, instance: str) -> bool:
        """Forget an instance; whether it was there."""
        self._heard_s.pop(instance, None)
        return self._presence.pop(instance, None) is not None

    def silent(self, steady_s: float, limit_s: float) -> list[str]:
        """Instances not heard for longer than the limit."""
        return sorted(instance for instance, heard_s in self._heard_s.items() if steady_s - heard_s > limit_s)

    def __contains__(self, instance: str) -> bool:
        return instance in self._presence

    def has(self, role: m.Role) -> bool:
        """Whether any instance of the role can take work."""
        return any(worker.role is role for worker in self._usable())

    def views(self) -> dict[str, WorkerView]:
        """Instances that can take work, by id."""
        views = (
            WorkerView(worker.sender, worker.role, worker.device, worker.max_units, worker.broken)
            for worker in self._usable()
        )
        return {view.instance: view for view in sorted(views, key=lambda view: view.instance)}

    def devices(self) -> dict[str, DeviceView]:
        """Devices of instances that can take work; where instances disagree about one, the least is believed."""
        found: dict[str, DeviceView] = {}
        for worker in self._usable():
            known = found.get(worker.device, DeviceView(worker.device, worker.units, worker.memory_mb))
            least = DeviceView(known.id, min(known.units, worker.units), min(known.memory_mb, worker.memory_mb))
            found[worker.device] = least
        return dict(sorted(found.items()))

    def _usable(self) -> list[m.Worker]:
        return [worker for worker in self._presence.values() if not worker.draining]


def _capabilities(worker: m.Worker) -> tuple[object, ...]:
    broken = frozenset(worker.broken)
    return worker.role, worker.device, worker.units, worker.max_units, worker.memory_mb, worker.draining, broken
