"""``python -m services.scheduler --settings FILE``: the scheduler service."""

from libs.common.service import run_service
from services.scheduler.service import serve

if __name__ == "__main__":
    run_service("scheduler", serve, sets_up_bus=True)
