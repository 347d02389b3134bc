"""Compare our number formats with the kernels of a vLLM 0.25.0 wheel, bit by bit on random data.

By hand, in a throw-away environment with this package, torch and triton (not part of `make test`):

    pip download --no-deps vllm==0.25.0 && unzip -q vllm-0.25.0-*.whl -d WHEEL
    TRITON_INTERPRET=1 python tests/unit/precision/vllm_reference.py WHEEL                 # on a CPU
    python tests/unit/precision/vllm_reference.py WHEEL --device cuda [--extension _C_stable_libtorch.abi3.so]

Only the Python files of vLLM's kernels are loaded, around stand-ins for the rest of its package. The interpreter casts
FP32 to BF16 by truncation and drops BF16 subnormals, unlike the hardware; both casts are replaced here. It has no BF16
addition or product either: what needs one is compared on CUDA only.
"""

import argparse
import json
import os
import sys
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from score_centering.precision import int4_kv
from score_centering.precision.int8 import int8_linear, quantise_activation, quantise_weight

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HEAD_SIZES = (32, 64, 128, 256)


def load_kernels(wheel: Path, cuda: bool) -> SimpleNamespace:
    """vLLM's kernel modules, with stand-ins for platform, logging and environment."""
    platform = SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        is_cuda=lambda: cuda,
        is_cuda_alike=lambda: cuda,
        has_device_capability=lambda _: False,
    )
    modes = IntEnum("KVQuantMode", ["NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD"], start=0)
    stand_ins = {
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": lambda _: None},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": modes},
    }
    layers = "vllm.model_executor.layers.quantization"
    packages = ["vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops", "vllm.model_executor"]
    packages += ["vllm.model_executor.layers", layers, f"{layers}.utils", f"{layers}.compressed_tensors"]
    for name in packages:
        module = ModuleType(name)
        module.__path__ = [str(wheel.joinpath(*name.split(".")))]
        sys.modules[name] = module
    for name, content in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)
    import vllm.model_executor.layers.quantization.compressed_tensors.triton_scaled_mm as scaled_mm
    import vllm.v1.attention.ops.int4_per_token_head as int4

    int4._HADACORE_AVAILABLE = False
    return SimpleNamespace(int4=int4, scaled_mm=scaled_mm)


def activations(rows: int, columns: int, device: str, seed: int) -> Tensor:
    """Rows of heavy-tailed BF16 values of many magnitudes, with a zero and a constant row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.exp(3 * torch.randn(rows, 1, generator=generator))
    x *= torch.where(torch.rand(rows, columns, generator=generator) < 0.01, 20.0, 1.0)
    x[0], x[1] = 0.0, 1.5
    return x.to(torch.bfloat16).to(device)


def differing(one: Tensor, other: Tensor) -> dict[str, int]:
    return {"compared": one.numel(), "different": int((one != other).sum())}


def compare_rotation(kernels: SimpleNamespace, device: str) -> dict[str, dict[str, int]]:
    """vLLM's `single_rht` in FP32 (butterfly) and through its Triton matrix product, against `int4_kv.rotate`."""
    rows = 200 if INTERPRETED else 20_000
    result = {}
    for head_size in HEAD_SIZES:
        x = activations(rows, head_size, device, head_size)
        signs = kernels.int4._get_rht_signs(head_size, 0, x.device)
        butterfly = kernels.int4.single_rht(x.cpu().float()).to(device)
        ours = int4_kv.rotate(x)
        result[f"rotation D={head_size}, butterfly"] = differing(butterfly.to(torch.bfloat16), ours)
        if not INTERPRETED and head_size <= kernels.int4._TRITON_HADAMARD_MAX_D:
            product = kernels.int4._triton_hadamard_transform(x.float() * signs)
            result[f"rotation D={head_size}, Triton product"] = differing(product.to(torch.bfloat16), ours)
    return result


def compare_cache(kernels: SimpleNamespace, device: str) -> dict[str, dict[str, int]]:
    """Bytes written by `_reshape_cache_int4_kernel` for equal rotated vectors, against `pack(quantise(...))`."""
    tokens, heads, result = (100 if INTERPRETED else 20_000), 2, {}
    for head_size in HEAD_SIZES:
        key, value = (
            int4_kv.rotate(activations(tokens * heads, head_size, device, seed).view(tokens, heads, head_size))
            for seed in (head_size, head_size + 1)
        )
        size = int4_kv.packed_bytes(head_size)
        pages = torch.zeros(2, tokens, 1, heads, size, dtype=torch.uint8, device=device)
        scales = [page.view(torch.float32)[..., -1] for page in pages]
        kernels.int4._run_reshape_kernel(
            kernels.int4._reshape_cache_int4_kernel,
            key=key,
            value=value,
            key_cache=pages[0],
            value_cache=pages[1],
            k_scale_cache=scales[0],
            v_scale_cache=scales[1],
            slot_mapping=torch.arange(tokens, device=device),
            packing_factor=2,
        )
        theirs = pages.squeeze(2)
        ours = torch.stack([int4_kv.pack(*int4_kv.quantise(x.cpu())) for x in (key, value)]).to(device)
        codes, scales_, zeros = zip(*(int4_kv.unpack(packed) for packed in (theirs, ours)), strict=True)
        result[f"INT4 codes D={head_size}"] = differing(*codes)
        result[f"INT4 scales D={head_size}"] = differing(*(scale.view(torch.int32) for scale in scales_))
        result[f"INT4 zero points D={head_size}"] = differing(*zeros)
    return result


def compare_attention(kernels: SimpleNamespace, device: str) -> dict[str, float]:
    """vLLM's attention over its packed cache against FP64 attention over `int4_kv.decode`: relative error of norms."""
    length, heads, kv_heads, head_size, block = 48, 4, 2, 64, 16
    generator = torch.Generator().manual_seed(7)
    q, k, v = (
        torch.randn(length, n, head_size, generator=generator).to(torch.bfloat16).to(device)
        for n in (heads, kv_heads, kv_heads)
    )
    packed = torch.stack([int4_kv.encode(k), int4_kv.encode(v)]).view(2, length // block, block, kv_heads, -1)
    scale_views = [page.view(torch.float32)[..., -1] for page in packed]
    out = torch.empty_like(q)
    kernels.int4.unified_attention_int4(
        q,
        packed[0],
        packed[1],
        out,
        cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32, device=device),
        max_seqlen_q=length,
        seqused_k=torch.tensor([length], dtype=torch.int32, device=device),
        max_seqlen_k=length,
        softmax_scale=head_size**-0.5,
        window_size=(-1, -1),
        block_table=torch.arange(length // block, dtype=torch.int32, device=device)[None],
        softcap=0.0,
        sinks=None,
        alibi_slopes=None,
        use_alibi_sqrt=False,
        qq_bias=None,
        output_scale=None,
        mm_prefix_range=None,
        k_scale_cache=scale_views[0],
        v_scale_cache=scale_views[1],
    )
    keys, values = (int4_kv.decode(x.reshape(length, kv_heads, -1)).double().cpu() for x in packed)
    keys, values = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
    rotated = int4_kv.rotate(q).double().cpu()
    scores = torch.einsum("thd,shd->hts", rotated, keys) * head_size**-0.5 / head_size
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    expected = int4_kv.unrotate(torch.einsum("hts,shd->thd", weights, values).float()).double()
    return {"attention over the packed cache": ((out.cpu().double() - expected).norm() / expected.norm()).item()}


def compare_linear(kernels: SimpleNamespace, device: str) -> dict[str, dict[str, int]]:
    """`triton_scaled_mm` on our codes and scales, with and without bias, against `int8_linear` of the CPU."""
    result = {}
    for n_in, n_out, rows in ((96, 40, 5), (576, 192, 20), (1536, 64, 33)):
        x = activations(rows, n_in, device, n_in)
        weight = activations(n_out, n_in, device, n_out)
        bias = activations(2, n_out, device, 3)[1]
        codes, scale = quantise_weight(weight)
        x_codes, x_scale = quantise_activation(x)
        for label, b in (("", None),) if INTERPRETED else (("", None), (" with bias", bias)):
            theirs = kernels.scaled_mm.triton_scaled_mm(
                x_codes, codes.T, x_scale, scale.float(), torch.bfloat16, bias=b
            )
            ours = int8_linear(x.cpu(), codes.cpu(), scale.cpu(), None if b is None else b.cpu()).to(device)
            result[f"INT8 linear {rows}x{n_in}x{n_out}{label}"] = differing(theirs, ours)
    return result


def compare_production_quantiser(device: str) -> dict[str, dict[str, int]]:
    """The compiled `dynamic_scaled_int8_quant` of the wheel against `quantise_activation` on the CPU."""
    x = activations(20_000, 4096, device, 11)
    codes = torch.empty_like(x, dtype=torch.int8)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=device)
    torch.ops._C.dynamic_scaled_int8_quant(codes, x, scale, None)
    ours_codes, ours_scale = quantise_activation(x.cpu())
    return {
        "INT8 activation codes, compiled kernel": differing(codes.cpu(), ours_codes),
        "INT8 activation scales, compiled kernel": differing(scale.cpu(), ours_scale),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the unpacked wheel")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--extension", type=Path, help="vLLM's compiled kernels, for the activation quantiser (CUDA)")
    arguments = parser.parse_args()
    if INTERPRETED:
        import triton_interpreter

        triton_interpreter.mend()
    kernels = load_kernels(arguments.wheel, arguments.device == "cuda")
    figures: dict[str, object] = {}
    for compare in (compare_rotation, compare_cache, compare_attention, compare_linear):
        figures.update(compare(kernels, arguments.device))
    if arguments.extension:
        torch.ops.load_library(arguments.extension)
        figures.update(compare_production_quantiser(arguments.device))
    for name, value in figures.items():
        print(f"{name:45} {value}")
    versions = {"torch": torch.__version__, "triton": triton.__version__, "numpy": np.__version__}
    print(
        json.dumps({"device": arguments.device, "interpreted": INTERPRETED, "versions": versions, "figures": figures})
    )


if __name__ == "__main__":
    main()
