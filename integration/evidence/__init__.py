"""What was measured, bound to the patches by their hashes: fresh, stale, in words."""
