// Which parameters are reduced together, in which order, and where each lies in its bucket's storage.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"
#include "fingerprint.h"
#include "param_schema.h"

namespace unified_ddp {

struct Assignment {
  std::vector<std::uint32_t> params;  // in storage order
  std::int64_t cap;                   // bytes; 0 for a sparse parameter, which has none
};

// The rules of torch's compute_bucket_assignment_by_size: parameters are taken in `order`; those of one dtype and
// device fill a bucket until it holds at least its cap in bytes; each dtype and device walks through `caps` on its own,
// and the last cap repeats; a sparse parameter is a bucket of its own. Without `order` parameters come as registered
// and buckets are sorted by their first parameter; with one, buckets come as they fill, unfinished ones at the end in
// the order of their first parameter. Linear in the number of parameters.
inline std::vector<Assignment> assign_buckets(const Params& params, const std::vector<std::int64_t>& caps,
                                              const std::optional<std::vector<std::uint32_t>>& order) {
  if (caps.empty()) throw PlanError("no bucket cap was given; give at least one, in bytes");
  for (std::int64_t cap : caps)
    if (cap < 0) throw PlanError("the bucket cap " + std::to_string(cap) + " is negative; give a size in bytes");

  std::vector<std::uint32_t> sequence;
  if (order) {
    sequence = *order;
    std::vector<bool> seen(params.size(), false);
    for (std::uint32_t index : sequence) {
      if (index >= params.size() || seen[index])
        throw PlanError("the order given is not a permutation of the " + std::to_string(params.size()) +
                        " parameters: " + std::to_string(index) + " is out of range or stands in it twice");
      seen[index] = true;
    }
    if (sequence.size() != params.size()) {
      auto missing = static_cast<std::size_t>(std::find(seen.begin(), seen.end(), false) - seen.begin());
      throw PlanError("the order given lacks parameter '" + params[missing]->name() +
                      "'; it must name every parameter once");
    }
  } else {
    sequence.resize(params.size());
    std::iota(sequence.begin(), sequence.end(), 0);
  }

  struct Open {
    std::vector<std::uint32_t> params;
    std::int64_t bytes = 0;
    std::size_t cap = 0;        // index into caps
    std::size_t opened_at = 0;  // position in sequence of the first parameter
  };
  std::map<std::pair<std::string_view, std::string_view>, Open> open;
  std::vector<Assignment> result;
  for (std::size_t position = 0; position < sequence.size(); ++position) {
    std::uint32_t index = sequence[position];
    const ParamSpec& param = *params[index];
    if (param.sparse()) {
      result.push_back({{index}, 0});
      continue;
    }
    Open& bucket = open[{param.dtype(), param.device()}];
    if (bucket.params.empty()) bucket.opened_at = position;
    bucket.params.push_back(index);
    // Never past the cap before the sum, so comparing with what is left cannot overflow where adding could.
    std::int64_t left = caps[bucket.cap] - bucket.bytes;
    if (param.nbytes() < left) {
      bucket.bytes += param.nbytes();
    } else {
      result.push_back({std::move(bucket.params), caps[bucket.cap]});
      bucket = Open{{}, 0, std::min(bucket.cap + 1, caps.size() - 1), 0};
    }
  }
  std::vector<Open*> rest;
  for (auto& [key, bucket] : open)
    if (!bucket.params.empty()) rest.push_back(&bucket);
  std::sort(rest.begin(), rest.end(), [](Open* a, Open* b) { return a->opened_at < b->opened_at; });
  for (Open* bucket : rest) result.push_back({std::move(bucket->params), caps[bucket->cap]});
  if (!order)
    std::sort(result.begin(), result.end(),
              [](const Assignment& a, const Assignment& b) { return a.params.front() < b.params.front(); });
  return result;
}

class BucketSpec {
 public:
  BucketSpec(const Params& params, Assignment assignment)
      : params_(std::move(assignment.params)), cap_(assignment.cap), first_(params[params_.front()]) {
    offsets_.reserve(params_.size());
    for (std::uint32_t index : params_) {
      const ParamSpec& param = *params[index];
      if (param.dtype() != first_->dtype() || param.device() != first_->device())
        throw PlanError("parameters '" + first_->name() + "' and '" + param.name() +
                        "' differ in dtype or device and cannot share a bucket");
      if (param.sparse() && params_.size() > 1)
        throw PlanError("the sparse parameter '" + param.name() + "' shares a bucket; it must be alone in one");
      if (param.numel() >
          std::numeric_limits<std::int64_t>::max() / static_cast<std::int64_t>(param.itemsize()) - numel_)
        throw PlanError("the bucket of parameter '" + param.name() + "' is larger than 2^63 bytes; give a smaller cap");
      offsets_.push_back(numel_);
      numel_ += param.numel();
    }
  }

  const std::vector<std::uint32_t>& params() const { return params_; }
  const std::vector<std::int64_t>& offsets() const { return offsets_; }  // in elements, one for each of params()
  std::int64_t numel() const { return numel_; }
  std::int64_t nbytes() const { return numel_ * static_cast<std::int64_t>(first_->itemsize()); }
  std::int64_t cap() const { return cap_; }
  const std::string& dtype() const { return first_->dtype(); }
  const std::string& device() const { return first_->device(); }
  bool sparse() const { return first_->sparse(); }

  // The same places under the same cap; whether the parameters are equal is for the plan to say.
  bool same_places(const BucketSpec& other) const { return params_ == other.params_ && cap_ == other.cap_; }

 private:
  std::vector<std::uint32_t> params_;
  std::vector<std::int64_t> offsets_;
  std::int64_t numel_ = 0;
  std::int64_t cap_;
  std::shared_ptr<const ParamSpec> first_;
};

class BucketPlan {
 public:
  // `buckets` holds indices into `params`; every parameter stands in exactly one bucket.
  BucketPlan(Params params, std::vector<Assignment> buckets) : params_(std::move(params)) {
    require_unique_names(params_);
    std::vector<bool> placed(params_.size(), false);
    buckets_.reserve(buckets.size());
    for (Assignment& assignment : buckets) {
      if (assignment.params.empty()) throw PlanError("a bucket is empty; leave it out");
      for (std::uint32_t index : assignment.params) {
        if (index >= params_.size())
          throw PlanError("a bucket names parameter number " + std::to_string(index) + " of " +
                          std::to_string(params_.size()));
        if (placed[index])
          throw PlanError("parameter '" + params_[index]->name() +
                          "' stands in two places of the plan; one bucket must hold it");
        placed[index] = true;
      }
      buckets_.push_back(std::make_shared<const BucketSpec>(params_, std::move(assignment)));
    }
    auto missing = std::find(placed.begin(), placed.end(), false);
    if (missing != placed.end())
      throw PlanError("parameter '" + params_[static_cast<std::size_t>(missing - placed.begin())]->name() +
                      "' stands in no bucket; every parameter must be reduced");
  }

  const Params& params() const { return params_; }
  const std::vector<std::shared_ptr<const BucketSpec>>& buckets() const { return buckets_; }

  // Parameters in order of storage, bucket by bucket: two plans agree if and only if they reduce the same
  // parameters in the same order and places.
  std::uint64_t fingerprint() const {
    Fingerprint fingerprint;
    fingerprint.add(std::string_view("unified_ddp.plan.1"));
    fingerprint.add(static_cast<std::uint64_t>(buckets_.size()));
    for (const auto& bucket : buckets_) {
      fingerprint.add(static_cast<std::uint64_t>(bucket->params().size()));
      for (std::uint32_t index : bucket->params()) params_[index]->add_to(fingerprint);
    }
    return fingerprint.digest();
  }

  bool operator==(const BucketPlan& other) const {
    return std::equal(params_.begin(), params_.end(), other.params_.begin(), other.params_.end(),
                      [](const auto& a, const auto& b) { return a == b || *a == *b; }) &&
           std::equal(buckets_.begin(), buckets_.end(), other.buckets_.begin(), other.buckets_.end(),
                      [](const auto& a, const auto& b) { return a->same_places(*b); });
  }

 private:
  Params params_;
  std::vector<std::shared_ptr<const BucketSpec>> buckets_;
};

}  // namespace unified_ddp
