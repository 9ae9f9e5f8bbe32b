"""Bytes and seconds for reading, and numbers rounded up."""

GIB = 2**30


def in_gib(size_bytes: float | None) -> str:
    """Bytes for reading: GiB; MiB, KiB and bytes below a tenth of the next larger; a dash for unknown."""
    if size_bytes is None:
        return "-"
    if abs(size_bytes) < 2**10 / 10:
        return f"{size_bytes:.0f} B"
    if abs(size_bytes) < 2**20 / 10:
        return f"{size_bytes / 2**10:,.1f} KiB"
    if abs(size_bytes) < 2**30 / 10:
        return f"{size_bytes / 2**20:,.1f} MiB"
    return f"{size_bytes / 2**30:,.2f} GiB"


def in_ms(seconds: float | None) -> str:
    """Seconds for reading, in ms; a dash for unknown."""
    return "-" if seconds is None else f"{ms(seconds)} ms"


def duration(seconds: float | None) -> str:
    """Seconds for reading, in the largest unit of which there are more than about two: 100 s, 90 min, 3.5 h,
    4 days; a dash for unknown."""
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def counted(count: int, what: str) -> str:
    """So many of something whose plural takes an s, for reading."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def ceil_div(number: int, divisor: int) -> int:
    """number / divisor, rounded up."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `number`."""
    return ceil_div(number, multiple) * multiple
