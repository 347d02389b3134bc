"""Reading a configuration: default < preset < smoke < arms.<name>.overrides < command line."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from score_centering.settings.block import Block
from score_centering.settings.dotted import deep_merge
from score_centering.settings.errors import UserError
from score_centering.settings.keys import did_you_mean
from score_centering.settings.model import Settings

DEFAULT_CONFIG = "config/config.yaml"
PUBLISHED_PREFIXES = ("agentlightning.", "default_proxy.")

B = TypeVar("B", bound=Block)


def load_settings(
    configfiles: Sequence[str | Path] = (DEFAULT_CONFIG,),
    overrides: Sequence[str] = (),
    arm: str | None = None,
    smoke: bool = False,
) -> Settings:
    """Settings of the overlaid `configfiles`, resolved for one arm and with `key=value` overrides.

    Raises:
        UserError: a file that is missing or no mapping, an unknown key or arm, a value that is not allowed.
    """
    merged: dict[str, Any] = {}
    for path in configfiles:
        merged = deep_merge(merged, read_yaml(path))
    return resolve(merged, overrides, arm, smoke)


def resolve(
    config: Mapping[str, Any],
    overrides: Sequence[str] = (),
    arm: str | None = None,
    smoke: bool = False,
    overlays: Sequence[Mapping[str, Any]] = (),
) -> Settings:
    """Settings of an already merged configuration; see `load_settings`. `overlays` are laid over the arm's."""
    given = parse_overrides(overrides)
    config = interpolate(deep_merge(config, given))
    base = validate(config)
    if smoke:
        config = deep_merge(config, base.smoke.overrides)
    if arm is not None:
        if arm not in base.arms:
            raise UserError(f"unknown arm {arm!r} (defined: {', '.join(sorted(base.arms))})")
        config = deep_merge(config, base.overrides_of(arm))
    for overlay in (*overlays, given):
        config = deep_merge(config, overlay)
    return validate(config)


def validate(config: Mapping[str, Any]) -> Settings:
    """The typed form of `config`.

    Raises:
        UserError: one line for each fault, with the key's dotted path.
    """
    return parse(Settings, interpolate(config))


def parse(model: type[B], content: Mapping[str, Any]) -> B:
    """`content` as a `model`; validation faults become one `UserError` of one line each."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise UserError("\n".join(_fault(item, model) for item in error.errors())) from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        UserError: the file is missing, is no YAML, or holds no mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read the configuration: {os.strerror(error.errno or 0)}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    try:
        content = _parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: a configuration must be a mapping of keys to values")
    return content


def _parse_yaml(text: str) -> Any:
    """`yaml.safe_load`, whose every fault is a ValueError of one line; a node that contains itself is one too."""
    try:
        content = yaml.safe_load(text)
        json.dumps(content, default=str, skipkeys=True)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    return content


def interpolate(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with every `${oc.env:NAME,default}` and `${other.key}` resolved; slow, so a caller of many does it once.

    Raises:
        UserError: a variable that is not set, or a key that does not exist.
    """
    if not _has_interpolation(config):
        return dict(config)
    from omegaconf import OmegaConf  # slow to import, and the settings of a stage hold no reference
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.create(dict(config)), resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise UserError(f"configuration: {' '.join(str(error).split())}") from None


def _has_interpolation(node: Any) -> bool:
    if isinstance(node, Mapping):
        return any(_has_interpolation(value) for value in node.values())
    if isinstance(node, list):
        return any(_has_interpolation(value) for value in node)
    return isinstance(node, str) and "${" in node


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The nested mapping that `key=value` overrides with dotted keys and YAML values stand for; later ones win.

    Raises:
        UserError: an override that is no `key=value`, or whose value is no YAML.
    """
    parsed: dict[str, Any] = {}
    for item in overrides:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise UserError(f"override {item!r}: write key=value, for instance trainer.total_training_steps=5")
        for prefix in PUBLISHED_PREFIXES:
            key = key.removeprefix(prefix)
        try:
            nested: Any = _parse_yaml(value)
        except ValueError:
            raise UserError(f"override {item!r}: the value is not valid YAML") from None
        if isinstance(nested, str):
            nested = _number_or_text(nested)
        for part in reversed(key.split(".")):
            nested = {part: nested}
        parsed = deep_merge(parsed, nested)
    return parsed


def with_dotted_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the `key=value` of its entry `set`, one or a list, laid over it and the entry gone: Snakemake's own
    `--config` takes no dotted key.

    Raises:
        UserError: as `parse_overrides`.
    """
    plain = {key: value for key, value in config.items() if key != "set"}
    given = config.get("set") or []
    return deep_merge(plain, parse_overrides([str(item) for item in ([given] if isinstance(given, str) else given)]))


def _number_or_text(text: str) -> float | str:
    """YAML 1.1 reads 1e-3 as text; users mean the number."""
    try:
        return float(text)
    except ValueError:
        return text


def _fault(item: Mapping[str, Any], model: type[Block]) -> str:
    where = ".".join(str(part) for part in item["loc"]) or "configuration"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key{did_you_mean(model, item['loc'])}"
    if item["type"] == "missing":
        return f"{where}: missing"
    if item["type"] == "value_error":
        return message if where == "configuration" else f"{where}: {message}"
    return f"{where} = {item['input']!r}: {message[0].lower()}{message[1:]}"
