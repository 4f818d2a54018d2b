"""What each contribution is worth inside the set: the same job, contribution by contribution."""
