// flash-attn 3 (hopper/) with kernels that do nothing, as in flash_attn_2.cpp.
#include <cuda_runtime.h>

#include "flash.h"

template <
    int arch, typename Type, int head_dim, int value_dim, bool split, bool paged, bool has_softcap, bool pack_gqa>
void run_mha_fwd_(Flash_fwd_params&, cudaStream_t) {}
template <typename Type, typename Partial, int block>
void run_mha_fwd_combine_(Flash_fwd_params&, cudaStream_t, bool) {}
template <int arch, typename Type, int head_dim, bool has_softcap>
void run_mha_bwd_(Flash_bwd_params&, cudaStream_t) {}
void prepare_varlen_num_blocks(Flash_fwd_params&, cudaStream_t, bool, int, int, bool) {}

#include "flash_api.cpp"
