"""Files that the ranks leave in a run's folder for the ladder. No torch."""

RESULT_FILE = "measured.json"
TRACE_FILE = "trace-{rank}.json"
SNAPSHOT_FILE = "snapshot-{rank}.pickle"
# What the ladder keeps of them, beside its JSON file.
KEPT_TRACE = "{rung}.json.gz"
KEPT_SNAPSHOT = "{rung}.snapshot.pickle.gz"
