// Matrix products of float weights: sixteen lanes along k, fused multiply-adds in order, then the lanes' sum.
#include "isa.h"
#include "simd.h"

namespace tandem::TANDEM_ISA {
namespace {

struct F32 {
    using Element = float;
    TANDEM_INLINE static Wide load(const float *p) { return wide_load(p); }
};
struct F16 {
    using Element = uint16_t;
    TANDEM_INLINE static Wide load(const uint16_t *p) { return wide_load_f16(p); }
};
struct BF16 {
    using Element = uint16_t;
    TANDEM_INLINE static Wide load(const uint16_t *p) { return wide_load_bf16(p); }
};

template <class F>
TANDEM_INLINE Wide load_end(const typename F::Element *p, int64_t n) {
    typename F::Element padded[kWide] = {};
    std::memcpy(padded, p, n * sizeof(padded[0]));
    return F::load(padded);
}

template <class F, int kRows, int kTokens>
void tile(const typename F::Element *const *w, const float *const *x, int64_t k, float *const *out) {
    Wide acc[kRows][kTokens];
    TANDEM_UNROLL
    for (int r = 0; r < kRows; ++r) {
        TANDEM_UNROLL
        for (int t = 0; t < kTokens; ++t) {
            acc[r][t] = wide(0.0f);
        }
    }
    int64_t i = 0;
    for (; i + kWide <= k; i += kWide) {
        Wide xs[kTokens];
        TANDEM_UNROLL
        for (int t = 0; t < kTokens; ++t) {
            xs[t] = wide_load(x[t] + i);
        }
        TANDEM_UNROLL
        for (int r = 0; r < kRows; ++r) {
            const Wide ws = F::load(w[r] + i);
            TANDEM_UNROLL
            for (int t = 0; t < kTokens; ++t) {
                acc[r][t] = fma(ws, xs[t], acc[r][t]);
            }
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int t = 0; t < kTokens; ++t) {
            Wide total = acc[r][t];
            if (i < k) {
                total = fma(load_end<F>(w[r] + i, k - i), load_end<F32>(x[t] + i, k - i), total);
            }
            out[t][r] = sum(total);
        }
    }
}

template <class F, int kRows>
void rows_of_tokens(const FloatMatmul &m, const typename F::Element *const *w, int64_t row, int64_t token_begin,
                    int64_t token_end) {
    constexpr int kTokens = kRows == 1 ? 1 : kParts == 1 ? 4 : 2;
    const float *x[kTokens];
    float *out[kTokens];
    const auto place = [&](int i, int64_t t) {
        x[i] = m.x + (m.x_index ? m.x_index[t] : t) * m.x_stride;
        out[i] = m.out + (m.out_index ? m.out_index[t] : t) * m.out_stride + row;
    };
    int64_t t = token_begin;
    for (; t + kTokens <= token_end; t += kTokens) {
        for (int i = 0; i < kTokens; ++i) {
            place(i, t + i);
        }
        tile<F, kRows, kTokens>(w, x, m.k, out);
    }
    for (; t < token_end; ++t) {
        place(0, t);
        tile<F, kRows, 1>(w, x, m.k, out);
    }
}

template <class F>
void run(const FloatMatmul &m, int64_t row_begin, int64_t row_end, int64_t token_begin, int64_t token_end) {
    constexpr int kRows = kParts == 4 ? 2 : 4;
    const typename F::Element *w[kRows];
    const auto place = [&](int i, int64_t row) {
        w[i] = reinterpret_cast<const typename F::Element *>(m.weights + row * m.row_stride);
    };
    int64_t r = row_begin;
    for (; r + kRows <= row_end; r += kRows) {
        for (int i = 0; i < kRows; ++i) {
            place(i, r + i);
        }
        rows_of_tokens<F, kRows>(m, w, r, token_begin, token_end);
    }
    for (; r < row_end; ++r) {
        place(0, r);
        rows_of_tokens<F, 1>(m, w, r, token_begin, token_end);
    }
}

}  // namespace

void matmul_float(const FloatMatmul &m, int64_t row_begin, int64_t row_end, int64_t token_begin, int64_t token_end) {
    switch (m.type) {
        case Type::F32: return run<F32>(m, row_begin, row_end, token_begin, token_end);
        case Type::F16: return run<F16>(m, row_begin, row_end, token_begin, token_end);
        case Type::BF16: return run<BF16>(m, row_begin, row_end, token_begin, token_end);
        default: return;
    }
}

}  // namespace tandem::TANDEM_ISA
