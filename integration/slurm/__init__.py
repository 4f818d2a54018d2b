"""Job scripts for Slurm, and what they need before they are submitted."""
