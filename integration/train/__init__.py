"""Start the training job on this machine: choose, check, launch, follow, explain."""
