"""What starts a script: batch systems, by the comments at its head, other shells and other machines."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, takewhile
from math import prod
from pathlib import Path

from planner import library
from planner.trainers.reading.shell.text import CLOSE, OPEN, gap, is_open, roots


def batch_options(text: str) -> dict[str, str]:
    """Options of #SBATCH lines, and nodes and GPUs of #PBS, #BSUB and #$ lines in the same words."""
    short = {"N": "nodes", "n": "ntasks", "G": "gpus"}
    found = {}
    for line in re.findall(r"^#\s?SBATCH\s+(.*)$", text, re.MULTILINE):
        line = re.sub(r"(?<!\S)-([NnG])(?=\d)", r"-\1 ", line)
        for name, value in re.findall(r"--?([A-Za-z][\w-]*)(?:[= ]\s*([^\s#-][^\s#]*))?", line.split(" #")[0]):
            found[short.get(name, name)] = value
    for line in re.findall(r"^#\s?PBS\s+(.*)$", text, re.MULTILINE):  # -l select=4:ncpus=64:ngpus=8, -l nodes=4:gpus=8
        if (asked := re.search(r"\b(?:select|nodes)=(\d{1,6})\b(\S*)", line)) is not None:
            gpus = re.search(r":n?gpus=(\d{1,4})\b", asked[2])
            found |= {"nodes": asked[1], **({"gpus-per-node": gpus[1]} if gpus else {})}
    for nodes in re.findall(r"^#\s?BSUB\s.*?-nnodes\s+(\d{1,6})\b", text, re.MULTILINE):
        found["nodes"] = nodes
    for nodes in re.findall(r"^#\$\s.*?-l\s+(?:node_f|f_node)=(\d{1,6})\b", text, re.MULTILINE):  # TSUBAME
        found |= {"nodes": nodes, "hosts": nodes}
    return found


SUBMITS = {"sbatch": ("SBATCH",), "salloc": ("SBATCH",), "qsub": ("PBS", "$"), "bsub": ("BSUB",)}
"""Commands that submit a script, with the marks of the lines at its head that say the same."""
_GPUS = ("gres", "gpus-per-node", "gpus-per-task", "gpus")


def _job_options(words: Sequence[str]) -> dict[str, str]:
    """What a command that submits a script says of its job, as batch_options names it."""
    own = list(takewhile(lambda one: not re.search(r"\.(sh|bash|slurm|sbatch)$", one), words[1:]))
    line = " ".join(own).replace("\n", " ")
    found = batch_options("\n".join(f"#{mark} {line}" for mark in SUBMITS[words[0]]))
    for word, after in pairwise([*own, ""]):  # its values may have blanks
        if word in ("--export", "-v") or word.startswith("--export="):
            found["export"] = word.partition("=")[2] or after
    return found


def job_of(text: str, words: Sequence[str], outer: Mapping[str, str], put: Callable[[str, str], None]) -> dict[str, str]:
    """Options of the job that a script runs in: where ``words`` before it submit it theirs go before its own lines, and what the
    batch system sets is ``put`` into the variables; else those of the ``outer`` script."""
    own = batch_options(text)
    if not words or words[0] not in SUBMITS:
        return own | {name: value for name, value in outer.items() if "$" not in value}
    said = _job_options(words)
    found = {name: value for name, value in own.items() if name not in _GPUS or not said.keys() & set(_GPUS)} | said
    for name, value in launcher_variables(found).items():
        put(name, value)
    return found


def launcher_variables(batch: Mapping[str, str]) -> dict[str, str]:
    """What SLURM and Grid Engine set from a script's own options, and the random number of a shell, for ports and seeds."""
    names = {
        "SLURM_NNODES": "nodes", "SLURM_JOB_NUM_NODES": "nodes", "SLURM_NTASKS": "ntasks",
        "SLURM_NTASKS_PER_NODE": "ntasks-per-node", "SLURM_CPUS_PER_TASK": "cpus-per-task", "NHOSTS": "hosts",
    }  # fmt: skip
    given = {name: batch.get(option, "") for name, option in names.items()}
    found = {name: text for name, text in given.items() if re.fullmatch(r"\d{1,6}", text) or is_open(text)}
    counted = {"SLURM_GPUS": "gpus", "SLURM_GPUS_PER_NODE": "gpus-per-node", "SLURM_GPUS_PER_TASK": "gpus-per-task"}
    found |= {name: batch[option] for name, option in counted.items() if _count(batch.get(option))}  # the text as it is asked for
    if (gpus := gpus_on_node(batch)) is not None:
        found["SLURM_GPUS_ON_NODE"] = str(gpus)
    found["RANDOM"] = "4"
    counts = [found.get(name, "") for name in ("SLURM_NNODES", "SLURM_NTASKS_PER_NODE")]
    if "SLURM_NTASKS" not in found and all(counts):
        product = str(prod(map(int, counts))) if all(map(str.isdigit, counts)) else gap(roots("".join(counts)))
        found["SLURM_NTASKS"] = product
    plain = (one for one in batch.get("export", "").split(",") if re.fullmatch(r"[A-Za-z_]\w*=[^$\"']*", one))
    return found | {name: value for name, _, value in (one.partition("=") for one in plain)}


UNKNOWN = {"megatron": r"(sft|pt|rlhf) .*--tensor_model_parallel_size\b", "swift": r"(sft|pt|rlhf) .*--model\b(?!_)",
           "llamafactory-cli": r"train .*--(stage|finetuning_type)\b"}  # fmt: skip
"""Programs by the words that only they take, where a variable that is not known starts them."""


OF_TORCHTITAN = r"([\w.]+\.)?(llama[34]|deepseek_v3|qwen3(_5)?|gpt_oss|kimi_k2_7|muse_glimmer|transformers_modeling_backend)(_\w+)?"
"""Its modules, which MODULE names; scripts of others have variables of the same names."""


def _of_torchtitan(words: list[str], folder: Path | None, went: Path | None, look: Callable[[str], str | None]) -> list[str]:
    """What torchtitan's own run_train.sh starts, where a script calls it by its name and variables and it is not there."""
    place, file, module, config = place_of_file(words), *(look(one) or "" for one in ("CONFIG_FILE", "MODULE", "CONFIG"))
    own = place >= 0 and re.search(r"(^|/)run_(llama_)?train\.sh$", words[place])
    if not any(one.startswith("--parallelism.") for one in words[place + 1 :]):  # its own flags need no other sign
        file = file if file.endswith(".toml") else ""
        known = re.fullmatch(OF_TORCHTITAN, module) and (is_open(config) or re.fullmatch(r"\w+", config))
        config = config if known else ""
    if not own or not (file or config) or script_near(folder, words[place], went) is not None:
        return words
    named = ["--job.config_file", file] if file else ["--module", module or "llama3", "--config", config]
    start = ["torchrun", f"--nproc_per_node={look('NGPU') or 8}", "-m", "torchtitan.train"]
    return [*before_file(words, place), *start, *named, *words[place + 1 :]]


def with_program(words: list[str], folder: Path | None, went: Path | None, look: Callable[[str], str | None]) -> list[str]:
    """A command whose program is not known or is torchtitan's own script, with the one that takes such words."""
    words = _of_torchtitan(words, folder, went, look)
    place = next((i for i, one in enumerate(words) if re.fullmatch(f"{OPEN}[^{CLOSE}]*{CLOSE}", one)), -1)
    behind = " ".join(words[place + 1 :])
    found = next((name for name, form in UNKNOWN.items() if re.match(form, behind, re.DOTALL)), None) if place >= 0 else None
    return words if found is None else [*words[:place], found, *words[place + 1 :]]


def gpus_on_node(batch: Mapping[str, str]) -> int | None:
    """GPUs of a node that the options of a batch system ask for: --gres=gpu:4, --gres=gpu:a100:4,nvme:1, --gpus-per-node=a100:4,
    --gpus-per-task by tasks, --gpus of one node; None = they do not say it."""
    kinds = [one for one in batch.get("gres", "").split(",") if re.match(r"gpu(:|$)", one)]
    if kinds:
        counts = [re.fullmatch(r"gpu(?::[A-Za-z][\w.-]*)?(?::(\d{1,4}))?(?:\(\S*\))?", one) for one in kinds]
        return sum(int(one[1] or 1) for one in counts if one) if all(counts) else None
    if (each := _count(batch.get("gpus-per-node"))) is not None:
        return each
    each, tasks = _count(batch.get("gpus-per-task")), _count(batch.get("ntasks-per-node"))
    if each and tasks:
        return each * tasks
    return _count(batch.get("gpus")) if batch.get("nodes") == "1" else None


def _count(text: str | None) -> int | None:
    """The number of 4 and of a100:4."""
    found = re.fullmatch(r"(?:[A-Za-z][\w.-]*:)?([1-9]\d{0,5})", text or "")
    return int(found[1]) if found else None


def script_place(words: list[str]) -> int:
    """Place of a word that is a script itself, of sh -c or the last of ssh; 0 = there is none."""
    for i in range(len(words) - 2):
        if re.fullmatch(r"(?:\S*/)?(?:ba|z)?sh", words[i]) and re.fullmatch(r"-\w*c", words[i + 1]):
            return i + 2
    if words[0] == "tmux":
        return next((i for i in range(len(words) - 1, 1, -1) if re.search(r"\S\s+\S", words[i])), 0)
    remote = len(words) > 2 and words[0] in ("ssh", "pdsh") and re.search(r"\s", words[-1].strip())
    return len(words) - 1 if remote else 0


def before_shell(words: list[str]) -> list[str]:
    """The words of srun or mpirun before a shell that it starts on every node."""
    shell = next((i for i, word in enumerate(words) if word in SHELLS), 0)
    return words[:shell] if _on_nodes(words) else []


SHELLS = ("bash", "sh", "zsh")
ON_NODES = ("srun", "mpirun", "mpiexec")
"""Commands that start another one on every node."""


def place_of_file(words: list[str]) -> int:
    """Place of the script that bash, sbatch or its own name starts; -1 = none."""
    script = rf"([^\s{CLOSE}]*{CLOSE})?[\w./-]{{1,200}}\.(sh|bash|slurm|sbatch)"
    skipped = len(before_shell(words))
    if words[0] in SUBMITS or (_on_nodes(words) and not skipped):  # without a shell: srun --nodes 2 ./node.sh
        return next((i for i, word in enumerate(words) if not word.startswith("-") and re.fullmatch(script, word)), -1)
    first = skipped + 1 if words[skipped] in SHELLS else 0
    place = next((i for i, word in enumerate(words) if i >= first and not word.startswith("-")), len(words))
    named = place < len(words) and re.fullmatch(script, words[place])
    return place if named and (first or place == 0) else -1


def before_file(words: list[str], place: int) -> list[str]:
    """The words of srun or mpirun before a script that it starts on every node, and the shell before it."""
    return words[: place - (words[place - 1] in SHELLS)] if _on_nodes(words) else []


def _on_nodes(words: list[str]) -> bool:
    name = words[0].rpartition("/")[2]
    return name in ON_NODES or (name in CONTAINERS and words[1:2] in (["exec"], ["run"], ["start"], ["shell"]))


def at_end(folder: Path, path: Path) -> Path | None:
    """A script that a path on the author's machine names, by its last two parts or more, in the folder or one above."""
    ends = [Path(*path.parts[one:]) for one in range(1, len(path.parts) - 1)]
    return next((place for end in ends for one in (folder, *list(folder.parents)[:6]) if library.is_file(place := one / end)), None)


def included_gpus(text: str) -> int | None:
    """GPUs of DeepSpeed's --include: host:0,1@other:0,1; None where one of its hosts says none.  [launcher/runner.py]"""
    hosts = text.split("@")
    if not all(re.fullmatch(r"[^\s:@]+:\d{1,4}(,\d{1,4})*", one) for one in hosts):
        return None
    return sum(len(one.rpartition(":")[2].split(",")) for one in hosts)


def hosts_gpus(text: str) -> int | None:
    """GPUs of a host file: 'host slots=8', one host a line; None where it is none."""
    lines = [one.partition("#")[0].strip() for one in text.splitlines()]
    slots = [re.fullmatch(r"[^\s=]+\s+slots\s*=\s*(\d{1,4})", one) for one in lines if one]
    return sum(int(one[1]) for one in slots if one) if slots and all(slots) else None


def without_env(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """(Variables that ``env`` sets for a command, the command)."""
    if words[:1] != ["env"]:
        return {}, words
    found: dict[str, str] = {}
    rest = iter(words[1:])
    for word in rest:
        if re.match(r"\w+=", word):
            found[word.partition("=")[0]] = word.partition("=")[2]
        elif word in ("-u", "--unset", "-C", "--chdir"):
            next(rest, None)
        elif not word.startswith("-"):
            return found, [word, *rest]
    return found, []


def in_container(given: Mapping[str, str], words: Sequence[str]) -> dict[str, str]:
    """Variables that a command sets in the container that it starts: SINGULARITYENV_NAME of its own environment, docker run -e
    NAME=value, apptainer exec --env NAME=value,NAME=value."""
    found = {name.partition("ENV_")[2]: value for name, value in given.items() if re.match(r"(SINGULARITY|APPTAINER)ENV_\w", name)}
    if not any(one.rpartition("/")[2] in CONTAINERS for one in words[:8]):
        return found
    pairs = [after for one, after in pairwise(words) if one in ("-e", "--env")]
    pairs += [one.removeprefix("--env=") for one in words if one.startswith("--env=")]
    texts = [text for one in pairs for text in re.split(r",(?=\w+=)", one) if re.match(r"\w+=", text)]
    return found | {name: value for name, _, value in (one.partition("=") for one in texts)}


CONTAINERS = ("docker", "podman", "nerdctl", "singularity", "apptainer", "enroot")


def of_written(words: list[str], written: Mapping[str, str]) -> tuple[list[str], str] | None:
    """(Words before a script that another one has written and that a command starts, its text). A container may have its folder
    under another name, and its own options say nothing of the job."""
    box = next((i for i, one in enumerate(words[:8]) if one.rpartition("/")[2] in CONTAINERS), None)
    inside = box is not None or any(one.startswith("--container-") for one in words)
    texts = {one.removeprefix("./"): text for one, text in written.items() if one}
    ends = {one.rpartition("/")[2]: text for one, text in texts.items()} if inside else {}
    first = next((i for i, one in enumerate(words) if one not in ("time", "nohup", "exec", "sudo")), 0)
    for i, word in enumerate(words):
        text = texts.get(word.removeprefix("./"), ends.get(word.rpartition("/")[2], "") if word.startswith("/") else "")
        if not text:
            continue
        if i and words[0] in SUBMITS:
            return [], text
        if i and re.fullmatch(r"(?:\S*/)?(?:(?:ba|z)?sh|srun)", words[i - 1]):
            return words[: i - 1 if box is None else box], text
        script = re.search(r"\.(sh|bash|slurm|sbatch)$", word) or re.match(r"#!.*sh\b", text)
        if i == first or (script and (inside or words[first].rpartition("/")[2] in ON_NODES)):
            return words[: i if box is None else box], text
    return None


def read_line(words: list[str], line: str | None, marks: str | Sequence[str]) -> dict[str, str | list[str]]:
    """Variables that ``IFS=, read -r A B <<< line`` sets: each gets a part, the last one what is left; with -a one array gets all.
    ``line``: None where it is not known, so that each is asked for; ``marks``: the IFS of the command, blanks where it has none."""
    if line is None:
        return {one: gap([one]) for one in words if re.fullmatch(r"[A-Za-z_]\w*", one)}
    if "-d" in words and (kept := [one for one in words if re.fullmatch(r"[A-Za-z_]\w*", one)]):  # up to the end of what it reads
        return {kept[-1]: line.strip("\n")}
    line = line.partition("\n")[0]
    between = marks if isinstance(marks, str) and marks and not is_open(marks) else " \t\n"
    names = [one for one in words if re.fullmatch(r"[A-Za-z_]\w*", one)] or ["REPLY"]
    parts = line.split() if between.isspace() else re.split(f"[{re.escape(between)}]", line.strip())
    if any(re.fullmatch(r"-[a-zA-Z]*a", one) for one in words):
        return {names[-1]: gap(roots(line)) if is_open(line) else parts}
    if is_open(line):
        return {name: gap(roots(line) or [name]) for name in names}
    first = {name: parts[i] if i < len(parts) else "" for i, name in enumerate(names[:-1])}
    return {**first, names[-1]: between[0].join(parts[len(names) - 1 :])}


def script_near(directory: Path | None, name: str, went: Path | None = None) -> Path | None:
    """A script that lies in the folder of another one or above, or where that one ``went``; of a path of another machine its end
    counts."""
    folders = [] if directory is None else [directory, *list(directory.resolve().parents)[:4]]
    if went is not None and library.is_file(went / name):
        return went / name
    parts = [one for one in name.rpartition(CLOSE)[2].split("/") if one]
    ends = ["/".join(parts[i:]) for i in range(len(parts))] if is_open(name) or name.startswith("/") else []
    tried = [one / end for end in ([] if is_open(name) else [name]) + ends for one in folders]
    found = next((one for one in tried if library.is_file(one)), None)
    return found or _in_a_folder_beside(folders[1:3], [one for one in ends if one.count("/") > 1])


def _in_a_folder_beside(folders: Sequence[Path], ends: Sequence[str]) -> Path | None:
    """The one script with such an end of its path in the folders of some folders; None where there are none or several."""
    plain = [one for one in ends if re.fullmatch(r"[\w./-]+", one) and ".." not in one]
    found = {place for end in plain for one in folders for place in one.glob(f"*/{end}") if library.is_file(place)}
    return found.pop() if len(found) == 1 else None


_PLACEHOLDER = re.compile(r"(?<![<>\w])<([A-Za-z_][\w -]{0,60}\w)>")
_REMARK = re.compile(r"(?m)^([ \t]*(?:export +)?\w+=)(<[A-Za-z][^<>'\n]{0,100}\([^<>'\n]{0,100}>)")
"""NAME=<Path to the file (e.g. /data/file)>: bash reads no such line, people fill it in."""


def without_places(text: str, value: Callable[[str], str | None]) -> str:
    """A script without the places that people fill in by hand, <LIKE THIS>: what the user says of each, by ``value``, or a gap."""

    def said(found: re.Match[str]) -> str:
        name = re.sub(r"\W+", "_", found[1])
        known = value(name)
        return gap([name]) if known is None else known

    return _PLACEHOLDER.sub(said, _REMARK.sub(r"\1'\2'", text))
