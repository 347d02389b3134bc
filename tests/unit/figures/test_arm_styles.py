from itertools import combinations

import numpy as np
import pytest

from score_centering.figures.arms import KNOWN, OTHERS, in_order, styles
from score_centering.figures.colours import contrast, readable_on_white

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
DEFICIENCIES = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[index : index + 2], 16) for index in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("kind", DEFICIENCIES)
@pytest.mark.parametrize("theme", ["colour", "dark_colour"])
def test_published_arms_differ_for_every_colour_vision(kind, theme):
    seen = {arm: lab(np.array(DEFICIENCIES[kind]) @ linear(getattr(look, theme))) for arm, look in KNOWN.items()}
    for first, second in combinations(seen, 2):
        assert np.linalg.norm(seen[first] - seen[second]) > 12, (kind, first, second)


def test_line_and_marker_differ_without_colour():
    looks = [*KNOWN.values()]
    assert len({look.marker for look in looks}) == len(looks)
    assert len({(look.dashes, look.marker) for look in looks}) == len(looks)
    assert len({marker for *_, marker in OTHERS} | {look.marker for look in looks}) == len(OTHERS) + len(looks)


def test_text_in_an_arms_colour_is_readable():
    for look in KNOWN.values():
        assert contrast(readable_on_white(look.colour), "#ffffff") >= 4.5
        assert contrast(look.dark_colour, "#16181c") >= 4.5
    assert readable_on_white("#000000") == "#000000"


def test_no_colour_ever_repeats_and_each_is_seen_on_its_ground():
    looks = styles([*KNOWN, *(f"arm{index:03}" for index in range(200))], "another control")
    for theme, ground in (("colour", "#ffffff"), ("dark_colour", "#16181c")):
        colours = [getattr(look, theme) for look in looks.values()]
        assert len(set(colours)) == len(colours) == 206
        assert min(contrast(colour, ground) for colour in colours) >= 1.8


def test_a_label_takes_the_place_of_a_name():
    looks = styles(["sc", "mine", "other"], labels={"sc": "Ours", "mine": "My arm"})
    assert [look.label for look in looks.values()] == ["Ours", "My arm", "other"]
    assert looks["mine"].colour == styles(["mine", "other"])["mine"].colour


def test_order_and_style_do_not_depend_on_company():
    assert in_order(["zeta", "sc_tis", "grpo", "alpha", "grpo_bf16", "grpo"]) == [
        "grpo_bf16", "grpo", "sc_tis", "alpha", "zeta",
    ]  # fmt: skip
    assert styles(["sc"])["sc"] == styles(["grpo", "mine", "sc"])["sc"]
    assert styles(["mine"])["mine"].label == "mine"


def test_a_control_of_any_name_comes_first_in_black():
    assert in_order(["grpo", "sc", "exact"], "exact") == ["exact", "grpo", "sc"]
    looks = styles(["sc", "exact", "mine"], "exact")
    assert (looks["exact"].label, looks["exact"].colour) == ("exact", "#000000")
    assert looks["mine"] == styles(["sc", "mine"])["mine"]
