"""The one exception that means "the user can mend this"."""


class UserError(Exception):
    """A mistake or a circumstance outside the program, told in one sentence.

    The message says what was expected, what was found, what follows, and the next command.
    The command line prints it without a stack trace (``--debug`` shows one) and exits with
    ``exit_code``.
    """

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def nearest(name: str, known: list[str]) -> str:
    """Return ``"; did you mean X?"`` for the closest of ``known``, or the list of them.

    >>> nearest("shared_rop_cache", ["cpu_device", "shared_rope_cache"])
    '; did you mean shared_rope_cache?'
    """
    import difflib

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known) or 'none'}"
