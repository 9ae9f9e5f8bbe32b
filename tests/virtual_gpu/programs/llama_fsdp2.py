"""A hand-written loop over FSDP2: `llama_fsdp2.py CONFIG BATCH LENGTH`, a Llama of transformers.

Every block and the root sharded, bf16 over fp32 weights, gradients reduced in fp32, blocks checkpointed,
gradients clipped, AdamW. Started by torchrun, or as one rank alone.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
config, batch, length = AutoConfig.from_pretrained(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
model.gradient_checkpointing_enable({"use_reentrant": False})
model.config.use_cache = False
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.model.layers:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device="cuda").train()  # a checkpoint would be loaded here, shard by shard
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(3):
    ids = torch.randint(config.vocab_size, (batch, length)).cuda()
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
allocated, reserved = (f"{peak / 2**30:.2f} GiB" for peak in peaks)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: allocated {allocated}, reserved {reserved}")
dist.destroy_process_group()
