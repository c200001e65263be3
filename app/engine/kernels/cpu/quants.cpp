#include "quants.h"

#include <cmath>
#include <cstring>

#include "half.h"

namespace tandem {
namespace {

const int8_t *codebooks[static_cast<int>(Codebook::COUNT)];

const int8_t *book(Codebook which) { return codebooks[static_cast<int>(which)]; }

uint16_t word16(const uint8_t *p) {
    uint16_t value;
    std::memcpy(&value, p, 2);
    return value;
}
uint32_t word32(const uint8_t *p) {
    uint32_t value;
    std::memcpy(&value, p, 4);
    return value;
}
float half_at(const uint8_t *p) { return half_to_float(word16(p)); }
float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kE2m1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

void scale_pair(Block &out, int pair, float d, float m) {
    out.d[2 * pair] = out.d[2 * pair + 1] = d;
    out.m[2 * pair] = out.m[2 * pair + 1] = m;
}

// 32 elements in 16 bytes: the low nibbles, then the high ones.
template <class F>
void nibbles(const uint8_t *p, int8_t *q, F value) {
    for (int i = 0; i < 16; ++i) {
        q[i] = value(p[i] & 15, i);
        q[i + 16] = value(p[i] >> 4, i + 16);
    }
}

void q4_0(const uint8_t *p, Block &out) {
    scale_pair(out, 0, half_at(p), 0);
    nibbles(p + 2, out.q, [](int n, int) { return static_cast<int8_t>(n - 8); });
}
void q4_1(const uint8_t *p, Block &out) {
    scale_pair(out, 0, half_at(p), half_at(p + 2));
    nibbles(p + 4, out.q, [](int n, int) { return static_cast<int8_t>(n); });
}
void q5_0(const uint8_t *p, Block &out) {
    scale_pair(out, 0, half_at(p), 0);
    const uint32_t high = word32(p + 2);
    nibbles(p + 6, out.q, [high](int n, int e) { return static_cast<int8_t>((n | ((high >> e) & 1) << 4) - 16); });
}
void q5_1(const uint8_t *p, Block &out) {
    scale_pair(out, 0, half_at(p), half_at(p + 2));
    const uint32_t high = word32(p + 4);
    nibbles(p + 8, out.q, [high](int n, int e) { return static_cast<int8_t>(n | ((high >> e) & 1) << 4); });
}
void q8_0(const uint8_t *p, Block &out) {
    scale_pair(out, 0, half_at(p), 0);
    std::memcpy(out.q, p + 2, 32);
}
void iq4_nl(const uint8_t *p, Block &out) {
    scale_pair(out, 0, half_at(p), 0);
    nibbles(p + 2, out.q, [](int n, int) { return kIq4[n]; });
}
void mxfp4(const uint8_t *p, Block &out) {
    const uint32_t e = p[0];
    scale_pair(out, 0, float_of_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23), 0);
    nibbles(p + 1, out.q, [](int n, int) { return kE2m1Doubled[n]; });
}

// The scale of a quarter of an NVFP4 block, halved for the doubled values.
float ue4m3_half(uint8_t s) {
    const int exponent = (s >> 3) & 15;
    const int mantissa = s & 7;
    if (s == 0 || s == 0x7f) {
        return 0.0f;
    }
    const float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                      : std::ldexp(1.0f + static_cast<float>(mantissa) / 8.0f, exponent - 7);
    return value * 0.5f;
}
void nvfp4(const uint8_t *p, Block &out) {
    for (int b = 0; b < 4; ++b) {
        out.d[b] = ue4m3_half(p[b]);
        out.m[b] = 0;
        for (int i = 0; i < 8; ++i) {
            const uint8_t byte = p[4 + 8 * b + i];
            out.q[16 * b + i] = kE2m1Doubled[byte & 15];
            out.q[16 * b + 8 + i] = kE2m1Doubled[byte >> 4];
        }
    }
}
void q1_0(const uint8_t *p, Block &out) {
    for (int e = 0; e < 128; ++e) {
        out.q[e] = (p[2 + e / 8] >> (e % 8)) & 1 ? 1 : -1;
    }
    for (int b = 0; b < 4; ++b) {
        scale_pair(out, b, half_at(p), 0);
    }
}
void q2_0(const uint8_t *p, Block &out) {
    for (int e = 0; e < 64; ++e) {
        out.q[e] = static_cast<int8_t>(((p[2 + e / 4] >> (2 * (e % 4))) & 3) - 1);
    }
    scale_pair(out, 0, half_at(p), 0);
    scale_pair(out, 1, half_at(p), 0);
}

int two_bits(const uint8_t *q, int e) { return (q[32 * (e / 128) + e % 32] >> (2 * ((e % 128) / 32))) & 3; }

void q2_k(const uint8_t *p, Block &out) {
    const float d = half_at(p + 80);
    const float dmin = half_at(p + 82);
    for (int b = 0; b < 16; ++b) {
        out.d[b] = d * static_cast<float>(p[b] & 15);
        out.m[b] = -(dmin * static_cast<float>(p[b] >> 4));
    }
    for (int e = 0; e < 256; ++e) {
        out.q[e] = static_cast<int8_t>(two_bits(p + 16, e));
    }
}
void q3_k(const uint8_t *p, Block &out) {
    const float d = half_at(p + 108);
    const uint8_t *s = p + 96;
    for (int j = 0; j < 16; ++j) {
        const int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4;
        const int top = (s[8 + j % 4] >> (2 * (j / 4))) & 3;
        out.d[j] = d * static_cast<float>((low | top << 4) - 32);
        out.m[j] = 0;
    }
    for (int e = 0; e < 256; ++e) {
        const bool high = (p[e % 32] >> (e / 32)) & 1;
        out.q[e] = static_cast<int8_t>(two_bits(p + 32, e) - (high ? 0 : 4));
    }
}

// Eight 6-bit scales and minimums in twelve bytes.
void k_scales(const uint8_t *s, float d, float dmin, Block &out) {
    for (int j = 0; j < 8; ++j) {
        const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        const int minimum = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6) << 4;
        scale_pair(out, j, d * static_cast<float>(scale), -(dmin * static_cast<float>(minimum)));
    }
}
void q4_k(const uint8_t *p, Block &out) {
    k_scales(p + 4, half_at(p), half_at(p + 2), out);
    for (int e = 0; e < 256; ++e) {
        const uint8_t byte = p[16 + 32 * (e / 64) + e % 32];
        out.q[e] = static_cast<int8_t>((e / 32) % 2 ? byte >> 4 : byte & 15);
    }
}
void q5_k(const uint8_t *p, Block &out) {
    k_scales(p + 4, half_at(p), half_at(p + 2), out);
    for (int e = 0; e < 256; ++e) {
        const uint8_t byte = p[48 + 32 * (e / 64) + e % 32];
        const int high = (p[16 + e % 32] >> (e / 32)) & 1;
        out.q[e] = static_cast<int8_t>(((e / 32) % 2 ? byte >> 4 : byte & 15) | high << 4);
    }
}
void q6_k(const uint8_t *p, Block &out) {
    const float d = half_at(p + 208);
    for (int b = 0; b < 16; ++b) {
        out.d[b] = d * static_cast<float>(static_cast<int8_t>(p[192 + b]));
        out.m[b] = 0;
    }
    for (int e = 0; e < 256; ++e) {
        const int h = e / 128, j = (e % 128) / 32, l = e % 32;
        const uint8_t low = p[64 * h + l + 32 * (j & 1)];
        const int high = (p[128 + 32 * h + l] >> (2 * j)) & 3;
        out.q[e] = static_cast<int8_t>(((j < 2 ? low & 15 : low >> 4) | high << 4) - 32);
    }
}
void iq4_xs(const uint8_t *p, Block &out) {
    const float d = half_at(p);
    const uint16_t high = word16(p + 2);
    for (int b = 0; b < 8; ++b) {
        const int low = (p[4 + b / 2] >> (4 * (b % 2))) & 15;
        const int scale = (low | ((high >> (2 * b)) & 3) << 4) - 32;
        scale_pair(out, b, d * static_cast<float>(scale), 0);
        nibbles(p + 8 + 16 * b, out.q + 32 * b, [](int n, int) { return kIq4[n]; });
    }
}

void tq1_0(const uint8_t *p, Block &out) {
    static constexpr uint8_t kPowers[5] = {1, 3, 9, 27, 81};
    const auto digit = [](uint8_t byte, int k) {
        const auto moved = static_cast<uint8_t>(byte * kPowers[k]);
        return static_cast<int8_t>(((moved * 3) >> 8) - 1);
    };
    for (int e = 0; e < 160; ++e) {
        out.q[e] = digit(p[e % 32], e / 32);
    }
    for (int e = 0; e < 80; ++e) {
        out.q[160 + e] = digit(p[32 + e % 16], e / 16);
    }
    for (int e = 0; e < 16; ++e) {
        out.q[240 + e] = digit(p[48 + e % 4], e / 4);
    }
    for (int b = 0; b < 8; ++b) {
        scale_pair(out, b, half_at(p + 52), 0);
    }
}
void tq2_0(const uint8_t *p, Block &out) {
    for (int e = 0; e < 256; ++e) {
        out.q[e] = static_cast<int8_t>(two_bits(p, e) - 1);
    }
    for (int b = 0; b < 8; ++b) {
        scale_pair(out, b, half_at(p + 64), 0);
    }
}

// Signs of eight elements from seven bits: the eighth makes the number of set bits even.
uint8_t eight_signs(uint32_t seven) {
    const uint32_t bits = seven & 127;
    return static_cast<uint8_t>(bits | static_cast<uint32_t>(__builtin_popcount(bits) & 1) << 7);
}
void signed_entries(const int8_t *entries, uint8_t signs, int first_sign, int n, int8_t *q) {
    for (int i = 0; i < n; ++i) {
        q[i] = static_cast<int8_t>((signs >> (first_sign + i)) & 1 ? -entries[i] : entries[i]);
    }
}

void iq2_xxs(const uint8_t *p, Block &out) {
    const float d = half_at(p);
    for (int g = 0; g < 8; ++g) {
        const uint8_t *group = p + 2 + 8 * g;
        const uint32_t packed = word32(group + 4);
        scale_pair(out, g, d * (0.5f + static_cast<float>(packed >> 28)) * 0.25f, 0);
        for (int i = 0; i < 4; ++i) {
            signed_entries(book(Codebook::IQ2_XXS) + 8 * group[i], eight_signs(packed >> (7 * i)), 0, 8,
                           out.q + 32 * g + 8 * i);
        }
    }
}

// Scales of the 2-bit types with a nibble per sixteen elements.
void scales_per_16(const uint8_t *nibble_bytes, float d, Block &out) {
    for (int b = 0; b < 16; ++b) {
        const int s = (nibble_bytes[b / 2] >> (4 * (b % 2))) & 15;
        out.d[b] = d * (0.5f + static_cast<float>(s)) * 0.25f;
        out.m[b] = 0;
    }
}
void iq2_xs(const uint8_t *p, Block &out) {
    scales_per_16(p + 66, half_at(p), out);
    for (int i = 0; i < 32; ++i) {
        const uint16_t code = word16(p + 2 + 2 * i);
        signed_entries(book(Codebook::IQ2_XS) + 8 * (code & 511), eight_signs(code >> 9), 0, 8, out.q + 8 * i);
    }
}
void iq2_s(const uint8_t *p, Block &out) {
    scales_per_16(p + 74, half_at(p), out);
    for (int i = 0; i < 32; ++i) {
        const int index = p[2 + i] | ((p[66 + i / 4] >> (2 * (i % 4))) & 3) << 8;
        signed_entries(book(Codebook::IQ2_S) + 8 * index, p[34 + i], 0, 8, out.q + 8 * i);
    }
}
void iq3_xxs(const uint8_t *p, Block &out) {
    const float d = half_at(p);
    for (int g = 0; g < 8; ++g) {
        const uint32_t packed = word32(p + 66 + 4 * g);
        scale_pair(out, g, d * (0.5f + static_cast<float>(packed >> 28)) * 0.5f, 0);
        for (int i = 0; i < 8; ++i) {
            signed_entries(book(Codebook::IQ3_XXS) + 4 * p[2 + 8 * g + i], eight_signs(packed >> (7 * (i / 2))),
                           4 * (i % 2), 4, out.q + 32 * g + 4 * i);
        }
    }
}
void iq3_s(const uint8_t *p, Block &out) {
    const float d = half_at(p);
    for (int g = 0; g < 8; ++g) {
        const int s = (p[106 + g / 2] >> (4 * (g % 2))) & 15;
        scale_pair(out, g, d * static_cast<float>(1 + 2 * s), 0);
    }
    for (int i = 0; i < 64; ++i) {
        const int index = p[2 + i] | ((p[66 + i / 8] >> (i % 8)) & 1) << 8;
        signed_entries(book(Codebook::IQ3_S) + 4 * index, p[74 + i / 2], 4 * (i % 2), 4, out.q + 4 * i);
    }
}

// IQ1: eight times (entry + delta) is whole, so the scale takes the eighth.
void iq1_entries(const int8_t *entries, bool negative, int8_t *q) {
    for (int i = 0; i < 8; ++i) {
        q[i] = static_cast<int8_t>(8 * entries[i] + (negative ? -1 : 1));
    }
}
void iq1_s(const uint8_t *p, Block &out) {
    const float d = half_at(p);
    for (int g = 0; g < 8; ++g) {
        const uint16_t code = word16(p + 34 + 2 * g);
        scale_pair(out, g, d * static_cast<float>(2 * ((code >> 12) & 7) + 1) * 0.125f, 0);
        for (int i = 0; i < 4; ++i) {
            const int index = p[2 + 4 * g + i] | ((code >> (3 * i)) & 7) << 8;
            iq1_entries(book(Codebook::IQ1_S) + 8 * index, code & 0x8000, out.q + 32 * g + 8 * i);
        }
    }
}
void iq1_m(const uint8_t *p, Block &out) {
    uint16_t scales[4];
    for (int i = 0; i < 4; ++i) {
        scales[i] = word16(p + 48 + 2 * i);
    }
    const auto d_bits = static_cast<uint16_t>((scales[0] >> 12) | ((scales[1] >> 8) & 0xf0) |
                                              ((scales[2] >> 4) & 0xf00) | (scales[3] & 0xf000));
    const float d = half_to_float(d_bits);
    for (int b = 0; b < 16; ++b) {
        out.d[b] = d * static_cast<float>(2 * ((scales[b / 4] >> (3 * (b % 4))) & 7) + 1) * 0.125f;
        out.m[b] = 0;
    }
    for (int i = 0; i < 32; ++i) {
        const int high = (p[32 + i / 2] >> (4 * (i % 2))) & 15;
        iq1_entries(book(Codebook::IQ1_S) + 8 * (p[i] | (high & 7) << 8), high & 8, out.q + 8 * i);
    }
}

using Decode = void (*)(const uint8_t *, Block &);

Decode decoder(Type type) {
    switch (type) {
        case Type::Q4_0: return q4_0;
        case Type::Q4_1: return q4_1;
        case Type::Q5_0: return q5_0;
        case Type::Q5_1: return q5_1;
        case Type::Q8_0: return q8_0;
        case Type::Q2_K: return q2_k;
        case Type::Q3_K: return q3_k;
        case Type::Q4_K: return q4_k;
        case Type::Q5_K: return q5_k;
        case Type::Q6_K: return q6_k;
        case Type::IQ2_XXS: return iq2_xxs;
        case Type::IQ2_XS: return iq2_xs;
        case Type::IQ2_S: return iq2_s;
        case Type::IQ3_XXS: return iq3_xxs;
        case Type::IQ3_S: return iq3_s;
        case Type::IQ1_S: return iq1_s;
        case Type::IQ1_M: return iq1_m;
        case Type::IQ4_NL: return iq4_nl;
        case Type::IQ4_XS: return iq4_xs;
        case Type::TQ1_0: return tq1_0;
        case Type::TQ2_0: return tq2_0;
        case Type::MXFP4: return mxfp4;
        case Type::NVFP4: return nvfp4;
        case Type::Q1_0: return q1_0;
        case Type::Q2_0: return q2_0;
        default: return nullptr;
    }
}

// The way back. Blocks of 32.

float inverse(float d) { return d != 0.0f ? 1.0f / d : 0.0f; }

// A float as an unsigned code: what ggml's casts do for sane values, and something harmless for NaN and infinity.
uint8_t code_of(float value, int top) {
    if (!(value > 0.0f)) {
        return 0;
    }
    return static_cast<uint8_t>(value < static_cast<float>(top) ? static_cast<int>(value) : top);
}

void put_half(uint8_t *p, float value) {
    const uint16_t half = float_to_half(value);
    std::memcpy(p, &half, 2);
}
void put_nibbles(uint8_t *p, const uint8_t *codes) {
    for (int i = 0; i < 16; ++i) {
        p[i] = static_cast<uint8_t>((codes[i] & 15) | codes[i + 16] << 4);
    }
}
void put_high_bits(uint8_t *p, const uint8_t *codes) {
    uint32_t bits = 0;
    for (int e = 0; e < 32; ++e) {
        bits |= static_cast<uint32_t>(codes[e] >> 4) << e;
    }
    std::memcpy(p, &bits, 4);
}

// The element of largest magnitude, with its sign; the first of equals.
float extreme(const float *x) {
    float best = 0.0f;
    float magnitude = 0.0f;
    for (int i = 0; i < 32; ++i) {
        if (std::fabs(x[i]) > magnitude) {
            magnitude = std::fabs(x[i]);
            best = x[i];
        }
    }
    return best;
}

void to_q8_0(const float *x, uint8_t *p) {
    float amax = 0.0f;
    for (int i = 0; i < 32; ++i) {
        amax = std::fabs(x[i]) > amax ? std::fabs(x[i]) : amax;
    }
    const float d = amax / 127.0f;
    const float id = inverse(d);
    put_half(p, d);
    for (int i = 0; i < 32; ++i) {
        const float rounded = std::round(x[i] * id);
        p[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(rounded == rounded ? rounded : 0.0f));
    }
}

float codes_around(const float *x, int top, uint8_t *codes) {
    const auto middle = static_cast<float>((top + 1) / 2);
    const float d = extreme(x) / -middle;
    const float id = inverse(d);
    for (int i = 0; i < 32; ++i) {
        codes[i] = code_of(x[i] * id + (middle + 0.5f), top);
    }
    return d;
}

struct Range {
    float d;
    float low;
};
Range codes_above(const float *x, int top, uint8_t *codes) {
    float low = x[0];
    float high = x[0];
    for (int i = 1; i < 32; ++i) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    const float d = (high - low) / static_cast<float>(top);
    const float id = inverse(d);
    for (int i = 0; i < 32; ++i) {
        codes[i] = code_of((x[i] - low) * id + 0.5f, top);
    }
    return {d, low};
}

void to_q4_0(const float *x, uint8_t *p) {
    uint8_t codes[32];
    put_half(p, codes_around(x, 15, codes));
    put_nibbles(p + 2, codes);
}
void to_q5_0(const float *x, uint8_t *p) {
    uint8_t codes[32];
    put_half(p, codes_around(x, 31, codes));
    put_high_bits(p + 2, codes);
    put_nibbles(p + 6, codes);
}
void to_q4_1(const float *x, uint8_t *p) {
    uint8_t codes[32];
    const Range range = codes_above(x, 15, codes);
    put_half(p, range.d);
    put_half(p + 2, range.low);
    put_nibbles(p + 4, codes);
}
void to_q5_1(const float *x, uint8_t *p) {
    uint8_t codes[32];
    const Range range = codes_above(x, 31, codes);
    put_half(p, range.d);
    put_half(p + 2, range.low);
    put_high_bits(p + 4, codes);
    put_nibbles(p + 8, codes);
}

// The nearest codebook entry; the upper one when two are equally near.
uint8_t nearest_iq4(float x) {
    int upper = 1;
    while (upper < 15 && static_cast<float>(kIq4[upper]) <= x) {
        ++upper;
    }
    return static_cast<uint8_t>(x - static_cast<float>(kIq4[upper - 1]) < static_cast<float>(kIq4[upper]) - x
                                    ? upper - 1
                                    : upper);
}

// Codes for the scale that maps the extreme element to the codebook's end, then the best scale for these codes.
void to_iq4_nl(const float *x, uint8_t *p) {
    const float largest = extreme(x);
    uint8_t codes[32] = {};
    float d = 0.0f;
    if (std::fabs(largest) >= 1e-15f) {
        const float id = inverse(largest / static_cast<float>(kIq4[0]));
        float sum_qx = 0.0f;
        float sum_q2 = 0.0f;
        for (int i = 0; i < 32; ++i) {
            codes[i] = nearest_iq4(x[i] * id);
            const auto q = static_cast<float>(kIq4[codes[i]]);
            const float weighted = x[i] * x[i] * q;
            sum_qx += weighted * x[i];
            sum_q2 += weighted * q;
        }
        d = sum_q2 > 0.0f ? sum_qx / sum_q2 : 0.0f;
    }
    put_half(p, d);
    put_nibbles(p + 2, codes);
}

using Encode = void (*)(const float *, uint8_t *);

Encode encoder(Type type) {
    switch (type) {
        case Type::Q8_0: return to_q8_0;
        case Type::Q4_0: return to_q4_0;
        case Type::Q4_1: return to_q4_1;
        case Type::Q5_0: return to_q5_0;
        case Type::Q5_1: return to_q5_1;
        case Type::IQ4_NL: return to_iq4_nl;
        default: return nullptr;
    }
}

}  // namespace

void decode_block(Type type, const uint8_t *block, Block &out) { decoder(type)(block, out); }

void row_to_float(Type type, const void *from, float *to, int64_t n) {
    if (type == Type::F32) {
        std::memcpy(to, from, n * sizeof(float));
        return;
    }
    const auto *bytes = static_cast<const uint8_t *>(from);
    if (type == Type::F16 || type == Type::BF16) {
        for (int64_t i = 0; i < n; ++i) {
            const uint16_t word = word16(bytes + 2 * i);
            to[i] = type == Type::F16 ? half_to_float(word) : bfloat_to_float(word);
        }
        return;
    }
    const Decode decode = decoder(type);
    const Traits t = traits(type);
    Block block;
    for (int64_t at = 0; at < n; at += t.block_elements, bytes += t.block_bytes) {
        decode(bytes, block);
        for (int e = 0; e < t.block_elements; ++e) {
            to[at + e] = block.d[e / 16] * static_cast<float>(block.q[e]) + block.m[e / 16];
        }
    }
}

void row_from_float(Type type, const float *from, void *to, int64_t n) {
    if (type == Type::F32) {
        std::memmove(to, from, n * sizeof(float));
        return;
    }
    auto *bytes = static_cast<uint8_t *>(to);
    if (type == Type::F16 || type == Type::BF16) {
        for (int64_t i = 0; i < n; ++i) {
            const uint16_t word = type == Type::F16 ? float_to_half(from[i]) : float_to_bfloat(from[i]);
            std::memcpy(bytes + 2 * i, &word, 2);
        }
        return;
    }
    const Encode encode = encoder(type);
    const Traits t = traits(type);
    for (int64_t at = 0; at < n; at += t.block_elements, bytes += t.block_bytes) {
        encode(from + at, bytes);
    }
}

void set_codebook(Codebook which, const int8_t *entries) { codebooks[static_cast<int>(which)] = entries; }

bool codebook_ready(Type type) {
    switch (type) {
        case Type::IQ2_XXS: return book(Codebook::IQ2_XXS) != nullptr;
        case Type::IQ2_XS: return book(Codebook::IQ2_XS) != nullptr;
        case Type::IQ2_S: return book(Codebook::IQ2_S) != nullptr;
        case Type::IQ3_XXS: return book(Codebook::IQ3_XXS) != nullptr;
        case Type::IQ3_S: return book(Codebook::IQ3_S) != nullptr;
        case Type::IQ1_S:
        case Type::IQ1_M: return book(Codebook::IQ1_S) != nullptr;
        default: return true;
    }
}

}  // namespace tandem
