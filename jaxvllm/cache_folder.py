"""Where the user's downloads and compiled programs are kept."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns `jaxvllm` in the user's cache folder: `$XDG_CACHE_HOME`, else `~/.cache`; it may not exist yet."""
    # The XDG rules have a relative path ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "jaxvllm"
