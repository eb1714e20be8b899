// unified_ddp._core: the header-only core for Python. Only names, dtypes, shapes and indices cross, never tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bucket_plan.h"
#include "error.h"
#include "param_schema.h"
#include "readiness.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace unified_ddp;

namespace {

template <class T>
nb::tuple to_tuple(const std::vector<T>& items) {
  nb::list list;
  for (const auto& item : items) list.append(nb::cast(item));
  return nb::tuple(list);
}

// Python's hashes are signed, and -1 is not one of them.
std::int64_t to_hash(std::uint64_t fingerprint) { return static_cast<std::int64_t>(fingerprint >> 1); }

std::vector<Arrival> to_arrivals(const Readiness& readiness, const nb::bytes& bytes) {
  const char* data = bytes.c_str();
  std::vector<Arrival> arrivals(bytes.size());
  for (std::size_t i = 0; i < arrivals.size(); ++i) {
    auto value = static_cast<std::uint8_t>(data[i]);
    if (value > 2)
      throw ReadinessError(
          "parameter '" + (i < readiness.size() ? readiness.name(static_cast<std::uint32_t>(i)) : "?") +
          "' was given the arrival " + std::to_string(value) + "; give 0 (unknown), 1 (once) or 2 (never)");
    arrivals[i] = static_cast<Arrival>(value);
  }
  return arrivals;
}

using Buckets = std::vector<std::vector<std::uint32_t>>;
using Caps = std::vector<std::int64_t>;

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
  if constexpr (std::is_same_v<Value, std::vector<std::int64_t>>) {
    return to_tuple((*handle.spec.*kGetter)());
  } else {
    return (*handle.spec.*kGetter)();
  }
}

// The base of all named errors is made here, where the first of them are.
void bind_errors(nb::module_& m) {
  std::string name = nb::cast<std::string>(m.attr("__name__")) + ".UnifiedDDPError";
  nb::object base = nb::steal(PyErr_NewExceptionWithDoc(name.c_str(), "Base of all named errors.", nullptr, nullptr));
  if (!base.is_valid()) nb::raise_python_error();
  m.attr("UnifiedDDPError") = base;
  nb::exception<PlanError>(m, "PlanError", nb::make_tuple(base, nb::handle(PyExc_ValueError))).doc() =
      "A schema or bucket plan cannot be made from what was given.";
  nb::exception<ReadinessError>(m, "ReadinessError", nb::make_tuple(base, nb::handle(PyExc_RuntimeError))).doc() =
      "A gradient came, or a call was made, that the state of the backward pass does not allow.";
}

using Extents = std::vector<std::int64_t>;
using ParamState = std::tuple<std::string, Extents, std::string, Extents, std::string, bool, bool>;
using PlanState = std::tuple<std::vector<ParamHandle>, Buckets, Caps>;

void make_param(ParamHandle* self, std::string name, Extents shape, std::string dtype, Extents strides,
                std::string device, bool trainable, bool sparse) {
  new (self) ParamHandle{std::make_shared<const ParamSpec>(std::move(name), std::move(shape), std::move(dtype),
                                                           std::move(strides), std::move(device), trainable, sparse)};
}

void bind_schema(nb::module_& m) {
  nb::class_<ParamHandle>(m, "ParamSpec", "What the core knows of one parameter; never its values.")
      .def("__init__", &make_param, "name"_a, "shape"_a, "dtype"_a, nb::kw_only(), "strides"_a = Extents{},
           "device"_a = "cpu", "trainable"_a = true, "sparse"_a = false,
           "Takes a numpy or ml_dtypes dtype name, and strides in elements (row-major if empty).")
      .def_prop_ro("name", &get<&ParamSpec::name>, "Full path, unique in a plan.")
      .def_prop_ro("shape", &get<&ParamSpec::shape>, "Extents.")
      .def_prop_ro("dtype", &get<&ParamSpec::dtype>, "Canonical numpy or ml_dtypes name.")
      .def_prop_ro("strides", &get<&ParamSpec::strides>, "In elements.")
      .def_prop_ro("device", &get<&ParamSpec::device>, "Kind of device.")
      .def_prop_ro("trainable", &get<&ParamSpec::trainable>, "Whether it gets gradients.")
      .def_prop_ro("sparse", &get<&ParamSpec::sparse>,
                   "Whether its gradient is sparse; then it is alone in its bucket.")
      .def_prop_ro("itemsize", &get<&ParamSpec::itemsize>, "Bytes of one element.")
      .def_prop_ro("numel", &get<&ParamSpec::numel>, "Number of elements.")
      .def_prop_ro("nbytes", &get<&ParamSpec::nbytes>, "Bytes of all elements.")
      .def(
          "__eq__", [](const ParamHandle& a, const ParamHandle& b) { return *a.spec == *b.spec; }, nb::is_operator())
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
        return nb::str("ParamSpec({!r}, shape={}, dtype={!r})")
            .attr("format")(self.attr("name"), self.attr("shape"), self.attr("dtype"));
      });
  m.def(
      "schema_fingerprint",
      [](const std::vector<ParamHandle>& params) { return schema_fingerprint(to_params(params)); }, "params"_a,
      "64-bit fingerprint of names, shapes, dtypes and trainable flags, whatever their order.");
  m.def("itemsize_of", &itemsize_of, "dtype"_a, "Bytes of one element of a dtype, by name; 0 if unknown.");
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
      .def("__len__", [](const BucketSpec& b) { return b.params().size(); })
      .def("__repr__", [](const BucketSpec& b) {
        return nb::str("BucketSpec({} parameters, dtype={!r}, nbytes={})")
            .attr("format")(b.params().size(), b.dtype(), b.nbytes());
      });
}

// Python's BucketPlan. It makes each tuple once, so that `plan.params[i]` in a loop is not quadratic; what is in them
// refers to no Python object, so keeping them makes no cycle.
struct PlanObject : BucketPlan {
  explicit PlanObject(BucketPlan plan) : BucketPlan(std::move(plan)) {}
  nb::object params_tuple, buckets_tuple, bucket_of_tuple;
};

template <class Make>
nb::object once(nb::object& kept, Make&& make) {
  if (!kept.is_valid()) kept = make();
  return kept;
}

void bind_plan(nb::module_& m) {
  nb::class_<PlanObject>(m, "BucketPlan", "Which parameters are reduced together, in which order. Cannot be changed.")
      .def(
          "__init__",
          [](PlanObject* self, const std::vector<ParamHandle>& params, Buckets buckets,
             const std::optional<Caps>& caps) {
            new (self) PlanObject(BucketPlan(to_params(params), to_assignments(std::move(buckets), caps)));
          },
          "params"_a, "buckets"_a, "caps"_a = nb::none(),
          "Takes buckets as lists of indices into `params`, in launch order; each index stands in exactly one.")
      .def_prop_ro(
          "params",
          [](PlanObject& p) { return once(p.params_tuple, [&] { return to_tuple(to_handles(p.params())); }); },
          "In registration order.")
      .def_prop_ro(
          "buckets", [](PlanObject& p) { return once(p.buckets_tuple, [&] { return to_tuple(p.buckets()); }); },
          "In launch order.")
      .def_prop_ro(
          "bucket_of", [](PlanObject& p) { return once(p.bucket_of_tuple, [&] { return to_tuple(p.bucket_of()); }); },
          "By parameter, the index of its bucket.")
      .def_prop_ro(
          "fingerprint", [](const PlanObject& p) { return p.fingerprint(); },
          "64 bits: equal if the same parameters are reduced in the same order and places.")
      .def(
          "__eq__", [](const PlanObject& a, const PlanObject& b) { return a == b; }, nb::is_operator())
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
        return nb::str("BucketPlan({} parameters in {} buckets, fingerprint={:#018x})")
            .attr("format")(p.params().size(), p.buckets().size(), p.fingerprint());
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
      "Fills buckets by DDP's rules, taking parameters in `order`; `reverse` turns the order of the buckets around.");
}

// The callables come in as weak references of the caller's choice. Readiness and its hooks are invisible to the cyclic
// garbage collector: hooks live as long as the parameters they are registered on, so a strong reference from here to
// the reducer, and from it to the parameters, would keep all three for ever.
void bind_readiness(nb::module_& m) {
  nb::enum_<Phase>(m, "Phase", "Where a backward pass stands.")
      .value("IDLE", Phase::idle)
      .value("ARMED", Phase::armed)
      .value("ACTIVE", Phase::active);
  nb::class_<Readiness>(m, "Readiness", "Counts the gradients of a backward pass and launches buckets in plan order.")
      .def(
          "__init__",
          [](Readiness* self, std::vector<std::string> names, Buckets buckets, std::vector<bool> eager,
             nb::object on_start, nb::object on_bucket, nb::object on_param) {
            new (self) Readiness(std::move(names), std::move(buckets), std::move(eager),
                                 {[on_start] { on_start(); }, [on_bucket](std::uint32_t bucket) { on_bucket(bucket); },
                                  [on_param](std::uint32_t param) { on_param(param); }});
          },
          "names"_a, "buckets"_a, "eager"_a, "on_start"_a, "on_bucket"_a, "on_param"_a,
          "Calls on_start(), on_bucket(bucket), on_param(param); pass callables that own no reducer.")
      .def_prop_ro("phase", &Readiness::phase, "Where the backward pass stands.")
      .def_prop_ro("launched", &Readiness::launched, "Number of buckets launched in this backward pass or the last.")
      .def_prop_ro("failed", &Readiness::failed,
                   "Whether an error was met in this backward pass: only abort() ends it.")
      .def_prop_ro(
          "order", [](const Readiness& r) { return to_tuple(r.order()); },
          "Parameters in the order of their first gradients in this backward pass or the last.")
      .def_prop_ro("seen_count", &Readiness::seen_count, "Number of parameters in `order`.")
      .def("touched", &Readiness::touched, "param"_a, "Whether a gradient came that is not reduced yet.")
      .def("seen", &Readiness::seen, "param"_a, "Whether a gradient came in this backward pass or the last.")
      .def("rebucket", &Readiness::rebucket, "buckets"_a, "Takes other buckets, between two backward passes.")
      .def("arm", &Readiness::arm, "Lets the next gradient start a backward pass, through on_start().")
      .def("disarm", &Readiness::disarm, "Lets gradients accumulate without being reduced.")
      .def(
          "begin",
          [](Readiness& r, const std::optional<nb::bytes>& arrival) {
            r.begin(arrival ? to_arrivals(r, *arrival) : std::vector<Arrival>{});
          },
          "arrival"_a = nb::none(), "Starts a backward pass; by parameter: 0 may come, 1 comes once, 2 does not come.")
      .def("mark", &Readiness::mark, "param"_a, "Says that a gradient was accumulated.")
      .def(
          "hook",
          [](std::shared_ptr<Readiness> self, std::uint32_t param) {
            self->touched(param);  // refuses an index out of range here rather than in the backward pass
            return nb::cpp_function([self, param](nb::handle) { self->mark(param); });
          },
          "param"_a, "A native callable that ignores its one argument and marks `param`.")
      .def("flush", &Readiness::flush, "Launches what is left, in order.")
      .def("end", &Readiness::end, "Ends a backward pass whose buckets are all launched.")
      .def("abort", &Readiness::abort, "Gives the backward pass up, if there is one.")
      .def("__len__", &Readiness::size);
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The native core of unified_ddp. It holds names, dtypes, shapes and indices, never tensors.";
  // A program may end while a model, and so its hooks, is still alive: that is no leak to warn of.
  nb::set_leak_warnings(false);
  bind_errors(m);
  bind_schema(m);
  bind_bucket(m);
  bind_plan(m);
  bind_readiness(m);
}
