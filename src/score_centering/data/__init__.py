"""Math problems with checkable answers: pinned sources, stable splits, a manifest that is verified on read."""

from score_centering.data.dataset_manifest import Manifest, load_manifest, read_split
from score_centering.data.prepare_dataset import Prepared, prepare, read_problems, write_dataset
from score_centering.data.problems import Problem, RawProblem, normalise_prompt
from score_centering.data.source import Source, open_source
from score_centering.data.tables import Reading

__all__ = [
    "Manifest",
    "Prepared",
    "Problem",
    "RawProblem",
    "Reading",
    "Source",
    "load_manifest",
    "normalise_prompt",
    "open_source",
    "prepare",
    "read_problems",
    "read_split",
    "write_dataset",
]
