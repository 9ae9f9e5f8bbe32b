"""How long a program's steps take on the virtual GPU by its clock (c/clock.c): printed when the program ends
and written as JSON into the folder of `harness emulate --out`.

A step lasts from one call of an optimizer's `step` to the next. The report has the device's time and where it
went, the tokens that were looked up in the largest embedding, and FLOPs.
"""

import atexit
import ctypes
import json
import os
import sys
import time
from collections import defaultdict
from itertools import pairwise
from statistics import median_low

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_C = ctypes.CDLL(None)
_NAMES = {"BFloat16": "bf16", "Half": "fp16", "Float": "fp32"}
LARGEST = 5
"""How many operators, and how many unknown kernels, are named."""
FIRST_WORD_S = float(os.environ.get("VIRTUAL_GPU_FIRST_WORD_S", "60"))
"""Seconds after which a running program is reported on, and again after twice and four times as long."""


class Operation(ctypes.Structure):
    """The struct Operation of c/clock.h, where its fields are explained."""

    _fields_ = (
        ("took_ns", ctypes.c_int64),
        ("held_ns", ctypes.c_int64),
        ("missed_ns", ctypes.c_int64),
        ("takes", ctypes.c_int64),
        ("results", ctypes.c_float * 2),
        ("calls", ctypes.c_uint64),
        ("total_ns", ctypes.c_int64),
        ("kernels", ctypes.c_int),
        ("product", ctypes.c_short),
        ("is_network", ctypes.c_int8),
        ("at_limit", ctypes.c_int8),
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("its_class", ctypes.c_char_p),
        ("flops", ctypes.c_double),
        ("is_unknown", ctypes.c_int),
        ("is_repeated", ctypes.c_int),
        ("step_calls", ctypes.c_uint64),
        ("calls_before", ctypes.c_uint64),
        ("step_ns", ctypes.c_int64),
        ("ns_before", ctypes.c_int64),
    )


class _Account(ctypes.Structure):
    """The struct Account of c/streams.h."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("busy_ns", "host_ns", "exposed_ns", "network_ns"))


_C.virtual_gpu_device_done.restype = _C.virtual_gpu_now.restype = ctypes.c_int64
_C.virtual_gpu_waited.restype = _C.virtual_gpu_computed.restype = ctypes.c_int64
_C.virtual_gpu_ease.argtypes = [ctypes.c_double]
_C.virtual_gpu_ease.restype = None
_C.virtual_gpu_end_step.restype = ctypes.c_double
_C.virtual_gpu_most.restype = ctypes.c_uint64
_C.virtual_gpu_nth_operation.restype = ctypes.POINTER(Operation)
watching = None
"""The Times of this process; None before the clock starts."""


class Times:
    """The times of one process' steps."""

    def __init__(self, estimates):
        self.hardware, self._power = estimates.hardware, estimates.power_limit()
        self._multiplied_in = estimates.multiplied_in
        _C.virtual_gpu_ease(self._power.factor)
        self.ends = []
        """The end of each step: (ns when the device had done all its work, its account, tokens so far, the
        step's FLOPs)."""
        self._optimizer = None
        self._computed_ns = 0
        self._began_s, self._next_word_s = time.monotonic(), FIRST_WORD_S
        self._found = None
        """The report, once it is known that no further step is to be in it."""

    def watch(self):
        """Note the end of every step from now on, and report when the process ends."""
        global watching
        watching = self
        register_optimizer_step_post_hook(self._stepped)
        atexit.register(self._report)

    def conclude(self):
        """The report is of the steps until now."""
        self._found = self.found()

    def _stepped(self, optimizer, *_):
        if self._optimizer is None:
            self._optimizer = id(optimizer)
        if id(optimizer) != self._optimizer:  # of several optimizers, the first one's `step` ends a step
            return
        account = _Account()
        device = torch.cuda.current_device()
        _C.virtual_gpu_account(device, ctypes.byref(account))
        ended_ns = max(_C.virtual_gpu_device_done(device), _C.virtual_gpu_now())
        parts = account.busy_ns, account.host_ns, account.exposed_ns, account.network_ns
        if self.ends:
            self._power.after_step(
                (_C.virtual_gpu_computed() - self._computed_ns), ended_ns - self.ends[-1][0]
            )
            _C.virtual_gpu_ease(self._power.factor)
        self._computed_ns = _C.virtual_gpu_computed()
        self.ends.append((ended_ns, parts, _tokens(), _C.virtual_gpu_end_step()))
        ran_s = time.monotonic() - self._began_s
        if ran_s >= self._next_word_s and len(self.ends) > 1 and _reports():
            self._next_word_s = 2 * ran_s
            begin = f"virtual GPU: {len(self.ends)} steps in {ran_s:.0f} s of this machine, and it goes on: "
            print(begin + _in_short(self.found(), self.hardware), "Ctrl-C ends it.", file=sys.stderr)

    def found(self):
        """The report, as it is written as JSON: of the step with the median time, without the first step,
        which warms up; the operators are the last step's. None for a program of fewer than two steps."""
        steps = [
            (end - begin, [b - a for a, b in zip(first, second, strict=True)], tokens - tokens_before, did)
            for (begin, first, tokens_before, _), (end, second, tokens, did) in pairwise(self.ends)
        ]
        if not steps:
            return None
        ns = median_low(step[0] for step in steps)
        parts, tokens, did = next(step[1:] for step in steps if step[0] == ns)  # all of one step
        operations = self._operations()
        by_class, flops, repeated = defaultdict(float), defaultdict(float), 0.0
        for each in operations:
            by_class[each["class"]] += each["time_s"]
            flops[each["dtype"]] += each["flops"]
            repeated += each["flops"] * each["is_repeated"]
        names = ("busy_s", "host_gaps_s", "exposed_communication_s", "communication_s")
        found = {
            "source": "estimated",
            "step_time_s": ns * 1e-9,
            "steps": len(steps),
            **{name: part * 1e-9 for name, part in zip(names, parts, strict=True)},
            "tokens_per_s": tokens / (ns * 1e-9) if tokens else None,
            "flops": sum(flops.values()),
            "repeated_flops": repeated,
            "kernels_s": dict(sorted(by_class.items(), key=lambda item: -item[1])),
            "operations": sorted(operations, key=lambda each: -each["time_s"]),
            "unknown": sum(each["calls"] for each in operations if each["is_unknown"]),
            "calls": sum(each["calls"] for each in operations),
        }
        peak_dtype = max(flops, key=lambda dtype: flops[dtype]) if found["flops"] else None
        if peak_dtype in ("bf16", "fp16", "fp32", "tf32") and self.hardware.supports(peak_dtype):
            found["hfu"] = did / (self.hardware.peak_flops(peak_dtype) * ns * 1e-9)
            found["mfu"] = found["hfu"] * (1 - repeated / found["flops"])  # the last step's share
        return found

    def _operations(self):
        """What ran in the last step: one entry for each description of work that the clock has."""
        operations, number = [], 0
        while pointer := _C.virtual_gpu_nth_operation(number):
            number += 1
            what = pointer.contents
            if not what.step_calls:
                continue
            text = what.description.decode()
            name = what.name.decode()
            first = text.partition('"dtype":"')[2].partition('"')[0] or text.split()[1 if " " in text else 0]
            dtype = _NAMES.get(first, first)
            operations.append(
                {
                    "name": name,
                    "description": text,
                    "class": (what.its_class or b"unknown").decode(),
                    "dtype": self._multiplied_in(name, dtype) if what.flops else dtype,
                    "calls": what.step_calls,
                    "time_s": what.step_ns * 1e-9,
                    "flops": what.flops * what.step_calls / max(1, what.kernels),
                    "is_repeated": bool(what.is_repeated),
                    "is_unknown": bool(what.is_unknown),
                }
            )
        return operations

    def _report(self):
        """Print the report, and write it into the folder. It is printed where the process began to write: a
        notebook's kernel puts a stream in the place of sys.stderr that nobody reads at its end."""
        at_first = sys.__stderr__ or sys.stderr
        waited_ms = _C.virtual_gpu_waited() * 1e-6
        if _reports() and waited_ms >= 1:
            print(
                f"virtual GPU: nobody really waited {waited_ms:,.0f} ms for the device: what the program "
                "times by time.time() is shorter by it. `harness emulate --real-time` waits.",
                file=at_first,
            )
        found = self._found or self.found()
        if found is None:
            return
        rank = os.environ.get("RANK")
        if _reports():
            print("\n".join(_lines(found, self.hardware)), file=at_first)
        folder = os.environ.get("VIRTUAL_GPU_TIMES")
        if folder:
            name = f"process-{os.getpid()}" if rank is None else f"rank-{rank}-process-{os.getpid()}"
            path = os.path.join(folder, f"{name}-times.json")
            try:
                with open(path, "w", encoding="utf-8") as file:
                    json.dump(found, file, indent=1)
            except OSError as error:
                print(f"virtual GPU: cannot write {path}: {error.strerror}.", file=at_first)


def _reports():
    """Whether this process prints its report: of several ranks, the first does, or the only one that runs."""
    is_first = os.environ.get("RANK") in (None, "0") or "VIRTUAL_GPU_ALONE" in os.environ
    return is_first and os.environ.get("VIRTUAL_GPU_SUMMARY") == "1"


def _in_short(found, hardware):
    """The report in two sentences."""
    used_gib = _C.virtual_gpu_most(torch.cuda.current_device()) / 2**30
    return (
        f"a step takes {found['step_time_s'] * 1e3:.1f} ms on this {hardware.name}, estimated; the median of "
        f"{found['steps']}. Of its {hardware.memory_bytes / 2**30:.2f} GiB the process had {used_gib:.2f} at "
        "most."
    )


def _lines(found, hardware):
    """The lines of the printed report."""
    yield f"virtual GPU: {_in_short(found, hardware)}"
    rates = []
    if found["tokens_per_s"]:
        rates.append(f"{found['tokens_per_s']:,.0f} tokens/s")
    if "mfu" in found:
        rates.append(f"MFU {found['mfu']:.1%}, HFU {found['hfu']:.1%}")
    parts = [f"the device is at work {found['busy_s'] * 1e3:.1f} ms"]
    parts.append(f"waits for this machine's host {found['host_gaps_s'] * 1e3:.1f} ms")
    if found["communication_s"]:
        exposed, whole = found["exposed_communication_s"] * 1e3, found["communication_s"] * 1e3
        parts.append(f"communicates {whole:.1f} ms, of which {exposed:.1f} ms beside no kernel")
    yield f"  {'; '.join([*rates, ', '.join(parts)])}."
    classes = [f"{name} {seconds * 1e3:.1f} ms" for name, seconds in found["kernels_s"].items()]
    yield f"  By kind of kernel: {', '.join(classes)}."
    for each in found["operations"][:LARGEST]:
        yield f"  {each['time_s'] * 1e3:9.2f} ms  {each['calls']:6d} kernels  {_shown(each)}"
    if found["unknown"]:
        names = sorted({each["name"] for each in found["operations"] if each["is_unknown"]})
        yield (
            f"  Of {found['calls']} kernels {found['unknown']} are unknown, which take the time of a launch, "
            f"or of the bytes that are seen: {', '.join(names[:LARGEST])}."
        )


def _shown(each):
    """An operator and the shapes of its tensors, as "aten::mm(512x768, 768x768)"."""
    sizes = [part.partition("]")[0] for part in each["description"].split('"sizes":[')[1:4]]
    again = ", again for backward" if each["is_repeated"] else ""
    return f"{each['name']}({', '.join(size.replace(',', 'x') for size in sizes)}){again}"


def _tokens():
    """Tokens that the program has looked up in its largest embedding so far."""
    _C.virtual_gpu_tokens.restype = ctypes.c_int64
    return _C.virtual_gpu_tokens()
