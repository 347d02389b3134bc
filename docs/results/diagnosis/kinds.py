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
    "uniform-0.003": ("tail", {"uniform": 0.003}),
    "uniform-0.01-int4kv": ("tail", {**LOW, "uniform": 0.01}),
    "noise-0.1": ("harmless", {"noise": 0.1}),
    "noise-0.3": ("harmless", {"noise": 0.3}),
    "temperature-0.9-int4kv": ("bug", {**LOW, "sampler_temperature": 0.9}),
    "top-p-0.95-int4kv": ("bug", {**LOW, "top_p": 0.95}),
    "shifted-noise-0.1": ("bug", {"noise": 0.1, "shift": -1}),
    "retokenised-noise-0.1": ("bug", {"noise": 0.1, "dropped": 0.1}),
    "raw-logprobs-1.2-int4kv": (
        "bug",
        {**LOW, "sampler_temperature": 1.2, "trainer_temperature": 1.2, "raw": True},
    ),
    "stale-8": ("off_policy", {"sync_every": 8, "lr": 2.0, "steps": 60}),
    "stale-16": ("off_policy", {"sync_every": 16, "lr": 3.0, "steps": 70}),
    "too-fast-bf16": ("instability", {"lr": 3.0, "steps": 70}),
}
RUNS = {f"{kind}-s{seed}": (verdict, settings | {"seed": seed}) for seed in range(3)
        for kind, (verdict, settings) in KINDS.items()}  # fmt: skip
