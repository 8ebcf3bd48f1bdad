"""Record → DBRecordData."""
