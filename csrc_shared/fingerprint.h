// A 64-bit fingerprint, the same on every platform: FNV-1a over little-endian bytes, mixed at the end.
#pragma once

#include <cstdint>
#include <string_view>

namespace unified_ddp {

class Fingerprint {
 public:
  void add(std::uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) add_byte(static_cast<std::uint8_t>(value >> shift));
  }

  // The length goes first, so that ("ab", "c") and ("a", "bc") differ.
  void add(std::string_view text) {
    add(static_cast<std::uint64_t>(text.size()));
    for (char c : text) add_byte(static_cast<std::uint8_t>(c));
  }

  // FNV-1a alone leaves the high bits of short inputs weak; the finaliser is MurmurHash3's.
  std::uint64_t digest() const {
    std::uint64_t h = state_;
    h ^= h >> 33;
    h *= 0xff51afd7ed558ccdULL;
    h ^= h >> 33;
    h *= 0xc4ceb9fe1a85ec53ULL;
    h ^= h >> 33;
    return h;
  }

 private:
  void add_byte(std::uint8_t byte) { state_ = (state_ ^ byte) * 0x100000001b3ULL; }

  std::uint64_t state_ = 0xcbf29ce484222325ULL;
};

}  // namespace unified_ddp
