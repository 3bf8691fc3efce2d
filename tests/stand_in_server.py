"""An OpenAI-compatible server with known delays, for tests: every request waits, then streams tokens at an even pace."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StandIn:
    """What it does, and what it saw."""

    first: float = 0.02
    """Seconds to the first token."""
    gap: float = 0.005
    """Seconds between tokens."""
    chunked: bool = True
    chat_only: bool = False
    refuses_ignore_eos: bool = False
    refuses_tokens: bool = False
    per_word: int = 2
    """Tokens that it counts for a word."""
    fail_after: int | None = None
    """Requests after which it answers 500."""
    not_ready: int = 0
    """Requests that it answers 503 first."""
    breaks: str = ""
    """cut: from the fourth request on it ends within the stream; junk: no HTTP; silent: no tokens; bad: no JSON; endless: a line
    without end."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    inside: int = 0
    most: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.readline()
        length = 0
        while (line := await reader.readline()).strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        body = json.loads(await reader.readexactly(length)) if length else {}
        path = first.split()[1].decode()
        if self.breaks == "junk":
            writer.write(b"SSH-2.0-OpenSSH\r\n")
            return
        if self.not_ready:
            self.not_ready -= 1
            self._whole(writer, 503, {"error": "No models available"})
            return
        if not path.endswith("/completions"):
            found = path.endswith(("/models", "/health"))
            self._whole(writer, 200 if found else 404, {"data": [{"id": "stand-in"}]})
            return
        refused = self._refused(path, body)
        if refused or (self.fail_after is not None and len(self.bodies) >= self.fail_after):
            self._whole(writer, 400 if refused else 500, {"error": {"message": refused or "overloaded"}})
            return
        self.bodies.append(body)
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self._stream(writer, body, "chat" in path)
        finally:
            self.inside -= 1

    def _refused(self, path: str, body: dict[str, Any]) -> str:
        if self.chat_only and "chat" not in path:
            return "no such path"
        if self.refuses_ignore_eos and "ignore_eos" in body:
            return "ignore_eos is no field"
        return "prompt must be a text" if self.refuses_tokens and isinstance(body.get("prompt"), list) else ""

    def _whole(self, writer: asyncio.StreamWriter, status: int, data: Any) -> None:
        text = json.dumps(data).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], chat: bool) -> None:
        kind = "Transfer-Encoding: chunked\r\n" if self.chunked else ""
        writer.write(f"HTTP/1.1 200 OK\r\n{kind}Content-Type: text/event-stream\r\n\r\n".encode())
        if chat:
            await self._event(writer, {"choices": [{"delta": {"role": "assistant"}}]})
        await asyncio.sleep(self.first)
        if self.breaks == "endless":
            await self._send(writer, b"data: " + b"x" * (3 << 20))
        if self.breaks == "bad":
            await self._send(writer, b"data: {]\n\n")
        number = 0 if self.breaks == "silent" else body["max_tokens"]
        for one in range(number):
            if one:
                await asyncio.sleep(self.gap)
            if self.breaks == "cut" and one == 2 and len(self.bodies) > 3:
                return
            await self._event(writer, {"choices": [{"delta": {"content": "a "}} if chat else {"text": "a "}]})
        prompt = body.get("prompt") or body["messages"][0]["content"]
        size = len(prompt) if isinstance(prompt, list) else self.per_word * len(prompt.split()) + (7 if chat else 0)
        await self._event(writer, {"choices": [], "usage": {"prompt_tokens": size, "completion_tokens": number}})
        await self._send(writer, b"data: [DONE]\n\n")
        if self.chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _event(self, writer: asyncio.StreamWriter, data: Any) -> None:
        await self._send(writer, b"data: " + json.dumps(data).encode() + b"\n\n")

    async def _send(self, writer: asyncio.StreamWriter, text: bytes) -> None:
        writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n" if self.chunked else text)
        await writer.drain()


@contextmanager
def running(**kinds: Any) -> Iterator[StandIn]:
    """The server in a thread of its own."""
    found, ready, loop = StandIn(**kinds), threading.Event(), asyncio.new_event_loop()

    async def run() -> None:
        server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
        found.port = server.sockets[0].getsockname()[1]
        ready.set()
        async with server:
            await server.serve_forever()

    def main() -> None:
        asyncio.set_event_loop(loop)
        task = loop.create_task(run())
        found.stop = lambda: loop.call_soon_threadsafe(task.cancel)  # type: ignore[attr-defined]
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            pass
        finally:
            for one in asyncio.all_tasks(loop):
                one.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield found
    finally:
        found.stop()  # type: ignore[attr-defined]
        thread.join(10)
