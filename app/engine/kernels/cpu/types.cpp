#include "types.h"

#include <cstring>

namespace tandem {

Traits traits(Type type) {
    switch (type) {
        case Type::F32: return {1, 4};
        case Type::F16: return {1, 2};
        case Type::BF16: return {1, 2};
        case Type::Q4_0: return {32, 18};
        case Type::Q4_1: return {32, 20};
        case Type::Q5_0: return {32, 22};
        case Type::Q5_1: return {32, 24};
        case Type::Q8_0: return {32, 34};
        case Type::Q2_K: return {256, 84};
        case Type::Q3_K: return {256, 110};
        case Type::Q4_K: return {256, 144};
        case Type::Q5_K: return {256, 176};
        case Type::Q6_K: return {256, 210};
        case Type::IQ2_XXS: return {256, 66};
        case Type::IQ2_XS: return {256, 74};
        case Type::IQ3_XXS: return {256, 98};
        case Type::IQ1_S: return {256, 50};
        case Type::IQ4_NL: return {32, 18};
        case Type::IQ3_S: return {256, 110};
        case Type::IQ2_S: return {256, 82};
        case Type::IQ4_XS: return {256, 136};
        case Type::IQ1_M: return {256, 56};
        case Type::TQ1_0: return {256, 54};
        case Type::TQ2_0: return {256, 66};
        case Type::MXFP4: return {32, 17};
        case Type::NVFP4: return {64, 36};
        case Type::Q1_0: return {128, 18};
        case Type::Q2_0: return {64, 18};
        case Type::I8: return {1, 1};
        case Type::I16: return {1, 2};
        case Type::I32: return {1, 4};
        case Type::I64: return {1, 8};
        case Type::F64: return {1, 8};
    }
    return {0, 0};
}

int64_t Tensor::span_bytes() const {
    if (empty()) {
        return 0;
    }
    const Traits t = traits(type);
    int64_t bytes = t.block_elements == 1 ? t.block_bytes + (ne[0] - 1) * nb[0] : ne[0] * nb[0] / t.block_elements;
    for (int d = 1; d < 4; ++d) {
        bytes += (ne[d] - 1) * nb[d];
    }
    return bytes;
}

bool Tensor::contiguous() const {
    if (!packed_rows()) {
        return false;
    }
    int64_t expected = row_bytes(type, ne[0]);
    for (int d = 1; d < 4; ++d) {
        if (ne[d] != 1 && nb[d] != expected) {
            return false;
        }
        expected *= ne[d];
    }
    return true;
}

float Tensor::param_f32(int i) const {
    float value;
    std::memcpy(&value, &params[i], sizeof(value));
    return value;
}

}  // namespace tandem
