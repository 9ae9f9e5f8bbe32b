"""One rank that runs alone: the rendezvous, gloo and the exchange of objects, answered for all the others.

They have what this one has. What only another rank could say, nobody knows: it stays what it is here.
"""

import copy
import os
from importlib import import_module

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d

_kept = []


def install():
    """Answer for the others. To be called once, after torch.distributed is imported."""
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    for scheme in ("env", "tcp", "file"):
        handlers[scheme] = _answer_for_all
    c10d.ProcessGroupGloo = _Gloo
    FakeProcessGroup._set_sequence_number_for_group = lambda group: None
    for function in (all_gather_object, gather_object, broadcast_object_list, scatter_object_list):
        for module in (c10d, dist):
            setattr(module, function.__name__, function)


class _IsFake(type):
    def __instancecheck__(cls, instance):
        return isinstance(instance, FakeProcessGroup)


class _Gloo(metaclass=_IsFake):
    """In the place of gloo, which would connect to the others: PyTorch's own group that moves nothing."""

    def __new__(cls, store, rank, size, **_):  # timeout; since 2.15 enable_reconfigure
        return FakeProcessGroup._create_internal(rank, size)


def all_gather_object(object_list, obj, group=None, **_):
    for rank in range(len(object_list)):
        object_list[rank] = _as_sent(obj)


def gather_object(obj, object_gather_list=None, *_, **__):
    for rank in range(len(object_gather_list or [])):
        object_gather_list[rank] = _as_sent(obj)


def broadcast_object_list(object_list, *_, **__):
    """What another rank would say, their size to begin with, nobody knows."""


def scatter_object_list(
    scatter_object_output_list, scatter_object_input_list=None, src=None, group=None, **_
):
    if scatter_object_input_list:
        scatter_object_output_list[0] = _as_sent(scatter_object_input_list[dist.get_rank(group)])


def _as_sent(thing):
    return copy.deepcopy(thing)


def _answer_for_all(url, timeout=None, **_):
    store = _Store()
    _kept.append(store)  # C++ alone would not keep what Python says of it
    yield store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    raise RuntimeError("a rank that runs alone cannot form the group anew")


class _Store(dist.Store):
    """What the others would write is there as soon as it is asked for."""

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
