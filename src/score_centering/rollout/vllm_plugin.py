"""vLLM's plug-in (entry point `vllm.general_plugins`, called in every engine process): which kernel rotates K and V.

The INT4 cache's fast Hadamard kernel (hadacore) was measured to return garbage now and then, so the safe kernels are
the default until the repeatability check passes on the machine at hand; `SC_VLLM_HADACORE=1` switches the fast one on.
"""

import os

FAST_ROTATION = "SC_VLLM_HADACORE"


def choose_rotation() -> None:
    """Set the flag that vLLM asks before each rotation; None lets it look for the fast kernel. Only CUDA has one."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    import vllm.v1.attention.ops.int4_per_token_head as kernels

    kernels._HADACORE_AVAILABLE = None if os.environ.get(FAST_ROTATION) == "1" else False
