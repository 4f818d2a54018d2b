"""What the launcher and the config registry share. No torch here: the launcher starts fast."""

# Set by the launcher: the tokenizer's size, and its folder.
VOCAB_VARIABLE = "INTEGRATION_VOCAB_SIZE"
TOKENIZER_VARIABLE = "INTEGRATION_TOKENIZER"
# Set by the launcher where the user cuts the config `slice`.
LAYERS_VARIABLE = "INTEGRATION_LAYERS"
EXPERTS_VARIABLE = "INTEGRATION_EXPERTS"
# Set by the launcher: the overlay's folder.
OVERLAY_VARIABLE = "INTEGRATION_OVERLAY"

# Written by the trainer into the run's folder when training has ended.
END_FILE = "end.json"
