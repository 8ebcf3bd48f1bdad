"""Walks through the source: what a training step, and a claim until its DBRecordData, really run through."""
