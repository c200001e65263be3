// Ops on one row of floats at a time: element by element, norms, softmax, rope.
#include "isa.h"
#include "simd.h"

namespace tandem::TANDEM_ISA {
namespace {

// y[i] = f(x[i]) over a row; x may be y.
template <class F>
TANDEM_INLINE void map_row(const float *x, float *y, int64_t n, F f) {
    int64_t i = 0;
    for (; i + kWide <= n; i += kWide) {
        wide_store(y + i, f(wide_load(x + i)));
    }
    if (i < n) {
        wide_store(y + i, f(wide_load(x + i, n - i)), n - i);
    }
}

template <class F>
TANDEM_INLINE void zip_row(const float *a, const float *b, float *y, int64_t n, F f) {
    int64_t i = 0;
    for (; i + kWide <= n; i += kWide) {
        wide_store(y + i, f(wide_load(a + i), wide_load(b + i)));
    }
    if (i < n) {
        wide_store(y + i, f(wide_load(a + i, n - i), wide_load(b + i, n - i)), n - i);
    }
}

// Sum over a row of f(x): sixteen lanes along the row, then the lanes. f(0) must be 0.
template <class F>
TANDEM_INLINE float reduce_row(const float *x, int64_t n, F add) {
    Wide total = wide(0.0f);
    int64_t i = 0;
    for (; i + kWide <= n; i += kWide) {
        total = add(total, wide_load(x + i));
    }
    if (i < n) {
        total = add(total, wide_load(x + i, n - i));
    }
    return sum(total);
}

template <class F>
TANDEM_INLINE void broadcast_row(const float *a, const float *b, int64_t n_b, float *y, int64_t n, F f) {
    if (n_b == n) {
        return zip_row(a, b, y, n, f);
    }
    if (n_b == 1) {
        const Wide scalar = wide(*b);
        return map_row(a, y, n, [&](Wide v) { return f(v, scalar); });
    }
    for (int64_t i = 0; i < n; i += n_b) {
        zip_row(a + i, b, y + i, n_b, f);
    }
}

TANDEM_INLINE Wide relu(Wide x) { return select(x > wide(0.0f), x, wide(0.0f)); }
TANDEM_INLINE Wide silu(Wide x) { return x / (wide(1.0f) + exp(-x)); }
TANDEM_INLINE Wide gelu(Wide x) {
    const Wide inner = wide(0.79788456080286535588f) * x * fma(wide(0.044715f) * x, x, wide(1.0f));
    return wide(0.5f) * x * (wide(1.0f) + tanh(inner));
}
TANDEM_INLINE Wide gelu_quick(Wide x) { return x * sigmoid(wide(1.702f) * x); }
TANDEM_INLINE Wide clip(Wide x, Wide low, Wide high) {
    const Wide bounded = select(x < low, low, x);
    return select(bounded > high, high, bounded);
}
TANDEM_INLINE Wide hardsigmoid(Wide x) {
    return clip((x + wide(3.0f)) / wide(6.0f), wide(0.0f), wide(1.0f));
}

// ln x for the softplus; from libm, lane by lane: it is rare and must be the same everywhere.
TANDEM_INLINE Wide each_lane(Wide x, float (*f)(float)) {
    float lanes[kWide];
    wide_store(lanes, x);
    for (float &lane : lanes) {
        lane = f(lane);
    }
    return wide_load(lanes);
}

// erf by Abramowitz and Stegun 7.1.26 would be too coarse; libm's is used.
TANDEM_INLINE Wide gelu_erf(Wide x) {
    const Wide e = each_lane(x * wide(0.70710678118654752440f), scalar_functions().erf);
    return wide(0.5f) * x * (wide(1.0f) + e);
}

}  // namespace

void binary_row(Op op, const float *a, const float *b, int64_t n_b, float *y, int64_t n) {
    switch (op) {
        case Op::ADD: return broadcast_row(a, b, n_b, y, n, [](Wide p, Wide q) { return p + q; });
        case Op::SUB: return broadcast_row(a, b, n_b, y, n, [](Wide p, Wide q) { return p - q; });
        case Op::MUL: return broadcast_row(a, b, n_b, y, n, [](Wide p, Wide q) { return p * q; });
        case Op::DIV: return broadcast_row(a, b, n_b, y, n, [](Wide p, Wide q) { return p / q; });
        default: return;
    }
}

void scale_row(const float *x, float *y, int64_t n, float s, float b) {
    // One rounding more than a fused form, and the same as scaling alone when b is zero.
    const Wide factor = wide(s);
    if (b == 0.0f) {
        return map_row(x, y, n, [&](Wide v) { return v * factor; });
    }
    map_row(x, y, n, [&](Wide v) { return v * factor + wide(b); });
}

void clamp_row(const float *x, float *y, int64_t n, float low, float high) {
    map_row(x, y, n, [&](Wide v) { return clip(v, wide(low), wide(high)); });
}

void unary_row(Unary op, const float *p, const float *x, float *y, int64_t n) {
    const Wide zero = wide(0.0f), one = wide(1.0f);
    const ScalarFunctions &libm = scalar_functions();
    const auto by_lane = [&](float (*f)(float)) { map_row(x, y, n, [f](Wide v) { return each_lane(v, f); }); };
    switch (op) {
        case Unary::ABS: return map_row(x, y, n, [](Wide v) { return abs(v); });
        case Unary::SGN:
            return map_row(x, y, n, [&](Wide v) { return select(v > zero, one, select(v < zero, -one, zero)); });
        case Unary::NEG: return map_row(x, y, n, [](Wide v) { return -v; });
        case Unary::STEP: return map_row(x, y, n, [&](Wide v) { return select(v > zero, one, zero); });
        case Unary::TANH: return map_row(x, y, n, [](Wide v) { return tanh(v); });
        case Unary::ELU: return by_lane(libm.elu);
        case Unary::RELU: return map_row(x, y, n, [](Wide v) { return relu(v); });
        case Unary::SIGMOID: return map_row(x, y, n, [](Wide v) { return sigmoid(v); });
        case Unary::GELU: return map_row(x, y, n, [](Wide v) { return gelu(v); });
        case Unary::GELU_QUICK: return map_row(x, y, n, [](Wide v) { return gelu_quick(v); });
        case Unary::SILU: return map_row(x, y, n, [](Wide v) { return silu(v); });
        case Unary::HARDSWISH: return map_row(x, y, n, [](Wide v) { return v * hardsigmoid(v); });
        case Unary::HARDSIGMOID: return map_row(x, y, n, [](Wide v) { return hardsigmoid(v); });
        case Unary::EXP: return map_row(x, y, n, [](Wide v) { return exp(v); });
        case Unary::EXPM1: return by_lane(libm.expm1);
        case Unary::SOFTPLUS: return by_lane(libm.softplus);
        case Unary::GELU_ERF: return map_row(x, y, n, [](Wide v) { return gelu_erf(v); });
        case Unary::XIELU:
            for (int64_t i = 0; i < n; ++i) {
                y[i] = libm.xielu(x[i], p[0], p[1], p[2], p[3]);
            }
            return;
        case Unary::FLOOR: return by_lane(libm.floor);
        case Unary::CEIL: return by_lane(libm.ceil);
        case Unary::ROUND: return by_lane(libm.round);
        case Unary::TRUNC: return by_lane(libm.trunc);
    }
}

void glu_row(Glu op, const float *a, const float *b, float *y, int64_t n, float alpha, float limit) {
    switch (op) {
        case Glu::REGLU: return zip_row(a, b, y, n, [](Wide p, Wide q) { return relu(p) * q; });
        case Glu::GEGLU: return zip_row(a, b, y, n, [](Wide p, Wide q) { return gelu(p) * q; });
        case Glu::SWIGLU: return zip_row(a, b, y, n, [](Wide p, Wide q) { return silu(p) * q; });
        case Glu::SWIGLU_OAI:
            return zip_row(a, b, y, n, [&](Wide p, Wide q) {
                const Wide x = select(p > wide(limit), wide(limit), p);
                const Wide g = clip(q, wide(-limit), wide(limit));
                return x * sigmoid(wide(alpha) * x) * (g + wide(1.0f));
            });
        case Glu::GEGLU_ERF: return zip_row(a, b, y, n, [](Wide p, Wide q) { return gelu_erf(p) * q; });
        case Glu::GEGLU_QUICK: return zip_row(a, b, y, n, [](Wide p, Wide q) { return gelu_quick(p) * q; });
        case Glu::SWIGLU_CLAMP:
            return zip_row(a, b, y, n, [&](Wide p, Wide q) {
                const Wide x = select(p > wide(limit), wide(limit), p);
                return silu(x) * clip(q, wide(-limit), wide(limit));
            });
    }
}

float sum_row(const float *x, int64_t n) {
    return reduce_row(x, n, [](Wide total, Wide v) { return total + v; });
}

void rms_norm_row(const float *x, float *y, int64_t n, float eps) {
    const float squares = reduce_row(x, n, [](Wide total, Wide v) { return fma(v, v, total); });
    const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
    map_row(x, y, n, [&](Wide v) { return v * wide(scale); });
}

void norm_row(const float *x, float *y, int64_t n, float eps) {
    const Wide mean = wide(sum_row(x, n) / static_cast<float>(n));
    float squares = 0.0f;
    {
        Wide total = wide(0.0f);
        int64_t i = 0;
        for (; i + kWide <= n; i += kWide) {
            const Wide v = wide_load(x + i) - mean;
            total = fma(v, v, total);
        }
        if (i < n) {
            float tail[kWide] = {};
            wide_store(tail, wide_load(x + i, n - i) - mean, n - i);
            const Wide v = wide_load(tail);
            total = fma(v, v, total);
        }
        squares = sum(total);
    }
    const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
    map_row(x, y, n, [&](Wide v) { return (v - mean) * wide(scale); });
}

void l2_norm_row(const float *x, float *y, int64_t n, float eps) {
    const float squares = reduce_row(x, n, [](Wide total, Wide v) { return fma(v, v, total); });
    const float length = __builtin_sqrtf(squares);
    const float scale = 1.0f / (length > eps ? length : eps);
    map_row(x, y, n, [&](Wide v) { return v * wide(scale); });
}

// softmax(scale * x + slope * mask) with an optional sink that only joins the maximum and the sum.
void softmax_row(const float *x, const float *mask, float *y, int64_t n, float scale, float slope, const float *sink) {
    float largest = sink ? *sink : -__builtin_inff();
    const Wide low = wide(-__builtin_inff());
    Wide top = low;
    for (int64_t i = 0; i < n; i += kWide) {
        Wide z = wide_load(x + i, n - i) * wide(scale);
        if (mask) {
            const Wide m = wide_load(mask + i, n - i);
            z = select(m == low, low, fma(wide(slope), m, z));  // what is hidden may be NaN
        }
        wide_store(y + i, z, n - i);
        if (n - i < kWide) {
            float lanes[kWide];
            wide_store(lanes, z);
            for (int64_t j = n - i; j < kWide; ++j) {
                lanes[j] = -__builtin_inff();
            }
            z = wide_load(lanes);
        }
        top = max(z, top);
    }
    const float row_max = max_lane(top);
    largest = row_max > largest ? row_max : largest;
    if (largest == -__builtin_inff()) {  // nothing to look at: zeros instead of NaN
        return map_row(y, y, n, [](Wide) { return wide(0.0f); });
    }
    map_row(y, y, n, [&](Wide z) { return exp(z - wide(largest)); });
    float total = sum_row(y, n);
    if (sink) {
        float lanes[kWide];
        wide_store(lanes, exp(wide(*sink - largest)));
        total += lanes[0];
    }
    const Wide inverse = wide(1.0f / total);
    map_row(y, y, n, [&](Wide p) { return p * inverse; });
}

// `table` holds cos and sin of each pair, already times the magnitude: cos in the first n_dims / 2 places, then sin.
void rope_row(const float *x, float *y, const float *table, int64_t n_dims, int64_t n, int64_t first, bool neighbours,
              int64_t distance) {
    const int64_t half = n_dims / 2;
    const float *cosines = table;
    const float *sines = table + half;
    if (y != x) {
        std::memcpy(y, x, n * sizeof(float));
    }
    float *p = y + first;
    if (neighbours) {
        for (int64_t i = 0; i < half; ++i) {
            const float a = p[2 * i], b = p[2 * i + 1];
            p[2 * i] = a * cosines[i] - b * sines[i];
            p[2 * i + 1] = a * sines[i] + b * cosines[i];
        }
        return;
    }
    int64_t i = 0;
    for (; i + kWide <= half; i += kWide) {
        const Wide a = wide_load(p + i), b = wide_load(p + distance + i);
        const Wide c = wide_load(cosines + i), s = wide_load(sines + i);
        wide_store(p + i, a * c - b * s);
        wide_store(p + distance + i, a * s + b * c);
    }
    for (; i < half; ++i) {
        const float a = p[i], b = p[distance + i];
        p[i] = a * cosines[i] - b * sines[i];
        p[distance + i] = a * sines[i] + b * cosines[i];
    }
}

void f16_to_f32(const uint16_t *x, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + kWide <= n; i += kWide) {
        wide_store(y + i, wide_load_f16(x + i));
    }
    if (i < n) {
        uint16_t padded[kWide] = {};
        std::memcpy(padded, x + i, (n - i) * sizeof(uint16_t));
        wide_store(y + i, wide_load_f16(padded), n - i);
    }
}

void f32_to_f16(const float *x, uint16_t *y, int64_t n) {
    int64_t i = 0;
    for (; i + kWide <= n; i += kWide) {
        wide_store_f16(y + i, wide_load(x + i));
    }
    if (i < n) {
        uint16_t padded[kWide];
        wide_store_f16(padded, wide_load(x + i, n - i));
        std::memcpy(y + i, padded, (n - i) * sizeof(uint16_t));
    }
}

}  // namespace tandem::TANDEM_ISA
