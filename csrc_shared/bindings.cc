// unified_ddp._core: the header-only core for Python. Only names, dtypes, shapes and indices cross, never tensors.
// Signatures and docstrings here are what the stub, made of the module when it is built, says to users.
#include "bindings.h"

#include <string>

#include "error.h"

using namespace unified_ddp;

namespace {

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

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = R"(The native core of unified_ddp. It holds names, dtypes, shapes and indices, never tensors.

Parameters and buckets are named by their index: parameters in registration order, buckets in launch order.)";
  // A program may end while a model, and so its hooks, is still alive: that is no leak to warn of.
  nb::set_leak_warnings(false);
  bind_errors(m);
  bind_plan(m);
  bind_readiness(m);
}
