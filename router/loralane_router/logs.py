"""Log lines of the router process: text for people or one JSON object a line for machines."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, Literal

LogFormat = Literal["text", "json"]

#: Chatty at INFO, and about nothing that the access log does not say.
_QUIET: Final = ("uvicorn", "asyncio", "grpc", "httpx")


class LineFormatter(logging.Formatter):
    """One record, one line; only a traceback makes text longer."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its end."""
        cause = self.formatException(record.exc_info) if record.exc_info else ""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        level, message = record.levelname.lower(), record.getMessage()
        if self._form == "json":
            fields = {"time": time, "level": level, "logger": record.name, "message": message}
            return json.dumps(fields | ({"exception": cause} if cause else {}))
        line = f"{time[11:23]} {level:7} {message}"
        return f"{line}\n{cause}" if cause else line


def configure(form: LogFormat) -> None:
    """Send everything from INFO on to stderr in `form`."""
    # What no line says need not be found out for each.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(form))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
