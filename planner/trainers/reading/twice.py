"""Keys of a YAML file that are given twice."""

from typing import Any

import yaml


def given_twice(text: str) -> list[str]:
    """Keys that stand in a mapping of a text in YAML, which is valid, with more than one value; those inside a section with its
    name and a dot before them."""
    found: set[str] = set()
    waiting: list[tuple[str, Any]] = [("", yaml.compose(text, Loader=yaml.SafeLoader))]
    done: set[int] = set()
    while waiting:
        place, node = waiting.pop()
        if id(node) in done:  # an anchor's
            continue
        done.add(id(node))
        waiting += [(place, one) for one in (node.value if isinstance(node, yaml.SequenceNode) else ())]
        seen: dict[str, set[str]] = {}
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            name = f"{place}{key.value if isinstance(key.value, str) else '?'}"
            seen.setdefault(name, set()).add(yaml.serialize(value, Dumper=yaml.SafeDumper))
            waiting.append((f"{name}.", value))
        found |= {name for name, values in seen.items() if len(values) > 1}
    return sorted(found)
