"""What the launcher and the config registry share. No torch here: the launcher starts fast."""

# Set by the launcher: the tokenizer's size, and its folder.
VOCAB_VARIABLE = "INTEGRATION_VOCAB_SIZE"
TOKENIZER_VARIABLE = "INTEGRATION_TOKENIZER"
MINI_VOCAB = 4096

# Written by the trainer into the run's folder when training has ended.
END_FILE = "end.json"

CONFIGS = {"mini": "the 1T model in small; trains on two CPU cores"}


def expert_parallel_degree(ranks: int) -> int:
    """Return 2 where it divides ``ranks``, else 1."""
    return 2 if ranks % 2 == 0 else 1


def global_batch(ranks: int) -> int:
    """Return the smallest multiple of ``ranks`` that is at least 4, in sequences."""
    return ranks * -(-4 // ranks)
