"""Where a run was made and from which state of the sources: what a reader asks, and what never decides about resuming.

No time is among it, so a run that was killed and resumed on one machine ends in the same bytes; when each step began
and how long it took is in timing.parquet.
"""

import platform
import subprocess
from pathlib import Path
from typing import Any

import score_centering

SOURCES = ("src", "workflow", "config")


def provenance() -> dict[str, Any]:
    """host, processor, git_commit, and whether the sources were as in that commit (git_clean).

    The last two are None where this package lies in no git work tree, or there is no git.
    """
    root = Path(score_centering.__file__).parents[2]
    commit = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    changed = None if commit is None else _git(root, "status", "--porcelain", "--", *SOURCES)
    return {
        "host": platform.node(),
        "processor": processor(Path("/proc/cpuinfo")),
        "git_commit": commit,
        "git_clean": None if changed is None else changed == "",
    }


def processor(cpuinfo: Path) -> str:
    """The first model name in Linux' list of processors; elsewhere the architecture."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
