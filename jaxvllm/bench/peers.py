"""The engines that a user would otherwise pick, each in a process and an environment of its own."""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Self

from jaxvllm.bench.requests import Request

# In a folder of its own, which is the first that the peer's Python searches: names like our requests.py would get in
# the way of the libraries there.
_SCRIPT = Path(__file__).parent / "peer" / "process.py"
PEERS = {  # name: (what its environment must import, how to get that, what it is called in a sentence)
    "hf": ("transformers", "pip install torch transformers gguf accelerate", "transformers' static batch"),
    "llamacpp": ("llama_cpp", "pip install llama-cpp-python", "llama.cpp"),
    "vllm": ("vllm", "pip install vllm", "vLLM"),
}


class Peer:
    """A process that holds the peer's model and runs the requests whenever asked, greedily, past the end ids.

    Raises ValueError where the peer's environment lacks it, and OSError when it fails.
    """

    def __init__(self, name: str, model: str, dtype: str, requests: list[Request], python: str | None = None):
        if name not in PEERS:
            raise ValueError(f"--against={name} is none of {', '.join(PEERS)}.")
        module, command, self.label = PEERS[name]
        python = python or sys.executable
        found = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True)
        if found.returncode:
            raise ValueError(
                f"--against={name}: {python} cannot import {module}. Make an environment with `{command}` and give its "
                "interpreter as --peer-python."
            )
        self._requests = tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8")  # noqa: SIM115  # see close
        json.dump([asdict(request) for request in requests], self._requests)
        self._requests.flush()
        arguments = [python, str(_SCRIPT), name, model, dtype, self._requests.name]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions: dict[str, str] = self._answer()["versions"]
        self.run()  # whatever is done once is done

    def run(self) -> tuple[float, float]:
        """Runs all requests once; returns the seconds that took, and those of all its threads."""
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        answer = self._answer()
        return answer["run_s"], answer["cpu_s"]

    def close(self):
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._requests.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error):
        self.close()

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print too
                return json.loads(line)
        raise OSError(f"the peer ended with status {self._process.wait()}: see its messages above.")
