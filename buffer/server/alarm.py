"""Send an alarm when a run stands still: a command, or a POST to a webhook."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import urllib.request

from tba.common.config import AlarmSection
from tba.common.log import get_logger
from tba.common.stall.facts import Stall
from tba.common.system.background import Background
from tba.common.system.process import SAFE_PATH

log = get_logger(__name__)

_COMMAND_SECONDS = 60.0
_WEBHOOK_SECONDS = 10.0
_ATTEMPTS = 3
_PAUSE_SECONDS = 10.0


class Alarm:
    """Sends what `[alarm]` asks for, in a thread: neither a slow command nor a slow server holds the buffer up."""

    def __init__(self, section: AlarmSection, run: str) -> None:
        self._section = section
        self._run_name = run
        self._thread: Background | None = None

    def send(self, stall: Stall, seconds: float) -> None:
        """Send one alarm. It is dropped with a warning if the last one has not been sent yet."""
        if not (self._section.command.get_secret_value() or self._section.webhook.get_secret_value()):
            return
        if self._thread is not None and self._thread.running:
            log.warning("alarm dropped: the last one has not been sent yet", reason=stall.sentence)
            return
        self._thread = Background("alarm", lambda: self._send(stall, seconds))
        self._thread.start()

    def close(self) -> None:
        """End what is being sent."""
        if self._thread is not None:
            self._thread.stop(_WEBHOOK_SECONDS)

    def _send(self, stall: Stall, seconds: float) -> None:
        if command := self._section.command.get_secret_value():
            self._run(command, stall, seconds)
        if url := self._section.webhook.get_secret_value():
            self._post(url, stall, seconds)

    def _run(self, command: str, stall: Stall, seconds: float) -> None:
        """Run the command in a session of its own, which is killed at the end."""
        variables = {
            # A script of the user may import its neighbours.
            SAFE_PATH: "",
            "TBA_STALL": stall.sentence,
            "TBA_STALL_REASON": stall.reason,
            "TBA_STALL_SECONDS": f"{seconds:.0f}",
            "TBA_STALL_RUN": self._run_name,
        }
        # Its output goes to the log of the buffer.
        process = subprocess.Popen(  # noqa: S603
            ["/bin/sh", "-c", f"exec 1>&2\n{command}"],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        waited = 0.0
        while process.poll() is None and waited < _COMMAND_SECONDS and not self._thread_stopping(0.1):
            waited += 0.1
        late = process.poll() is None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        if late:
            log.warning("alarm.command killed: it did not end in time", seconds=waited)
        elif code:
            log.warning("alarm.command failed", exit_code=code)
        else:
            log.info("alarm.command was run", stall=stall.reason)

    def _post(self, url: str, stall: Stall, seconds: float) -> None:
        """POST the alarm, up to three times. The URL is not logged: it often contains a secret."""
        body = {
            "text": f"tba run {self._run_name} stands still: {stall.sentence}",
            "run": self._run_name,
            "host": socket.gethostname(),
            "reason": stall.reason,
            "sentence": stall.sentence,
            "seconds": round(seconds),
        }
        headers = {"Content-Type": "application/json", "User-Agent": "tba"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with urllib.request.urlopen(request, timeout=_WEBHOOK_SECONDS) as response:  # noqa: S310
                    log.info("alarm.webhook was called", stall=stall.reason, status=response.status)
                return
            # URLError, a timeout, or a broken reply of the server.
            except (OSError, ValueError, http.client.HTTPException) as error:
                log.warning("alarm.webhook failed", attempt=attempt, reason=str(error))
            if attempt < _ATTEMPTS and self._thread_stopping(_PAUSE_SECONDS):
                return

    def _thread_stopping(self, seconds: float) -> bool:
        """Wait for some seconds; True as soon as `close` is called."""
        assert self._thread is not None
        return self._thread.stopping.wait(seconds)
