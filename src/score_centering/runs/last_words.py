"""What the programs of failed jobs said, found by Snakemake's own logs."""

import re
from collections.abc import Iterable
from pathlib import Path

FAILED_LOG = re.compile(r"^ +log: (.+) \(check log file\(s\) for error details\)$", re.MULTILINE)
ERROR = "error: "


def errors_of_failed_jobs(snakemake_logs: Iterable[Path]) -> list[str]:
    """The `error:` lines in the logs of the jobs that failed, each once, job by job.

    A job that wrote none is named by its log; one without a log file, as training that draws a bar on a terminal, has
    said its line there.
    """
    texts = [log.read_text(encoding="utf-8", errors="replace") for log in snakemake_logs]
    failed = [match[1] for text in texts for match in FAILED_LOG.finditer(text)]
    logs = dict.fromkeys(name for names in failed for name in names.split(", "))
    lines: list[str] = []
    for path in map(Path, logs):
        if path.is_file():
            lines += _errors(path) or [f"{ERROR}a job failed without a word on why: {path}"]
    return list(dict.fromkeys(lines))


def _errors(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if line.startswith(ERROR)]
