"""The name of a model by the settings that make it, seeds aside: measured limits belong to it."""

import hashlib
import json

from score_centering.settings.model import Settings

DIGITS = 10


def model_name(settings: Settings) -> str:
    """`<source>-<digest>` of the chosen source, and of the warm start and its data where the weights are made here.

    Seeds are left out, as limits are ranges over them; so is every key that has its default, as a new one would.
    """
    model = settings.model
    chosen = getattr(model, model.source).model_dump(mode="json", exclude_defaults=True, exclude={"seed"})
    shaping = {model.source: chosen}
    if model.source == "scratch" or model.warm_start.max_steps > 0:
        data = settings.dataset
        shaping["warm_start"] = model.warm_start.model_dump(mode="json", exclude_defaults=True, exclude={"seed"})
        shaping[data.source] = getattr(data, data.source).model_dump(mode="json", exclude_defaults=True)
        shaping["columns"] = data.columns.model_dump(mode="json", exclude_defaults=True)
        shaping["instruction"] = settings.prompt.instruction
    text = json.dumps(shaping, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return f"{model.source}-{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}"
