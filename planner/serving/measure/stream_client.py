"""One streamed request to an OpenAI-compatible server, with the times of its tokens, over asyncio's own streams.

Times are those of ``vllm bench serve``: TTFT from the start of sending to the first piece of the answer, ITL between two pieces,
latency to the last piece; tokens are counted by the server (``usage``). [vllm 0.33 benchmarks/lib/endpoint_request_func.py]
"""

import asyncio
import contextlib
import json
import os
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from planner.errors import PlannerError, printable, shown
from planner.record import record

MOST_LINE = 1 << 20
"""Bytes of one event at most."""
MOST_ERROR = 400
"""Characters of a server's own message that are kept."""


@record
class Address:
    """Where a server listens."""

    host: str
    port: int
    path: str = ""
    """Before /v1."""
    tls: bool = False

    @classmethod
    def of(cls, url: str) -> "Address":
        """The server of a URL; a trailing /v1 is left out. Raises PlannerError."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise PlannerError(f"--url {shown(url)}: {error}; write it like http://localhost:8000") from error
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or not url.isprintable()
            or any(sign in url for sign in " \r\n")
        ):
            raise PlannerError(f"--url {shown(url)}: write it like http://localhost:8000")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(
            host=parts.hostname,
            port=port or (443 if parts.scheme == "https" else 80),
            path=path,
            tls=parts.scheme == "https",
        )

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}{self.path}"


@dataclass(kw_only=True)
class Answer:
    """One request as it went; seconds."""

    started: float = 0.0
    """On the clock of ``time.perf_counter``."""
    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    text: int = 0
    """Characters of the answer."""
    error: str = ""
    """Why it failed; '' = it did not."""

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class NotReadyError(PlannerError):
    """The server is there and says 503: it takes requests later, as a router does before its engines are known to it."""


class HttpError(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"HTTP {status}: {printable(text)[:MOST_ERROR]}")


async def post_stream(address: Address, path: str, body: Mapping[str, Any], timeout: float) -> Answer:
    """One request with ``stream``; what goes wrong stands in ``error``. ``timeout``: seconds for all of it."""
    found = Answer(started=time.perf_counter())
    try:
        async with asyncio.timeout(timeout):
            await _stream(address, path, body, found)
    except TimeoutError:
        found.error = f"no end after {timeout:g} s"
    except HttpError as error:
        found.error = str(error)
    except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        found.error = f"{type(error).__name__}: {printable(str(error))[:MOST_ERROR]}"
    if not found.error and not found.ttft:
        found.error = "the answer held no tokens"
    return found


async def get_json(address: Address, path: str, timeout: float = 10.0) -> Any:
    """The data behind a path. Raises NotReadyError, PlannerError."""
    try:
        async with asyncio.timeout(timeout), _connection(address) as (reader, writer):
            await _send(writer, address, "GET", path, b"")
            status, lines = await _head(reader)
            text = b"".join([piece async for piece in _body(reader, lines)])
            if status != 200:
                raise HttpError(status, text.decode("utf-8", "replace"))
            return json.loads(text)
    except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, HttpError) as error:
        why = str(error) or type(error).__name__
        kind = NotReadyError if isinstance(error, HttpError) and error.status == 503 else PlannerError
        raise kind(
            f"{address}{path}: no answer of a server ({printable(why)[:MOST_ERROR]}); is it running, and ready?"
        ) from error


async def _stream(address: Address, path: str, body: Mapping[str, Any], found: Answer) -> None:
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    async with _connection(address) as (reader, writer):
        await _send(writer, address, "POST", path, data)
        status, headers = await _head(reader)
        if status != 200:
            text = b"".join([piece async for piece in _body(reader, headers)])
            raise HttpError(status, text.decode("utf-8", "replace"))
        last, pieces = found.started, 0
        async for event in _events(_body(reader, headers)):
            now = time.perf_counter()
            if "error" in event and not event.get("choices"):
                raise HttpError(200, json.dumps(event["error"])[:MOST_ERROR])
            piece = _text(event)
            if piece is not None:
                pieces += 1
                found.text += len(piece)
                if pieces == 1:
                    found.ttft = now - found.started
                else:
                    found.gaps.append(now - last)
                last = now
                found.latency = now - found.started
            usage = event.get("usage")
            if isinstance(usage, dict):
                found.input_tokens = _count(usage.get("prompt_tokens")) or found.input_tokens
                found.output_tokens = _count(usage.get("completion_tokens")) or found.output_tokens
        found.output_tokens = found.output_tokens or pieces


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**9 else 0


def _text(event: Mapping[str, Any]) -> str | None:
    """The piece of an answer in an event; None where it holds none (the role at the beginning, the counts at the end)."""
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    text = choices[0].get("text")
    if isinstance(text, str):
        return text if text or choices[0].get("finish_reason") is None else None
    delta = choices[0].get("delta")
    if not isinstance(delta, dict):
        return None
    text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    return text if isinstance(text, str) and text else None


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Events of a stream of server-sent events until [DONE]. Raises ValueError for what is none."""
    waiting = b""
    async for piece in pieces:
        waiting += piece
        *lines, waiting = waiting.split(b"\n")
        if len(waiting) > MOST_LINE:
            raise ValueError(f"an event of more than {MOST_LINE} bytes")
        for line in lines:
            text = line.strip()
            if not text.startswith(b"data:"):
                continue
            text = text[5:].strip()
            if text == b"[DONE]":
                return
            event = json.loads(text)
            if isinstance(event, dict):
                yield event


@contextlib.asynccontextmanager
async def _connection(address: Address) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    context = ssl.create_default_context() if address.tls else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context, limit=MOST_LINE)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await writer.wait_closed()


async def _send(writer: asyncio.StreamWriter, address: Address, method: str, path: str, data: bytes) -> None:
    key = os.environ.get("OPENAI_API_KEY", "")
    head = [
        f"{method} {address.path}{path} HTTP/1.1", f"Host: {address.host}:{address.port}", "Connection: close",
        "Accept: text/event-stream, application/json", "Content-Type: application/json", f"Content-Length: {len(data)}",
        *([f"Authorization: Bearer {key}"] if key.isascii() and key.isprintable() and key else []),
    ]  # fmt: skip
    writer.write("\r\n".join([*head, "", ""]).encode() + data)
    await writer.drain()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers. Raises ValueError for what is no HTTP."""
    first = (await reader.readline()).split()
    if len(first) < 2 or not first[0].startswith(b"HTTP/") or not first[1].isdigit():
        raise ValueError("no answer in HTTP")
    headers: dict[str, str] = {}
    for _ in range(200):
        line = await reader.readline()
        if line in (b"\r\n", b"\n", b""):
            return int(first[1]), headers
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    raise ValueError("more than 200 headers")


async def _chunk(reader: asyncio.StreamReader) -> int:
    """Bytes of the next chunk, 0 after the last. Raises IncompleteReadError where the connection ends before that."""
    line = await reader.readline()
    if not line:
        raise asyncio.IncompleteReadError(b"", 1)
    return int(line.split(b";")[0].strip(), 16)


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Pieces of a body as they come: in chunks, of a given length, or until the connection ends."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while (left := await _chunk(reader)) > 0:
            while left > 0:
                piece = await reader.read(min(left, MOST_LINE))
                if not piece:
                    raise asyncio.IncompleteReadError(b"", left)
                left -= len(piece)
                yield piece
            await reader.readline()
        return
    length = int(headers["content-length"]) if headers.get("content-length", "").isdigit() else None
    while length is None or length > 0:
        piece = await reader.read(MOST_LINE if length is None else min(length, MOST_LINE))
        if not piece:
            return
        length = None if length is None else length - len(piece)
        yield piece
