"""The patch tool in one situation a file; each asserts the whole state that results."""
