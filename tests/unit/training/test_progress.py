"""What a person sees of a run: a bar on a terminal, plain lines elsewhere."""

import re

from score_centering.training.progress import progress

METRICS = {"reward_mean": 0.25, "k3_kl": 0.00125, "val_reward_mean": None}
TIMING = {"tokens_per_s": 1234.4}


def shown(capsys, *steps: int) -> str:
    with progress("sc_tis", 5, 60) as show:
        for step in steps:
            show(step, METRICS, TIMING)
    return capsys.readouterr().err


def test_plain_lines_in_a_log(capsys):
    first, second = shown(capsys, 6, 7).splitlines()
    assert re.fullmatch(r"sc_tis  step 6/60  reward 0\.250  K3 1\.25e-03  1234 tokens/s  \d+ s left", first)
    assert second.startswith("sc_tis  step 7/60  ")


def test_validation_before_the_first_step(capsys):
    with progress("sc", 0, 60) as show:
        show(0, {"val_reward_mean": 0.5}, {"step_s": 1.0})
    assert capsys.readouterr().err.startswith("sc  step 0/60  validation 0.500  ")


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    for name, value in {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(capsys, 6, 7))
    last = text.replace("\r", "\n").rstrip().splitlines()[-1]
    assert re.search(r"^sc_tis ━+.* 7/60 reward 0\.250  K3 1\.25e-03  1234 tokens/s (-|\d):", last), last
