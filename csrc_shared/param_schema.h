// What the core knows of a parameter: name, shape, dtype, layout, device kind, flags. Never its values.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"
#include "fingerprint.h"

namespace unified_ddp {

// Bytes of one element of a dtype given by its canonical numpy/ml_dtypes name; 0 if unknown.
inline std::size_t itemsize_of(std::string_view dtype) {
  using Row = std::pair<std::string_view, std::size_t>;
  static constexpr std::array<Row, 25> kSizes{{
      {"bool", 1},
      {"int8", 1},
      {"uint8", 1},
      {"int16", 2},
      {"uint16", 2},
      {"int32", 4},
      {"uint32", 4},
      {"int64", 8},
      {"uint64", 8},
      {"float16", 2},
      {"bfloat16", 2},
      {"float32", 4},
      {"float64", 8},
      {"complex32", 4},
      {"complex64", 8},
      {"complex128", 16},
      {"float8_e4m3fn", 1},
      {"float8_e4m3fnuz", 1},
      {"float8_e5m2", 1},
      {"float8_e5m2fnuz", 1},
      {"float8_e4m3", 1},
      {"float8_e3m4", 1},
      {"float8_e4m3b11fnuz", 1},
      {"float8_e8m0fnu", 1},
      {"float4_e2m1fn", 1},
  }};
  auto row = std::find_if(kSizes.begin(), kSizes.end(), [&](const Row& r) { return r.first == dtype; });
  return row == kSizes.end() ? 0 : row->second;
}

class ParamSpec {
 public:
  ParamSpec(std::string name, std::vector<std::int64_t> shape, std::string dtype, std::vector<std::int64_t> strides,
            std::string device, bool trainable, bool sparse)
      : name_(std::move(name)),
        shape_(std::move(shape)),
        dtype_(std::move(dtype)),
        strides_(std::move(strides)),
        device_(std::move(device)),
        trainable_(trainable),
        sparse_(sparse),
        itemsize_(itemsize_of(dtype_)),
        name_hash_(std::hash<std::string_view>{}(name_)) {
    if (itemsize_ == 0)
      throw PlanError("parameter '" + name_ + "' has the unknown dtype '" + dtype_ +
                      "'; give a numpy or ml_dtypes name such as 'float32' or 'bfloat16'");
    // Strides grow with extents of 0 counted as 1, so that product is the one that must not overflow.
    constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
    std::int64_t extents = 1;
    for (std::int64_t extent : shape_) {
      if (extent < 0)
        throw PlanError("parameter '" + name_ + "' has the negative extent " + std::to_string(extent) +
                        " in its shape; give its sizes, each 0 or more");
      if (extents > kMax / static_cast<std::int64_t>(itemsize_) / std::max<std::int64_t>(extent, 1))
        throw PlanError("parameter '" + name_ + "' is larger than 2^63 bytes; check its shape");
      extents *= std::max<std::int64_t>(extent, 1);
      numel_ *= extent;
    }
    if (strides_.empty()) {
      strides_ = row_major(shape_);
    } else if (strides_.size() != shape_.size()) {
      throw PlanError("parameter '" + name_ + "' has " + std::to_string(shape_.size()) + " dimensions but " +
                      std::to_string(strides_.size()) + " strides; give one stride for each dimension, or none");
    }
  }

  const std::string& name() const { return name_; }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  const std::string& dtype() const { return dtype_; }
  const std::vector<std::int64_t>& strides() const { return strides_; }  // in elements
  const std::string& device() const { return device_; }
  bool trainable() const { return trainable_; }
  bool sparse() const { return sparse_; }
  std::size_t name_hash() const { return name_hash_; }  // for tables in this process; differs between platforms
  std::size_t itemsize() const { return itemsize_; }
  std::int64_t numel() const { return numel_; }
  std::int64_t nbytes() const { return numel_ * static_cast<std::int64_t>(itemsize_); }

  // Name, shape, dtype and trainable only: what a torch module and a JAX pytree of the same model share.
  // Strides, device and sparsity are one framework's way of holding the same parameter.
  void add_to(Fingerprint& fingerprint) const {
    fingerprint.add(std::string_view(name_));
    fingerprint.add(static_cast<std::uint64_t>(shape_.size()));
    for (std::int64_t extent : shape_) fingerprint.add(static_cast<std::uint64_t>(extent));
    fingerprint.add(std::string_view(dtype_));
    fingerprint.add(static_cast<std::uint64_t>(trainable_));
  }

  bool operator==(const ParamSpec&) const = default;

 private:
  static std::vector<std::int64_t> row_major(const std::vector<std::int64_t>& shape) {
    std::vector<std::int64_t> strides(shape.size());
    std::int64_t step = 1;
    for (std::size_t d = shape.size(); d-- > 0;) {
      strides[d] = step;
      step *= std::max<std::int64_t>(shape[d], 1);
    }
    return strides;
  }

  std::string name_;
  std::vector<std::int64_t> shape_;
  std::string dtype_;
  std::vector<std::int64_t> strides_;
  std::string device_;
  bool trainable_;
  bool sparse_;
  std::size_t itemsize_;
  std::size_t name_hash_;
  std::int64_t numel_ = 1;
};

// Plans share their parameters instead of copying them.
using Params = std::vector<std::shared_ptr<const ParamSpec>>;

// Open addressing over hashes that were made with each name: 100,000 names take 3 ms, in a std::unordered_set 24.
inline void require_unique_names(const Params& params) {
  struct Slot {
    std::size_t hash;
    const ParamSpec* param = nullptr;
  };
  std::size_t mask = std::bit_ceil(2 * params.size() + 1) - 1;
  std::vector<Slot> table(mask + 1);
  for (const auto& param : params) {
    std::size_t at = param->name_hash() & mask;
    for (; table[at].param; at = (at + 1) & mask)
      if (table[at].hash == param->name_hash() && table[at].param->name() == param->name())
        throw PlanError("two parameters are named '" + param->name() +
                        "'; names must be unique, so give each its full path");
    table[at] = {param->name_hash(), param.get()};
  }
}

// Independent of the order of the parameters: equal for a module's registration order and a pytree's sorted leaves.
// Digests are sorted rather than names: 100,000 parameters take 15 ms instead of 100.
inline std::uint64_t schema_fingerprint(const Params& params) {
  std::vector<std::uint64_t> digests;
  digests.reserve(params.size());
  for (const auto& param : params) {
    Fingerprint one;
    param->add_to(one);
    digests.push_back(one.digest());
  }
  std::sort(digests.begin(), digests.end());
  Fingerprint all;
  all.add(std::string_view("unified_ddp.schema.1"));
  all.add(static_cast<std::uint64_t>(digests.size()));
  for (std::uint64_t digest : digests) all.add(digest);
  return all.digest();
}

}  // namespace unified_ddp
