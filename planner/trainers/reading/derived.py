"""Classes that a program derives from others: what they are made from, and the methods of theirs that count."""

import ast
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from planner.trainers.reading.python_text import last_name


def classes_of(tree: ast.AST) -> dict[str, ast.ClassDef]:
    """Classes of a program, by name."""
    return {one.name: one for one in ast.walk(tree) if isinstance(one, ast.ClassDef)}


def lineage(name: str, made: dict[str, ast.ClassDef]) -> tuple[list[ast.ClassDef], set[str]]:
    """(Classes of a program that a class is made from, itself the first; names of those that are elsewhere)."""
    waiting, own, others = deque([name]), dict[str, ast.ClassDef](), set[str]()
    while waiting:
        one = waiting.popleft()
        if one not in made:
            others.add(one)
        elif one not in own:
            own[one] = made[one]
            bases = [last_name(base) for base in made[one].bases]
            others |= {one} & {*bases}  # class Trainer(Trainer): that of the library
            waiting += bases
    return list(own.values()), others


def own_functions(classes: Sequence[ast.ClassDef]) -> dict[str, ast.FunctionDef]:
    """Methods of a class and of those that it is made from, by name: of each name the one that counts."""
    return {part.name: part for one in reversed(classes) for part in one.body if isinstance(part, ast.FunctionDef)}


def methods_of(classes: Sequence[ast.ClassDef], names: Sequence[str]) -> Iterator[tuple[ast.ClassDef, ast.FunctionDef]]:
    """Methods of some names that count, of a class and of those that it is made from, with those that they call above."""
    for name in names:
        for each in classes:
            if (found := own_functions([each]).get(name)) is not None:
                yield each, found
                if not calls_above(found):
                    break


def calls_above(method: ast.FunctionDef) -> bool:
    """Whether a method calls the one that it replaces: super().name(...) or Base.name(self, ...)."""
    calls = (one for one in ast.walk(method) if isinstance(one, ast.Call) and last_name(one.func) == method.name)
    owners = [getattr(one.func, "value", None) for one in calls]
    return any(last_name(getattr(one, "func", one)) == "super" or last_name(one)[:1].isupper() for one in owners if one is not None)


def kinds_of(tree: ast.AST, names: Iterable[str]) -> set[str]:
    """Some classes with all that they are made from, in a program or elsewhere."""
    made = classes_of(tree)
    found = [lineage(one, made) for one in names]
    return {one for own, others in found for one in (*others, *(each.name for each in own))}
