"""Evidence in, verdict out."""

from fleetdump.diagnosis.anonymise import anonymise
from fleetdump.diagnosis.decide import diagnose
from fleetdump.diagnosis.types import HIGH, LOW, MEDIUM, OK, STALL, WAIT, Verdict

__all__ = ["HIGH", "LOW", "MEDIUM", "OK", "STALL", "WAIT", "Verdict", "anonymise", "diagnose"]
