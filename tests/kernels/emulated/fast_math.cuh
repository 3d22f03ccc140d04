// In place of csrc's.
#pragma once

#include <cmath>

namespace trtspec {

inline float exp2_of(float x) { return std::exp2(x); }
inline float inverse_of(float x) { return 1.0f / x; }
inline float better(float score, float than) {
  return std::isnan(score) || std::isnan(than) ? NAN : std::max(score, than);
}

}  // namespace trtspec
