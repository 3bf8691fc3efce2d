"""Texts that end a literal, a comment or a line of some language, and where texts stand in data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MARK = "HACKED"
"""What a text would create or call if it ran."""
COMMAND = f":>{MARK}"
"""Creates the file in any shell, with no program."""
HOSTILE: tuple[str, ...] = (
    f"a\n{COMMAND}\nb", f"a\r{COMMAND}\rb", f"a\u2028{COMMAND}\u2028b", f"a\u0085{COMMAND}\u0085b", f"a\v{COMMAND}\fb",
    f'a"; {COMMAND}; "', f"a'; {COMMAND}; '", f"$({COMMAND})", f"`{COMMAND}`", f"a; {COMMAND}", f"a && {COMMAND} #",
    f"${{x:={COMMAND}}}", f"a\\\n{COMMAND}", f"a <<EOF\n$({COMMAND})\nEOF\n", f'"""\nopen("{MARK}", "w")\n"""',
    f"'''\nopen('{MARK}', 'w')\n'''", f'a")\nopen("{MARK}", "w")', f"*/ {MARK}() /*", f"--> <script>{MARK}()</script> <!--",
    f'" onload="{MARK}()', "{{ 7 * 7 }}", "{% raw %}", "{%# x #%}", "%(x)s %s {0} {x}",
    f"!!python/object/apply:os.system ['{COMMAND}']", "a: b\n- c: d", "a: [b", "&a *a", "# b", "%YAML 9", "--- a", "[/bold]",
    "[red]a", "[link=http://a]", f"\x1b]0;{MARK}\x07", f"\x00{COMMAND}", f"\u202e{COMMAND}", "\ud800", "\ufeffa",
    f"a|b||\n|{MARK}|", f"[a](javascript:{MARK}())", f"![a](http://{MARK})", "../../a", "~", "-rf", "--x", "", " ", "\t", "null",
    "yes", "1e3", "=1+1", "x" * 100_000, "\u0645\u0631\u062d\u0628\u0627", "\U0001f600", "a\\", "$", "\\u0000", "\\x00",
)  # fmt: skip


def texts(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Every text in nested data, with its place."""
    if isinstance(data, str):
        yield path, data
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from texts(value, (*path, key))


def put(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Nested data with one place changed; what does not lead to it is shared."""
    if not path:
        return value
    key, *rest = path
    if isinstance(data, dict):
        return {**data, key: put(data[key], tuple(rest), value)}
    return [put(one, tuple(rest), value) if number == key else one for number, one in enumerate(data)]


def numbers(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Every number in nested data, with its place."""
    if isinstance(data, (int, float)) and not isinstance(data, bool):
        yield path, data
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from numbers(value, (*path, key))
