// Tests of the header-only core alone, made to run under sanitizers: planner, fingerprints, readiness.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bucket_plan.h"
#include "fingerprint.h"
#include "param_schema.h"
#include "readiness.h"

using namespace unified_ddp;

namespace {

int checks = 0;

void check(bool condition, const char* what, int line) {
  ++checks;
  if (condition) return;
  std::fprintf(stderr, "core_test.cc:%d: %s\n", line, what);
  std::exit(1);
}
#define CHECK(...) check((__VA_ARGS__), #__VA_ARGS__, __LINE__)

// Whether `act` throws an `Error` whose message holds `part`.
template <class Error, class F>
bool throws(const char* part, F&& act) {
  try {
    act();
  } catch (const Error& error) {
    return std::string(error.what()).find(part) != std::string::npos;
  }
  return false;
}

using Shape = std::vector<std::int64_t>;
using Indices = std::vector<std::uint32_t>;

std::shared_ptr<const ParamSpec> param(std::string name, Shape shape, std::string dtype = "float32",
                                       bool sparse = false) {
  return std::make_shared<const ParamSpec>(std::move(name), std::move(shape), std::move(dtype), Shape{}, "cpu", true,
                                           sparse);
}

Params params_of(std::size_t n) {
  Params params;
  for (std::size_t i = 0; i < n; ++i) params.push_back(param("p" + std::to_string(i), {10}));
  return params;
}

void test_schema() {
  CHECK(param("a", {2, 0, 3})->numel() == 0);
  CHECK(param("a", {2, 0, 3})->strides() == Shape{3, 3, 1});
  CHECK(param("a", {})->nbytes() == 4);
  CHECK(*param("a", {2}) == *param("a", {2}));
  CHECK(throws<PlanError>("'a' has the unknown dtype", [] { param("a", {2}, "float"); }));
  CHECK(throws<PlanError>("negative extent", [] { param("a", {-1}); }));
  CHECK(throws<PlanError>("larger than 2^63", [] { param("a", {std::int64_t{1} << 61}); }));
  CHECK(throws<PlanError>("larger than 2^63", [] { param("a", {std::int64_t{1} << 40, 0, std::int64_t{1} << 40}); }));
  CHECK(throws<PlanError>("two parameters are named 'p1'", [] {
    Params params = params_of(3);
    params.push_back(param("p1", {1}));
    require_unique_names(params);
  }));
  require_unique_names({});
}

void test_fingerprint() {
  Params params = params_of(5);
  Params reversed(params.rbegin(), params.rend());
  CHECK(schema_fingerprint(params) == schema_fingerprint(reversed));
  CHECK(schema_fingerprint(params) != schema_fingerprint(params_of(4)));
  CHECK(Fingerprint{}.digest() == 0xefd01f60ba992926ULL);
}

void test_planner() {
  Params params = params_of(5);
  params[2] = param("sparse", {10}, "float32", true);
  auto buckets = assign_buckets(params, {40, 80}, Indices{4, 3, 2, 1, 0});
  CHECK(buckets.size() == 4);
  CHECK(buckets[0].params == Indices{4} && buckets[0].cap == 40);
  CHECK(buckets[1].params == Indices{2} && buckets[1].cap == 0);
  CHECK(buckets[2].params == Indices{3, 1} && buckets[2].cap == 80);
  CHECK(buckets[3].params == Indices{0});
  BucketPlan plan(params, buckets);
  CHECK(plan.buckets()[2]->offsets() == Shape{0, 10});
  CHECK(plan == BucketPlan(params, buckets));
  CHECK(plan.fingerprint() != BucketPlan(params, assign_buckets(params, {40}, Indices{4, 3, 2, 1, 0})).fingerprint());

  CHECK(throws<PlanError>("no bucket cap", [&] { assign_buckets(params, {}, {}); }));
  CHECK(throws<PlanError>("lacks parameter 'p0'", [&] { assign_buckets(params, {1}, Indices{4, 3, 2, 1}); }));
  CHECK(throws<PlanError>("not a permutation", [&] { assign_buckets(params, {1}, Indices{0, 0}); }));
  CHECK(throws<PlanError>("sparse", [&] { BucketPlan(params, {{{0, 1, 2, 3, 4}, 0}}); }));
  // Sums near 2^63 bytes neither overflow in the planner nor pass as a bucket.
  Params huge{param("x", {std::int64_t{1} << 60}), param("y", {std::int64_t{1} << 60})};
  auto whole = assign_buckets(huge, {std::numeric_limits<std::int64_t>::max()}, {});
  CHECK(throws<PlanError>("'y' is larger than 2^63", [&] { BucketPlan(huge, whole); }));
}

// Readiness over `n` parameters, with callbacks that a test may set.
struct Fixture {
  explicit Fixture(std::vector<Indices> buckets, bool eager = false) {
    std::size_t n = 0;
    for (const Indices& bucket : buckets) n += bucket.size();
    std::vector<std::string> names;
    for (std::size_t i = 0; i < n; ++i) names.push_back("p" + std::to_string(i));
    once.assign(n, true);
    readiness.emplace(std::move(names), std::move(buckets), std::vector<bool>(n, eager),
                      Readiness::Callbacks{[this] { on_start(); },
                                           [this](std::uint32_t bucket) {
                                             launched.push_back(bucket);
                                             on_bucket(bucket);
                                           },
                                           [this](std::uint32_t index) { on_param(index); }});
  }
  Readiness& operator*() { return *readiness; }
  Readiness* operator->() { return &*readiness; }

  // Whether only abort() leaves this backward pass.
  bool failed() {
    return throws<ReadinessError>("after an error", [&] { readiness->end(); });
  }

  std::function<void()> on_start = [] {};
  std::function<void(std::uint32_t)> on_bucket = [](std::uint32_t) {};
  std::function<void(std::uint32_t)> on_param = [](std::uint32_t) {};
  std::vector<bool> once;
  Indices launched;
  std::optional<Readiness> readiness;
};

void test_in_order() {
  Fixture f({{3, 2}, {1, 0}});
  f.on_start = [&] { f->begin(f.once); };
  f->arm();
  for (int pass = 0; pass < 2; ++pass) {
    f.launched.clear();
    for (std::uint32_t index : {0U, 1U, 2U}) f->mark(index);
    CHECK(f.launched.empty() && f->touched(0) && f->seen(0) && !f->seen(3));
    f->mark(3);
    CHECK(f.launched == Indices{0, 1});
    CHECK(f->order() == Indices{0, 1, 2, 3});
    f->end();
    CHECK(f->phase() == Phase::armed && !f->touched(0));
  }
  f->disarm();
  f->mark(0);
  CHECK(f->phase() == Phase::idle && f->touched(0));
  CHECK(throws<ReadinessError>("out of range", [&] { f->mark(4); }));
}

void test_reentrant_marks() {
  Fixture f({{3}, {2}, {1, 0}});
  f.on_bucket = [&](std::uint32_t bucket) {
    if (bucket == 0)
      for (std::uint32_t index : {2U, 1U, 0U}) f->mark(index);
  };
  f->begin(f.once);
  f->mark(3);
  CHECK(f.launched == Indices{0, 1, 2});
  f->end();

  f.launched.clear();
  f.on_bucket = [&](std::uint32_t bucket) { f->mark(bucket == 0 ? 3 : 0); };
  f->begin(f.once);
  CHECK(throws<ReadinessError>("'p3' got another gradient after its bucket was launched", [&] { f->mark(3); }));
  CHECK(f.failed() && f.launched == Indices{0});

  // A mark that comes in while flush() launches does not hold its bucket back.
  Fixture g({{2}, {1, 0}});
  g.on_bucket = [&](std::uint32_t bucket) {
    if (bucket == 0) g->mark(1);
  };
  g->begin(g.once);
  g->flush();
  CHECK(g.launched == Indices{0, 1});
  g->end();
}

void test_errors_in_callbacks() {
  Fixture f({{2}, {1, 0}}, true);
  auto fail = [](auto...) { throw std::runtime_error("on purpose"); };
  f.on_bucket = fail;
  f->begin(f.once);
  CHECK(throws<std::runtime_error>("on purpose", [&] { f->mark(2); }));
  f->mark(1);
  f->mark(0);
  CHECK(f.launched == Indices{0} && f.failed());
  CHECK(throws<ReadinessError>("after an error", [&] { f->flush(); }));
  CHECK(throws<ReadinessError>("after an error", [&] { f->end(); }));
  CHECK(throws<ReadinessError>("already", [&] { f->begin({}); }));
  f->abort();
  CHECK(f->phase() == Phase::idle && f->touched(1) && !f->seen(1));

  f.on_bucket = [](std::uint32_t) {};
  f.on_param = fail;
  f->begin(f.once);
  CHECK(throws<std::runtime_error>("on purpose", [&] { f->mark(0); }));
  CHECK(f.failed());
  f->abort();

  f.on_start = [&] {
    f->begin(f.once);
    throw std::runtime_error("on purpose");
  };
  f->arm();
  CHECK(throws<std::runtime_error>("on purpose", [&] { f->mark(0); }));
  CHECK(f.failed() && f->phase() == Phase::active);
  f->abort();
  f.on_start = fail;
  CHECK(throws<std::runtime_error>("on purpose", [&] { f->mark(0); }));
  CHECK(f->phase() == Phase::armed);
}

void test_changes_from_inside_callbacks() {
  Fixture f({{2}, {1, 0}}, true);
  bool again = false;
  f.on_param = [&](std::uint32_t) {
    if (std::exchange(again, true)) return;
    f->abort();
    f->rebucket({{0, 1, 2}});  // fewer buckets than the mark under way knows
    f->begin(f.once);
  };
  f->begin(f.once);
  f->mark(0);
  CHECK(f->order().empty() && f.launched.empty());
  for (std::uint32_t index : {0U, 1U, 2U}) f->mark(index);
  CHECK(f.launched == Indices{0});
  f->end();

  Fixture g({{2}, {1}, {0}}, true);
  g.on_param = [&](std::uint32_t) { g->flush(); };
  g->begin(g.once);
  g->mark(0);
  CHECK(g.launched == Indices{0, 1, 2});
  g->end();

  Fixture h(std::vector<Indices>{{1}, {0}});
  bool given_up = false;
  h.on_bucket = [&](std::uint32_t) {
    if (std::exchange(given_up, true)) return;
    h->abort();
    h->begin(h.once);
    h->mark(1);
    h->mark(0);
  };
  h->begin(h.once);
  h->mark(1);
  CHECK(h.launched == Indices{0, 0, 1});
  h->end();
}

void test_arrivals() {
  Fixture f({{2}, {1, 0}});
  f->begin({false, true, true});
  for (std::uint32_t index : {1U, 0U, 0U, 1U, 2U}) f->mark(index);
  CHECK(f.launched == Indices{0} && f->seen_count() == 3);
  f->flush();
  CHECK(f.launched == Indices{0, 1});
  f->end();
  CHECK(throws<ReadinessError>("told of 1", [&] { f->begin({true}); }));
  f->begin({});
  CHECK(throws<ReadinessError>("cannot change during", [&] { f->rebucket({{0, 1, 2}}); }));
  CHECK(throws<ReadinessError>("2 of 2 buckets not launched", [&] { f->end(); }));

  Fixture empty(std::vector<Indices>{});
  empty->begin({});
  empty->flush();
  empty->end();
}

}  // namespace

int main() {
  test_schema();
  test_fingerprint();
  test_planner();
  test_in_order();
  test_reentrant_marks();
  test_errors_in_callbacks();
  test_changes_from_inside_callbacks();
  test_arrivals();
  std::printf("core_test: %d checks passed\n", checks);
}
