"""For one rank that runs alone: answers in the place of all other ranks, in torch.distributed's rendezvous,
in gloo and where Python objects are exchanged.

Every other rank has what this one has. What only another rank could say is unknown, and stays as it is.
"""

import copy
import os
from importlib import import_module

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d

_kept = []
"""Stores: torch.distributed's C++ alone would not keep the Python part of one alive."""


def install():
    """Answer for the other ranks. To be called once, after torch.distributed is imported."""
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    for scheme in ("env", "tcp", "file"):
        handlers[scheme] = _answer_for_all
    c10d.ProcessGroupGloo = _Gloo
    FakeProcessGroup._set_sequence_number_for_group = lambda group: None
    for function in (all_gather_object, gather_object, broadcast_object_list, scatter_object_list):
        for module in (c10d, dist):
            setattr(module, function.__name__, function)


def save_own_part(default_planner):
    """Have PyTorch's checkpoints written as with `no_dist`: this rank's parts of the tensors are saved, and
    the plan is not checked for the other ranks' parts."""
    wrapper = import_module("torch.distributed.checkpoint.utils")._DistWrapper
    original = wrapper.__init__

    def without_others(self, group, use_dist, coordinator_rank):
        original(self, group, False, coordinator_rank)

    wrapper.__init__ = without_others
    default_planner._validate_global_plan = lambda global_plan, metadata: []


def answer_a_stage(module):
    """Answer for the neighbours of a stage of a pipeline, which would send it the shapes of its tensors: its
    gradients have the shapes of its outputs, and its inputs those that the program gives."""
    stage = module.PipelineStage
    if not hasattr(stage, "_recv_meta"):  # an older PyTorch
        return

    def receive_shapes(self, of_stage):
        if of_stage > self.stage_index:
            return module._StageBackwardMeta(module._derive_grad_metas(self._stage_meta.outputs))
        if self._user_meta.inputs is None:
            raise RuntimeError(
                f"stage {self.stage_index} of a pipeline runs alone on this virtual GPU, and the shapes of "
                f"its inputs are what stage {of_stage} would tell it. Give them, of one micro batch: "
                "PipelineStage(..., input_args=torch.empty(..., device='meta')). Or run a process for each "
                "stage."
            )
        return module._StageForwardMeta(self._user_meta.inputs)

    def vote(self, has_backward=False, received_acc=None, received_result=None):
        """The result of the stages' vote whether all shapes are static, as if all vote as this one does."""
        if received_result is None:
            static = not module.InferenceMode.needs_dynamic(self._user_meta, has_backward)
            received_result = torch.tensor([int(static)], dtype=torch.int32, device=self.device)
        return received_result

    stage._recv_meta, stage._send_meta = receive_shapes, lambda self, meta, to_stage: None
    stage._warmup_forward_vote = stage._warmup_backward_result = vote


class _IsFake(type):
    def __instancecheck__(cls, instance):
        return isinstance(instance, FakeProcessGroup)


class _Gloo(metaclass=_IsFake):
    """In the place of gloo, which would connect to the other ranks: PyTorch's own process group for tests,
    which moves nothing."""

    def __new__(cls, store, rank, size, **_):  # the rest: timeout; since 2.15 enable_reconfigure
        return FakeProcessGroup._create_internal(rank, size)


def all_gather_object(object_list, obj, group=None, **_):
    for rank in range(len(object_list)):
        object_list[rank] = _as_sent(obj)


def gather_object(obj, object_gather_list=None, *_, **__):
    for rank in range(len(object_gather_list or [])):
        object_gather_list[rank] = _as_sent(obj)


def broadcast_object_list(object_list, *_, **__):
    """Leaves the list as it is: another rank's objects are not known, nor how large they would be."""


def scatter_object_list(
    scatter_object_output_list, scatter_object_input_list=None, src=None, group=None, **_
):
    if scatter_object_input_list:
        scatter_object_output_list[0] = _as_sent(scatter_object_input_list[dist.get_rank(group)])


def _as_sent(thing):
    """A copy: a rank that receives an object has one of its own."""
    return copy.deepcopy(thing)


def _answer_for_all(url, timeout=None, **_):
    """A rendezvous handler: yields the store, the rank and the world size, as soon as it is asked."""
    store = _Store()
    _kept.append(store)
    yield store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    raise RuntimeError("a rank that runs alone cannot form the group anew")


class _Store(dist.Store):
    """The key-value store that ranks share. A key that only another rank would write has zeros at once."""

    def __init__(self):
        super().__init__()
        self._found = {}

    def set(self, key, value):
        self._found[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key):
        return self._found.get(key, bytes(128))

    def add(self, key, amount):
        total = int(self._found.get(key, b"0")) + amount
        self._found[key] = str(total).encode()
        return total

    def compare_set(self, key, expected, desired):
        if self._found.get(key, b"") == expected:
            self._found[key] = desired
        return self._found.get(key, expected)

    def check(self, keys):
        return all(key in self._found for key in keys)

    def wait(self, keys, timeout=None):
        return None

    def delete_key(self, key):
        return self._found.pop(key, None) is not None

    def append(self, key, value):
        self._found[key] = self._found.get(key, b"") + bytes(value)

    def multi_get(self, keys):
        return [self.get(key) for key in keys]

    def multi_set(self, keys, values):
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self):
        return True

    def clone(self):
        return self

    def num_keys(self):
        return len(self._found)

    def set_timeout(self, timeout):
        return None
