// What the files of unified_ddp._core share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

namespace unified_ddp {

namespace nb = nanobind;

using Buckets = std::vector<std::vector<std::uint32_t>>;

template <class T>
using TupleOf = nb::typed<nb::tuple, T, nb::ellipsis>;

template <class T>
TupleOf<T> to_tuple(const std::vector<T>& items) {
  nb::list list;
  for (const auto& item : items) list.append(nb::cast(item));
  return TupleOf<T>(nb::tuple(list));
}

void bind_plan(nb::module_& m);
void bind_readiness(nb::module_& m);

}  // namespace unified_ddp
