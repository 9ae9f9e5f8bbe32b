// What flash-attn's flash_api.cpp launches, for every type and head dim it may ask for: nothing.
#include <cuda_runtime.h>

#include "namespace_config.h"

#include "flash.h"
#include <cutlass/numeric_types.h>

namespace FLASH_NAMESPACE {
template <typename Type, int head_dim, bool is_causal>
void run_mha_fwd_(Flash_fwd_params&, cudaStream_t) {}
template <typename Type, int head_dim, bool is_causal>
void run_mha_fwd_splitkv_dispatch(Flash_fwd_params&, cudaStream_t) {}
template <typename Type, int head_dim, bool is_causal>
void run_mha_bwd_(Flash_bwd_params&, cudaStream_t) {}

#define KERNELS(Type, head_dim, is_causal)                                                        \
  template void run_mha_fwd_<Type, head_dim, is_causal>(Flash_fwd_params&, cudaStream_t);         \
  template void run_mha_fwd_splitkv_dispatch<Type, head_dim, is_causal>(Flash_fwd_params&, cudaStream_t); \
  template void run_mha_bwd_<Type, head_dim, is_causal>(Flash_bwd_params&, cudaStream_t);
#define HEAD_DIMS(Type, is_causal)                                                            \
  KERNELS(Type, 32, is_causal) KERNELS(Type, 64, is_causal) KERNELS(Type, 96, is_causal)      \
  KERNELS(Type, 128, is_causal) KERNELS(Type, 192, is_causal) KERNELS(Type, 256, is_causal)
HEAD_DIMS(cutlass::half_t, true)
HEAD_DIMS(cutlass::half_t, false)
HEAD_DIMS(cutlass::bfloat16_t, true)
HEAD_DIMS(cutlass::bfloat16_t, false)
}  // namespace FLASH_NAMESPACE
