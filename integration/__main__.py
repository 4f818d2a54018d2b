"""``python -m integration VERB …``, the same command as the console script ``integration``."""

from integration.cli.main import main

if __name__ == "__main__":
    main()
