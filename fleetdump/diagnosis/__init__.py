"""Evidence in, verdict out."""

from fleetdump.diagnosis.anonymise import anonymise
from fleetdump.diagnosis.decide import diagnose
from fleetdump.diagnosis.types import CERTAINTY, DIRECT, LOG_ONLY, MEASURED, OK, PATTERN, STALL, WAIT, Verdict

__all__ = [
    "CERTAINTY",
    "DIRECT",
    "LOG_ONLY",
    "MEASURED",
    "OK",
    "PATTERN",
    "STALL",
    "WAIT",
    "Verdict",
    "anonymise",
    "diagnose",
]
