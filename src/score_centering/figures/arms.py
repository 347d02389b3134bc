"""How an arm looks, everywhere: its label, colour, line style and marker.

Colours are the Okabe-Ito palette, which people with any common colour-vision deficiency can tell apart. Warm colours
are arms without score centering, cool ones arms with it, black is the control. Line style and marker differ as
well, so that a greyscale print is still readable.
"""

from collections.abc import Iterable, Mapping
from colorsys import hls_to_rgb
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True)
class ArmStyle:
    label: str
    colour: str  # on a light background
    dark_colour: str  # on a dark background
    dashes: tuple[float, ...]  # on-off lengths in points; () is a solid line
    marker: str  # Matplotlib's code


KNOWN = {
    "grpo_bf16": ArmStyle("GRPO, BF16 rollouts", "#000000", "#f2f2f2", (), "s"),
    "grpo": ArmStyle("GRPO", "#d55e00", "#ff8a3d", (4.5, 1.5), "X"),
    "sc": ArmStyle("SC", "#0072b2", "#4aa8e0", (), "o"),
    "sc_mis": ArmStyle("SC + MIS", "#009e73", "#2fc79b", (1.2, 1.0), "^"),
    "sc_tis": ArmStyle("SC + TIS", "#56b4e9", "#8fd0f5", (6.0, 1.2, 1.2, 1.2), "D"),
    "grpo_mis": ArmStyle("GRPO + MIS", "#e69f00", "#ffc247", (2.5, 1.5), "P"),
}

# For a control of another name.
CONTROL = ("#000000", "#f2f2f2", (3.0, 1.0, 1.0, 1.0), "d")
# For arms that the published experiment does not have.
OTHERS = (
    ("#cc79a7", "#e6a3c6", (), "v"),
    ("#7a4fbf", "#b496ea", (4.5, 1.5), "<"),
    ("#8c6d31", "#c7a766", (1.2, 1.0), ">"),
    ("#6b6b6b", "#ababab", (6.0, 1.2, 1.2, 1.2), "h"),
    ("#a50f15", "#ef6a6f", (2.5, 1.5), "*"),
    ("#b8c800", "#d8e84a", (), "p"),
)
GOLDEN_SECTION = 0.6180339887
DASHES = ((4.5, 1.5), (1.2, 1.0), (6.0, 1.2, 1.2, 1.2), (2.5, 1.5), ())


def in_order(arms: Iterable[str], control: str | None = None) -> list[str]:
    """The control first, then the published arms in their order, then the others by name; each once."""
    known = list(KNOWN)
    return sorted(set(arms), key=lambda arm: (arm != control, known.index(arm) if arm in KNOWN else len(known), arm))


def styles(
    arms: Iterable[str], control: str | None = None, labels: Mapping[str, str] = MappingProxyType({})
) -> dict[str, ArmStyle]:
    """One style per arm, in the order given. Published arms always get the same one, others get theirs by name; the
    control is black, whatever its name. labels: of arms that are not to be called as here."""
    arms = list(dict.fromkeys(arms))
    others = sorted(set(arms) - set(KNOWN) - {control})
    looks = {arm: other_look(index) for index, arm in enumerate(others)} | {control: CONTROL}
    found = {arm: KNOWN[arm] if arm in KNOWN else ArmStyle(arm, *looks[arm]) for arm in arms}
    return {arm: replace(look, label=labels.get(arm, look.label)) for arm, look in found.items()}


def other_look(index: int) -> tuple[str, str, tuple[float, ...], str]:
    """Colours, dashes and marker of the arm of this index among those that are not published. After the six chosen
    ones, hues a golden section of the circle apart, which never come back to one that was there."""
    if index < len(OTHERS):
        return OTHERS[index]
    hue = index * GOLDEN_SECTION % 1
    light, dark = _hex(hue, 0.38, 0.6), _hex(hue, 0.7, 0.65)
    _, _, _, marker = OTHERS[index % len(OTHERS)]
    return light, dark, DASHES[index % len(DASHES)], marker


def _hex(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in hls_to_rgb(hue, lightness, saturation))
