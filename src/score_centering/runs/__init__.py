"""The run folder: metrics log, checkpoints, resume, lock, identity. Importing it loads no torch."""

from score_centering.runs.clock import Stopwatch, peak_rss_bytes
from score_centering.runs.folder import PRODUCTS, RunFolder, finished_again, open_run
from score_centering.runs.identity import make_identity, package_digest
from score_centering.runs.lock import gpu_lease
from score_centering.runs.process import EXIT_RESUMABLE, die_with_parent

__all__ = [
    "EXIT_RESUMABLE",
    "PRODUCTS",
    "RunFolder",
    "Stopwatch",
    "die_with_parent",
    "finished_again",
    "gpu_lease",
    "make_identity",
    "open_run",
    "package_digest",
    "peak_rss_bytes",
]
