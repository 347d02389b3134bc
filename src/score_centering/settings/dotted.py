"""Nested settings laid over each other, by dotted key, and the keys in which several of them differ."""

from collections.abc import Mapping, Sequence
from typing import Any


def deep_merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `overlay` laid over it: mappings merge key by key, anything else replaces."""
    merged = dict(base)
    for key, value in overlay.items():
        old = merged.get(key)
        merged[key] = deep_merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def by_dotted_key(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings by their dotted key, in their order; lists and empty inner mappings are leaves."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        leaves |= by_dotted_key(value, name) if isinstance(value, Mapping) and value else {name: value}
    return leaves


def differing(settings: Sequence[Mapping[str, Any]], absent: Any = None) -> dict[str, list[Any]]:
    """Dotted key → its value in each of `settings`, for the keys whose values are not all equal.

    absent: stands for the value where a key is missing; with None, a missing key and a null are equal.
    """
    leaves = [by_dotted_key(each) for each in settings]
    names = dict.fromkeys(name for own in leaves for name in own)
    values = {name: [own.get(name, absent) for own in leaves] for name in names}
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}
