"""Shows a benchmark's figures: a table for people, and one JSON line for scripts.

`python -m jaxvllm.bench.report FOLDER README.md` writes the performance section of the README from the JSON lines of
`*.json` in a folder, between two marks.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- performance: begin -->", "<!-- performance: end -->"


def show(result: Mapping[str, Any]) -> str:
    """Returns the table and, as the last line, the JSON."""
    rows = list(_flat(result))
    width = max(len(name) for name, _ in rows)
    table = "\n".join(f"{name:{width}}  {_text(value)}" for name, value in rows)
    return f"{table}\n{json.dumps(result, separators=(',', ':'))}"


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Reads every line of every file, in the order of the files' names."""
    return [
        json.loads(line)
        for file in sorted(folder.glob("*.json"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]


def markdown(results: list[dict[str, Any]]) -> str:
    """Returns a table of the results: what was measured, how much, and where."""
    lines = ["| measured | result | of the floor | machine, commit, date | command |", "|---|---|---|---|---|"]
    for result in results:
        machine = result["machine"]
        hardware = machine["hardware"]
        where = (
            f"{hardware['cores']} cores of {hardware['cpu']} ({', '.join(hardware['instructions']) or 'no AVX2'}), "
            f"load {machine['load_average']}; {machine['commit']}; {machine['date'][:10]}"
        )
        floor = result.get("floor_share")
        command = machine["command"].replace("|", "\\|")
        share = "" if floor is None else f"{100 * floor:.0f}%"
        lines.append(f"| {result['title']} | {result['summary']} | {share} | {where} | `{command}` |")
    return "\n".join(lines)


def write_section(document: Path, text: str):
    """Replaces what stands between the marks. Raises ValueError where the document lacks them."""
    content = document.read_text(encoding="utf-8")
    if BEGIN not in content or END not in content:
        raise ValueError(f"{document} lacks the marks {BEGIN} and {END}.")
    head, rest = content.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    document.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", value))
    return rows


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    write_section(Path(sys.argv[2]), markdown(read_results(Path(sys.argv[1]))))
