// Tells the clock which operator of PyTorch launches a thread's kernels, with its shapes. PyTorch calls `begin` and
// `end` around every call of its dispatcher (ATen/record_function.h), as it does for torch.profiler. The first call of
// a description goes to Python, which estimates what its kernels take together; after that it is found by its hash.
#include "clock.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <sstream>
#include <string_view>
#include <unordered_map>

namespace {

using c10::DispatchKey;
using c10::IValue;

// What decides whether an operator is described to the clock. Of operators that call one another it is the outermost
// that has kernels of its own; one that autocast only casts for is not.
struct Kind {
  std::string name, overload;
  bool is_operator = false, has_kernels = false, is_cast = false, is_embedding = false;
};
struct Known {  // an operator with shapes that was described
  Operation* what = nullptr;
  std::string inputs;  // in JSON, for the estimate
};

std::mutex lock;
std::unordered_map<const char*, Kind> kinds;  // by the name in the schema, which lies where the schema does
std::unordered_map<uint64_t, Known> known;
void (*estimate)(Operation*, const char* inputs, const char* products);

// What this thread has found before, so that it takes no lock. Elements of the two maps are never moved.
constexpr size_t SEEN = 1 << 13;
struct SeenKind {
  const char* name;
  const Kind* kind;
};
struct SeenKnown {
  uint64_t hash;
  Known* known;
};
thread_local SeenKind seen_kinds[SEEN];
thread_local SeenKnown seen_known[SEEN];

thread_local std::vector<Touch> touches;  // of the operator that runs
thread_local double missed_now;           // the share of its bytes that it waits for memory for

struct Context : at::ObserverContext {
  static void operator delete(void*) {}  // each thread has one, which is never freed
};
thread_local Context context;
thread_local bool is_inside = false;
thread_local Known* known_now;

const Kind& kind_of(const at::RecordFunction& function) {
  const char* name = function.name();
  SeenKind& seen = seen_kinds[((uintptr_t)name >> 4) % SEEN];
  if (seen.name == name) return *seen.kind;
  std::lock_guard<std::mutex> guard(lock);
  Kind& kind = kinds[name];
  if (kind.name == name) {
    if (kind.is_operator) seen = {name, &kind};
    return kind;
  }
  kind = {name};  // of a new name, or of one whose memory another name had before, which was no operator
  if (auto named = function.operator_name()) {
    kind.overload = named->overload_name;
    kind.is_operator = true;
    auto handle = c10::Dispatcher::singleton().findSchema(*named);
    bool is_collective = kind.name.find("c10d") != std::string::npos;  // nccl.c puts it on the stream itself
    if (handle && !is_collective) {
      for (auto key : {DispatchKey::CUDA, DispatchKey::CompositeExplicitAutograd,
                       DispatchKey::CompositeExplicitAutogradNonFunctional})
        kind.has_kernels |= handle->hasKernelForDispatchKey(key);
      kind.is_embedding = kind.name == "aten::embedding";
      kind.is_cast = handle->hasKernelForDispatchKey(DispatchKey::AutocastCUDA);
      for (const auto& result : handle->schema().returns())  // a view launches nothing
        if (result.alias_info() && !result.alias_info()->isWrite()) kind.has_kernels = false;
    }
  }
  return kind;
}

void mix(uint64_t& hash, uint64_t value) { hash = (hash ^ value) * 0x9E3779B97F4A7C15ull ^ hash >> 29; }

// False for a tensor that stands for others: the operators on those are described instead.
bool mix_tensor(uint64_t& hash, const at::Tensor& tensor) {
  if (!tensor.defined()) return mix(hash, 1), true;
  if (tensor.key_set().has(DispatchKey::Python)) return false;
  mix(hash, (uint64_t)tensor.scalar_type() << 8 | (uint64_t)tensor.device().type());
  if (tensor.layout() != c10::kStrided) return true;
  for (auto size : tensor.sizes()) mix(hash, size);
  for (auto stride : tensor.strides()) mix(hash, ~stride);
  return true;
}
bool mix_value(uint64_t& hash, const IValue& value) {
  if (value.isTensor()) return mix_tensor(hash, value.toTensor());
  if (value.isInt()) return mix(hash, value.toInt()), true;
  if (value.isBool()) return mix(hash, 2 + value.toBool()), true;
  if (value.isIntList()) {
    for (int64_t each : value.toIntList()) mix(hash, each);
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorList())
      if (!mix_tensor(hash, each)) return false;
  } else if (value.isList()) {
    for (const IValue& each : value.toListRef())
      if (!mix_value(hash, each)) return false;
  } else {
    mix(hash, value.isNone());
  }
  return true;
}

// These write JSON, from which the time is estimated: of numbers that no description has, those of the first call.
void write(std::ostream& to, const IValue& value);
void write(std::ostream& to, c10::IntArrayRef values) {
  to << '[';
  for (size_t i = 0; i < values.size(); i++) to << (i ? "," : "") << values[i];
  to << ']';
}
void write(std::ostream& to, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != c10::kStrided) {
    to << (tensor.defined() ? "\"sparse\"" : "null");
    return;
  }
  to << "{\"dtype\":\"" << c10::toString(tensor.scalar_type()) << "\",\"device\":\"" << tensor.device().type() << "\",\"sizes\":";
  write(to, tensor.sizes());
  to << ",\"strides\":";
  write(to, tensor.strides());
  to << '}';
}
template <class List>
void write_list(std::ostream& to, const List& values) {
  to << '[';
  bool is_first = true;
  for (const auto& value : values) {
    if (!is_first) to << ',';
    is_first = false;
    write(to, IValue(value));
  }
  to << ']';
}
void write(std::ostream& to, const IValue& value) {
  if (value.isTensor()) write(to, value.toTensor());
  else if (value.isInt()) to << value.toInt();
  else if (value.isBool()) to << (value.toBool() ? "true" : "false");
  else if (value.isDouble() && std::isfinite(value.toDouble())) to << value.toDouble();
  else if (value.isString() && value.toStringRef().find_first_of("\"\\") == std::string::npos)
    to << '"' << value.toStringRef() << '"';
  else if (value.isList()) write_list(to, value.toListRef());
  else to << "null";
}

// ---- what an operator touches

constexpr int64_t SMALLEST = 32 << 10, SHARED = 64 << 20;  // bytes: see harness/simulate/l2_cache.py
void touch(const at::Tensor& tensor, int argument) {
  if (!tensor.defined() || !tensor.is_cuda() || tensor.layout() != c10::kStrided || !tensor.has_storage()) return;
  int64_t bytes = tensor.itemsize();
  auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t i = 0; i < sizes.size(); i++)
    if (strides[i] || !sizes[i]) bytes *= sizes[i];  // an expanded tensor is read once
  if (bytes < SMALLEST) return;
  const auto& storage = tensor.storage();
  uint64_t place = (uint64_t)storage.data();
  if ((int64_t)storage.nbytes() > SHARED) place += tensor.storage_offset() * tensor.itemsize();
  touches.push_back({place, (double)bytes, argument, 0, 0});
}
void touch(const IValue& value, int argument) {
  if (value.isTensor()) touch(value.toTensor(), argument);
  else if (value.isTensorList())
    for (const at::Tensor& each : value.toTensorList()) touch(each, argument);
  else if (value.isList())
    for (const IValue& each : value.toListRef())
      if (each.isTensor()) touch(each.toTensor(), argument);
}
// Leaves those that the kernels read or write, by the letters of the estimate for arguments or results.
void keep_accessed(std::string_view letters) {
  auto has_none = [letters](Touch& each) {
    char letter = each.argument < (int)letters.size() ? letters[each.argument] : '-';
    each.is_read = letter == 'r' || letter == 'b', each.is_written = letter == 'w' || letter == 'b';
    return letter == '-';
  };
  touches.erase(std::remove_if(touches.begin(), touches.end(), has_none), touches.end());
}
double missed_share(const Operation* what) {
  if (!what->accesses) return 0;
  std::string_view letters = what->accesses;
  keep_accessed(letters.substr(0, letters.find('|')));
  return virtual_gpu_missed_share(touches.data(), touches.size(), what->results);
}
void see_results(Operation* what, const std::vector<IValue>& results) {
  if (!what->accesses) return;
  touches.clear();
  for (size_t i = 0; i < results.size(); i++) touch(results[i], i);
  std::string_view letters = what->accesses;
  keep_accessed(letters.substr(letters.find('|') + 1));
  what->results = virtual_gpu_results(touches.data(), touches.size());
}

// Tokens that the program has looked up in its largest embedding, which has this many rows.
std::atomic<int64_t> rows, tokens;
void count_tokens(c10::ArrayRef<const IValue> inputs) {
  const auto &table = inputs[0].toTensor(), &indices = inputs[1].toTensor();
  if (table.dim() != 2 || table.size(0) < rows) return;
  if (table.size(0) > rows) rows = table.size(0), tokens = 0;
  tokens += indices.numel();
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  if (is_inside) return nullptr;
  const Kind& kind = kind_of(function);
  if (!kind.has_kernels) return nullptr;
  auto tls = c10::impl::tls_local_dispatch_key_set();
  if (kind.is_cast && !tls.excluded_.has(DispatchKey::AutocastCUDA)) return nullptr;
  if (tls.included_.has(DispatchKey::Python) && !tls.excluded_.has(DispatchKey::Python)) return nullptr;
  // whether a checkpointed block runs again: within backward, and recording operators for it
  bool again = c10::GradMode::is_enabled() && torch::autograd::get_current_node().get() != nullptr;
  uint64_t hash = (uint64_t)function.name() + again;
  if (kind.is_embedding) count_tokens(function.inputs());
  for (const IValue& value : function.inputs())
    if (!mix_value(hash, value)) return nullptr;
  SeenKnown& seen = seen_known[hash % SEEN];
  if (seen.hash != hash || !seen.known) {
    std::lock_guard<std::mutex> guard(lock);
    seen = {hash, &known[hash]};
  }
  Known& found = *seen.known;
  if (!found.what) {
    std::lock_guard<std::mutex> guard(lock);
    std::ostringstream text, description;
    write_list(text, function.inputs());
    found.inputs = text.str();
    description << kind.name << '.' << kind.overload << ' ' << (again ? "again " : "") << found.inputs;
    found.what = virtual_gpu_operation(kind.name.c_str(), description.str().c_str());
    found.what->is_repeated = again;
  }
  is_inside = true;
  known_now = &found;
  touches.clear();
  int argument = 0;
  for (const IValue& value : function.inputs()) touch(value, argument++);
  missed_now = missed_share(found.what);
  virtual_gpu_begin_operator(found.what, missed_now);
  return std::unique_ptr<at::ObserverContext>(&context);
}

void end(const at::RecordFunction& function, at::ObserverContext* ours) {
  if (!ours) return;
  Operation* what = known_now->what;
  if (virtual_gpu_end_operator()) {
    if (what->took_ns < 0) {
      int64_t stopped = virtual_gpu_stop_clock();
      at::RecordFunctionGuard unseen(false);  // profilers shall not see the operators that estimating runs
      estimate(what, known_now->inputs.c_str(), virtual_gpu_products());
      virtual_gpu_go_on(stopped);
      missed_now = missed_share(what);
    }
    virtual_gpu_place_pending(missed_now);
  }
  see_results(what, function.outputs());
  is_inside = false;
}

}  // namespace

extern "C" int64_t virtual_gpu_tokens() { return tokens; }
extern "C" void virtual_gpu_watch_operators(void (*estimator)(Operation*, const char*, const char*)) {
  estimate = estimator;
  at::addGlobalCallback(at::RecordFunctionCallback(begin, end)
                            .needsInputs(true)
                            .needsOutputs(true)
                            .scopes({at::RecordScope::FUNCTION}));
}
