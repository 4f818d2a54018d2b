"""Tell whether TorchTitan's own parser takes a trainer's command line, and what it says in numbers.

``python -m integration.ranks.accept --module=… --config=…`` prints one JSON object, or ends as the
parser does. It runs on the overlay, in a process of its own, before any rank starts.
"""

import json
import logging
import sys
from operator import attrgetter

from torchtitan.config import ConfigManager

# What TorchTitan takes at any value, and what trains nothing, or divides by it, below 1.
NUMBERS = (
    "training.steps",
    "training.seq_len",
    "training.local_batch_size",
    "checkpoint.interval",
    "metrics.log_freq",
)


def main() -> None:
    logging.disable(logging.WARNING)  # the ranks say it
    config = ConfigManager().parse_args()
    numbers = {name: attrgetter(name)(config) for name in NUMBERS}
    for name, value in numbers.items():
        if value < 1:
            sys.exit(f"--{name} must be at least 1, got {value}")
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
