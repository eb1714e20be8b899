// Errors of the core. Each message gives the cause, where it is (parameter names), and the remedy.
#pragma once

#include <stdexcept>
#include <string>

namespace unified_ddp {

// A schema or bucket plan that cannot be made from what was given. A ValueError in Python.
struct PlanError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A gradient arrived when the state of the backward pass does not allow it. A RuntimeError in Python.
struct ReadinessError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace unified_ddp
