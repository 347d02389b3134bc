"""The answer in a worked solution of a data set, by the way in which the data set marks it."""

from collections.abc import Callable

from score_centering.data import Reading
from score_centering.data.source_answers import after_hashes
from score_centering.reward.answers import final_answer
from score_centering.settings.dataset_blocks import Columns

WAYS: dict[str, Callable[[str], str | None]] = {"hashes": after_hashes, "boxed": final_answer}
"""By the values of `dataset.columns.extract`."""


def reading_of(columns: Columns) -> Reading:
    """How rows with these columns are read."""
    return Reading(columns, WAYS.get(columns.extract))
