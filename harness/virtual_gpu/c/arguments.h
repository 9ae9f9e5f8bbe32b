// The arguments of an operator's call, for operators.cpp: by what calls are told apart, how they are described for an
// estimate, and which tensors kernels may touch.
#pragma once
#include "clock.h"

#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>
#include <tuple>

namespace {

using c10::DispatchKey;
using c10::IValue;
using Values = c10::ArrayRef<IValue>;
struct Touched : Touch {
  Place place;
};
using Touches = c10::SmallVector<Touched, 4>;

// ---- a hash of them

void mix(uint64_t& hash, uint64_t value) { hash = (hash ^ value) * 0x9E3779B97F4A7C15ull ^ hash >> 29; }

// False for a tensor that stands for others: the operators on those are described instead.
bool mix_value(uint64_t& hash, const at::Tensor& tensor) {
  if (!tensor.defined()) return mix(hash, 1), true;
  auto keys = tensor.key_set();  // the kind of device among them
  if (keys.has(DispatchKey::Python)) return false;
  uint64_t mixed = hash;  // in a register
  mix(mixed, keys.raw_repr() ^ (uint64_t)tensor.scalar_type() << 56);
  if (keys.has_any(c10::DispatchKeySet(DispatchKey::Dense))) [[likely]] {
    for (auto size : tensor.sizes()) mix(mixed, size);
    if (!tensor.is_contiguous())
      for (auto stride : tensor.strides()) mix(mixed, ~stride);
  }
  hash = mixed;
  return true;
}
bool mix_value(uint64_t& hash, bool value) { return mix(hash, 2 + value), true; }
bool mix_value(uint64_t& hash, const at::Scalar& value) {
  if (value.isBoolean()) return mix_value(hash, value.toBool());
  return mix(hash, value.isIntegral(false) ? value.toLong() : 0), true;
}
bool mix_value(uint64_t& hash, int64_t value) { return mix(hash, value), true; }
bool mix_value(uint64_t& hash, const c10::SymInt& value) { return mix(hash, value.as_int_unchecked()), true; }
bool mix_value(uint64_t& hash, c10::SymIntArrayRef values) {
  for (const auto& each : values) mix(hash, each.as_int_unchecked());
  return true;
}
bool mix_value(uint64_t& hash, at::OptionalIntArrayRef values) {
  mix(hash, values.has_value());
  for (int64_t each : values.value_or(at::IntArrayRef())) mix(hash, each);
  return true;
}
bool mix_value(uint64_t& hash, std::optional<at::ScalarType> value) { return mix(hash, value ? (int)*value : -1), true; }
bool mix_value(uint64_t& hash, const IValue& value) {
  if (value.isTensor()) return mix_value(hash, value.toTensor());
  if (value.isBool()) return mix_value(hash, value.toBool());
  if (value.isInt()) return mix(hash, value.toInt()), true;
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

// ---- a description of them

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
const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}
inline Place place_of(const at::Tensor& tensor) {
  const c10::StorageImpl* storage = storage_of(tensor);
  bool is_shared = (int64_t)storage->nbytes() > SHARED;
  return virtual_gpu_place_at((uint64_t)storage->data() + (is_shared ? tensor.storage_offset() * tensor.itemsize() : 0));
}
void find_touched(const at::Tensor& tensor, int argument, int item, Touches& found) {
  if (!tensor.defined() || !tensor.is_cuda() || tensor.layout() != c10::kStrided || !tensor.has_storage()) return;
  int64_t bytes = tensor.itemsize();
  auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t i = 0; i < sizes.size(); i++)
    if (strides[i] || !sizes[i]) bytes *= sizes[i];  // an expanded tensor is read once
  if (bytes >= SMALLEST) found.push_back({{(float)bytes, (short)item, (unsigned char)argument}, place_of(tensor)});
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

// Tensors and their places, as the clock takes them.
struct Together {
  std::vector<Touch> touches;
  std::vector<Place> places;
  explicit Together(const Touches& from) : touches(from.begin(), from.end()) {
    for (const Touched& each : from) places.push_back(each.place);
  }
  void told(void (*tell)(const Touch*, const Place*, int)) { tell(touches.data(), places.data(), places.size()); }
};

// ---- the call

// The arguments of a call: as values that say their types, or as they are.
struct Boxed {
  Values values;
  bool mix_into(uint64_t& hash) const {
    return std::all_of(values.begin(), values.end(), [&hash](const IValue& each) { return mix_value(hash, each); });
  }
  const at::Tensor& tensor(int argument, int item) const {
    return item < 0 ? values[argument].toTensor() : values[argument].toListRef()[item].toTensor();
  }
  Values boxed() const { return values; }
};
template <class... Types>
struct Unboxed {
  std::tuple<const Types&...> values;
  std::array<const void*, sizeof...(Types)> all =
      std::apply([](const auto&... each) { return std::array<const void*, sizeof...(Types)>{&each...}; }, values);
  bool mix_into(uint64_t& hash) const {
    return std::apply([&hash](const auto&... each) { return (mix_value(hash, each) && ...); }, values);
  }
  const at::Tensor& tensor(int argument, int) const { return *(const at::Tensor*)all[argument]; }
  std::vector<IValue> boxed() const {
    return std::apply([](const auto&... each) { return std::vector<IValue>{each...}; }, values);
  }
};
}  // namespace
