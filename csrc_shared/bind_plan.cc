// ParamSpec, BucketSpec and BucketPlan for Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "bindings.h"
#include "bucket_plan.h"
#include "param_schema.h"

using namespace nanobind::literals;
using namespace unified_ddp;

namespace {

using Caps = std::vector<std::int64_t>;
using Extents = std::vector<std::int64_t>;
using ParamState = std::tuple<std::string, Extents, std::string, Extents, std::string, bool, bool>;

// Python's hashes are signed, and -1 is not one of them.
std::int64_t to_hash(std::uint64_t fingerprint) { return static_cast<std::int64_t>(fingerprint >> 1); }

std::vector<Assignment> to_assignments(Buckets buckets, const std::optional<Caps>& caps) {
  if (caps && caps->size() != buckets.size())
    throw PlanError("a plan of " + std::to_string(buckets.size()) + " buckets was given " +
                    std::to_string(caps->size()) + " caps; give one for each bucket, or none");
  std::vector<Assignment> assignments;
  assignments.reserve(buckets.size());
  for (std::size_t b = 0; b < buckets.size(); ++b)
    assignments.push_back({std::move(buckets[b]), caps ? (*caps)[b] : 0});
  return assignments;
}

// Python's ParamSpec: a share of one. nanobind would wrap a plain ParamSpec in a shared pointer that holds the Python
// object, which takes 250 ns to make and drop; copying this one takes 20, and plans need no lock to drop theirs.
struct ParamHandle {
  std::shared_ptr<const ParamSpec> spec;
};

using PlanState = std::tuple<std::vector<ParamHandle>, Buckets, Caps>;

Params to_params(const std::vector<ParamHandle>& handles) {
  Params params;
  params.reserve(handles.size());
  for (const ParamHandle& handle : handles) params.push_back(handle.spec);
  return params;
}

std::vector<ParamHandle> to_handles(const Params& params) {
  std::vector<ParamHandle> handles;
  handles.reserve(params.size());
  for (const auto& param : params) handles.push_back({param});
  return handles;
}

// A property of ParamSpec; extents come as a tuple.
template <auto kGetter>
auto get(const ParamHandle& handle) {
  using Value = std::decay_t<decltype((*handle.spec.*kGetter)())>;
  if constexpr (std::is_same_v<Value, Extents>) {
    return to_tuple((*handle.spec.*kGetter)());
  } else {
    return (*handle.spec.*kGetter)();
  }
}

void make_param(ParamHandle* self, std::string name, Extents shape, std::string dtype, Extents strides,
                std::string device, bool trainable, bool sparse) {
  new (self) ParamHandle{std::make_shared<const ParamSpec>(std::move(name), std::move(shape), std::move(dtype),
                                                           std::move(strides), std::move(device), trainable, sparse)};
}

void bind_param(nb::module_& m) {
  nb::class_<ParamHandle>(
      m, "ParamSpec",
      "What the core knows of one parameter; never its values. Equal if every field is; hashable; can be pickled.")
      .def("__init__", &make_param, "name"_a, "shape"_a, "dtype"_a, nb::kw_only(), "strides"_a = nb::tuple(),
           "device"_a = "cpu", "trainable"_a = true, "sparse"_a = false, R"(Describes a parameter.

Args:
    name: full path, unique in a plan.
    shape: extents, each 0 or more.
    dtype: canonical numpy or ml_dtypes name, such as `float32` or `bfloat16`.
    strides: in elements, one a dimension; empty means row-major.
    device: kind of device, such as `cpu` or `cuda:0`; parameters of two devices share no bucket.
    trainable: whether it gets gradients.
    sparse: whether its gradient is sparse; then it is alone in its bucket.

Raises:
    PlanError: the dtype is unknown, an extent is negative, strides and shape differ in length, or the parameter is
        larger than 2^63 bytes.)")
      .def_prop_ro("name", &get<&ParamSpec::name>, "Full path, unique in a plan.")
      .def_prop_ro("shape", &get<&ParamSpec::shape>, "Extents.")
      .def_prop_ro("dtype", &get<&ParamSpec::dtype>, "Canonical numpy or ml_dtypes name.")
      .def_prop_ro("strides", &get<&ParamSpec::strides>, "In elements.")
      .def_prop_ro("device", &get<&ParamSpec::device>, "Kind of device.")
      .def_prop_ro("trainable", &get<&ParamSpec::trainable>, "Whether it gets gradients.")
      .def_prop_ro("sparse", &get<&ParamSpec::sparse>,
                   "Whether its gradient is sparse; then it is alone in its bucket.")
      .def_prop_ro("numel", &get<&ParamSpec::numel>, "Number of elements.")
      .def_prop_ro("nbytes", &get<&ParamSpec::nbytes>, "Bytes of all elements.")
      .def(
          "__eq__", [](const ParamHandle& a, const ParamHandle& b) { return *a.spec == *b.spec; }, nb::is_operator(),
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__",
           [](const ParamHandle& p) {
             Fingerprint fingerprint;
             p.spec->add_to(fingerprint);
             return to_hash(fingerprint.digest());
           })
      .def("__getstate__",
           [](const ParamHandle& p) -> ParamState {
             const ParamSpec& s = *p.spec;
             return {s.name(), s.shape(), s.dtype(), s.strides(), s.device(), s.trainable(), s.sparse()};
           })
      .def("__setstate__",
           [](ParamHandle& p, const ParamState& state) {
             std::apply([&](auto&&... fields) { make_param(&p, fields...); }, state);
           })
      .def("__repr__", [](nb::handle self) {
        return nb::str(nb::str("ParamSpec({!r}, shape={}, dtype={!r})")
                           .attr("format")(self.attr("name"), self.attr("shape"), self.attr("dtype")));
      });
  m.def(
      "schema_fingerprint",
      [](const std::vector<ParamHandle>& params) { return schema_fingerprint(to_params(params)); }, "params"_a,
      "Returns 64 bits of names, shapes, dtypes and trainable flags, whatever the order of the parameters.");
  m.def("itemsize_of", &itemsize_of, "dtype"_a,
        "Returns the bytes of one element of a dtype, by its numpy or ml_dtypes name; 0 if unknown.");
}

void bind_bucket(nb::module_& m) {
  nb::class_<BucketSpec>(m, "BucketSpec",
                         "One bucket: parameters of one dtype and device, side by side in its storage.")
      .def_prop_ro(
          "params", [](const BucketSpec& b) { return to_tuple(b.params()); },
          "Indices into the plan's parameters, in order of storage.")
      .def_prop_ro(
          "offsets", [](const BucketSpec& b) { return to_tuple(b.offsets()); },
          "Where each of `params` begins in the storage, in elements.")
      .def_prop_ro("numel", &BucketSpec::numel, "Elements of the storage.")
      .def_prop_ro("nbytes", &BucketSpec::nbytes, "Bytes of the storage.")
      .def_prop_ro("cap", &BucketSpec::cap, "The cap under which it was planned, in bytes; 0 if none.")
      .def_prop_ro("dtype", &BucketSpec::dtype, "Canonical numpy or ml_dtypes name.")
      .def_prop_ro("device", &BucketSpec::device, "Kind of device.")
      .def_prop_ro("sparse", &BucketSpec::sparse, "Whether its one parameter's gradient is sparse.")
      .def("__repr__", [](const BucketSpec& b) {
        return nb::str(nb::str("BucketSpec({} parameters, dtype={!r}, nbytes={})")
                           .attr("format")(b.params().size(), b.dtype(), b.nbytes()));
      });
}

// Python's BucketPlan. It makes each tuple once, so that `plan.params[i]` in a loop is not quadratic; what is in them
// refers to no Python object, so keeping them makes no cycle.
struct PlanObject : BucketPlan {
  explicit PlanObject(BucketPlan plan) : BucketPlan(std::move(plan)) {}
  nb::object params_tuple, buckets_tuple;
};

template <class Make>
auto once(nb::object& kept, Make&& make) {
  if (!kept.is_valid()) kept = make();
  return nb::borrow<decltype(make())>(kept);
}

void bind_bucket_plan(nb::module_& m) {
  nb::class_<PlanObject>(m, "BucketPlan", R"(Which parameters are reduced together, in which order.

Cannot be changed. Equal if parameters, buckets and caps are; hashable; can be pickled.)")
      .def(
          "__init__",
          [](PlanObject* self, const std::vector<ParamHandle>& params, Buckets buckets,
             const std::optional<Caps>& caps) {
            new (self) PlanObject(BucketPlan(to_params(params), to_assignments(std::move(buckets), caps)));
          },
          "params"_a, "buckets"_a, "caps"_a = nb::none(),
          R"(Makes a plan of given buckets; `plan_buckets` fills them by DDP's rules.

Args:
    params: in registration order.
    buckets: indices into `params`, in launch order; each index stands in exactly one bucket.
    caps: bytes, one a bucket; kept for the record.

Raises:
    PlanError: names are not unique, a bucket is empty or mixes dtypes or devices, a sparse parameter is not alone, or
        a parameter stands in two buckets or in none.)")
      .def_prop_ro(
          "params",
          [](PlanObject& p) { return once(p.params_tuple, [&] { return to_tuple(to_handles(p.params())); }); },
          "In registration order.")
      .def_prop_ro(
          "buckets", [](PlanObject& p) { return once(p.buckets_tuple, [&] { return to_tuple(p.buckets()); }); },
          "In launch order.")
      .def_prop_ro(
          "fingerprint", [](const PlanObject& p) { return p.fingerprint(); },
          R"(64 bits: equal if the same names, shapes, dtypes and trainable flags lie in the same order and places.

The same on every platform and in every framework: strides, devices and caps are left out.)")
      .def(
          "__eq__", [](const PlanObject& a, const PlanObject& b) { return a == b; }, nb::is_operator(),
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [](const PlanObject& p) { return to_hash(p.fingerprint()); })
      .def("__getstate__",
           [](const PlanObject& p) -> PlanState {
             PlanState state{to_handles(p.params()), {}, {}};
             for (const auto& bucket : p.buckets()) {
               std::get<1>(state).push_back(bucket->params());
               std::get<2>(state).push_back(bucket->cap());
             }
             return state;
           })
      .def("__setstate__",
           [](PlanObject& p, PlanState state) {
             auto& [params, buckets, caps] = state;
             new (&p) PlanObject(BucketPlan(to_params(params), to_assignments(std::move(buckets), std::move(caps))));
           })
      .def("__repr__", [](const PlanObject& p) {
        return nb::str(nb::str("BucketPlan({} parameters in {} buckets, fingerprint={:#018x})")
                           .attr("format")(p.params().size(), p.buckets().size(), p.fingerprint()));
      });
  m.def(
      "plan_buckets",
      [](const std::vector<ParamHandle>& handles, const Caps& caps,
         const std::optional<std::vector<std::uint32_t>>& order, bool reverse) {
        Params params = to_params(handles);
        auto buckets = assign_buckets(params, caps, order);
        if (reverse) std::reverse(buckets.begin(), buckets.end());
        return PlanObject(BucketPlan(std::move(params), std::move(buckets)));
      },
      "params"_a, "caps"_a, nb::kw_only(), "order"_a = nb::none(), "reverse"_a = false,
      R"(Fills buckets by the rules of `torch.distributed._compute_bucket_assignment_by_size`.

Args:
    params: in registration order.
    caps: bytes; parameters of each dtype and device walk through them on their own, and the last one repeats.
    order: indices into `params`, each once, in the order in which they are taken. Buckets then come as they fill.
        None takes them as registered, and sorts buckets by their first parameter.
    reverse: turns the order of the buckets around.

Raises:
    PlanError: no cap, a negative one, an order that is not a permutation, or names that are not unique.)");
}

}  // namespace

void unified_ddp::bind_plan(nb::module_& m) {
  bind_param(m);
  bind_bucket(m);
  bind_bucket_plan(m);
}
