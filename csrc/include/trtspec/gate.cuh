// What stands between an expert's products: an activated gate times up.
#pragma once

#include "skinny_linear.cuh"

namespace trtspec {

struct Gate {
  bool is_gelu;  // gelu, approximated by tanh, in place of silu
  float limit;   // activated gates are at most this, and up within ± this
  float alpha;   // above 0: gates g, at most the limit, are g * sigmoid(alpha * g), and 1 is added to up
};

// Activated gate times up, both limited. (fminf would drop NaN.)
__device__ inline float gated(const Gate& p, float gate, float up) {
  const float limited = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
  if (p.alpha > 0.0f) {
    const float low = gate > p.limit ? p.limit : gate;
    return low / (1.0f + __expf(-p.alpha * low)) * (limited + 1.0f);
  }
  const float activated = activate(gate, p.is_gelu);
  return (activated > p.limit ? p.limit : activated) * limited;
}

}  // namespace trtspec
