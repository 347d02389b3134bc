"""The planted faults: name, the verdict that is right, and the settings of `plant.train`."""

LOW = {"int8": True, "kv": "int4_per_token_head"}

KINDS = {  # name: (verdict, settings)
    "temperature-0.7": ("bug", {"sampler_temperature": 0.7}),
    "temperature-0.85": ("bug", {"sampler_temperature": 0.85}),
    "temperature-1.3": ("bug", {"sampler_temperature": 1.3}),
    "top-p-0.9": ("bug", {"top_p": 0.9}),
    "shifted": ("bug", {"shift": 1}),
    "stale-logprobs": ("bug", {"logprobs_of": 8, "lr": 1.0}),
    "retokenised": ("bug", {"dropped": 0.2}),
    "raw-logprobs": ("bug", {"sampler_temperature": 0.7, "trainer_temperature": 0.7, "raw": True}),
    "sum-for-mean": ("bug", {"summed": True, "lr": 1e-4}),
    "lr-0": ("bug", {"lr": 0.0, **LOW}),
    "cache-codes-0.01": ("tail", {**LOW, "fault": (0.01, "codes", True)}),
    "cache-scale-0.01": ("tail", {**LOW, "fault": (0.01, "scale", True)}),
    "cache-codes-0.1": ("sampler_broken", {**LOW, "fault": (0.1, "codes", True)}),
    "healthy-bf16": ("harmless", {}),
    "healthy-int4kv": ("harmless", LOW),
    "healthy-sc": ("harmless", {**LOW, "centering": True}),
    "stale-16": ("off_policy", {"sync_every": 16, "lr": 3.0, "steps": 70}),
    "too-fast-bf16": ("instability", {"lr": 3.0, "steps": 70}),
}
RUNS = {f"{kind}-s{seed}": (verdict, settings | {"seed": seed}) for seed in range(3)
        for kind, (verdict, settings) in KINDS.items()}  # fmt: skip
