"""What is wrong with this training? A verdict from the log of any framework. Imports no torch."""

from score_centering.diagnosis.readers import Log, Series, read
from score_centering.diagnosis.verdicts import CORRECTIONS, VERDICTS, Diagnosis, diagnose

__all__ = ["CORRECTIONS", "VERDICTS", "Diagnosis", "Log", "Series", "diagnose", "read"]
