"""``python -m services.reward``."""

from libs.common.service import run_service
from services.reward.service import serve

if __name__ == "__main__":
    run_service("reward", serve)
