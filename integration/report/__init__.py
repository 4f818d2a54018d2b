"""The report: one static page of what was measured, planned and trained."""
