"""Numbers of a Prometheus endpoint: the text that an exporter shows, or the answer of a server to a query."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from planner import library
from planner.errors import PlannerError, shown
from planner.record import record

TIMEOUT = 5.0
"""Seconds until an endpoint has answered."""
MOST_BYTES = 100_000_000
"""Eight metrics of 16,384 GPUs are half of that."""
WANTED = (
    r"DCGM_FI_DEV_(SM_CLOCK|POWER_USAGE|GPU_TEMP|XID_ERRORS|CLOCK_THROTTLE_REASONS|CLOCKS_EVENT_REASONS|PCIE_(MAX_)?LINK_WIDTH)"
    r"|.*(step|compute|comm|wait)(_time)?_seconds|.*expert_tokens"
)
"""Names of metrics that a watcher reads, as one expression that matches the whole."""
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


@record
class Metric:
    """One number with its labels."""

    name: str
    labels: dict[str, str]
    value: float


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Redirects are not followed: an endpoint is where its user says."""

    def redirect_request(self, *_: Any) -> None:
        return None


def fetch(url: str, said: str) -> str:
    """The text at an address, which messages call as the user ``said`` it. Raises PlannerError: no http, no answer in time, too
    long."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise PlannerError(f"--url is {shown(said)}; it must begin with http:// or https:// and name a host")
    opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
    try:
        asked = urllib.request.Request(url, headers={"Accept": "text/plain, application/json"})
        with opener.open(asked, timeout=TIMEOUT) as answer:
            data = _read(answer)
    except (OSError, ValueError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or str(reason)
        raise PlannerError(f"{said} does not answer ({shown(why)}); check the address and its port") from error
    if len(data) > MOST_BYTES:
        raise PlannerError(f"{said} answers with more than {MOST_BYTES} bytes; name a query: {said.partition('?')[0]}?query=...")
    return data.decode("utf-8", errors="replace")


def _read(answer: Any) -> bytes:
    """All of an answer that comes in time and is not too long. Raises TimeoutError."""
    end, data = time.monotonic() + 2.0 * TIMEOUT, b""
    while len(data) <= MOST_BYTES and (piece := answer.read(65536)):
        data += piece
        if time.monotonic() > end:
            raise TimeoutError(f"not all of the answer came within {2.0 * TIMEOUT:g} s")
    return data


def metrics_of(url: str) -> list[Metric]:
    """What a watcher reads of an exporter (``/metrics``) or of a Prometheus server (its address, or ``/api/v1/query?...``)."""
    parts, asked = urllib.parse.urlsplit(url), url
    if parts.path in ("", "/"):
        query = urllib.parse.urlencode({"query": f'{{__name__=~"{WANTED}"}}'})
        asked = urllib.parse.urlunsplit((parts.scheme, parts.netloc, "/api/v1/query", query, ""))
    text = fetch(asked, url)
    return from_query(text, url) if text.lstrip().startswith("{") else from_text(text, url)


def from_query(text: str, where: str) -> list[Metric]:
    """The numbers of a server's answer. Raises PlannerError."""
    data = library.parse_json(text, where)
    result = data.get("data", {}).get("result") if isinstance(data, dict) and isinstance(data.get("data"), dict) else None
    if not isinstance(result, list):
        raise PlannerError(f"{where}: the answer has no data.result; is it a Prometheus server?")
    found = []
    for one in result:
        labels = one.get("metric") if isinstance(one, dict) else None
        value = one.get("value") if isinstance(one, dict) else None
        if isinstance(labels, dict) and isinstance(value, list) and len(value) == 2:
            found += _metric(str(labels.get("__name__", "")), {str(k): str(v) for k, v in labels.items()}, str(value[1]))
    return found


def from_text(text: str, where: str) -> list[Metric]:
    """The numbers of the text that exporters show. Raises PlannerError where no line is one."""
    found = []
    for line in text.splitlines():
        match = None if line.startswith("#") else _LINE.match(line)
        if match and re.fullmatch(WANTED, match[1]):
            found += _metric(match[1], dict(_LABEL.findall(match[2] or "")), match[3])
    if not found:
        raise PlannerError(f"{where}: no metric of DCGM or of ranks' times is there; known: {WANTED.replace('|', ', ')}")
    return found


def _metric(name: str, labels: dict[str, str], text: str) -> list[Metric]:
    """One number, or nothing where the text is none."""
    try:
        value = float(text)
    except ValueError:
        return []
    return [Metric(name=name, labels=labels, value=value)] if abs(value) < 1e18 else []
