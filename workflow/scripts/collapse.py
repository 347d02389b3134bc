"""Table, figure and page of the map of the collapse, from those runs of its grid that have finished."""

import argparse
from pathlib import Path

from score_centering.figures.canvas import drawing, save
from score_centering.figures.collapse_map import draw_map
from score_centering.figures.collapse_study import collapse_table, page
from score_centering.figures.scan import write_table
from score_centering.settings import cli, run_main
from score_centering.settings.stages import CollapseStage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR", help="…/<cell>/<arm>/seed<k> lie below it")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="STEM", help="STEM.png, .svg, .pdf, .parquet and .md"
    )
    cli.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    stage, stem = cli.read(arguments, CollapseStage), arguments.output
    table = collapse_table(stage, arguments.runs)
    write_table(table, stem.with_name(f"{stem.name}.parquet"))
    text = page(table, stage)
    stem.with_name(f"{stem.name}.md").write_text(text, encoding="utf-8")
    with drawing():
        save(draw_map(table, stage), stem)
    print(text, end="")


if __name__ == "__main__":
    run_main(main)
