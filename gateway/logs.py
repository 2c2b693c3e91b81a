"""Structured logs on standard error: for people on a terminal, JSON lines elsewhere."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any

import structlog

from gateway.core.unseen import seen
from gateway.settings import Log


class _StandardError:
    """Writes lines to whatever standard error is at that moment. A line that cannot be written stops no request."""

    def msg(self, message: str) -> None:
        with suppress(OSError):
            sys.stderr.write(f"{message}\n")  # in one piece: workers write to one pipe
            sys.stderr.flush()

    debug = info = warning = error = exception = critical = msg


def _written_out(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """What a client named must not turn the direction of a line, nor look like another; JSON escapes it by itself."""
    return {key: seen(value) if isinstance(value, str) else value for key, value in event.items()}


def configure(settings: Log) -> None:
    """Set up structlog and the standard library's loggers as the configuration says."""
    people = settings.format == "console" or (settings.format == "auto" and sys.stderr.isatty())
    level = getattr(logging, settings.level.upper())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    last: list[structlog.typing.Processor] = (
        [_written_out, structlog.dev.ConsoleRenderer()] if people else [structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: _StandardError(),
    )
    handler = logging.StreamHandler(sys.stderr)
    of_others = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=of_others, foreign_pre_chain=shared))
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)
