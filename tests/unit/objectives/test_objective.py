"""Arms as records: what the config's names give, and what is refused."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from score_centering.objectives import Objective, TokenBatch, build_objective, build_weight
from score_centering.objectives.weights import Cispo, IcePop, Mis, Tis

DEFAULTS = {
    "policy_loss": "score_centering",
    "centering": True,
    "is_mode": "none",
    "tis_max": 2.0,
    "mis_min": 0.5,
    "mis_max": 5.0,
    "kpop_max": 0.1,
    "dppo_max": 0.2,
    "cispo_min": 0.0,
    "cispo_max": 5.0,
    "geo_min": 0.99,
    "geo_max": 1.01,
    "opsm_max": 0.5,
    "gspo_low": 3e-4,
    "gspo_high": 4e-4,
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


@pytest.mark.parametrize("mode", ["seq_tis", "seq_mis", "geo_mask", "opsm", "gspo"])
def test_a_weight_of_whole_rollouts_is_neither_centred_nor_metered(mode):
    settings = DEFAULTS | {"is_mode": mode}
    with pytest.raises(ValueError, match=r"^objective arm: .* weighs a whole rollout.*mean is over all continuations"):
        build_objective("arm", **settings)
    objective = build_objective("arm", **settings | {"centering": False})
    assert objective.weighs_rollouts
    with pytest.raises(ValueError, match=r"^objective arm: trainer\.drift_freq .*weighs whole rollouts"):
        objective.drift()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_loss": "reinforce"}, "actor.policy_loss 'reinforce' is not one of ppo, score_centering$"),
        ({"is_mode": "typo"}, "is_mode 'typo' is not one of none, importance, tis, mis, icepop, kpop"),
        ({"loss_agg_mode": "sum"}, "loss_agg_mode 'sum' is not one of token-mean, seq-mean-token-mean"),
        ({"policy_loss": "ppo"}, "takes centering off and is_mode none, not centering on and Unweighted"),
        ({**PPO, "is_mode": "tis"}, "not centering off and Tis.tis_max=2.0.; choose policy_loss score_centering"),
        ({"is_mode": "tis", "tis_max": 0.0}, "tis_max 0.0 must be positive and finite"),
        ({"is_mode": "tis", "tis_max": math.inf}, "tis_max inf must be positive and finite"),
        ({"is_mode": "kpop", "kpop_max": 0.0}, "kpop_max 0.0 must be positive"),
        ({"is_mode": "dppo_tv", "dppo_max": 1.5}, "dppo_max 1.5 must lie in"),
        ({"is_mode": "cispo", "cispo_min": -0.1}, "the clip .* not negative and hold 1"),
        ({"is_mode": "seq_tis", "tis_max": math.inf}, "tis_max inf must be positive and finite"),
        ({"is_mode": "seq_mis", "mis_max": 0.5}, "the band"),
        ({"is_mode": "geo_mask", "geo_min": 1.1}, "the band"),
        ({"is_mode": "opsm", "opsm_max": math.nan}, "opsm_max nan must be positive"),
        ({"is_mode": "gspo", "gspo_low": 1.0}, r"gspo_low 1.0 must lie in \[0, 1\)"),
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


TOKEN_MODES = ["none", "importance", "tis", "mis", "icepop", "kpop", "dppo_tv", "cispo"]
BY_RATIO = ["none", "importance", "tis", "mis", "icepop", "cispo"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    mode=st.sampled_from(TOKEN_MODES),
    log_p=st.floats(-18, -1e-6),
    log_q=st.floats(-18, -1e-6),
    gain=st.sampled_from([-1.5, 0.0, 0.5]),
    shift=st.floats(-5, 5),
)
def test_a_mass_form_is_q_f_and_homogeneous_where_f_is_of_the_ratio(reference, mode, log_p, log_q, gain, shift):
    """m(p, q) = q·f(p, q), and ω = f; where f is a function of p/q, m(s·p, s·q) = s·m(p, q), so it gives α too."""
    weight = build_weight(mode, reference.bounds)
    p, q, a, s = (torch.tensor([value], dtype=torch.float64) for value in (log_p, log_q, gain, shift))
    edges = (0.2, 0.5, 0.6, 1.5, 2.0, 5.0)
    assume(min(abs((p - q).item() - math.log(edge)) for edge in edges) > 1e-9)
    f = reference.f[mode](p.exp(), q.exp(), a, weight)
    rows = TokenBatch(torch.zeros(1), q, a, a, a == a)
    assert torch.allclose(weight.mass(p, q, a), q.exp() * f, rtol=1e-9)
    assert torch.allclose(weight.of_sampled(p, rows), f, rtol=1e-9)
    if mode in BY_RATIO:
        assert torch.allclose(weight.mass(p + s, q + s, a), s.exp() * weight.mass(p, q, a), rtol=1e-12)
        assert torch.allclose(weight.of_tail(q - p, a), weight.mass(p - p, q - p, a), rtol=1e-12)


@pytest.mark.parametrize("mode", ["none", "tis", "mis", "icepop", "kpop", "dppo_tv", "cispo"])
def test_no_unbounded_ratio_is_exponentiated(reference, mode):
    """Log-probs of a broken sampler, far below and above the trainer's."""
    log_p, log_q = torch.tensor([-1e-4, -1000.0, -50.0]), torch.tensor([-1000.0, -1e-4, -900.0])
    gains = torch.ones(3)
    rows = TokenBatch(torch.zeros(3), log_q, gains, gains, gains > 0)
    weight = build_weight(mode, reference.bounds)
    assert bool(weight.of_sampled(log_p, rows).isfinite().all())
    assert bool(weight.mass(log_p, log_q, gains).isfinite().all())


@pytest.mark.parametrize(
    ("mode", "gaps", "gain", "wanted"),
    [
        # two tokens with r = 2 and 0.9: Π = 1.8, geometric mean √1.8 = 1.3416
        ("seq_tis", (2.0, 0.9), 1.0, 1.8),
        ("seq_tis", (2.0, 1.5), 1.0, 2.0),
        ("seq_mis", (2.0, 0.9), 1.0, 1.8),
        ("seq_mis", (2.0, 3.0), 1.0, 0.0),
        ("seq_mis", (0.5, 0.9), 1.0, 0.0),
        ("geo_mask", (2.0, 0.5), 1.0, 1.0),
        ("geo_mask", (2.0, 0.9), 1.0, 0.0),
        ("opsm", (0.5, 0.9), -1.0, 0.0),  # mean of log q − log p = −log(0.45)/2 = 0.399 > 0.1
        ("opsm", (0.5, 0.9), 1.0, 1.0),
        ("opsm", (2.0, 0.9), -1.0, 1.0),
        ("gspo", (1.0, 1.0404), 1.0, 1.02),
        ("gspo", (2.0, 0.9), 1.0, 0.0),
        ("gspo", (2.0, 0.9), -1.0, math.sqrt(1.8)),
        ("gspo", (0.5, 0.9), -1.0, 0.0),
    ],
)
def test_weights_of_a_rollout_by_hand(reference, mode, gaps, gain, wanted):
    """Beside another rollout of one token, and with a masked row inside that counts for nothing."""
    log_r = torch.tensor([0.0, math.log(gaps[0]), 7.0, math.log(gaps[1])], dtype=torch.float64)
    rows = TokenBatch(
        target_ids=torch.zeros(4),
        sampler_logprobs=torch.full((4,), -2.0, dtype=torch.float64),
        advantages=torch.full((4,), gain, dtype=torch.float64),
        loss_weights=torch.ones(4),
        mask=torch.tensor([True, True, False, True]),
        sequence_ids=torch.tensor([3, 4, 4, 4]),
    )
    weights = build_weight(mode, reference.bounds).of_sampled(log_r - 2, rows)
    assert weights[0].item() == 1
    assert weights[[1, 3]].tolist() == pytest.approx([wanted, wanted])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    mode=st.sampled_from(["kpop", "dppo_tv"]),
    tail_p=st.floats(1e-6, 0.9),
    tail_q=st.floats(1e-6, 0.9),
    share=st.floats(1e-3, 1),
    gain=st.sampled_from([-1.0, 1.0]),
)
def test_no_token_of_the_tail_is_masked_where_the_whole_tail_is_kept(reference, mode, tail_p, tail_q, share, gain):
    """Why α = 1 is right for a trust region: under q̂ = ρ·p a token of the tail has a share of both tail masses."""
    weight = build_weight(mode, reference.bounds)
    values = [
        torch.tensor([value], dtype=torch.float64).log() for value in (tail_p, tail_q, tail_p * share, tail_q * share)
    ]
    gains = torch.tensor([gain], dtype=torch.float64)
    if weight.kept(values[0], values[1], gains):
        assert weight.kept(values[2], values[3], gains)


def test_cispo_without_a_lower_bound_is_tis():
    log_p, log_q = torch.randn(2, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gains = torch.ones(100)
    assert torch.equal(Cispo(0.0, 2.0).mass(log_p, log_q, gains), Tis(2.0).mass(log_p, log_q, gains))
