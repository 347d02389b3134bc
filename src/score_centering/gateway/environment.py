"""The environment variables of the gateway."""

import math
import os

from score_centering.settings import UserError

DEFAULT_PORT, DEFAULT_KEY, DEFAULT_TIMEOUT_SECONDS = "8282", "sc-local", "3600"


def port() -> int:
    """`SC_PORT`: where the gateway listens.

    Raises:
        UserError: no port.
    """
    text = os.environ.get("SC_PORT", DEFAULT_PORT)
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise UserError(f"SC_PORT = {text!r}: must be a port, 1 … 65535")
    return int(text)


def key() -> str:
    """`SC_KEY`: what clients of the gateway, and the gateway itself as a client of its upstream, show.

    Raises:
        UserError: an empty key, or one that no HTTP header can carry.
    """
    text = os.environ.get("SC_KEY", DEFAULT_KEY)
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise UserError("SC_KEY: must be one word of printable ASCII characters")
    return text


def upstream_timeout_seconds() -> float:
    """`SC_UPSTREAM_TIMEOUT_SECONDS`: deadline of one request to the upstream.

    Raises:
        UserError: no positive number.
    """
    text = os.environ.get("SC_UPSTREAM_TIMEOUT_SECONDS", DEFAULT_TIMEOUT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UserError(f"SC_UPSTREAM_TIMEOUT_SECONDS = {text!r}: must be a number of seconds above 0")
    return seconds
