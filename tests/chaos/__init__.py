"""Chaos tests: inject faults into a whole run, then check that no work was lost or trained twice."""
