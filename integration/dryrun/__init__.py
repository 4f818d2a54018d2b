"""A dry run: one rank of a job on one CPU, with fake tensors and a fake process group."""
