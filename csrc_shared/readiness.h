// Which gradients of one backward pass have arrived, and which buckets may be launched.
//
//        arm()            begin()              end() or abort()
//   idle ------> armed -----------> active ----------------------> idle or armed, as before
//    ^  disarm()   |                  |
//    +-------------+                  +-- mark() counts a bucket down; flush() launches what is left
//
// Buckets are launched in plan order, whatever order their gradients come in: all ranks issue the same collectives.
// A callback that throws, and a gradient that comes too late, fail the backward pass: nothing more is launched in it
// and it cannot end, only be aborted, so that a half-reduced pass never looks whole.
//
// Not thread-safe: callers hold one lock (Python's) around every call. A callback may let it go; calls that then come
// from other threads or from the callback itself find a consistent state.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "error.h"

namespace unified_ddp {

enum class Phase : std::uint8_t { idle, armed, active };

class Readiness {
 public:
  struct Callbacks {
    std::function<void()> start;  // a gradient arrived while armed: call begin() to reduce this backward pass
    std::function<void(std::uint32_t)> bucket;  // launch this bucket
    std::function<void(std::uint32_t)> param;   // an eager parameter's gradient came and its bucket is not launched
  };

  // `buckets` in launch order; `eager` marks parameters which the caller wants to hear of one by one.
  Readiness(std::vector<std::string> names, std::vector<std::vector<std::uint32_t>> buckets, std::vector<bool> eager,
            Callbacks callbacks)
      : names_(std::move(names)),
        eager_(std::move(eager)),
        callbacks_(std::move(callbacks)),
        once_(names_.size(), false),
        seen_(names_.size(), false),
        touched_(names_.size(), false) {
    if (eager_.size() != names_.size())
      throw PlanError("readiness was given " + std::to_string(eager_.size()) + " eager flags for " +
                      std::to_string(names_.size()) + " parameters; give one for each");
    rebucket(std::move(buckets));
  }

  // Takes other buckets over the same parameters, between two backward passes.
  void rebucket(std::vector<std::vector<std::uint32_t>> buckets) {
    if (phase_ == Phase::active) throw ReadinessError("buckets cannot change during a backward pass; end it first");
    constexpr auto kNone = std::numeric_limits<std::uint32_t>::max();
    std::vector<std::uint32_t> bucket_of(names_.size(), kNone);
    for (std::size_t b = 0; b < buckets.size(); ++b)
      for (std::uint32_t index : buckets[b]) {
        if (bucket_of[check(index)] != kNone)
          throw PlanError("parameter '" + names_[index] + "' stands in two buckets; one must hold it");
        bucket_of[index] = static_cast<std::uint32_t>(b);
      }
    for (std::size_t i = 0; i < bucket_of.size(); ++i)
      if (bucket_of[i] == kNone) throw PlanError("parameter '" + names_[i] + "' stands in no bucket");
    buckets_ = std::move(buckets);
    bucket_of_ = std::move(bucket_of);
    clear();
  }

  Phase phase() const { return phase_; }
  std::size_t size() const { return names_.size(); }
  const std::string& name(std::uint32_t index) const { return names_[check(index)]; }
  bool touched(std::uint32_t index) const { return touched_[check(index)]; }  // since the last end()
  bool seen(std::uint32_t index) const { return seen_[check(index)]; }        // in this backward pass

  // Parameters in the order in which their gradients first came in this backward pass.
  const std::vector<std::uint32_t>& order() const { return order_; }

  void arm() {
    resting_ = Phase::armed;
    if (phase_ == Phase::idle) phase_ = Phase::armed;
  }

  void disarm() {
    resting_ = Phase::idle;
    if (phase_ == Phase::armed) phase_ = Phase::idle;
  }

  // Number of parameters whose gradients came in this backward pass.
  std::size_t seen_count() const { return order_.size(); }

  // Starts one synchronising backward pass. `once` says by parameter whether its gradient comes exactly once, so that
  // its bucket counts on it; otherwise it may come any number of times, and the bucket waits for flush(). Empty: none.
  void begin(std::vector<bool> once) {
    if (phase_ == Phase::active)
      throw ReadinessError("a backward pass is being reduced already; end or abort it before the next begins");
    if (!once.empty() && once.size() != names_.size())
      throw ReadinessError("begin() was told of " + std::to_string(once.size()) + " parameters, but there are " +
                           std::to_string(names_.size()));
    clear();
    phase_ = Phase::active;
    once_ = std::move(once);
    once_.resize(names_.size());
    for (std::uint32_t bucket : bucket_of_) ++pending_[bucket];
  }

  // A gradient has been accumulated. The hot path: one call a parameter and backward pass.
  void mark(std::uint32_t index) {
    touched_[check(index)] = true;
    if (phase_ == Phase::armed) start();
    if (phase_ != Phase::active || failed_) return;
    std::uint32_t bucket = bucket_of_[index];
    bool first = !seen_[index];
    if (bucket < next_) refuse_late(index, "its bucket was launched");
    // Its packed gradient would lack what comes now; packing again would scale the first part twice.
    if (!first && eager_[index] && once_[index]) refuse_late(index, "it was packed");
    if (first) {
      seen_[index] = true;
      order_.push_back(index);
    }
    if (!once_[index] || !first) return;
    if (eager_[index]) {
      std::uint64_t pass = pass_;
      call([&] { callbacks_.param(index); });
      if (pass != pass_ || failed_) return;  // it gave this pass up
    }
    // A flush() under way has set it to 0 already, and launches this bucket next.
    if (pending_[bucket] > 0 && --pending_[bucket] == 0) advance();
  }

  // Launches, in order, every bucket not launched yet, whatever has arrived.
  void flush() {
    require_active("flush()");
    pending_.assign(pending_.size(), 0);
    advance();
  }

  // Ends the backward pass: everything was launched and reduced.
  void end() {
    require_active("end()");
    if (next_ != buckets_.size())
      throw ReadinessError("the backward pass ended with " + std::to_string(buckets_.size() - next_) + " of " +
                           std::to_string(buckets_.size()) + " buckets not launched; call flush() first");
    phase_ = resting_;
    touched_.assign(touched_.size(), false);
  }

  // Gives the backward pass up; what was touched stays so, for it is not reduced.
  void abort() {
    phase_ = resting_;
    clear();
  }

 private:
  void require_active(const char* what) const {
    if (phase_ != Phase::active)
      throw ReadinessError(std::string(what) + " outside a backward pass; call begin() first");
    if (failed_)
      throw ReadinessError(std::string(what) +
                           " after an error in this backward pass, whose gradients are not all reduced; "
                           "abort() it, then run it again");
  }

  [[noreturn]] void refuse_late(std::uint32_t index, const char* after) {
    failed_ = true;
    throw ReadinessError(
        "parameter '" + names_[index] + "' got another gradient after " + after +
        ", so that gradient would be lost. It is reached both by the outer graph and by a reentrant backward pass; "
        "use torch.utils.checkpoint(use_reentrant=False)");
  }

  void start() {
    try {
      callbacks_.start();
    } catch (...) {
      failed_ = phase_ == Phase::active;  // it began the pass, but this gradient is not counted in it
      throw;
    }
  }

  // Calls back; an error fails the pass in which it was made.
  template <class F>
  void call(F&& callback) {
    std::uint64_t pass = pass_;
    try {
      callback();
    } catch (...) {
      if (pass == pass_) failed_ = true;
      throw;
    }
  }

  std::uint32_t check(std::uint32_t index) const {
    if (index >= names_.size())
      throw ReadinessError("parameter number " + std::to_string(index) + " is out of range; there are " +
                           std::to_string(names_.size()));
    return index;
  }

  void clear() {
    seen_.assign(seen_.size(), false);
    pending_.assign(buckets_.size(), 0);
    order_.clear();
    next_ = 0;
    failed_ = false;
    ++pass_;
  }

  // A launch may let another thread's mark() in; that one only counts, and this loop goes on to launch in order.
  void advance() {
    if (launching_) return;
    struct Guard {
      bool& flag;
      explicit Guard(bool& f) : flag(f) { flag = true; }
      ~Guard() { flag = false; }
    } guard(launching_);
    while (phase_ == Phase::active && !failed_ && next_ < buckets_.size() && pending_[next_] == 0) {
      auto bucket = static_cast<std::uint32_t>(next_++);
      call([&] { callbacks_.bucket(bucket); });
    }
  }

  std::vector<std::string> names_;
  std::vector<std::vector<std::uint32_t>> buckets_;
  std::vector<bool> eager_;
  Callbacks callbacks_;
  std::vector<std::uint32_t> bucket_of_;
  std::vector<bool> once_;
  std::vector<bool> seen_;
  std::vector<bool> touched_;
  std::vector<std::uint32_t> pending_;
  std::vector<std::uint32_t> order_;
  std::size_t next_ = 0;
  Phase phase_ = Phase::idle;
  Phase resting_ = Phase::idle;
  bool launching_ = false;
  bool failed_ = false;
  std::uint64_t pass_ = 0;  // tells a callback's pass from one that it aborted or began
};

}  // namespace unified_ddp
