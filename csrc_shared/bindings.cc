// unified_ddp._core: the header-only core for Python. Only names, dtypes, shapes and indices cross, never tensors.
#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

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

std::vector<Arrival> to_arrivals(const nb::bytes& bytes) {
  const char* data = bytes.c_str();
  std::vector<Arrival> arrivals(bytes.size());
  for (std::size_t i = 0; i < arrivals.size(); ++i) {
    auto value = static_cast<std::uint8_t>(data[i]);
    if (value > 2) throw ReadinessError("an arrival is 0 (unknown), 1 (once) or 2 (never), not " + std::to_string(value));
    arrivals[i] = static_cast<Arrival>(value);
  }
  return arrivals;
}

Assignment to_assignment(std::vector<std::uint32_t> params) { return {std::move(params), 0}; }

void bind_schema(nb::module_& m) {
  nb::class_<ParamSpec>(m, "ParamSpec")
      .def(nb::init<std::string, std::vector<std::int64_t>, std::string, std::vector<std::int64_t>, std::string, bool, bool>(),
           "name"_a, "shape"_a, "dtype"_a, nb::kw_only(), "strides"_a = std::vector<std::int64_t>{}, "device"_a = "cpu",
           "trainable"_a = true, "sparse"_a = false)
      .def_prop_ro("name", &ParamSpec::name)
      .def_prop_ro("shape", [](const ParamSpec& p) { return to_tuple(p.shape()); })
      .def_prop_ro("dtype", &ParamSpec::dtype)
      .def_prop_ro("strides", [](const ParamSpec& p) { return to_tuple(p.strides()); })
      .def_prop_ro("device", &ParamSpec::device)
      .def_prop_ro("trainable", &ParamSpec::trainable)
      .def_prop_ro("sparse", &ParamSpec::sparse)
      .def_prop_ro("itemsize", &ParamSpec::itemsize)
      .def_prop_ro("numel", &ParamSpec::numel)
      .def_prop_ro("nbytes", &ParamSpec::nbytes)
      .def(nb::self == nb::self)
      .def("__hash__", [](const ParamSpec& p) {
        Fingerprint fingerprint;
        p.add_to(fingerprint);
        return static_cast<std::int64_t>(fingerprint.digest() >> 1);
      })
      .def("__getstate__",
           [](const ParamSpec& p) {
             return nb::make_tuple(p.name(), p.shape(), p.dtype(), p.strides(), p.device(), p.trainable(), p.sparse());
           })
      .def("__setstate__",
           [](ParamSpec& p, const std::tuple<std::string, std::vector<std::int64_t>, std::string, std::vector<std::int64_t>,
                                             std::string, bool, bool>& s) {
             std::apply([&](auto&&... args) { new (&p) ParamSpec(args...); }, s);
           })
      .def("__repr__", [](nb::handle self) {
        return nb::str("ParamSpec({!r}, shape={}, dtype={!r})")
            .attr("format")(self.attr("name"), self.attr("shape"), self.attr("dtype"));
      });
  m.def("schema_fingerprint", &schema_fingerprint, "params"_a);
  m.def("itemsize_of", &itemsize_of, "dtype"_a);
}

void bind_plan(nb::module_& m) {
  nb::class_<BucketSpec>(m, "BucketSpec")
      .def_prop_ro("params", [](const BucketSpec& b) { return to_tuple(b.params()); })
      .def_prop_ro("offsets", [](const BucketSpec& b) { return to_tuple(b.offsets()); })
      .def_prop_ro("numel", &BucketSpec::numel)
      .def_prop_ro("nbytes", &BucketSpec::nbytes)
      .def_prop_ro("cap", &BucketSpec::cap)
      .def_prop_ro("dtype", &BucketSpec::dtype)
      .def_prop_ro("device", &BucketSpec::device)
      .def_prop_ro("sparse", &BucketSpec::sparse)
      .def("__len__", [](const BucketSpec& b) { return b.params().size(); });
  nb::class_<BucketPlan>(m, "BucketPlan")
      .def(
          "__init__",
          [](BucketPlan* self, Params params, std::vector<std::vector<std::uint32_t>> buckets,
             const std::optional<std::vector<std::int64_t>>& caps) {
            if (caps && caps->size() != buckets.size())
              throw PlanError("a plan of " + std::to_string(buckets.size()) + " buckets was given " +
                              std::to_string(caps->size()) + " caps; give one for each bucket, or none");
            std::vector<Assignment> assignments;
            for (auto& bucket : buckets) assignments.push_back(to_assignment(std::move(bucket)));
            for (std::size_t b = 0; caps && b < caps->size(); ++b) assignments[b].cap = (*caps)[b];
            new (self) BucketPlan(std::move(params), std::move(assignments));
          },
          "params"_a, "buckets"_a, "caps"_a = nb::none())
      .def_prop_ro("params", [](const BucketPlan& p) { return to_tuple(p.params()); })
      .def_prop_ro("buckets", [](const BucketPlan& p) { return to_tuple(p.buckets()); })
      .def_prop_ro("bucket_of", [](const BucketPlan& p) { return to_tuple(p.bucket_of()); })
      .def_prop_ro("fingerprint", &BucketPlan::fingerprint);
  m.def(
      "plan_buckets",
      [](Params params, const std::vector<std::int64_t>& caps, const std::optional<std::vector<std::uint32_t>>& order,
         bool reverse) {
        auto buckets = assign_buckets(params, caps, order);
        if (reverse) std::reverse(buckets.begin(), buckets.end());
        return BucketPlan(std::move(params), std::move(buckets));
      },
      "params"_a, "caps"_a, nb::kw_only(), "order"_a = nb::none(), "reverse"_a = false);
}

// The callables come in as weak references of the caller's choice: nanobind functions are invisible to the cyclic
// garbage collector, so a strong reference from here to the reducer would keep it alive for ever.
void bind_readiness(nb::module_& m) {
  nb::enum_<Phase>(m, "Phase").value("IDLE", Phase::idle).value("ARMED", Phase::armed).value("ACTIVE", Phase::active);
  nb::class_<Readiness>(m, "Readiness")
      .def(
          "__init__",
          [](Readiness* self, std::vector<std::string> names, std::vector<std::vector<std::uint32_t>> buckets,
             std::vector<bool> eager, nb::object on_start, nb::object on_bucket, nb::object on_param) {
            new (self) Readiness(std::move(names), std::move(buckets), std::move(eager),
                                 {[on_start] { on_start(); }, [on_bucket](std::uint32_t bucket) { on_bucket(bucket); },
                                  [on_param](std::uint32_t param) { on_param(param); }});
          },
          "names"_a, "buckets"_a, "eager"_a, "on_start"_a, "on_bucket"_a, "on_param"_a)
      .def_prop_ro("phase", &Readiness::phase)
      .def_prop_ro("launched", &Readiness::launched)
      .def_prop_ro("order", [](const Readiness& r) { return to_tuple(r.order()); })
      .def_prop_ro("seen_count", &Readiness::seen_count)
      .def("touched", &Readiness::touched, "param"_a)
      .def("seen", &Readiness::seen, "param"_a)
      .def("rebucket", &Readiness::rebucket, "buckets"_a)
      .def("arm", &Readiness::arm)
      .def("disarm", &Readiness::disarm)
      .def(
          "begin",
          [](Readiness& r, const std::optional<nb::bytes>& arrival) {
            r.begin(arrival ? to_arrivals(*arrival) : std::vector<Arrival>{});
          },
          "arrival"_a = nb::none())
      .def("mark", &Readiness::mark, "param"_a)
      .def(
          "hook",
          [](std::shared_ptr<Readiness> self, std::uint32_t param) {
            self->touched(param);  // refuses an index out of range here rather than in the backward pass
            return nb::cpp_function([self, param](nb::handle) { self->mark(param); });
          },
          "param"_a)
      .def("flush", &Readiness::flush)
      .def("end", &Readiness::end)
      .def("abort", &Readiness::abort)
      .def("__len__", &Readiness::size);
}

}  // namespace

NB_MODULE(_core, m) {
  nb::exception<PlanError>(m, "PlanError", PyExc_ValueError);
  nb::exception<ReadinessError>(m, "ReadinessError", PyExc_RuntimeError);
  bind_schema(m);
  bind_plan(m);
  bind_readiness(m);
}
