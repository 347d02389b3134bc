import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loading import load
from score_centering.diagnosis.changes import change, changes, course
from score_centering.diagnosis.readers import Series
from score_centering.diagnosis.verdicts import VERDICTS, diagnose

log_from = load("unit/diagnosis/diagnosis_simulation.py").log_from

STEPS = 60
RNG = np.random.default_rng(0)
NOISE = RNG.normal(0, 0.01, STEPS)
ALIVE = np.linspace(0.3, 0.6, STEPS) + NOISE
LOST = np.where(np.arange(STEPS) < 30, 0.5, 0.03) + NOISE / 2
GROWING = np.where(np.arange(STEPS) < 28, 2e-2, 3e-1)
SAWTOOTH = 1e-5 + 5e-3 * (np.arange(STEPS) % 8) ** 2
LONG = 20.0  # tokens

CASES = {  # name: (log, corrections, verdict)
    "no mismatch, alive": ({"reward": ALIVE, "k3_kl": 2e-5, "length": LONG}, "none", "harmless"),
    "a small mismatch, alive": ({"reward": ALIVE, "k3_kl": 2e-3, "length": LONG}, "none", "harmless"),
    "the same K3 in long responses": ({"reward": ALIVE, "k3_kl": 2e-3, "length": 4000.0}, "none", "cannot_tell"),
    "a large mismatch, alive, uncorrected": ({"reward": ALIVE, "k3_kl": 0.1, "length": LONG}, "none", "cannot_tell"),
    "a large mismatch, alive, centred": ({"reward": ALIVE, "k3_kl": 0.1, "length": LONG}, "centering", "harmless"),
    "no mismatch, lost": ({"reward": LOST, "k3_kl": 2e-5, "length": LONG}, "none", "instability"),
    "a small and steady mismatch, lost": ({"reward": LOST, "k3_kl": 1.5e-3, "length": LONG}, "none", "instability"),
    "K3 grows as the reward is lost": ({"reward": LOST, "k3_kl": GROWING, "length": LONG}, "none", "drift"),
    "the same, centred": ({"reward": LOST, "k3_kl": GROWING, "length": LONG}, "centering", "instability"),
    "an old sampler, lost": (
        {"reward": LOST, "k3_kl": SAWTOOTH, "sampler_age": np.arange(STEPS) % 8, "length": LONG},
        "none",
        "off_policy",
    ),
    "an old sampler whose age is not logged": (
        {"reward": LOST, "k3_kl": SAWTOOTH, "length": LONG},
        "none",
        "off_policy",
    ),
    "the clean reward lives": (
        {"reward": 0.05 + NOISE / 5, "clean_reward": 0.4, "k3_kl": 0.7, "length": LONG},
        "none",
        "sampler_broken",
    ),
    "the clean reward dies too": (
        {"reward": LOST, "clean_reward": LOST, "k3_kl": GROWING, "length": LONG},
        "none",
        "drift",
    ),
    "few tokens carry it": (
        {"reward": ALIVE, "k3_kl": 0.09, "abs_gap": 0.03, "chi2": 5.0, "length": LONG},
        "none",
        "tail",
    ),
    "no mismatch logged": ({"reward": ALIVE, "length": LONG}, "none", "cannot_tell"),
    "no reward logged": ({"k3_kl": 2e-3, "length": LONG}, "none", "cannot_tell"),
    "three steps": ({"reward": [0.3, 0.3, 0.4], "k3_kl": 2e-3, "length": LONG}, "none", "cannot_tell"),
    "learning rate 0": ({"reward": ALIVE, "k3_kl": 2e-3, "learning_rate": 0.0, "length": LONG}, "none", "bug"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_verdict(case):
    columns, corrections, verdict = CASES[case]
    found = diagnose(log_from(**columns), corrections)
    assert found.verdict == verdict, found
    assert found.evidence and found.advice


def test_every_verdict_has_a_case():
    assert {verdict for _, _, verdict in CASES.values()} == set(VERDICTS)


def test_cannot_tell_names_what_to_log():
    advice = diagnose(log_from(reward=ALIVE, length=LONG)).advice
    assert any(line.startswith("Log k3_kl (") for line in advice)
    assert not any(line.startswith("Log reward") for line in advice)


def test_the_log_itself_shows_weights():
    """K3 × length is 0.2: too much for an objective that does nothing, little enough for one that weighs its tokens."""
    shown = [diagnose(log_from(reward=ALIVE, k3_kl=0.01, length=LONG, weight_mean=mean)) for mean in (1.0, 0.98)]
    assert [found.verdict for found in shown] == ["cannot_tell", "harmless"]


def test_k3_at_learning_rate_zero_is_told():
    found = diagnose(log_from(reward=ALIVE, k3_kl=2e-3, length=LONG, learning_rate=[0.0] * 5 + [1e-6] * (STEPS - 5)))
    assert any(line.startswith("K3 is 0.002 at learning rate 0") for line in found.evidence)


def test_k3_is_estimated_from_the_gap_where_it_is_missing():
    """For a Gaussian gap of mean |d| m, K3 is σ²/2 with σ² = π/2·m²: π/4·m². At m = 0.02 that is 3.1e-4."""
    found = diagnose(log_from(reward=ALIVE, abs_gap=0.02, length=LONG))
    assert found.measures["k3_healthy"] == pytest.approx(3.1416e-4, rel=1e-3)
    assert any("estimated" in line for line in found.evidence)


@settings(deadline=None, max_examples=60)
@given(
    rewards=st.lists(st.floats(0, 1), max_size=40),
    k3=st.lists(st.floats(0, 5, allow_subnormal=False) | st.just(float("nan")), min_size=1, max_size=40),
    corrections=st.sampled_from(["unknown", "none", "centering", "weights", "both"]),
)
def test_any_log_gets_some_verdict(rewards, k3, corrections):
    size = max(len(rewards), len(k3))
    columns = {"k3_kl": np.resize(k3, size)} | ({"reward": np.resize(rewards, size)} if rewards else {})
    found = diagnose(log_from(**columns), corrections)
    assert found.verdict in VERDICTS and 0 <= found.confidence <= 1


def test_a_course_by_hand():
    path = course(Series(np.arange(1, 41), np.array([0.4] * 20 + [0.8] * 10 + [0.1] * 10)))
    assert (path.window, path.start, path.peak, path.last) == (
        4,
        pytest.approx(0.4),
        pytest.approx(0.8),
        pytest.approx(0.1),
    )
    assert path.lost and not path.dipped
    assert path.fell_at == 32  # the mean of steps 29 … 32 is 0.45; of 30 … 33 it is 0.275, below 0.4


def test_a_dip_is_no_loss():
    path = course(Series(np.arange(40), np.array([0.6] * 15 + [0.1] * 10 + [0.6] * 15)))
    assert path.dipped and not path.lost and path.fell_at is None


def test_noise_is_no_loss():
    rng = np.random.default_rng(1)
    for _ in range(20):
        path = course(Series(np.arange(100), rng.binomial(16, 0.3, 100) / 16))
        assert not path.lost and not path.dipped


def test_a_change_by_hand():
    found = change("k3_kl", Series(np.arange(10, 30), np.array([1e-3] * 12 + [1e-1] * 8)))
    assert (found.step, found.before, found.after) == (22, pytest.approx(1e-3), pytest.approx(1e-1))
    assert change("reward", Series(np.arange(20), np.full(20, 0.5))) is None
    assert change("reward", Series(np.arange(5), np.array([0, 0, 0, 1, 1.0]))) is None  # too short to say


def test_what_changed_first():
    columns = {
        "truncated": np.where(np.arange(STEPS) < 20, 0.02, 0.6),
        "k3_kl": np.where(np.arange(STEPS) < 26, 1e-3, 5e-2),
        "reward": np.where(np.arange(STEPS) < 31, 0.5, 0.1),
        "entropy": 0.4,
    }
    log = log_from(**{name: values + 1e-4 * NOISE for name, values in columns.items()})
    assert [(item.quantity, item.step) for item in changes(log)] == [("truncated", 21), ("k3_kl", 27), ("reward", 32)]
