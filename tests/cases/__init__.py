"""Hung and healthy servers as bundles of evidence, with the verdicts that may come first and those that never may."""
