"""The events of a trace file, one after the other: a file of gigabytes is never held in memory as a whole.

What Kineto writes is one JSON object whose ``traceEvents`` are a list, or plain the list; keys may stand before and after it.
[pytorch/kineto, libkineto/src/output_json.cpp; Trace Event Format]
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from planner import library
from planner.errors import PlannerError
from planner.units import GIB

MOST_FILE = 1 << 30
"""Largest file, packed or not."""
MOST_TEXT = 8 << 30
"""Most text that a packed file may unpack to."""
MOST_ITEM = 16 << 20
"""Longest event, or other value of the file, in characters."""
CHUNK = 4 << 20
_SPACE = " \t\r\n"
_DECODER = json.JSONDecoder()
_BROKEN = (ValueError, RecursionError)
Tell = Callable[[str], object]
"""Called with how far the reading is."""


class Trace:
    """A file of a trace; iterating gives its events. ``about`` holds all other keys once the iteration has ended."""

    def __init__(self, path: Path, tell: Tell = lambda _: None) -> None:
        self.path, self.tell, self.about = path, tell, dict[str, Any]()
        self._text, self._at, self._read, self._size = "", 0, 0, 0
        self._whole = False
        self.events = 0
        """Events that were read."""

    def __iter__(self) -> Iterator[Any]:
        """Every event, whatever its type. Raises PlannerError for what is no trace, or one that was not written to its end."""
        try:
            with self._open() as stream:
                self._stream: Any = stream
                self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
                self._more()
                yield from self._document()
        except OSError as error:  # gzip raises BadGzipFile, which is one
            raise PlannerError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        except (EOFError, zlib.error) as error:
            raise self._ended() from error

    def _open(self) -> BinaryIO:
        self._size = library.regular_file(self.path)
        if self._size > MOST_FILE:
            raise PlannerError(
                f"{self.path} has {self._size / GIB:.1f} GiB, more than the {MOST_FILE >> 30} GiB that are read of a "
                "trace; record fewer steps (schedule(active=3)), without with_stack, or pack it with gzip"
            )
        self._raw = self.path.open("rb")
        packed = self._raw.read(2) == b"\x1f\x8b"
        self._raw.seek(0)
        return gzip.GzipFile(fileobj=self._raw) if packed else self._raw  # type: ignore[return-value]

    def _more(self) -> bool:
        """Read another piece of the file behind what is not used yet; False at its end."""
        if self._whole:
            return False
        piece = self._stream.read(CHUNK)
        self._whole = not piece
        self._read += len(piece)
        if self._read > MOST_TEXT:
            raise PlannerError(f"{self.path} unpacks to more than the {MOST_TEXT >> 30} GiB that are read of a trace")
        self._text = self._text[self._at :] + self._decoder.decode(piece, final=self._whole)
        self._at = 0
        self.tell(f"{self.path.name}: {100 * self._raw.tell() / max(self._size, 1):.0f} %, {self.events} events")
        return not self._whole

    def _sign(self) -> str:
        """The next character that is no space; '' at the end of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _value(self) -> Any:
        """The next value. Raises PlannerError."""
        self._sign()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                # a number that ends where the piece ends may go on behind it
                if end < len(self._text) or self._whole or not isinstance(value, (int, float)):
                    self._at = end
                    return value
            except _BROKEN as error:
                if isinstance(error, RecursionError):
                    raise PlannerError(
                        f"{self.path}: event {self.events + 1} is nested too deep; no trace of torch is"
                    ) from error
                if len(self._text) - self._at > MOST_ITEM:
                    raise self._no_json() from error
            if not self._more():
                # the end of the file has come: what is left is broken JSON or its first part
                try:
                    value, self._at = _DECODER.raw_decode(self._text, self._at)
                    return value
                except json.JSONDecodeError as error:
                    raise self._no_json() if error.pos < len(self._text) - CHUNK else self._ended() from error
                except _BROKEN as error:
                    raise self._no_json() from error

    def _document(self) -> Iterator[Any]:
        sign = self._sign()
        if sign == "[":
            yield from self._list()
        elif sign == "{":
            yield from self._object()
        else:
            raise PlannerError(
                f"{self.path}: no trace in JSON; give what torch.profiler's export_chrome_trace wrote (.json or .json.gz)"
            )
        if self._sign():
            raise PlannerError(f"{self.path}: there is more behind the end of the trace: two files in one?")

    def _object(self) -> Iterator[Any]:
        self._at += 1
        found = False
        if self._sign() == "}":
            self._at += 1
        else:
            while True:
                key = self._value()
                if not isinstance(key, str) or self._sign() != ":":
                    raise self._no_json() if self._sign() else self._ended()
                self._at += 1
                if key == "traceEvents" and self._sign() == "[":
                    found = True
                    yield from self._list()
                else:
                    self.about[key] = self._value()
                if self._separator("}"):
                    break
        if not found:
            raise PlannerError(
                f"{self.path}: no trace: it has no list 'traceEvents'; give what export_chrome_trace wrote"
            )

    def _list(self) -> Iterator[Any]:
        self._at += 1
        if self._sign() == "]":
            self._at += 1
            return
        while True:
            value = self._value()
            self.events += 1
            yield value
            if self._separator("]"):
                return

    def _separator(self, end: str) -> bool:
        """Step over a comma (False) or the end of a list or object (True)."""
        sign = self._sign()
        if sign not in (",", end) or not sign:
            raise self._no_json() if sign else self._ended()
        self._at += 1
        if sign == "," and self._sign() == end:  # some writers leave a comma behind the last event
            self._at += 1
            return True
        return sign == end

    def _no_json(self) -> PlannerError:
        return PlannerError(
            f"{self.path}: not JSON after {self.events} events; give the trace as torch.profiler wrote it"
        )

    def _ended(self) -> PlannerError:
        return PlannerError(
            f"{self.path}: ends in the middle, after {self.events} events: the job ended before the trace was written, or the "
            "copy is not complete"
        )
