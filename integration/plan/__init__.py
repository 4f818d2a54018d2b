"""What a job needs before it is run: memory, traffic and time of a rank. No torch, no GPU."""
