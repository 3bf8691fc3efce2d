"""The report as Markdown: for an issue, a wiki or a mail; the same document as the page."""

from planner.questions.report.document import Chart, Document
from planner.terminal.tables import markdown_table
from planner.trainers.bundle.quoting import markdown as quoted

MOST_ROWS = 40
"""Rows of a table; longer ones say how many are left out."""


def markdown(document: Document) -> str:
    """The whole document."""
    parts = [
        f"# {quoted(document.title)}", f"**{document.verdict}**", f"`{document.layout}`", quoted(document.job),
        *(f"> {quoted(notice)}" for notice in document.notices),
        markdown_table(["", "", ""], [[one.label, one.text, one.note] for one in document.figures]),
        f"## {document.reasons}", *map(quoted, document.why),
    ]  # fmt: skip
    if document.alternatives.rows:
        parts += [f"{document.alternatives.title}:", _chart_table(document.alternatives)]
    parts.append("## Run it")
    parts += [f"{one['what']}:\n\n```sh\n{one['command']}\n```" for one in document.run]
    for one in document.charts:
        parts += [f"## {one.title}", one.reading, _chart_table(one), *(f"_{note}_" for note in one.notes)]
        parts.append(f"_How it is computed: docs/{one.docs}._")
    parts.append("## Assumptions")
    if document.assumptions:
        rows = [[*(quoted(one[key]) for key in ("what", "value", "why")), quoted(one["flag"])] for one in document.assumptions]
        parts.append(markdown_table(["what", "value", "why", "change with"], rows))
    else:
        parts.append("The plan file names no assumption: everything was given.")
    parts += [
        f"Rates behind GPU-hours, cost and energy. They leave out {document.left_out}.",
        markdown_table(
            ["rate", "value", "source", "date"],
            [[one[key] for key in ("what", "value", "source", "date")] for one in document.basis],
        ),
    ]  # fmt: skip
    parts.append(f"Made on {document.date} with planner {document.version}.".replace(" .", "."))
    return "\n\n".join(parts) + "\n"


def _chart_table(chart: Chart) -> str:
    columns, cells = chart.cells()
    text = markdown_table([column.title for column in columns], cells[:MOST_ROWS])
    left = len(chart.table_rows) - MOST_ROWS
    return text if left <= 0 else f"{text}\n\n{left:,} more rows are in `--format json`."
