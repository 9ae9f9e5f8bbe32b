// flash-attn 2 with kernels that do nothing: defined before flash_api.cpp, they are made for whatever it launches.
#include <cuda_runtime.h>

#include "namespace_config.h"

#include "flash.h"

namespace FLASH_NAMESPACE {
template <typename Type, int head_dim, bool is_causal>
void run_mha_fwd_(Flash_fwd_params&, cudaStream_t) {}
template <typename Type, int head_dim, bool is_causal>
void run_mha_fwd_splitkv_dispatch(Flash_fwd_params&, cudaStream_t) {}
template <typename Type, int head_dim, bool is_causal>
void run_mha_bwd_(Flash_bwd_params&, cudaStream_t) {}
}  // namespace FLASH_NAMESPACE

#include "flash_api.cpp"
