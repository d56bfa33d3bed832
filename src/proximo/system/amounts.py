"""Amounts in words: parameters and bytes, to three digits."""

UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))


def in_units(number: float) -> str:
    """Example: in_units(1_540_000_000) == "1.54 B"."""
    for unit, letter in UNITS:
        if number >= unit:
            return f"{number / unit:.3g} {letter}"
    return f"{number:.0f}"


def in_bytes(number: float) -> str:
    """Example: in_bytes(12_808_192) == "12.8 MB"."""
    return f"{number / 1e9:.3g} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"
