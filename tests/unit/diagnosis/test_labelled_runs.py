import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "docs" / "results" / "diagnosis"


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("measure", "split", "kinds"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import measure

    return measure


def test_the_half_that_the_rules_were_made_on(measure, monkeypatch, capsys):
    """A change of the rules that undoes what they were made for shows here; the other half is for the page alone."""
    monkeypatch.setattr(sys, "argv", ["measure.py"])
    measure.main()
    table = [
        line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith(("| first", "| whole"))
    ]
    assert len(table) == 2
    for row in table:
        assert int(row[5].strip(" %")) >= 90  # right or cannot_tell
        assert int(row[2]) > int(row[3])  # and more often told than not


def test_the_split_goes_by_name_alone(measure):
    """The published digests of "" and "abc" begin with e3, odd, and ba, even."""
    assert measure.held_out("") and not measure.held_out("abc")


def test_labels_by_hand(measure):
    runs = measure.labelled()
    assert measure.right(runs["control_l1"], runs) == {"harmless"}
    assert measure.right(runs["control_l3"], runs) == {"instability"}
    assert measure.right(runs["pg_b4_l15"], runs) == {"drift"}  # its control lived
    assert measure.right(runs["w_sc_b2_l07_s1"], runs) == {"sampler_broken"}  # 0.37 clean, 0.07 sampled
    assert measure.right(runs["shifted-s0"], runs) == {"bug"}
