"""Let Triton's interpreter (TRITON_INTERPRET=1) do on a CPU what a GPU does."""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    """Its casts of FP32 to BF16 truncate, those from BF16 drop subnormals, and its fused multiply-add rounds twice."""
    original = interpreter._convert_float

    def convert(values: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
            return rounded.view(torch.int16).numpy().view(np.uint16)
        if source == tl.bfloat16 and target == tl.float32:
            return (np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return original(values, source, target, rounding)

    def fma(self: object, x: object, y: object, z: object) -> object:
        exact = x.data.astype(np.float64) * y.data.astype(np.float64)  # 48 bits
        return interpreter.TensorHandle((exact + z.data).astype(np.float32), z.dtype.scalar)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_fma = fma
