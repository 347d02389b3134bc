"""What passes between agent loop and rollout server: one request, and the capture record in its answer.

A server's `generate` gets `sampling_params` as `request` makes them. It answers verl's TokenOutput with the whole
`Rollout` in `extra_fields` under RECORD; verl's own log-prob lists and stop reasons are not used (the first are Python
lists, the second tell "stop" and "length" not apart).
"""

from typing import Any

from score_centering.rollout import Sampling

RECORD = "rollout"


def request(sampling: Sampling, seed: int, top_logprobs: int) -> dict[str, Any]:
    """How one rollout is sampled. seed: of this rollout alone. top_logprobs: K candidates a position."""
    return {"sampling": sampling, "seed": seed, "top_logprobs": top_logprobs}
