"""What one operator does on CUDA: which kernels run, the memory that they take, FLOPs, bytes and time.

A simulation asks with shape-only tensors, the virtual GPU's clock with the shapes of operators that really
run. Each file declares the operators of its own kernels, by the name in their schema.
"""
# pyright: reportUnusedImport=false

import harness.kernels.attention
import harness.kernels.collectives
import harness.kernels.convolution
import harness.kernels.flash_attention
import harness.kernels.matmul
import harness.kernels.rules
import harness.kernels.sorting
import harness.kernels.triton_kernels
import harness.kernels.without_temporaries
from harness.kernels.attention_choice import (
    CUDNN_DEPRIORITIZED,
    HALF_DTYPES,
    AttentionCall,
    Backend,
    chosen_backend,
)
from harness.kernels.cost import NOTHING, Cost, accesses, given_results, operator_cost, tensor_bytes
from harness.kernels.described import Described
from harness.kernels.gpu import Gpu
from harness.kernels.operator_time import KernelClass
from harness.kernels.operators import operator_name, operator_of, script_of, unknown_ops
from harness.kernels.quantized import unasked_tables
from harness.kernels.script import Free, Keep, Output, Step, Take, Unknown
