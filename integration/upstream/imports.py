"""Which of an upstream's tests touch what a patch touches, from their imports alone.

A test file touches a module that it imports, directly or through one module of the package
between. A name is followed to where it is defined: `from torch.distributed.fsdp import
fully_shard` means `_fully_shard.py`, not all that the package's `__init__` pulls in. (The full
closure of imports would be no choice at all: it reaches nearly every file.)
"""

import ast
from collections.abc import Collection, Iterator, Set
from functools import cache, lru_cache
from pathlib import Path

DEPTH = 2  # test -> module -> touched module


class Imports:
    """The import graph of some packages below ``root``, read from their sources when asked."""

    def __init__(self, root: Path, packages: Collection[str]) -> None:
        self._root = root
        self._packages = packages
        self._of = lru_cache(maxsize=None)(self._read)

    def touches(self, test: Path, touched: Set[str]) -> bool:
        """Tell whether ``test`` reaches one of the paths ``touched`` below the root."""
        level = self._modules(test, "")
        seen: set[str] = set()
        for _ in range(DEPTH):
            if level & touched:
                return True
            seen |= level
            level = {found for path in level for found in self._of(path)} - seen
        return False

    def _read(self, path: str) -> frozenset[str]:
        return frozenset(self._modules(self._root / path, path))

    def _modules(self, file: Path, path: str) -> set[str]:
        return {
            found
            for module, name in _imported(file, path)
            if module.partition(".")[0] in self._packages
            for found in self._resolve(module, name)
        }

    def _resolve(self, module: str, name: str | None, depth: int = 0) -> Iterator[str]:
        """Yield the file of ``module``, or that in which its ``name`` is defined."""
        folder = module.replace(".", "/")
        if name and (inner := self._file(f"{folder}/{name}")):
            yield inner
            return
        found = self._file(folder)
        if found and name and found.endswith("/__init__.py") and depth < 8:
            for other, exported in _imported(self._root / found, found):
                if exported == name and other != module:
                    yield from self._resolve(other, name, depth + 1)
                    return
        if found:
            yield found

    def _file(self, stem: str) -> str | None:
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if (self._root / path).is_file():
                return path
        return None


@cache
def _imported(file: Path, path: str) -> tuple[tuple[str, str | None], ...]:
    """Return ``(module, name)`` for each import in ``file``; the name is None for `import x`.

    Imports inside functions count: tests and lazily loading modules have them there.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return ()
    package = path.rpartition("/")[0]  # of `pkg/__init__.py` and of `pkg/module.py` alike
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parts = package.split("/")
                above = parts[: len(parts) - node.level + 1]
                module = ".".join([*above, *([module] if module else [])])
            found += [(module, alias.name) for alias in node.names]
    return tuple(found)
