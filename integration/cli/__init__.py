"""The verbs of the command line. Nothing imports it."""
