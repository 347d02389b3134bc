"""The 16-bit grid of candidate log-probs.

A candidate's log-prob travels as an unsigned fixed-point number: code = round(−log p · 1024), 0 … 65535. The step is
2^-10 nats, the range 0 … −63.999 nats, the error below 5e-4 nats inside the range; anything below is clamped to its end
(p < 2e-28). Every path, direct or over a wire, rounds through this grid, so all of them train to the same bits.
"""

import numpy as np

STEPS_PER_NAT = 1024
MAX_CODE = 65535
MIN_LOGPROB = -MAX_CODE / STEPS_PER_NAT


def encode_logprobs(logprobs: np.ndarray) -> np.ndarray:
    """Log-probs (…) in nats, at most 0 and not NaN → codes (…) uint16; half to even."""
    if np.isnan(logprobs).any() or (logprobs > 0).any():
        raise ValueError("candidate log-probs must be at most 0 nats and not NaN")
    codes = np.rint(np.asarray(logprobs, dtype=np.float32) * np.float32(-STEPS_PER_NAT))
    return np.minimum(codes, np.float32(MAX_CODE)).astype(np.uint16)


def decode_logprobs(codes: np.ndarray) -> np.ndarray:
    """Codes (…) uint16 → log-probs (…) float32 in nats; exact."""
    return codes.astype(np.float32) * np.float32(-1 / STEPS_PER_NAT) + np.float32(0)


def round_logprobs(logprobs: np.ndarray) -> np.ndarray:
    """Log-probs (…) → the nearest point of the 16-bit grid (…) float32. Idempotent."""
    return decode_logprobs(encode_logprobs(logprobs))
