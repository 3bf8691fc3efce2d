"""Arithmetic of the shell on whole numbers, evaluated without running code."""

import ast
import operator
import re
from collections.abc import Callable

LONGEST = 400
LARGEST = 10**18
OUTER = re.compile(r"[A-Z][A-Z0-9_]*")
"""Names that the environment may set: such a one that the script does not set is open, any other is 0."""
_WORDS = re.compile(r"\d+#\w+|0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%()<>!?:&|^~]|\s+")
_BINARY: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
_COMPARED: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


def arithmetic(text: str, variable: Callable[[str], str]) -> int | None:
    """The value of an expression; ``variable`` gives the text of a name. None where it cannot be told."""
    if len(text) > LONGEST or text.count("(") > 40:
        return None
    parts = _WORDS.findall(text)
    if "".join(parts) != text or not text.strip():
        return None
    written = []
    for part in parts:
        if re.match(r"[A-Za-z_]", part):
            value = variable(part).strip() or "0"
            if not re.fullmatch(r"-?\d{1,18}", value):
                return None
            part = f"({int(value)})"
        elif part[0].isdigit():
            if not re.fullmatch(r"\d{1,18}", part):
                return None
            part = str(int(part))
        written.append({"&&": " and ", "||": " or ", "!": " not ", "/": "//"}.get(part, part.replace("\n", " ")))
    expression = re.sub(r"^([^?:]+)\?([^?:]+):([^?:]+)$", r"(\2) if (\1) else (\3)", "".join(written).strip())
    try:
        result = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return result if result is not None and abs(result) <= LARGEST else None


def _value(node: ast.expr) -> int:
    """Raises ValueError for anything but whole numbers and operators."""
    match node:
        case ast.Constant(value=int() as number):
            result = int(number)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            result = -_value(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            result = _value(inner)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            result = int(not _value(inner))
        case ast.BinOp(left=left, op=sign, right=right):
            result = _combined(_value(left), sign, _value(right))
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _COMPARED:
            result = int(_COMPARED[type(sign)](_value(left), _value(right)))
        case ast.BoolOp(op=joint, values=values):
            numbers = [bool(_value(one)) for one in values]
            result = int(all(numbers) if isinstance(joint, ast.And) else any(numbers))
        case ast.IfExp(test=test, body=body, orelse=other):
            result = _value(body) if _value(test) else _value(other)
        case _:
            raise ValueError
    if abs(result) > LARGEST:
        raise ValueError
    return result


def _combined(left: int, sign: ast.operator, right: int) -> int:
    if isinstance(sign, ast.FloorDiv):  # a shell cuts towards zero
        return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
    if isinstance(sign, ast.Mod):
        return left - right * _combined(left, ast.FloorDiv(), right)
    if isinstance(sign, ast.Pow | ast.LShift | ast.RShift):
        if not 0 <= right <= 64 or abs(left) > LARGEST:
            raise ValueError
        return {ast.Pow: operator.pow, ast.LShift: operator.lshift, ast.RShift: operator.rshift}[type(sign)](
            left, right
        )
    if type(sign) not in _BINARY:
        raise ValueError
    return _BINARY[type(sign)](left, right)
