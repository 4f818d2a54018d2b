"""Run pytest on an overlay and read the outcomes."""
