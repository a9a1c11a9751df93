"""What one part of `gpu_check` finds, on disk as soon as it is found: a hung or killed process loses nothing before."""

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ERROR_LENGTH = 2000  # characters kept of an error


class Record:
    """The results of one part, by name, in the file `PART.json`. One that fails is recorded, the next one runs."""

    def __init__(self, folder: Path, part: str):
        self.path = folder / f"{part}.json"
        self.results: dict[str, dict[str, Any]] = {}
        self._save()

    def run(self, name: str, function: Callable[..., dict[str, Any]], *arguments: Any, **options: Any):
        """Runs one check, which returns its results; the file names it while it runs."""
        self.results[name] = {"error": "it did not come to an end"}
        self._save()
        begin = time.perf_counter()
        try:
            result = function(*arguments, **options)
        except Exception as error:  # whatever fails on a device, the other checks are still wanted
            text = "".join(traceback.format_exception_only(error)).strip()
            result = {"error": text[-_ERROR_LENGTH:]}
        self.results[name] = {**result, "seconds": round(time.perf_counter() - begin, 2)}
        self._save()

    def _save(self):
        self.path.write_text(json.dumps(self.results, indent=1) + "\n")


def read_record(folder: Path, part: str) -> dict[str, dict[str, Any]]:
    """Returns the results of a part so far; none where it never began."""
    path = folder / f"{part}.json"
    return json.loads(path.read_text()) if path.is_file() else {}
