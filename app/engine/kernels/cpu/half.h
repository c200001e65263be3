// Half floats in plain C++, as hardware converts them: to nearest, ties to even; NaN becomes quiet.
#pragma once

#include <cstdint>
#include <cstring>

namespace tandem {

inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    const uint32_t rest = static_cast<uint32_t>(h & 0x7fff) << 13;
    float value;
    uint32_t bits;
    if (rest >= 0x0f800000) {  // infinity or NaN, made quiet as hardware does
        bits = rest + 0x70000000;
        bits |= (h & 0x3ff) != 0 ? 0x00400000 : 0;
    } else {
        // 2^112 moves the exponent's bias; it also makes denormal halves normal.
        std::memcpy(&value, &rest, 4);
        value *= 5.192296858534828e33f;
        std::memcpy(&bits, &value, 4);
    }
    bits |= sign;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline uint16_t float_to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) {
        return static_cast<uint16_t>(sign | 0x7e00 | ((bits >> 13) & 0x1ff));
    }
    if (bits >= 0x477ff000) {  // rounds to 65536 or is above
        return static_cast<uint16_t>(sign | 0x7c00);
    }
    if (bits < 0x38800000) {  // denormal half: the float adder rounds when the last bit is worth 2^-24
        float value;
        std::memcpy(&value, &bits, 4);
        value += 0.5f;
        std::memcpy(&bits, &value, 4);
        return static_cast<uint16_t>(sign | (bits - 0x3f000000));
    }
    bits += 0xc8000fff + ((bits >> 13) & 1);
    return static_cast<uint16_t>(sign | (bits >> 13));
}

inline float bfloat_to_float(uint16_t b) {
    const uint32_t bits = static_cast<uint32_t>(b) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint16_t float_to_bfloat(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) {
        return static_cast<uint16_t>((bits >> 16) | 64);
    }
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace tandem
