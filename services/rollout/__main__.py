"""``python -m services.rollout``."""

from libs.common.service import run_service
from services.rollout.service import serve

if __name__ == "__main__":
    run_service("rollout", serve)
