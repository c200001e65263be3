// Decoders of packed weights: from a block of sixteen interleaved rows to bytes for the integer units.
//
// A format hands out blocks of 32 elements: eight vectors of bytes (each holds four consecutive elements of as many rows
// as a native vector has lanes) with the block's float scale per row, or two scales where sixteen elements share one.
// An element is scale * (byte - kOffset) + minimum; `minimum` is only there where kMin says so. Scales are products of
// a half float and a small integer, hence exact.
#pragma once

#include <utility>

#include "kernels.h"
#include "pack.h"
#include "simd.h"

namespace tandem::TANDEM_ISA {

TANDEM_INLINE vb load_bytes(const uint8_t *p) {
    vb v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}
TANDEM_INLINE vb chunk(const uint8_t *field, int c, int part) { return load_bytes(field + 64 * c + 4 * kNative * part); }
typedef uint16_t v16 __attribute__((vector_size(4 * kNative)));
// Bits moved up by `places` (down if negative), and masked.
TANDEM_INLINE vb moved(vb v, int places, uint8_t mask) {
    return (vb)(places >= 0 ? (v16)v << places : (v16)v >> -places) & mask;
}
TANDEM_INLINE vf half_scale(const uint8_t *field, int part) { return load_f16(field + 2 * kNative * part); }
template <class Narrow>
TANDEM_INLINE vi byte_scale(const uint8_t *field, int j, int part) {
    return widen_from(reinterpret_cast<const Narrow *>(field + kGroupRows * j + kNative * part));
}

// How blocks are multiplied, whatever they were decoded from: the largest byte (128: signed bytes), the offset to
// subtract (a power of two, or 0), whether there is a minimum, elements per scale (32 or 16), blocks of 32 that share
// the activations' scale, and whether scales have 22 bits or fewer and stay far below the largest float.
template <int kMax_, int kOffset_, bool kMin_, int kSub_, int kSpan_ = 1, bool kExactScale_ = true>
struct Kind {
    static constexpr int kMax = kMax_;
    static constexpr int kOffset = kOffset_;
    static constexpr bool kMin = kMin_;
    static constexpr int kSub = kSub_;
    static constexpr int kSpan = kSpan_;
    static constexpr bool kExactScale = kExactScale_;
};

// The shape of a format: elements and bytes per block of a group, and its kind.
template <int kElements_, int kBlockBytes_, int kMax_, int kOffset_, bool kMin_, int kSub_,
          bool kExactScale_ = true>
struct Shape {
    static constexpr int kElements = kElements_;
    static constexpr int kBlockBytes = kBlockBytes_;
    static constexpr int kSpan = kElements == kLongBlock ? kLongSpan / 32 : 1;
    using Kind = ::tandem::TANDEM_ISA::Kind<kMax_, kOffset_, kMin_, kSub_, kSpan, kExactScale_>;
};

// Calls f(i) for i below kN. Unrolled, i is a constant and so are all shifts and places made of it, which is what a lone
// token needs; rolled, the code of several tokens stays short.
template <int kN, bool kUnrolled, class F>
TANDEM_INLINE void each_index(F f) {
    if constexpr (kUnrolled) {
        [&]<int... kI>(std::integer_sequence<int, kI...>) {
            (f(std::integral_constant<int, kI>()), ...);
        }(std::make_integer_sequence<int, kN>());
    } else {
        TANDEM_ROLLED
        for (int i = 0; i < kN; ++i) {
            f(i);
        }
    }
}

TANDEM_INLINE void nibbles(const uint8_t *quants, int part, vb *w) {
    TANDEM_UNROLL
    for (int c = 0; c < 4; ++c) {
        const vb v = chunk(quants, c, part);
        w[c] = v & (uint8_t)15;
        w[c + 4] = moved(v, -4, 15);
    }
}

// Adds the fifth bit, regrouped by packing so that bit c of each byte belongs to chunk c.
TANDEM_INLINE void fifth_bits(const uint8_t *field, int part, vb *w) {
    const vb bits = chunk(field, 0, part);
    TANDEM_UNROLL
    for (int c = 0; c < 4; ++c) {
        w[c] |= moved(bits, 4 - c, 16);
        w[c + 4] |= moved(bits, -c, 16);
    }
}

struct Q4_0 : Shape<32, 288, 15, 8, false, 32> {
    template <bool kUnrolled, class Emit>
    TANDEM_INLINE static void decode(const uint8_t *p, int part, Emit emit) {
        vb w[8];
        nibbles(p + 32, part, w);
        emit(0, w, half_scale(p, part), vf{}, vf{}, vf{});
    }
};

struct Q4_1 : Shape<32, 320, 15, 0, true, 32> {
    template <bool kUnrolled, class Emit>
    TANDEM_INLINE static void decode(const uint8_t *p, int part, Emit emit) {
        vb w[8];
        nibbles(p + 64, part, w);
        emit(0, w, half_scale(p, part), half_scale(p + 32, part), vf{}, vf{});
    }
};

struct Q5_0 : Shape<32, 352, 31, 16, false, 32> {
    template <bool kUnrolled, class Emit>
    TANDEM_INLINE static void decode(const uint8_t *p, int part, Emit emit) {
        vb w[8];
        nibbles(p + 96, part, w);
        fifth_bits(p + 32, part, w);
        emit(0, w, half_scale(p, part), vf{}, vf{}, vf{});
    }
};

struct Q5_1 : Shape<32, 384, 31, 0, true, 32> {
    template <bool kUnrolled, class Emit>
    TANDEM_INLINE static void decode(const uint8_t *p, int part, Emit emit) {
        vb w[8];
        nibbles(p + 128, part, w);
        fifth_bits(p + 64, part, w);
        emit(0, w, half_scale(p, part), half_scale(p + 32, part), vf{}, vf{});
    }
};

struct Q8_0 : Shape<32, 544, 128, 0, false, 32> {
    template <bool kUnrolled, class Emit>
    TANDEM_INLINE static void decode(const uint8_t *p, int part, Emit emit) {
        vb w[8];
        TANDEM_UNROLL
        for (int c = 0; c < 8; ++c) {
            w[c] = signed_form(chunk(p + 32, c, part));
        }
        emit(0, w, half_scale(p, part), vf{}, vf{}, vf{});
    }
};

// Codes into signed bytes, in the form the dot product wants them.
struct Codebook {
    uint8_t values[16];
};
TANDEM_INLINE Codebook signed_codebook(const int8_t (&values)[16]) {
    Codebook book;
    TANDEM_UNROLL
    for (int i = 0; i < 16; ++i) {
        book.values[i] = static_cast<uint8_t>(values[i]) ^ (kSignedNeedsInit ? 0x80 : 0);
    }
    return book;
}
constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct IQ4_NL : Shape<32, 288, 128, 0, false, 32> {
    template <bool kUnrolled, class Emit>
    TANDEM_INLINE static void decode(const uint8_t *p, int part, Emit emit) {
        const Codebook book = signed_codebook(kIq4Values);
        vb w[8];
        nibbles(p + 32, part, w);
        TANDEM_UNROLL
        for (int c = 0; c < 8; ++c) {
            w[c] = lookup(book.values, w[c]);
        }
        emit(0, w, half_scale(p, part), vf{}, vf{}, vf{});
    }
};

// Twice the values of E2M1, moved up by 16 so that they are small unsigned bytes; the scale is halved for it.
constexpr uint8_t kMxfp4Values[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

struct MXFP4 : Shape<32, 272, 31, 16, false, 32, false> {  // scales reach 2^126
    template <bool kUnrolled, class Emit>
    TANDEM_INLINE static void decode(const uint8_t *p, int part, Emit emit) {
        vb w[8];
        nibbles(p + 16, part, w);
        TANDEM_UNROLL
        for (int c = 0; c < 8; ++c) {
            w[c] = lookup(kMxfp4Values, w[c]);
        }
        const vi e = byte_scale<uint8_t>(p, 0, part);
        const vi normal = (e - 1) << 23;
        const vi small = e == 1 ? splat_int(0x00400000) : splat_int(0x00200000);
        emit(0, w, (vf)(e < 2 ? small : normal), vf{}, vf{}, vf{});
    }
};

// The 6-bit scales and minimums of Q4_K and Q5_K: twelve bytes hold eight of each.
struct KScales {
    vf scale[8];
    vf minimum[8];  // negative: what is subtracted
};
TANDEM_INLINE void k_scales(const uint8_t *field, const uint8_t *halves, int part, KScales &out) {
    const vf d = half_scale(halves, part);
    const vf dmin = half_scale(halves + 32, part);
    for (int b = 0; b < 4; ++b) {
        const vi first = byte_scale<uint8_t>(field, b, part);
        const vi second = byte_scale<uint8_t>(field, b + 4, part);
        const vi third = byte_scale<uint8_t>(field, b + 8, part);
        out.scale[b] = d * to_float(first & 63);
        out.minimum[b] = -(dmin * to_float(second & 63));
        out.scale[b + 4] = d * to_float((third & 15) | ((first >> 6) << 4));
        out.minimum[b + 4] = -(dmin * to_float((third >> 4) | ((second >> 6) << 4)));
    }
}

struct Q4_K : Shape<256, 2304, 15, 0, true, 32> {
    template <bool kUnrolled, class Emit>
    TANDEM_INLINE static void decode(const uint8_t *p, int part, Emit emit) {
        KScales s;
        k_scales(p + 64, p, part, s);
        each_index<4, kUnrolled>([&](auto pair) {
            vb low[8], high[8];
            TANDEM_UNROLL
            for (int c = 0; c < 8; ++c) {
                const vb v = chunk(p + 256 + 512 * pair, c, part);
                low[c] = v & (uint8_t)15;
                high[c] = moved(v, -4, 15);
            }
            emit(2 * pair, low, s.scale[2 * pair], s.minimum[2 * pair], vf{}, vf{});
            emit(2 * pair + 1, high, s.scale[2 * pair + 1], s.minimum[2 * pair + 1], vf{}, vf{});
        });
    }
};

struct Q5_K : Shape<256, 2816, 31, 0, true, 32> {
    template <bool kUnrolled, class Emit>
    TANDEM_INLINE static void decode(const uint8_t *p, int part, Emit emit) {
        // The first quarter of the quants alternates with the high bits of all.
        const uint8_t *first = p + 256;
        KScales s;
        k_scales(p + 64, p, part, s);
        each_index<4, kUnrolled>([&](auto pair) {
            const uint8_t *quants = pair == 0 ? first : p + 768 + 512 * pair;
            const int stride = pair == 0 ? 2 : 1;
            vb low[8], high[8];
            TANDEM_UNROLL
            for (int c = 0; c < 8; ++c) {
                const vb v = chunk(quants, stride * c, part);
                const vb bits = chunk(first, 2 * c + 1, part);
                low[c] = (v & (uint8_t)15) | moved(bits, 4 - 2 * pair, 16);
                high[c] = moved(v, -4, 15) | moved(bits, 3 - 2 * pair, 16);
            }
            emit(2 * pair, low, s.scale[2 * pair], s.minimum[2 * pair], vf{}, vf{});
            emit(2 * pair + 1, high, s.scale[2 * pair + 1], s.minimum[2 * pair + 1], vf{}, vf{});
        });
    }
};

struct Q6_K : Shape<256, 3360, 63, 32, false, 16> {
    TANDEM_INLINE static vf scale(const uint8_t *p, int i, int part, vf d) {
        return d * to_float(byte_scale<int8_t>(p + 32, i, part));
    }
    template <bool kUnrolled, class Emit>
    TANDEM_INLINE static void decode(const uint8_t *p, int part, Emit emit) {
        const vf d = half_scale(p, part);
        // Always rolled: loads that come back every 768 bytes stream from memory at its full rate, loads that come back
        // every 3360 bytes, as those of a whole block do, at five sixths of it.
        each_index<4, false>([&](int pair) {
            // Of two runs of 32, the first in the lower bits: low bits of chunk c and of chunk c + 4, high bits of both.
            const uint8_t *quants = p + 288 + 768 * pair;
            vb first[8], second[8];
            TANDEM_UNROLL
            for (int c = 0; c < 4; ++c) {
                const vb bits = chunk(quants, 3 * c + 2, part);
                const vb low = chunk(quants, 3 * c, part), next = chunk(quants, 3 * c + 1, part);
                first[c] = moved(low, 0, 15) | moved(bits, 4, 48);
                first[c + 4] = moved(next, 0, 15) | moved(bits, 0, 48);
                second[c] = moved(low, -4, 15) | moved(bits, 2, 48);
                second[c + 4] = moved(next, -4, 15) | moved(bits, -2, 48);
            }
            emit(2 * pair, first, scale(p, 4 * pair, part, d), vf{}, scale(p, 4 * pair + 1, part, d), vf{});
            emit(2 * pair + 1, second, scale(p, 4 * pair + 2, part, d), vf{}, scale(p, 4 * pair + 3, part, d), vf{});
        });
    }
};

struct Q3_K : Shape<256, 1760, 7, 4, false, 16> {
    TANDEM_INLINE static vf scale(const uint8_t *field, int j, int part, vf d) {
        const vi low = byte_scale<uint8_t>(field, j % 8, part) >> (j < 8 ? 0 : 4);
        const vi top = byte_scale<uint8_t>(field, 8 + j % 4, part) >> (2 * (j / 4));
        return d * to_float(((low & 15) | ((top & 3) << 4)) - 32);
    }
    template <bool kUnrolled, class Emit>
    TANDEM_INLINE static void decode(const uint8_t *p, int part, Emit emit) {
        const vf d = half_scale(p, part);
        // The first half of the quants alternates with the high bits of all.
        const uint8_t *first = p + 224;
        each_index<8, kUnrolled>([&](auto b) {
            const uint8_t *quants = b < 4 ? first : first + 1024;
            const int stride = b < 4 ? 2 : 1;
            vb w[8];
            TANDEM_UNROLL
            for (int c = 0; c < 8; ++c) {
                w[c] = moved(chunk(quants, stride * c, part), -2 * (b % 4), 3) |
                       moved(chunk(first, 2 * c + 1, part), 2 - b, 4);
            }
            emit(b, w, scale(p + 32, 2 * b, part, d), vf{}, scale(p + 32, 2 * b + 1, part, d), vf{});
        });
    }
};

struct Q2_K : Shape<256, 1344, 3, 0, true, 16> {
    template <bool kUnrolled, class Emit>
    TANDEM_INLINE static void decode(const uint8_t *p, int part, Emit emit) {
        const vf d = half_scale(p, part);
        const vf dmin = half_scale(p + 32, part);
        each_index<8, kUnrolled>([&](auto b) {
            vb w[8];
            TANDEM_UNROLL
            for (int c = 0; c < 8; ++c) {
                w[c] = moved(chunk(p + 320 + 512 * (b / 4), c, part), -2 * (b % 4), 3);
            }
            const vi first = byte_scale<uint8_t>(p + 64, 2 * b, part);
            const vi second = byte_scale<uint8_t>(p + 64, 2 * b + 1, part);
            emit(b, w, d * to_float(first & 15), -(dmin * to_float(first >> 4)), d * to_float(second & 15),
                 -(dmin * to_float(second >> 4)));
        });
    }
};

struct IQ4_XS : Shape<256, 2176, 128, 0, false, 32> {
    template <bool kUnrolled, class Emit>
    TANDEM_INLINE static void decode(const uint8_t *p, int part, Emit emit) {
        const Codebook book = signed_codebook(kIq4Values);
        const vf d = half_scale(p, part);
        const vi high = widen_from(reinterpret_cast<const uint16_t *>(p + 32 + 2 * kNative * part));
        each_index<8, kUnrolled>([&](auto b) {
            vb w[8];
            nibbles(p + 128 + 256 * b, part, w);
            TANDEM_UNROLL
            for (int c = 0; c < 8; ++c) {
                w[c] = lookup(book.values, w[c]);
            }
            const vi low = byte_scale<uint8_t>(p + 64, b / 2, part) >> (4 * (b % 2));
            const vi scale = ((low & 15) | (((high >> (2 * b)) & 3) << 4)) - 32;
            emit(b, w, d * to_float(scale), vf{}, vf{}, vf{});
        });
    }
};

}  // namespace tandem::TANDEM_ISA
