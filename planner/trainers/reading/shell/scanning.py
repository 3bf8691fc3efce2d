"""Where words, quotes and brackets of the shell end. Iterative: a text may nest as deep as it likes."""


def word_end(text: str, start: int) -> int:
    """Where the word that starts here ends; -1 = a quote or bracket in it is never closed."""
    i = start
    while i < len(text) and text[i] not in " \t\n;&|()<>":
        i = skipped(text, i)
        if i < 0:
            return -1
    return i


def skipped(text: str, i: int) -> int:
    """Past one character, quoted text or expansion; -1 = never closed."""
    here = text[i]
    if here == "\\":
        return i + 2
    if here == "'":
        return text.find("'", i + 1) + 1 or -1
    if here == '"':
        return closed(text, i + 1, '"')
    if here == "`":
        return closed(text, i + 1, "`", plain=True)
    if here == "$" and text[i + 1 : i + 2] in ("(", "{"):
        return closed(text, i + 2, ")" if text[i + 1] == "(" else "}")
    if here == "$" and text[i + 1 : i + 2] == "'":
        return closed(text, i + 2, "'", plain=True)
    return i + 1


def closed(text: str, i: int, end: str, plain: bool = False) -> int:
    """Past the closing character, with everything that nests; quoting is what a shell does at this place. Iterative: the text
    may nest as deep as it likes."""
    ends = [end]
    while i < len(text):
        here, inside = text[i], ends[-1]
        if here == "\\":
            i += 2
            continue
        if here == inside:
            ends.pop()
            if not ends:
                return i + 1
        elif plain or inside in ("`", "'"):
            pass
        elif here == "$" and text[i + 1 : i + 2] in ("(", "{"):
            ends.append(")" if text[i + 1] == "(" else "}")
            i += 1
        elif here == "`":
            ends.append("`")
        elif here == '"':
            ends.append('"')
        elif here == "'" and (inside == ")" or (inside == "}" and '"' not in ends)):
            i = text.find("'", i + 1)
            if i < 0:
                return -1
        elif inside == ")" and here == "(":
            ends.append(")")
        elif inside == ")" and here == "#" and text[i - 1] in " \t\n;":
            i = min(text.find("\n", i) % (len(text) + 1), len(text))
            continue
        i += 1
    return -1
