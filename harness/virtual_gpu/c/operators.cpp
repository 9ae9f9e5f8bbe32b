// Tells the clock which operator of PyTorch launches a thread's kernels, with its shapes. In front of every operator's
// CUDA kernel, in the dispatcher's table, stands one that describes the call and passes it on. The first call of a
// description goes to Python, which estimates what its kernels take together; after that it is found by its hash.
// at::RecordFunction would tell of these calls, too, and of many more, at several times the cost.
#include "arguments.h"
#include "clock.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <sstream>
#include <string_view>
#include <type_traits>
#include <unordered_map>

namespace {

// An operator with shapes that was described. Each line of the processor's cache that has to be read again is a good part
// of what a call costs: what a call needs lies together, and what was described one after the other is side by side.
struct alignas(64) Known {
  uint64_t hash = 0;
  Operation* what = nullptr;
  Known* next = nullptr;           // what followed last time, in whichever thread
  const Touch* touched = nullptr;  // the arguments that its kernels touch; null until it was estimated
  Touch few[3];                    // `touched`, if these are enough
  short num_touched = 0;
  bool writes = false;     // whether they write the first result
  char results[16] = {};   // a letter for each, as in Operation::accesses
  std::string inputs;      // in JSON, for the estimate
};
template <class Pointer>
[[gnu::always_inline]] inline Pointer* load(Pointer* const& from) { return __atomic_load_n(&from, __ATOMIC_ACQUIRE); }
template <class Pointer>
[[gnu::always_inline]] inline void store(Pointer*& to, Pointer* what) { __atomic_store_n(&to, what, __ATOMIC_RELEASE); }

std::mutex lock;
constexpr int PLACES = 13;                           // bits of a hash: its highest, which all that was mixed in decides
Known* known[1 << PLACES];                           // by hash, read without the lock
std::unordered_map<uint64_t, Known*> known_besides;  // those that came second to a place
Known*& place_in_known(uint64_t hash) { return known[hash >> (64 - PLACES)]; }
Known* new_known() {
  constexpr int TOGETHER = 256;
  static Known* side_by_side;
  static int used = TOGETHER;
  if (used == TOGETHER) side_by_side = new Known[TOGETHER], used = 0;
  return &side_by_side[used++];
}
void (*estimate)(Operation*, const char* inputs, const char* products);

// Leaves those that the kernels read or write, by the letters for arguments or results.
void keep_accessed(std::string_view letters, Touches& touches) {
  auto is_not = [letters](Touched& each) {
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
  found.writes = found.results[0] == 'w';
  found.num_touched = touches.size();
  Touch* to = touches.size() > std::size(found.few) ? new Touch[touches.size()] : found.few;
  std::copy(touches.begin(), touches.end(), to);
  store<const Touch>(found.touched, to);
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

// SafeKernelFunction calls what it holds with boxed arguments only. This names its private member: an explicit instantiation
// may, by the language's rules.
using Safe = c10::SafeKernelFunction;
using Held = c10::KernelFunction Safe::*;
Held kernel_of(const Safe&);
template <Held member>
struct Open {
  friend Held kernel_of(const Safe&) { return member; }
};
template struct Open<&Safe::kernel_>;

// An operator that was begun. Ends it.
struct Running {
  Known& found;
  Touches* touches = nullptr;  // what it touches, if it was not estimated
  bool has_ended = false;

  [[gnu::always_inline]] ~Running() {
    if (!has_ended) [[unlikely]] failed();
  }
  void returned(Values results) {
    Touches written = find_touched(results);
    keep_accessed(found.results, written);
    if (written.empty()) end(0, 0);
    else if (written.size() == 1) end(written[0].bytes, written[0].place);
    else if (!has_settled()) Together(written).told(virtual_gpu_end_operator_with);
  }
  [[gnu::always_inline]] void returned(const at::Tensor& result) {
    const c10::StorageImpl* storage = found.writes ? storage_of(result) : nullptr;  // it has it for itself
    int64_t bytes = storage ? storage->nbytes() : 0;
    if (bytes >= SMALLEST) end(bytes, place_of(result));
    else end(0, 0);
  }

 private:
  [[gnu::cold, gnu::noinline]] void failed() { end(0, 0); }
  [[gnu::always_inline]] void end(float bytes, Place place) {
    if (!has_settled()) virtual_gpu_end_operator(bytes, place);
  }
  [[gnu::always_inline]] bool has_settled() {
    has_ended = true;
    if (!virtual_gpu_thread.pending) [[likely]] return false;
    settle();
    return true;
  }
  // Puts the kernels on their streams that were launched before the operator was estimated.
  [[gnu::cold]] void settle() {
    Operation* what = found.what;
    if (what->took_ns < 0) {
      int64_t stopped = virtual_gpu_stop_clock();
      at::RecordFunctionGuard unseen(false);  // profilers shall not see the operators that estimating runs
      estimate(what, found.inputs.c_str(), virtual_gpu_products());
      virtual_gpu_go_on(stopped);
    }
    Touches none, &its = touches ? *touches : none;
    if (what->accesses) learn_accesses(found, its);
    else its.clear();
    Together(its).told(virtual_gpu_place_pending);
  }
};

// Whether a checkpointed block runs again: within backward, and recording operators for it. Between two operators that are
// recorded in one thread, backward neither begins nor ends without others that are not.
[[gnu::always_inline]] inline bool is_again() {
  enum { UNKNOWN, NO, YES };
  int& is = virtual_gpu_thread.is_again;
  if (!c10::AutogradState::get_tls_state().get_grad_mode()) return is = UNKNOWN, false;
  if (is == UNKNOWN) [[unlikely]] is = torch::autograd::get_current_graph_task_id() == -1 ? NO : YES;
  return is == YES;
}

// Stands in front of an operator's CUDA kernel.
class Watch : public c10::OperatorKernel {
 protected:
  Watch(const c10::OperatorHandle& op) : op(op), original(op.getComputedKernelForDispatchKey(DispatchKey::CUDA)) {}

  // `run` runs the kernel and returns its results.
  template <class Inputs, class Run>
  [[gnu::always_inline]] std::invoke_result_t<Run> watch(const Inputs& inputs, Run run) {
    Thread& thread = virtual_gpu_thread;
    if (thread.runs) return run();  // operators that one calls which was described are not
    if (has_new) [[unlikely]] watch_new();
    Known* last = (Known*)thread.last;
    Known* found = describe(inputs, last);
    if (!found) return run();
    __builtin_prefetch(found->what);
    if (last && load(last->next) != found) store(last->next, found);
    thread.last = found;
    __builtin_prefetch(load(found->next));
    const Touch* touched = load(found->touched);
    if (!touched) [[unlikely]] touched = learn(*found, inputs);
    if (!touched) [[unlikely]] return watch_unknown(*found, inputs, run);
    virtual_gpu_begin_operator(found->what);
    if (found->num_touched <= MOST_TOUCHED) [[likely]] {
      Call& call = virtual_gpu_call;
      call.touched = found->num_touched, call.touches = touched;
      for (int i = 0; i < found->num_touched; i++) call.places[i] = place_of(inputs.tensor(touched[i].argument, touched[i].item));
    } else {
      touch_many(*found, inputs);
    }
    Running running{*found};
    std::invoke_result_t<Run> results = run();
    running.returned(results);
    return results;
  }

  const c10::OperatorHandle op;
  const c10::SafeKernelFunction original;

 private:
  // Null for tensors that stand for others: the operators on those are described instead.
  template <class Inputs>
  [[gnu::always_inline]] Known* describe(const Inputs& inputs, const Known* last) const {
    bool again = is_again();
    uint64_t hash = (uint64_t)this + again;
    if (!inputs.mix_into(hash)) return nullptr;
    Known* found = last ? load(last->next) : nullptr;
    if (found && found->hash == hash) return found;
    found = load(place_in_known(hash));
    return found && found->hash == hash ? found : describe(Values(inputs.boxed()), hash, again);
  }
  [[gnu::cold]] Known* describe(Values inputs, uint64_t hash, bool again) const {
    std::lock_guard<std::mutex> guard(lock);
    Known*& place = place_in_known(hash);
    Known* found = place;
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
    if (!place) store(place, found);
    else known_besides[hash] = found;
    return found;
  }
  template <class Inputs>
  [[gnu::cold, gnu::noinline]] static void touch_many(const Known& found, const Inputs& inputs) {
    std::vector<Place> places;
    for (int i = 0; i < found.num_touched; i++)
      places.push_back(place_of(inputs.tensor(found.touched[i].argument, found.touched[i].item)));
    virtual_gpu_touches(found.touched, places.data(), places.size());
  }
  // What an operator touches, if it was estimated since, for another description of the same.
  template <class Inputs>
  [[gnu::cold]] static const Touch* learn(Known& found, const Inputs& inputs) {
    if (!found.what->accesses) return nullptr;
    Touches touches = find_touched(Values(inputs.boxed()));
    learn_accesses(found, touches);
    return found.touched;
  }
  // For an operator that was not estimated, or whose estimate says nothing of what it touches, which is found before: its
  // arguments are gone when it returns.
  template <class Inputs, class Run>
  [[gnu::cold]] static std::invoke_result_t<Run> watch_unknown(Known& found, const Inputs& inputs, Run run) {
    Touches touches = find_touched(Values(inputs.boxed()));
    Running running{found, &touches};
    virtual_gpu_begin_unknown(found.what);
    return run();
  }
};

struct BoxedWatch final : Watch {
  BoxedWatch(const c10::OperatorHandle& op)
      : Watch(op),
        arguments(op.schema().arguments().size()),
        results(op.schema().returns().size()),
        is_embedding(op.operator_name().name == "aten::embedding") {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    Values inputs = torch::jit::last(*stack, arguments);
    if (is_embedding && !virtual_gpu_thread.runs) count_tokens(inputs);
    watch(Boxed{inputs}, [&] {
      original.callBoxed(op, keys, stack);
      return Values(torch::jit::last(*stack, results));
    });
  }

 private:
  const unsigned short arguments, results;  // how many
  const bool is_embedding;
};

// For the operators that are called most: to box their arguments takes longer than to describe them.
template <class Type>
struct UnboxedWatch;
template <class Result, class... Arguments>
struct UnboxedWatch<Result(Arguments...)> final : Watch {
  UnboxedWatch(const c10::OperatorHandle& op) : Watch(op) {}
  Result operator()(c10::DispatchKeySet keys, Arguments... arguments) {
    Unboxed<std::decay_t<Arguments>...> inputs{{arguments...}};
    return watch(inputs, [&]() __attribute__((always_inline)) -> Result {
      return (original.*kernel_of(original)).template call<Result, Arguments...>(op, keys, arguments...);
    });
  }
};
template <class Type>
c10::KernelFunction unboxed(const c10::OperatorHandle& op) {
  op.typed<Type>();  // raises an error where its kernels are called otherwise
  return c10::KernelFunction::makeFromUnboxedFunctor<false, UnboxedWatch<Type>>(std::make_unique<UnboxedWatch<Type>>(op));
}
// The types of an operator's arguments and of its result; a "!" behind those that it writes to. Only PyTorch's own operators
// are sure to be called as their types say: "" for others.
std::string type_of(const c10::FunctionSchema& schema) {
  std::string type;
  if (!schema.name().starts_with("aten::")) return type;
  for (const auto* part : {&schema.arguments(), &schema.returns()}) {
    type += part == &schema.returns() ? "->" : "";
    for (const auto& each : *part) type += each.type()->str() + (each.alias_info() && each.alias_info()->isWrite() ? "! " : " ");
  }
  return type;
}
c10::KernelFunction watch(const c10::OperatorHandle& op) {
  using Read = const at::Tensor&;
  using Written = at::Tensor&;
  using Number = const at::Scalar&;
  using Maker = c10::KernelFunction (*)(const c10::OperatorHandle&);
  using Size = c10::SymInt;
  static const std::unordered_map<std::string, Maker> makers = {
      {"Tensor ->Tensor ", unboxed<at::Tensor(Read)>},
      {"Tensor Tensor ->Tensor ", unboxed<at::Tensor(Read, Read)>},
      {"Tensor Scalar ->Tensor ", unboxed<at::Tensor(Read, Number)>},
      {"Tensor Tensor Scalar ->Tensor ", unboxed<at::Tensor(Read, Read, Number)>},
      {"Tensor int[]? bool int? ->Tensor ", unboxed<at::Tensor(Read, at::OptionalIntArrayRef, bool, std::optional<at::ScalarType>)>},
      {"Tensor int[] int int int int ->Tensor ", unboxed<at::Tensor(Read, c10::SymIntArrayRef, int64_t, Size, Size, Size)>},
      {"Tensor! ->Tensor! ", unboxed<Written(Written)>},
      {"Tensor! Tensor ->Tensor! ", unboxed<Written(Written, Read)>},
      {"Tensor! Scalar ->Tensor! ", unboxed<Written(Written, Number)>},
      {"Tensor! Tensor Scalar ->Tensor! ", unboxed<Written(Written, Read, Number)>},
      {"Tensor! Tensor bool ->Tensor! ", unboxed<Written(Written, Read, bool)>},
  };
  auto found = makers.find(type_of(op.schema()));
  try {
    if (found != makers.end()) return found->second(op);
  } catch (const c10::Error&) {  // in another release of PyTorch
  }
  return c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<BoxedWatch>(op));
}

// Whether its kernels are to be described.
bool launches(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  if (name.find("c10d") != std::string::npos) return false;  // nccl.c puts it on the stream itself
  for (auto without : {"aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::_local_scalar_dense",
                       // these call copy_ or fill_, which is described
                       "aten::_to_copy", "aten::clone", "aten::zero_", "aten::zeros", "aten::ones", "aten::full"})
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
          name, DispatchKey::CUDA, watch(*op), std::nullopt, nullptr, "the virtual GPU's clock"));
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
