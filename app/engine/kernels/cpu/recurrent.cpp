// Linear attention and state-space scans: rows of a state, each carried through all tokens on its own.
//
// A row never needs another row of its head, so rows are what threads share; along a row the order is that of all
// kernels here: sixteen lanes, fused multiply-adds, the lanes' sum.
#include "isa.h"
#include "simd.h"

namespace tandem::TANDEM_ISA {

void exp_row(const float *x, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += kWide) {
        wide_store(y + i, exp(wide_load(x + i, n - i)), n - i);
    }
}

// The gated delta rule on one row of a state (all keys of one value): decay it, correct what it says about k towards v
// by beta, ask it with q. `out` gets one float.
void delta_row(float *s, int64_t n, const float *decay, bool decay_per_key, const float *k, const float *q, float v,
               float beta, float scale, float *out) {
    Wide known = wide(0.0f);
    for (int64_t i = 0; i < n; i += kWide) {
        const Wide factor = decay_per_key ? wide_load(decay + i, n - i) : wide(*decay);
        const Wide faded = wide_load(s + i, n - i) * factor;
        wide_store(s + i, faded, n - i);
        known = fma(faded, wide_load(k + i, n - i), known);
    }
    const Wide change = wide(beta * (v - sum(known)));
    Wide answer = wide(0.0f);
    for (int64_t i = 0; i < n; i += kWide) {
        const Wide changed = fma(wide_load(k + i, n - i), change, wide_load(s + i, n - i));
        wide_store(s + i, changed, n - i);
        answer = fma(changed, wide_load(q + i, n - i), answer);
    }
    *out = sum(answer) * scale;
}

// One row of a scan's state: s = s * decay + b * input, then s . c.
float scan_row(float *s, int64_t n, const float *decay, bool decay_per_element, const float *b, float input,
               const float *c) {
    Wide answer = wide(0.0f);
    for (int64_t i = 0; i < n; i += kWide) {
        const Wide factor = decay_per_element ? wide_load(decay + i, n - i) : wide(*decay);
        const Wide next = fma(wide_load(b + i, n - i), wide(input), wide_load(s + i, n - i) * factor);
        wide_store(s + i, next, n - i);
        answer = fma(next, wide_load(c + i, n - i), answer);
    }
    return sum(answer);
}

}  // namespace tandem::TANDEM_ISA
