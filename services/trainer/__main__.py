"""``python -m services.trainer``."""

from libs.common.service import run_service
from services.trainer.service import serve

if __name__ == "__main__":
    run_service("trainer", serve)
