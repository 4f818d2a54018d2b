"""Units: numbers of bytes and seconds as people read them."""

import math

GIB = 2**30


def gib(size: float) -> str:
    """Return bytes in GiB with two decimals, without the unit."""
    return f"{size / GIB:.2f}"


def size(value: float) -> str:
    """Return bytes in the binary unit that gives one to four digits before the point.

    >>> size(67108864), size(20)
    ('64 MiB', '20 B')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log(max(abs(value), 1), 1024)), len(units) - 1)
    value /= 1024**power
    return f"{value:.3g} {units[power]}" if abs(value) < 1000 else f"{value:.0f} {units[power]}"


def seconds(value: float) -> str:
    """Return a time in s, ms or us.

    >>> seconds(32.0019), seconds(0.000396)
    ('32 s', '396 us')
    """
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if abs(value) * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def change(ratio: float) -> str:
    """Return by how much a value differs from what it is compared with.

    >>> change(0.935), change(1.0001)
    ('6.5 % less', '0.0 % more')
    """
    return f"{abs(ratio - 1):.1%} ".replace("%", " %") + ("less" if ratio < 1 else "more")
