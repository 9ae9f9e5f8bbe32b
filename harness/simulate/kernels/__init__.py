"""What one operator does on CUDA: which kernel, temporaries, bytes. Each file declares its own operators."""

import harness.simulate.kernels.attention
import harness.simulate.kernels.collectives
import harness.simulate.kernels.convolution
import harness.simulate.kernels.flash_attention
import harness.simulate.kernels.matmul
import harness.simulate.kernels.quantized
import harness.simulate.kernels.rules
import harness.simulate.kernels.sorting
import harness.simulate.kernels.without_temporaries
