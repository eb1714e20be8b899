// Readiness for Python. Its callables come in as weak references of the caller's choice: Readiness and its hooks are
// invisible to the cyclic garbage collector, and hooks live as long as the parameters they are registered on, so a
// strong reference from here to the reducer, and from it to the parameters, would keep all three for ever.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings.h"
#include "readiness.h"

using namespace nanobind::literals;
using namespace unified_ddp;

namespace {

std::vector<bool> to_once(const Readiness& readiness, const nb::bytes& arrival) {
  std::vector<bool> once(arrival.size());
  for (std::size_t i = 0; i < once.size(); ++i) {
    auto value = static_cast<std::uint8_t>(arrival.c_str()[i]);
    if (value > 1)
      throw ReadinessError(
          "parameter '" + (i < readiness.size() ? readiness.name(static_cast<std::uint32_t>(i)) : "?") +
          "' was given the arrival " + std::to_string(value) + "; give 0 (it may come) or 1 (it comes once)");
    once[i] = value == 1;
  }
  return once;
}

}  // namespace

void unified_ddp::bind_readiness(nb::module_& m) {
  nb::enum_<Phase>(m, "Phase", "Where a backward pass stands.")
      .value("IDLE", Phase::idle)
      .value("ARMED", Phase::armed)
      .value("ACTIVE", Phase::active);
  nb::class_<Readiness>(m, "Readiness", R"(Counts the gradients of a backward pass and launches buckets in plan order.

An error in a callback, and a gradient that comes too late, fail the backward pass: nothing more is launched in it, and
only `abort` ends it.)")
      .def(
          "__init__",
          [](Readiness* self, std::vector<std::string> names, Buckets buckets, std::vector<bool> eager,
             nb::object on_start, nb::object on_bucket, nb::object on_param) {
            new (self) Readiness(std::move(names), std::move(buckets), std::move(eager),
                                 {[on_start] { on_start(); }, [on_bucket](std::uint32_t bucket) { on_bucket(bucket); },
                                  [on_param](std::uint32_t param) { on_param(param); }});
          },
          "names"_a, "buckets"_a, "eager"_a, "on_start"_a, "on_bucket"_a, "on_param"_a,
          nb::sig("def __init__(self, names: collections.abc.Sequence[str], "
                  "buckets: collections.abc.Sequence[collections.abc.Sequence[int]], "
                  "eager: collections.abc.Sequence[bool], on_start: collections.abc.Callable[[], object], "
                  "on_bucket: collections.abc.Callable[[int], object], "
                  "on_param: collections.abc.Callable[[int], object]) -> None"),
          R"(Begins idle.

Args:
    names: of the parameters, for errors.
    buckets: indices of parameters, in launch order; each index stands in exactly one bucket.
    eager: by parameter, whether `on_param` is to hear of it.
    on_start: a gradient came while armed; calls `begin` if this backward pass is to be reduced.
    on_bucket: is to launch the bucket of the given index.
    on_param: the gradient of the given eager parameter came, and its bucket is not launched.

The garbage collector does not see what is held here, so the callables must own no reducer.

Raises:
    PlanError: `eager` has another length, or a parameter stands in two buckets or in none.)")
      .def_prop_ro("phase", &Readiness::phase, "Where the backward pass stands.")
      .def_prop_ro(
          "order", [](const Readiness& r) { return to_tuple(r.order()); },
          "Parameters in the order of their first gradients in this backward pass or the last.")
      .def_prop_ro("seen_count", &Readiness::seen_count, "Number of parameters in `order`.")
      .def("touched", &Readiness::touched, "param"_a, "Returns whether a gradient came that is not reduced yet.")
      .def("seen", &Readiness::seen, "param"_a, "Returns whether a gradient came in this backward pass or the last.")
      .def("rebucket", &Readiness::rebucket, "buckets"_a, R"(Takes other buckets over the same parameters.

Raises:
    PlanError: a parameter stands in two buckets or in none.
    ReadinessError: a backward pass is under way.)")
      .def("arm", &Readiness::arm, "Lets the next gradient start a backward pass, through `on_start`.")
      .def("disarm", &Readiness::disarm, "Lets gradients accumulate without being reduced.")
      .def(
          "begin",
          [](Readiness& r, const std::optional<nb::bytes>& arrival) {
            r.begin(arrival ? to_once(r, *arrival) : std::vector<bool>{});
          },
          "arrival"_a = nb::none(), R"(Starts a backward pass.

Args:
    arrival: one byte a parameter: 0 it may come, any number of times; 1 it comes exactly once. None means 0 for all.

Raises:
    ReadinessError: one is under way, or `arrival` has another length or value.)")
      .def("mark", &Readiness::mark, "param"_a, R"(Says that a gradient was accumulated.

Raises:
    ReadinessError: its bucket was launched before, or it is eager and came twice.)")
      .def(
          "hook",
          [](std::shared_ptr<Readiness> self, std::uint32_t param) {
            self->touched(param);  // refuses an index out of range here rather than in the backward pass
            return nb::cpp_function([self, param](nb::handle) { self->mark(param); });
          },
          "param"_a, nb::sig("def hook(self, param: int) -> collections.abc.Callable[[object], None]"),
          "Returns a native callable of one argument, not None, that marks `param`. It keeps this object alive.")
      .def("flush", &Readiness::flush, R"(Launches what is left, in order.

Raises:
    ReadinessError: no backward pass is under way, or an error was met in it.)")
      .def("end", &Readiness::end, R"(Ends the backward pass; what was touched no longer is.

Raises:
    ReadinessError: no backward pass is under way, an error was met in it, or a bucket was not launched.)")
      .def("abort", &Readiness::abort, "Gives the backward pass up, if there is one; what was touched stays so.");
}
