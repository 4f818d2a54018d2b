"""Torchrun, which ends with the process that has started it: it asks its ranks to save, and ends.

``python -m integration.train.agent`` takes torchrun's own command line.
"""

import os

from torch.distributed.run import get_args_parser, main

from integration.ground import processes

# Kept from torchrun's own patience with its ranks, for its own end.
ENDING_SECONDS = 15

if __name__ == "__main__":
    patience = get_args_parser().parse_args().shutdown_timeout
    processes.end_with_parent(patience + ENDING_SECONDS)
    os.environ[processes.PARENT_VARIABLE] = str(os.getpid())  # the ranks' parent
    main()
