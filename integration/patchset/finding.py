"""One thing that is wrong with a patch, with all that is needed to mend it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """``line`` is 1-based in ``file``; None where the whole file is meant."""

    patch: str
    file: str
    line: int | None
    expected: str
    found: str
    verdict: str
    next: str

    @property
    def where(self) -> str:
        """``file:line``, as editors and terminals understand it."""
        return self.file if self.line is None else f"{self.file}:{self.line}"

    def sentence(self) -> str:
        """Return the finding in one line."""
        return f"{self.where}: {self.verdict}: expected {self.expected}, found {self.found}"

    def __str__(self) -> str:
        return "\n".join(
            (
                f"{self.patch}: {self.verdict}",
                f"  at        {self.where}",
                f"  expected  {self.expected}",
                f"  found     {self.found}",
                f"  next      {self.next}",
            )
        )
