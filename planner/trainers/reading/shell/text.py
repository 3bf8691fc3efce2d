"""Text with gaps: what a script cannot say by itself stays in a value as a mark that names the variables to ask for."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

OPEN, CLOSE = "\ue000", "\ue001"
"""Around the names of the variables that a gap waits for, separated by commas; private-use characters, removed from files."""
MAYBE, SO_FAR, END = "\ue002", "\ue003", "\ue004"
"""Around words that stand under a condition that is not known: MAYBE names SO_FAR ... END, each a word of its own."""
_MARKS = re.compile(f"[{OPEN}-{END}]")
_GAP = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
OPTION = re.compile(r"(?:^|\s)--?[A-Za-z_]")
"""An option begins."""
SETTINGS = re.compile(r"serve$|\.(ya?ml|json|toml)$|^finetune_(lora|full|adapter\w*)$")
"""What says that a command without an option starts something too: a server, a file of settings."""


def cleaned(text: str) -> str:
    """The text of a file without characters that mean gaps here, with Unix line ends, and without a backslash at its very end,
    which a shell drops."""
    return _MARKS.sub(" ", text).replace("\r\n", "\n").removesuffix("\\")


def gap(names: Iterable[str]) -> str:
    """A value that is not known."""
    return OPEN + ",".join(dict.fromkeys(names)) + CLOSE


def is_open(text: str) -> bool:
    """Whether a part of it is not known."""
    return OPEN in text


def roots(text: str) -> list[str]:
    """Variables that the unknown parts wait for."""
    return list(dict.fromkeys(name for names in _GAP.findall(text) for name in names.split(",") if name))


def shown_text(text: str) -> str:
    """For people: gaps as ${NAME}."""
    return _MARKS.sub("", _GAP.sub(lambda found: "${" + (found.group(1).split(",")[0] or "...") + "}", text))


def maybe(names: Iterable[str], words: list[str]) -> list[str]:
    """Words under an unknown condition on these variables."""
    return [MAYBE + ",".join(dict.fromkeys(names)) + SO_FAR, *words, END] if words else []


@dataclass(frozen=True)
class Word:
    """A word of a command, and the variables that decide whether it is there at all; () = it is."""

    text: str
    under: tuple[str, ...] = ()


def words_of(words: Iterable[str]) -> Iterator[Word]:
    """Words with their conditions; a word that holds a whole list of options is split as a shell would in its turn."""
    under: list[tuple[str, ...]] = []
    for word in (part for one in words for part in _parts(one)):
        if word.startswith(MAYBE):
            under.append(tuple(word[1:-1].split(",")) if len(word) > 2 else ("",))
        elif word == END:
            under = under[:-1]
        else:
            yield Word(word, tuple(dict.fromkeys(name for names in under for name in names)))


def _parts(word: str) -> list[str]:
    if word.startswith(MAYBE) or (not (OPTION.search(word) and re.search(r"\s", word.strip())) and MAYBE not in word):
        return [word]
    return quoted_words(word)


def quoted_words(text: str) -> list[str]:
    """Words of a text separated by blanks, with quotes; a quote that is never closed is a character like another."""
    found: list[str] = []
    for match in re.finditer(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\s])+""", text, re.DOTALL):
        bare = re.sub(r'"((?:\\.|[^"\\])*)"|\'([^\']*)\'|\\(.)', _unquoted, match.group(), flags=re.DOTALL)
        found.append(bare)
    return found


def _unquoted(match: re.Match[str]) -> str:
    return next((group for group in match.groups() if group is not None), "")


def options(words: Iterable[Word]) -> Iterator[tuple[str, list[str], tuple[str, ...]]]:
    """Options with the words that follow each: (name without its dashes, values, variables that decide whether it is there); a
    flag has no values. '--name=value' is cut."""
    name, values, under = "", list[str](), tuple[str, ...]()
    for word in words:
        if re.match(r"--?[A-Za-z_]", word.text) or word.text.startswith("--"):
            if name:
                yield name, values, under
            name, mark, value = word.text.lstrip("-").partition("=")
            values, under = [value] if mark else [], word.under
        elif name:
            values.append(word.text)
    if name:
        yield name, values, under


_STARTED = re.compile(
    r"\"?\$\(\s*(?:(?:env|nohup|time|\w+=\S*)\s+)*(?:srun|torchrun|accelerate|deepspeed|python3?|llamafactory-cli|swift|axolotl|tune)\s"
)
_SUBMITTED = re.compile(r"\"?\$\(\s*((?:sbatch|qsub|bsub)\s[^()|;&]*)")
_PROGRAM = re.compile(r"\.py\s|\b(?:(?:llamafactory-cli|axolotl)\s+train|swift\s+(?:sft|pt|rlhf)|tune\s+run)\s")
_OPTION = re.compile(r"\s--\w|\.ya?ml\b")
_LONGEST = 8000
"""Characters of a text in which a program is looked for."""


def started_inside(raw: str | list[str]) -> str:
    """The program with options whose output a variable takes, which runs all the same: id=$(srun python train.py --tp 2 | tail),
    or the script that a batch system runs: id=$(sbatch --nodes=2 train.sh)."""
    if isinstance(raw, str) and (job := _SUBMITTED.match(raw)) is not None:
        return job[1]
    start = _STARTED.match(raw) if isinstance(raw, str) and len(raw) < _LONGEST else None
    text = raw.removesuffix('"') if isinstance(raw, str) else ""
    program = _PROGRAM.search(text) if start is not None and text.endswith(")") else None
    if program is None or _OPTION.search(text, program.end() - 1) is None:
        return ""
    return text[text.index("(") + 1 : -1]
