// Tells the clock which operator of PyTorch launches a thread's kernels, with its shapes. In front of every operator's
// CUDA kernel, in the dispatcher's table, stands one that describes the call and passes it on. The first call of a
// description goes to Python, which estimates what its kernels take together; after that it is found by its hash.
// at::RecordFunction would tell of these calls, too, and of many more, at several times the cost.
#include "clock.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>
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
using Values = c10::ArrayRef<IValue>;
using Touches = c10::SmallVector<Touch, 4>;

// An operator with shapes that was described. Each line of the processor's cache that has to be read again is a good part
// of what a call costs: what a call needs lies together, and what was described one after the other is side by side.
struct alignas(128) Known {
  uint64_t hash = 0;
  Operation* what = nullptr;
  std::atomic<Known*> next = nullptr;  // what followed last time, in whichever thread
  std::atomic<const Touch*> touched = nullptr;  // the arguments that its kernels touch; null until it was estimated
  int num_touched = 0;
  char results[12] = {};  // a letter for each, as in Operation::accesses
  Touch few[2];           // `touched`, if these are enough
  std::string inputs;     // in JSON, for the estimate
};

std::mutex lock;
std::atomic<Known*> known[1 << 13];                  // by hash, read without the lock
std::unordered_map<uint64_t, Known*> known_besides;  // those that came second to a place
Known* new_known() {
  constexpr int TOGETHER = 256;
  static Known* side_by_side;
  static int used = TOGETHER;
  if (used == TOGETHER) side_by_side = new Known[TOGETHER], used = 0;
  return &side_by_side[used++];
}
void (*estimate)(Operation*, const char* inputs, const char* products);

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
  } else if (value.isList()) {
    mix(hash, value.toListRef().size());  // what is touched has a number in its list
    for (const IValue& each : value.toListRef())
      if (!mix_value(hash, each)) return false;
  } else {
    mix(hash, value.isString() ? std::hash<std::string>{}(value.toStringRef()) : value.isNone());
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
uint64_t place_of(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  bool is_shared = (int64_t)storage.nbytes() > SHARED;
  return (uint64_t)storage.data() + (is_shared ? tensor.storage_offset() * tensor.itemsize() : 0);
}
void find_touched(const at::Tensor& tensor, int argument, int item, Touches& found) {
  if (!tensor.defined() || !tensor.is_cuda() || tensor.layout() != c10::kStrided || !tensor.has_storage()) return;
  int64_t bytes = tensor.itemsize();
  auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t i = 0; i < sizes.size(); i++)
    if (strides[i] || !sizes[i]) bytes *= sizes[i];  // an expanded tensor is read once
  if (bytes >= SMALLEST) found.push_back({place_of(tensor), (double)bytes, (short)argument, (short)item, 0, 0});
}
Touches find_touched(Values values) {
  Touches found;
  for (size_t argument = 0; argument < values.size(); argument++) {
    const IValue& value = values[argument];
    if (value.isTensor()) find_touched(value.toTensor(), argument, -1, found);
    if (!value.isList()) continue;
    auto list = value.toListRef();
    for (size_t item = 0; item < list.size(); item++)
      if (list[item].isTensor()) find_touched(list[item].toTensor(), argument, item, found);
  }
  return found;
}
// Leaves those that the kernels read or write, by the letters for arguments or results.
void keep_accessed(std::string_view letters, Touches& touches) {
  auto is_not = [letters](Touch& each) {
    char letter = each.argument < (int)letters.size() ? letters[each.argument] : '-';
    each.is_read = letter == 'r' || letter == 'b', each.is_written = letter == 'w' || letter == 'b';
    return letter == '-';
  };
  touches.erase(std::remove_if(touches.begin(), touches.end(), is_not), touches.end());
}
// Once the operator was estimated: of these arguments, keep what its kernels touch.
void learn_accesses(Known& found, Touches& touches) {
  std::string_view letters = found.what->accesses;
  size_t end = letters.find('|');
  keep_accessed(letters.substr(0, end), touches);
  std::lock_guard<std::mutex> guard(lock);
  if (found.touched) return;
  letters.copy(found.results, sizeof found.results - 1, end + 1);
  found.num_touched = touches.size();
  Touch* to = touches.size() > std::size(found.few) ? new Touch[touches.size()] : found.few;
  std::copy(touches.begin(), touches.end(), to);
  found.touched = to;
}
// The arguments of this call that its kernels touch.
Touches touched_by(const Known& found, Values inputs) {
  Touches touches(found.touched.load(), found.touched.load() + found.num_touched);
  for (Touch& each : touches) {
    const IValue& value = inputs[each.argument];
    each.place = place_of(each.item < 0 ? value.toTensor() : value.toListRef()[each.item].toTensor());
  }
  return touches;
}
double missed_share(const Operation* what, const Touches& touches) {
  return virtual_gpu_missed_share(touches.data(), touches.size(), what->results);
}

// Tokens that the program has looked up in its largest embedding, which has this many rows.
std::atomic<int64_t> rows, tokens;
void count_tokens(Values inputs) {
  const auto &table = inputs[0].toTensor(), &indices = inputs[1].toTensor();
  if (table.dim() != 2 || table.size(0) < rows) return;
  if (table.size(0) > rows) rows = table.size(0), tokens = 0;
  tokens += indices.numel();
}

std::mutex new_lock;
std::vector<c10::OperatorName> new_operators;
std::atomic<bool> has_new;
void watch_new();

// Stands in front of an operator's CUDA kernel.
class Watch final : public c10::OperatorKernel {
 public:
  Watch(const c10::OperatorHandle& op)
      : arguments(op.schema().arguments().size()),
        results(op.schema().returns().size()),
        is_embedding(op.operator_name().name == "aten::embedding"),
        original(op.getComputedKernelForDispatchKey(DispatchKey::CUDA)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    if (has_new) watch_new();
    Values inputs = torch::jit::last(*stack, arguments);
    Thread& thread = virtual_gpu_thread;
    // operators that one calls which was described are not
    Known* last = (Known*)thread.last;
    Known* found = thread.runs ? nullptr : describe(op, inputs, last);
    if (!found) return original.callBoxed(op, keys, stack);
    __builtin_prefetch(found->what);
    if (last) last->next.store(found, std::memory_order_release);
    thread.last = found;
    __builtin_prefetch(found->next.load(std::memory_order_relaxed));
    Touches touches;  // of an operator that was not estimated: these are gone when it returns
    if (!found->touched) touches = find_touched(inputs);
    if (!found->touched && found->what->accesses) learn_accesses(*found, touches);
    virtual_gpu_begin_operator(found->what, found->touched ? missed_share(found->what, touched_by(*found, inputs)) : 0);
    try {
      original.callBoxed(op, keys, stack);
    } catch (...) {
      end(*found, touches);
      throw;
    }
    end(*found, touches);
    if (!found->touched) return;
    Touches written = find_touched(torch::jit::last(*stack, results));
    keep_accessed(found->results, written);
    found->what->results = virtual_gpu_results(written.data(), written.size());
  }

 private:
  // Null for tensors that stand for others: the operators on those are described instead.
  Known* describe(const c10::OperatorHandle& op, Values inputs, const Known* last) const {
    // whether a checkpointed block runs again: within backward, and recording operators for it
    bool again = c10::GradMode::is_enabled() && torch::autograd::get_current_node().get() != nullptr;
    uint64_t hash = (uint64_t)this + again;
    if (is_embedding) count_tokens(inputs);
    for (const IValue& value : inputs)
      if (!mix_value(hash, value)) return nullptr;
    Known* found = last ? last->next.load(std::memory_order_acquire) : nullptr;
    if (found && found->hash == hash) return found;
    std::atomic<Known*>& place = known[hash % std::size(known)];
    found = place;
    if (found && found->hash == hash) return found;
    std::lock_guard<std::mutex> guard(lock);
    found = place;
    if (found && found->hash != hash) found = known_besides[hash];
    if (found) return found;
    found = new_known();
    const auto& [name, overload] = op.operator_name();
    std::ostringstream text;
    write_list(text, inputs);
    found->inputs = text.str();
    std::string description = name + '.' + overload + (again ? " again " : " ") + found->inputs;
    // kernels/triton_kernels.py: its kernel has a name of its own
    bool is_triton = name.starts_with("harness::") && inputs.size() && inputs.back().isString();
    found->what = virtual_gpu_operation((is_triton ? inputs.back().toStringRef() : name).c_str(), description.c_str());
    found->what->is_repeated = again;
    found->hash = hash;
    if (!place) place = found;
    else known_besides[hash] = found;
    return found;
  }
  // Puts the kernels on their streams that were launched before the operator was estimated, which touch these.
  static void end(Known& found, Touches& touches) {
    if (!virtual_gpu_end_operator()) return;
    Operation* what = found.what;
    if (what->took_ns < 0) {
      int64_t stopped = virtual_gpu_stop_clock();
      at::RecordFunctionGuard unseen(false);  // profilers shall not see the operators that estimating runs
      estimate(what, found.inputs.c_str(), virtual_gpu_products());
      virtual_gpu_go_on(stopped);
    }
    if (what->accesses) learn_accesses(found, touches);
    virtual_gpu_place_pending(what->accesses ? missed_share(what, touches) : 0);
  }

  const unsigned short arguments, results;  // how many
  const bool is_embedding;
  const c10::SafeKernelFunction original;
};

// Whether its kernels are to be described.
bool launches(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  if (name.find("c10d") != std::string::npos) return false;  // nccl.c puts it on the stream itself
  for (auto without : {"aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::_local_scalar_dense"})
    if (name.starts_with(without)) return false;
  for (const auto& result : op.schema().returns())  // a view launches nothing
    if (result.alias_info() && !result.alias_info()->isWrite()) return false;
  for (auto key : {DispatchKey::CUDA, DispatchKey::CompositeExplicitAutograd,
                   DispatchKey::CompositeExplicitAutogradNonFunctional})
    if (op.hasKernelForDispatchKey(key)) return true;
  return false;
}

// Notes operators that are registered: all there are, and later those of libraries that the program imports.
struct Listener final : c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle& op) override {
    std::lock_guard<std::mutex> guard(new_lock);
    new_operators.push_back(op.operator_name());
    has_new = true;
  }
  void onOperatorDeregistered(const c10::OperatorHandle&) override {}
};
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};
void watch_new() {
  static std::mutex one_at_a_time;
  static auto& registered = *new std::vector<c10::RegistrationHandleRAII>;  // for as long as the process lives
  static std::vector<c10::OperatorName> unwatched;
  std::lock_guard<std::mutex> guard(one_at_a_time);
  std::vector<c10::OperatorName> names;
  {
    std::lock_guard<std::mutex> guard(new_lock);
    has_new = false;
    names.swap(new_operators);
  }
  names.insert(names.end(), unwatched.begin(), unwatched.end());
  unwatched.clear();
  Silent silent;  // PyTorch warns of a kernel that takes another's place
  c10::WarningUtils::WarningHandlerGuard silence(&silent);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : names) {
    auto op = dispatcher.findSchema(name);
    if (op && launches(*op))
      registered.push_back(dispatcher.registerImpl(
          name, DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Watch>(*op)), std::nullopt,
          nullptr, "the virtual GPU's clock"));
    else if (op)
      unwatched.push_back(name);  // until another library gives it a kernel
  }
}
}  // namespace

extern "C" int64_t virtual_gpu_tokens() { return tokens; }
extern "C" void virtual_gpu_watch_operators(void (*estimator)(Operation*, const char*, const char*)) {
  estimate = estimator;
  new auto(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>()));  // it listens until the end
  watch_new();
}
