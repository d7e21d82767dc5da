"""Compiles the Triton kernels for a GPU that need not be there: `python compile_kernels.py`, without TRITON_INTERPRET."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from foreword.engine.kernels.paged_attention import attend_kernel, merge_kernel, write_kernel
from foreword.offload.checksum_kernel import checksum_kernel
from foreword.offload.device_kernels import copy_kernel

# Compute capability 9.0: Hopper.
TARGET = GPUTarget("cuda", 90, 32)
DIMS = {"K_DIM": 128, "V_DIM": 128, "K_PADDED": 128, "V_PADDED": 128}
FLAGS = {"SOFTCAP": True, "SINKS": True, "WIDEN": False, "PARTS": True}
TYPES = {
    "parts": "*fp32",
    "sums": "*fp32",
    "tiles": "*i32",
    "members": "*i32",
    "tables": "*i32",
    "slots": "*i32",
    "scale": "fp32",
    "softcap": "fp32",
}
BFLOAT16 = ("out", "query", "k_slots", "v_slots", "sinks", "key", "value")
TILE = {"ROWS": 16, "GROUP": 4, "KEYS": 64, "WINDOW": True, "SHARED": False, "REST": False}
SHARED = TILE | {"ROWS": 64, "WINDOW": False, "SHARED": True}
REST = TILE | {"WINDOW": False, "REST": True}
COPY = {"planes": "*i64", "units": "*i64", "frames": "i64", "frame_stride": "i64", "found": "*i32"}
WORDS = {"NUMBERS": 23, "AXES": 6, "WORDS": 1024, "KIND": tl.int64}

CHECKSUM = {
    "frames": "i64",
    "frame_stride": "i64",
    "slots": "*i64",
    "heads": "*u8",
    "found": "*i32",
    "table": "*i64",
}


def compile_kernel(
    kernel: triton.JITFunction, constants: dict[str, object], types: dict[str, str] | None = None
) -> None:
    """Down to machine code. Arguments without a type are int32."""
    known = TYPES | dict.fromkeys(BFLOAT16, "*bf16") | (types or {})
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    made = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=fixed), target=TARGET)
    print(kernel.__name__, len(made.asm["cubin"]))


compile_kernel(write_kernel, DIMS | {"HEADS": 8})
for tile in (TILE, SHARED, REST):
    compile_kernel(attend_kernel, DIMS | FLAGS | tile)
compile_kernel(merge_kernel, {"V_DIM": 128, "V_PADDED": 128, "PARTS": 8, "SINKS": True})
for gather, chosen in ((True, False), (False, False), (False, True)):
    compile_kernel(copy_kernel, WORDS | {"GATHER": gather, "CHOSEN": chosen}, COPY)
for short in (False, True):
    for seal in (False, True):
        compile_kernel(checksum_kernel, {"SHORT": short, "SEAL": seal, "AHEAD": 4}, CHECKSUM)
