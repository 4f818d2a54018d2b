"""Patches for pinned PyTorch and TorchTitan, their proofs, and the job that runs on them."""
