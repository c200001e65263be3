#include "step.h"

#include <cmath>
#include <cstring>

#include "half.h"
#include "quants.h"

namespace tandem {
namespace {

float element_as_float(Type type, const char *p) {
    switch (type) {
        case Type::F32: {
            float value;
            std::memcpy(&value, p, 4);
            return value;
        }
        case Type::I32: {
            int32_t value;
            std::memcpy(&value, p, 4);
            return static_cast<float>(value);
        }
        default: {
            uint16_t word;
            std::memcpy(&word, p, 2);
            return type == Type::F16 ? half_to_float(word) : bfloat_to_float(word);
        }
    }
}

}  // namespace

const float *read_row(const Context &context, const Tensor &t, const char *row, float *scratch) {
    const int64_t n = t.ne[0];
    if (t.packed_rows() && t.type != Type::I32) {
        if (t.type == Type::F32) {
            return reinterpret_cast<const float *>(row);
        }
        if (t.type == Type::F16) {
            context.kernels.f16_to_f32(reinterpret_cast<const uint16_t *>(row), scratch, n);
        } else {
            row_to_float(t.type, row, scratch, n);
        }
        return scratch;
    }
    for (int64_t i = 0; i < n; ++i) {
        scratch[i] = element_as_float(t.type, row + i * t.nb[0]);
    }
    return scratch;
}

float *row_target(const Tensor &t, char *row, float *scratch) {
    return t.type == Type::F32 && t.packed_rows() ? reinterpret_cast<float *>(row) : scratch;
}

void write_row(const Context &context, const Tensor &t, char *row, const float *values) {
    const int64_t n = t.ne[0];
    if (t.packed_rows() && t.type != Type::I32) {
        if (t.type == Type::F16) {
            context.kernels.f32_to_f16(values, reinterpret_cast<uint16_t *>(row), n);
        } else if (static_cast<const void *>(values) != row) {
            row_from_float(t.type, values, row, n);
        }
        return;
    }
    for (int64_t i = 0; i < n; ++i) {
        char *to = row + i * t.nb[0];
        if (t.type == Type::I32) {
            const auto whole = static_cast<int32_t>(values[i]);
            std::memcpy(to, &whole, 4);
        } else {
            row_from_float(t.type, values + i, to, 1);
        }
    }
}

std::vector<float> alibi_slopes(int64_t n_heads, float max_bias) {
    std::vector<float> slopes(n_heads, 1.0f);
    if (max_bias > 0.0f) {
        const double n = std::exp2(std::floor(std::log2(static_cast<double>(n_heads))));
        for (int64_t h = 0; h < n_heads; ++h) {
            const double exponent = h < n ? -max_bias / n * static_cast<double>(h + 1)
                                          : -max_bias / 2 / n * static_cast<double>(2 * (h - static_cast<int64_t>(n)) + 1);
            slopes[h] = static_cast<float>(std::exp2(exponent));
        }
    }
    return slopes;
}

}  // namespace tandem
