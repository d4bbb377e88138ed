"""Structured logs: readable on a terminal, JSON elsewhere; to stderr, so that stdout stays for results."""

import logging
import sys

import structlog
from structlog.typing import FilteringBoundLogger


def configure(*, instance: str, level: str = "info", json: bool | None = None) -> FilteringBoundLogger:
    """Set up logging for this process and return a logger bound to its instance id.

    Args:
        instance: id of this service instance.
        level: least severe level shown.
        json: one JSON object a line; None decides by whether stderr is a terminal.
    """
    as_json = not sys.stderr.isatty() if json is None else json
    renderer = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info if as_json else _unchanged,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logger: FilteringBoundLogger = structlog.get_logger().bind(instance=instance)
    return logger


def _unchanged(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return event
