"""The typeface of the figures: DejaVu Sans, cut once to the characters that figures write.

Matplotlib embeds in each PDF the glyphs it shows, cut out of the font's file. Out of DejaVu Sans, with 6,000 glyphs and
the layout tables of a dozen scripts, that takes 0.2 s for each font of each figure; out of these files, 0.01 s. Glyphs,
hinting and kerning are the same. A character that they lack comes from DejaVu Sans.
"""

import string
from importlib.resources import files
from pathlib import Path

import matplotlib
from fontTools import subset
from matplotlib import font_manager

NAME = "Score Centering Sans"
FAMILIES = (NAME, "DejaVu Sans")
SOURCES = {"Regular": "DejaVuSans.ttf", "Bold": "DejaVuSans-Bold.ttf"}  # by style; they come with Matplotlib
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \u00a0±²³·¹×Σθ–…⁰⁴⁵⁶⁷⁸⁹⁻→−≤≥"


def use() -> None:
    """Make FAMILIES known to Matplotlib."""
    for style in SOURCES:
        font_manager.fontManager.addfont(_file(style))


def cut(source: Path, style: str, target: Path) -> None:
    """Write CHARACTERS of the font `source` to `target`, as the `style` of NAME."""
    options = subset.Options(
        drop_tables=["FFTM", "GDEF", "GPOS", "GSUB", "MATH"], legacy_kern=True, notdef_outline=True
    )
    names = {1: NAME, 2: style, 3: f"{NAME} {style}", 4: f"{NAME} {style}", 6: f"{NAME}-{style}".replace(" ", "")}
    with subset.load_font(source, options) as font:
        cutter = subset.Subsetter(options)
        cutter.populate(text=CHARACTERS)
        cutter.subset(font)
        for identity, name in names.items():
            font["name"].setName(name, identity, platformID=3, platEncID=1, langID=0x409)
        font.save(target)


def main() -> None:
    """Write the files in assets anew."""
    for style, source in SOURCES.items():
        cut(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / source, style, _file(style))


def _file(style: str) -> Path:
    return Path(str(files("score_centering.figures").joinpath("assets", f"ScoreCenteringSans-{style}.ttf")))


if __name__ == "__main__":
    main()
