"""Random numbers of rollouts: a stream each, a hash of (seed, prompt index, sample index, position)."""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of uint64 with full avalanche."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def streams(seed: int, prompt_index: np.ndarray, sample_index: np.ndarray) -> np.ndarray:
    """The number that names each rollout's stream: seed, indices (N,) int64 → (N,) uint64."""
    key = np.full(len(prompt_index), seed % 2**64, dtype=np.uint64)
    for counter in (prompt_index, sample_index):
        key = _mix(key + _GOLDEN) ^ _mix(counter.astype(np.uint64) + np.uint64(1))
    return key


def uniforms(stream: np.ndarray, positions: int) -> np.ndarray:
    """Uniform numbers in [0, 1), one a position: (N,) uint64 → (N, positions) float64 with 52 random bits."""
    steps = np.arange(1, positions + 1, dtype=np.uint64) * _GOLDEN
    bits = _mix(_mix(stream[:, None] + _GOLDEN) + steps[None, :])
    return (bits >> np.uint64(12)) * 2.0**-52
