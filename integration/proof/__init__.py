"""Run each contribution's tests: alone, on the pristine pins, and in the full set."""
