"""WCAG contrast of sRGB colours, written "#rrggbb"."""


def relative_luminance(colour: str) -> float:
    """WCAG 2.2 relative luminance, 0 (black) to 1 (white)."""
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    """WCAG 2.2 contrast ratio, 1 to 21."""
    light, dark = sorted((relative_luminance(first), relative_luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def readable_on_white(colour: str, ratio: float = 4.5) -> str:
    """The colour, darkened in steps of 5 % until text in it has `ratio` contrast on white."""
    channels = [int(colour[index : index + 2], 16) for index in (1, 3, 5)]
    for percent in range(100, -1, -5):
        shade = "#" + "".join(f"{round(value * percent / 100):02x}" for value in channels)
        if contrast(shade, "#ffffff") >= ratio:
            return shade
    return "#000000"
