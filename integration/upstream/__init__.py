"""Living with upstream: drift, rebase, drop, prepared pull requests, and upstream's own tests."""
