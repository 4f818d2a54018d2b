"""The training data and the tokenizer: found, checked and built before any rank starts."""
