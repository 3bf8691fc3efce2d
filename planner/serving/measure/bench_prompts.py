"""What is sent to a server: prompts of the plan's lengths, as token numbers where the server takes them, else as words.

A probe finds the form: completions with token numbers, with text, chat. Words are sized by how many tokens the server counts in
probes, so no tokenizer is needed. Prompts are drawn with a seed, so that no two share a beginning but for the plan's prefix.
"""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

from planner.errors import PlannerError
from planner.record import record
from planner.serving.export.bench_command import ends_of
from planner.serving.measure.stream_client import Address, Answer, NotReadyError, get_json, post_stream
from planner.serving.traffic import Lengths, Traffic

SEED = 26
RESERVED = 1000
"""Token numbers at both ends of the vocabulary that may be special."""
PROBE_WORDS = 64
PROBE_TIMEOUT = 300.0
"""Seconds: a server that has just started may compile before its first answer."""
READY_WITHIN = 60.0
"""Seconds that a server may answer 503: a router listens some seconds before its engines are known to it."""
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand part "
    "place case week company system program question work number night point home water room mother area money story fact "
    "month lot right study book eye job word business issue side kind head house service friend father power hour game line"
)
WORDS = tuple(_WORDS.split())


@record
class Form:
    """How a server is asked."""

    model: str
    """Its own name for the model."""
    path: str
    """/v1/completions or /v1/chat/completions."""
    tokens: bool
    """Prompts are token numbers."""
    ignore_eos: bool
    """The server takes ignore_eos, so that answers have the length that is asked for."""
    per_word: float = 1.0
    """Tokens of a word."""
    overhead: float = 0.0
    """Tokens that a template adds."""

    def body(self, prompt: Any, output: int) -> dict[str, Any]:
        """The request for one prompt."""
        content = {"messages": [{"role": "user", "content": prompt}]} if "chat" in self.path else {"prompt": prompt}
        more = {"ignore_eos": True} if self.ignore_eos else {}
        return {"model": self.model, **content, "max_tokens": output, "temperature": 0.0, **more}


@record
class Asked:
    """One request to send."""

    body: dict[str, Any]
    output: int


async def find_form(address: Address, model: str | None, vocabulary: int) -> tuple[Form, Answer]:
    """The form that a server answers in, with the probe's own answer; a server that is not ready yet is waited for.

    Raises PlannerError where it answers in none.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + READY_WITHIN
    while True:
        try:
            return await _find_form(address, model, vocabulary)
        except NotReadyError:
            if clock() > end:
                raise
            await asyncio.sleep(0.5)


async def _find_form(address: Address, model: str | None, vocabulary: int) -> tuple[Form, Answer]:
    name = model or await _served_model(address)
    draws, failed = random.Random(SEED), ""
    for path, tokens in (("/v1/completions", True), ("/v1/completions", False), ("/v1/chat/completions", False)):
        for ignore_eos in (True, False):
            form = Form(model=name, path=path, tokens=tokens, ignore_eos=ignore_eos)
            found = await post_stream(
                address, path, form.body(_prompt(form, PROBE_WORDS, draws, vocabulary), 4), PROBE_TIMEOUT
            )
            if not found.error:
                return await _sized(address, form, found, draws), found
            if found.error.startswith("HTTP 503"):
                raise NotReadyError(f"{address}{path}: not ready ({found.error})")
            if not found.error.startswith("HTTP"):  # nobody there, or no end: another form does not help
                raise PlannerError(f"{address}: the probe failed ({found.error}); is the server ready?")
            failed = failed or found.error
    raise PlannerError(
        f"{address}: it answers neither completions nor chat with streaming; its first answer was {failed}"
    )


async def _served_model(address: Address) -> str:
    data = await get_json(address, "/v1/models")
    models = data.get("data") if isinstance(data, dict) else None
    names = [one.get("id") for one in models if isinstance(one, dict)] if isinstance(models, list) else []
    name = next((one for one in names if isinstance(one, str) and one), None)
    if name is None:
        raise PlannerError(f"{address}: it names no model; say it with --served-model")
    return name


async def _sized(address: Address, form: Form, first: Answer, draws: random.Random) -> Form:
    """The form with tokens per word and those of its template, by two probes of different length."""
    if form.tokens or not first.input_tokens:
        return form
    long = await post_stream(address, form.path, form.body(_prompt(form, 4 * PROBE_WORDS, draws, 0), 4), PROBE_TIMEOUT)
    if long.error or long.input_tokens <= first.input_tokens:
        return form
    per_word = (long.input_tokens - first.input_tokens) / (3 * PROBE_WORDS)
    overhead = max(first.input_tokens - per_word * PROBE_WORDS, 0.0)
    return Form(**{**vars(form), "per_word": per_word, "overhead": overhead})


def requests(form: Form, traffic: Traffic, vocabulary: int) -> Iterator[Asked]:
    """Requests without end, with the lengths of the traffic; what is hit in the prefix cache is the same in all of them."""
    draws = random.Random(SEED)
    prefix = traffic.prefix_hit * traffic.input.mean
    shared = _prompt(form, _words(form, prefix, 0.0), draws, vocabulary) if prefix else None
    while True:
        size, output = _drawn(traffic.input, draws), _drawn(traffic.output, draws)
        prompt = _prompt(form, _words(form, size - prefix, form.overhead), draws, vocabulary)
        if shared is not None:
            prompt = [*shared, *prompt] if form.tokens else f"{shared} {prompt}"
        yield Asked(body=form.body(prompt, output), output=output)


def _words(form: Form, tokens: float, overhead: float) -> int:
    return max(round(tokens if form.tokens else (tokens - overhead) / form.per_word), 1)


def _drawn(lengths: Lengths, draws: random.Random) -> int:
    low, high = ends_of(lengths)
    return max(draws.randint(round(low), max(round(high), round(low))), 1)


def _prompt(form: Form, words: int, draws: random.Random, vocabulary: int) -> Any:
    if form.tokens:
        edge = RESERVED if vocabulary > 4 * RESERVED else vocabulary // 4
        return [draws.randrange(edge, max(vocabulary - edge, edge + 1)) for _ in range(words)]
    return " ".join(draws.choices(WORDS, k=words))
