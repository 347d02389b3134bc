"""Arms as records: what the config's names give, and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from score_centering.objectives import WEIGHTS, Objective, build_objective, build_weight
from score_centering.objectives.weights import IcePop, Mis, Tis

DEFAULTS = {
    "policy_loss": "score_centering",
    "centering": True,
    "is_mode": "none",
    "tis_max": 2.0,
    "mis_min": 0.5,
    "mis_max": 5.0,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.3,
    "loss_agg_mode": "token-mean",
}
PPO = {"policy_loss": "ppo", "centering": False, "loss_agg_mode": "seq-mean-token-mean"}

PRESETS = {
    "grpo": (PPO, Objective("grpo", False, clip_low=0.2, clip_high=0.3, reduction="seq-mean-token-mean")),
    "sc": ({}, Objective("sc", True)),
    "sc_tis": ({"is_mode": "tis"}, Objective("sc_tis", True, Tis(2.0))),
    "sc_mis": ({"is_mode": "mis"}, Objective("sc_mis", True, Mis(0.5, 5.0))),
    "grpo_mis": ({"is_mode": "mis", "centering": False}, Objective("grpo_mis", False, Mis(0.5, 5.0))),
    "grpo_tis": ({"is_mode": "tis", "centering": False}, Objective("grpo_tis", False, Tis(2.0))),
    "sc_icepop": ({"is_mode": "icepop", "mis_max": 2.0}, Objective("sc_icepop", True, IcePop(2.0))),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    overrides, wanted = PRESETS[name]
    objective = build_objective(name, **DEFAULTS | overrides)
    assert objective == wanted
    assert objective.needs_candidates == name.startswith("sc")
    assert objective.clips == (name == "grpo")


@pytest.mark.parametrize("setting", ["policy_loss", "is_mode"])
def test_gspo_is_refused_with_the_reason(setting):
    with pytest.raises(ValueError, match="GSPO weights a whole rollout by one ratio"):
        build_objective("gspo", **DEFAULTS | {setting: "gspo"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_loss": "reinforce"}, "actor.policy_loss 'reinforce' is not one of ppo, score_centering$"),
        ({"is_mode": "typo"}, "is_mode 'typo' is not one of none, importance, tis, mis, icepop$"),
        ({"loss_agg_mode": "sum"}, "loss_agg_mode 'sum' is not one of token-mean, seq-mean-token-mean"),
        ({"policy_loss": "ppo"}, "takes centering off and is_mode none, not centering on and Unweighted"),
        ({**PPO, "is_mode": "tis"}, "not centering off and Tis.tis_max=2.0.; choose policy_loss score_centering"),
        ({"is_mode": "tis", "tis_max": 0.0}, "tis_max 0.0 must be positive and finite"),
        ({"is_mode": "tis", "tis_max": math.inf}, "tis_max inf must be positive and finite"),
        ({"is_mode": "mis", "mis_min": 1.5}, "the band .* must be positive, finite and hold 1"),
        ({"is_mode": "mis", "mis_min": 0.0}, "the band"),
        ({"is_mode": "icepop", "mis_max": math.nan}, "the band"),
        ({**PPO, "clip_ratio_low": 1.0}, r"clip_ratio_low 1.0 must lie in \[0, 1\)"),
        ({**PPO, "clip_ratio_high": -0.1}, "clip_ratio_high -0.1 be at least 0"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"^objective arm: .*{message}"):
        build_objective("arm", **DEFAULTS | changes)


def test_half_a_clip_is_refused():
    with pytest.raises(ValueError, match="given together or not at all"):
        Objective("arm", False, clip_low=0.2)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    mode=st.sampled_from(sorted(WEIGHTS)),
    log_p=st.floats(-30, 0),
    log_q=st.floats(-30, 0),
    shift=st.floats(-5, 5),
)
def test_a_mass_form_is_homogeneous_and_equals_q_f(reference, mode, log_p, log_q, shift):
    """m(s·p, s·q) = s·m(p, q) and m(p, q) = q·f(p/q): so one function gives head mass, ω and α."""
    weight = build_weight(mode, reference.bounds)
    p, q, s = (torch.tensor(value, dtype=torch.float64) for value in (log_p, log_q, shift))
    at_an_edge = min(abs((p - q).item() - math.log(edge)) for edge in (0.2, 0.5, 2.0, 5.0)) < 1e-9
    if at_an_edge:
        return
    mass = weight.mass(p, q)
    assert torch.allclose(weight.mass(p + s, q + s), s.exp() * mass, rtol=1e-12)
    assert torch.allclose(mass, q.exp() * reference.f[mode]((p - q).exp(), weight), rtol=1e-12)


@pytest.mark.parametrize("mode", ["none", "tis", "mis", "icepop"])
def test_no_unbounded_ratio_is_exponentiated(reference, mode):
    huge = torch.tensor([1000.0, -1000.0])
    weight = build_weight(mode, reference.bounds).mass(huge, torch.zeros(2))
    assert bool(weight.isfinite().all())
