// Matrix products of quantized weights with activations of eight bits.
//
// Per output element there is one order, whoever computes it: for each block of 32 (or half block, where sixteen
// elements share a scale) the integer dot product, exactly; then acc = fma(float(dot) * weight_scale, x_scale, acc),
// and acc = fma(minimum, x_sum, acc) where the format has minimums. Where blocks of a span share their x_scale it waits
// for all of them: sum = fma(float(dot), weight_scale, sum) for each, and acc = fma(sum, x_scale, acc) after the last.
// Few tokens decode weights as they go; many tokens decode sixteen rows into a panel once.
//
// The integer sum begins with the bits of kWhole, 1.5 * 2^23, so that read as a float it is kWhole + dot, exactly. One
// fma then multiplies and takes the rest away again: fma(kWhole + dot, scale, -kWhole * scale) rounds the same
// dot * scale once, since kWhole * scale is exact for scales of 22 bits and fewer. Within a span a subtraction takes it
// away, which other units than those of products do.
#include <type_traits>

#include "formats.h"
#include "isa.h"
#include "kernels.h"
#include "quants.h"

namespace tandem::TANDEM_ISA {
namespace {

constexpr int64_t kPanelElements = 2048;  // of each of the sixteen rows: the panel stays in the nearest caches
constexpr bool kPairsOfTiles = kParts == 1;  // vectors so wide come with registers for sixteen tokens

// One tile of activations from some block on.
struct Tile {
    const int8_t *q;
    const float *d;
    const float *sum32;
    const float *sum16;
    const int32_t *start32;
    const int32_t *start16;
};

Tile tile_at(const Activations &x, int64_t tile, int64_t block) {
    const int64_t at = (tile * (x.k / 32) + block) * x.tile;
    return {x.q + at * 32, x.d + at, x.sum32 + at, x.sum16 + 2 * at, x.start32 + at, x.start16 + 2 * at};
}

constexpr int shift_of(int power) { return power == 1 ? 0 : 1 + shift_of(power / 2); }

// What the integer sum of a (half) block begins with; `start` is that of signed weights.
template <class K>
TANDEM_INLINE vi first_sum(int32_t start) {
    constexpr int32_t kBegin = K::kExactScale ? kWholeBits : 0;
    if constexpr (K::kMax == 128) {
        return splat_int(!kSignedNeedsInit ? kBegin : K::kExactScale ? start : start - kWholeBits);
    } else if constexpr (K::kOffset != 0) {
        constexpr int kShift = shift_of(128 / K::kOffset);  // exact: all are multiples of 128
        return (splat_int(start) >> kShift) + (kBegin - (kWholeBits >> kShift));
    } else {
        return splat_int(kBegin);
    }
}

// Scales of a (half) block and what comes with them.
struct Scales {
    vf d;
    vf whole;  // -kWhole * d
    vf m;
};
TANDEM_INLINE Scales scales(vf d, vf m) { return {d, d * splat(-kWhole), m}; }

// What is added up for some rows and a token: the result, and what waits for the scale of its span.
struct Sums {
    vf acc;
    vf span;
};

template <class K>
TANDEM_INLINE void add_dot(Sums &sums, vi dot, const Scales &s, float x_scale, float x_sum) {
    if constexpr (K::kSpan > 1) {
        sums.span = fused((vf)dot - splat(kWhole), s.d, sums.span);
    } else {
        const vf product = K::kExactScale ? fused((vf)dot, s.d, s.whole) : to_float(dot) * s.d;
        sums.acc = fused(product, splat(x_scale), sums.acc);
    }
    if constexpr (K::kMin) {
        sums.acc = fused(s.m, splat(x_sum), sums.acc);
    }
}

// After the last block of a span, b: its sum gets its scale.
template <class K, int kTile>
TANDEM_INLINE void end_span(Sums &sums, const Tile &x, int64_t b, int t) {
    if constexpr (K::kSpan > 1) {
        sums.acc = fused(sums.span, splat(x.d[b * kTile + t]), sums.acc);
        sums.span = vf{};
    }
}

template <class K, int kTile>
TANDEM_INLINE void add_block(Sums &sums, const vb *w, const Scales &s0, const Scales &s1, const Tile &x, int64_t b,
                             int t) {
    const int8_t *q = x.q + (b * kTile + t) * 32;
    const float scale = x.d[b * kTile + t];
    if constexpr (K::kSub == 32) {
        const vi dot = dot_chunks<K::kMax, 8>(w, q, first_sum<K>(x.start32[b * kTile + t]));
        add_dot<K>(sums, dot, s0, scale, x.sum32[b * kTile + t]);
    } else {
        const int64_t at = 2 * b * kTile + t;
        const vi low = dot_chunks<K::kMax, 4>(w, q, first_sum<K>(x.start16[at]));
        const vi high = dot_chunks<K::kMax, 4>(w + 4, q + 16, first_sum<K>(x.start16[at + kTile]));
        add_dot<K>(sums, low, s0, scale, x.sum16[at]);
        add_dot<K>(sums, high, s1, scale, x.sum16[at + kTile]);
    }
}

#if defined(TANDEM_TOKEN_PAIRS)
// Tokens t and t + 1 at once; `w` as pair_rows leaves it.
template <class K, int kTile>
TANDEM_INLINE void add_block_pair(Sums *sums, const vb *w, const Scales &s0, const Scales &s1, const Tile &x, int64_t b,
                                  int t) {
    const int8_t *q = x.q + (b * kTile + t) * 32;
    const float *d = x.d + b * kTile + t;
    constexpr int kHalves = 32 / K::kSub;
    TANDEM_UNROLL
    for (int half = 0; half < kHalves; ++half) {
        const int64_t at = (kHalves * b + half) * kTile + t;
        const int32_t *start = (kHalves == 1 ? x.start32 : x.start16) + at;
        const float *sum = (kHalves == 1 ? x.sum32 : x.sum16) + at;
        vi dots[2] = {first_sum<K>(start[0]), first_sum<K>(start[1])};
        dot_pairs<K::kSub / 4>(w + 4 * half, q + 16 * half, q + 32 + 16 * half, dots);
        for (int i = 0; i < 2; ++i) {
            add_dot<K>(sums[i], dots[i], half == 0 ? s0 : s1, d[i], sum[i]);
        }
    }
}
#endif

// kTokens tokens of a tile times a block of a panel.
template <class K, int kTokens, int kTile>
TANDEM_INLINE void add_blocks(Sums *sums, vb *w, const Scales &s0, const Scales &s1, const Tile &x, int64_t b) {
#if defined(TANDEM_TOKEN_PAIRS)
    if constexpr (kTokens % 2 == 0) {
        pair_rows<8>(w);
        TANDEM_UNROLL
        for (int t = 0; t < kTokens; t += 2) {
            add_block_pair<K, kTile>(sums + t, w, s0, s1, x, b, t);
        }
        return;
    }
#endif
    TANDEM_UNROLL
    for (int t = 0; t < kTokens; ++t) {
        add_block<K, kTile>(sums[t], w, s0, s1, x, b, t);
    }
}

// Asks for a lone token's elements that a block of 256 will need after the one at hand, and for what belongs to them.
// Between two groups' reads of them the weights of a group have pushed them out of the nearest cache, if rows are long;
// and whoever waits for them does not ask for weights meanwhile.
template <class K>
TANDEM_INLINE void ask_ahead(const Tile &x, int64_t at) {
    TANDEM_UNROLL
    for (int i = 0; i < 256; i += 64) {
        __builtin_prefetch(x.q + at + i);
    }
    __builtin_prefetch(x.d + at / 32);
    if constexpr (K::kMin) {
        __builtin_prefetch((K::kSub == 32 ? x.sum32 : x.sum16) + at / K::kSub);
    }
    if constexpr (K::kOffset != 0 || K::kMax == 128) {
        __builtin_prefetch((K::kSub == 32 ? x.start32 : x.start16) + at / K::kSub);
    }
}

// One group times kTokens tokens, decoding as it goes. out[t] takes sixteen floats.
template <class F, int kTokens, int kTile>
void direct(const uint8_t *group, int64_t k, const Tile &x, float *const *out) {
    constexpr int kTogether = kTokens == 1 ? kParts : 1;  // a lone token leaves registers for all sixteen rows
    const int64_t n_blocks = k / F::kElements;
    for (int first = 0; first < kParts; first += kTogether) {
        Sums sums[kTogether][kTokens] = {};
        for (int64_t block = 0; block < n_blocks; ++block) {
            if constexpr (kTokens == 1 && F::kElements == 256) {
                ask_ahead<typename F::Kind>(x, block + 1 < n_blocks ? 256 * (block + 1) : 0);
            }
            TANDEM_UNROLL
            for (int p = 0; p < kTogether; ++p) {
                F::template decode<kTokens == 1>(group + block * F::kBlockBytes, first + p,
                          [&](int b, const vb *w, vf d0, vf m0, vf d1, vf m1) {
                              const Scales s0 = scales(d0, m0), s1 = scales(d1, m1);
                              const int64_t at = block * (F::kElements / 32) + b;
                              TANDEM_UNROLL
                              for (int t = 0; t < kTokens; ++t) {
                                  add_block<typename F::Kind, kTile>(sums[p][t], w, s0, s1, x, at, t);
                                  if (b % F::kSpan == F::kSpan - 1) {
                                      end_span<typename F::Kind, kTile>(sums[p][t], x, at, t);
                                  }
                              }
                          });
            }
        }
        for (int p = 0; p < kTogether; ++p) {
            for (int t = 0; t < kTokens; ++t) {
                store(out[t] + (first + p) * kNative, sums[p][t].acc);
            }
        }
    }
}

// How a panel holds weights. Where signed bytes cost nothing, offsets are gone and kinds are few.
template <class K>
using PanelKind = std::conditional_t<
    !kSignedNeedsInit, K,
    std::conditional_t<K::kMin, Kind<127, 0, true, K::kSub, K::kSpan, K::kExactScale>,
                       Kind<128, 0, false, K::kSub, K::kSpan, K::kExactScale>>>;

// Sixteen rows decoded: per block eight chunks of 64 bytes, and sixteen scales (and minimums) per (half) block.
struct Panel {
    uint8_t *w;
    float *d;
    float *m;
};

template <class F>
void decode_panel(const uint8_t *group, int64_t first_block, int64_t n_blocks, const Panel &panel) {
    constexpr int kScales = 32 / F::Kind::kSub;
    for (int64_t block = 0; block < n_blocks; ++block) {
        for (int part = 0; part < kParts; ++part) {
            F::template decode<false>(group + (first_block + block) * F::kBlockBytes, part,
                      [&](int sub, const vb *w, vf d0, vf m0, vf d1, vf m1) {
                          const int64_t b = block * (F::kElements / 32) + sub;
                          constexpr int kOffset = F::Kind::kOffset;
                          constexpr uint8_t kSigned = kSignedNeedsInit && kOffset != 0 ? 128 - kOffset : 0;
                          TANDEM_UNROLL
                          for (int c = 0; c < 8; ++c) {
                              const vb bytes = w[c] + kSigned;
                              std::memcpy(panel.w + 512 * b + 64 * c + 4 * kNative * part, &bytes, sizeof(vb));
                          }
                          const int64_t at = kScales * b * 16 + kNative * part;
                          store(panel.d + at, d0);
                          if constexpr (F::Kind::kMin) {
                              store(panel.m + at, m0);
                          }
                          if constexpr (kScales == 2) {
                              store(panel.d + at + 16, d1);
                              if constexpr (F::Kind::kMin) {
                                  store(panel.m + at + 16, m1);
                              }
                          }
                      });
        }
    }
}

// A block of a panel times kTokens tokens of each of kTiles tiles that follow each other.
template <class K, int kTokens, int kTile, int kTiles>
TANDEM_INLINE void add_panel_block(Sums *sums, const Panel &panel, int64_t b, int part, const Tile (&x)[kTiles]) {
    constexpr int kScales = 32 / K::kSub;
    vb w[8];
    TANDEM_UNROLL
    for (int c = 0; c < 8; ++c) {
        w[c] = chunk(panel.w + 512 * b, c, part);
    }
    const int64_t at = kScales * b * 16 + kNative * part;
    const Scales s0 = scales(load(panel.d + at), K::kMin ? load(panel.m + at) : vf{});
    const Scales s1 = kScales == 1 ? s0 : scales(load(panel.d + at + 16), K::kMin ? load(panel.m + at + 16) : vf{});
    TANDEM_UNROLL
    for (int i = 0; i < kTiles; ++i) {
        add_blocks<K, kTokens, kTile>(sums + i * kTokens, w, s0, s1, x[i], b);
    }
}

// The same for all n_blocks blocks; adds to what out holds unless `fresh`.
template <class K, int kTokens, int kTile, int kTiles>
void panel_tiles(const Panel &panel, int64_t n_blocks, const Tile (&x)[kTiles], float *const *out, bool fresh) {
    for (int part = 0; part < kParts; ++part) {
        Sums sums[kTiles * kTokens];
        TANDEM_UNROLL
        for (int t = 0; t < kTiles * kTokens; ++t) {
            sums[t] = {fresh ? vf{} : load(out[t] + part * kNative), vf{}};
        }
        for (int64_t b = 0; b < n_blocks; b += K::kSpan) {
            TANDEM_UNROLL
            for (int i = 0; i < K::kSpan; ++i) {
                add_panel_block<K, kTokens, kTile>(sums, panel, b + i, part, x);
            }
            TANDEM_UNROLL
            for (int t = 0; t < kTiles * kTokens; ++t) {
                end_span<K, kTile>(sums[t], x[t / kTokens], b, t % kTokens);
            }
        }
        TANDEM_UNROLL
        for (int t = 0; t < kTiles * kTokens; ++t) {
            store(out[t] + part * kNative, sums[t].acc);
        }
    }
}

// Where sixteen results of a token go. Groups at the end of a matrix with fewer rows go through a buffer, and so do the
// tokens that fill a tile up to the four or eight that kernels know.
struct Outputs {
    const QuantMatmul &m;
    int64_t row;
    int n_rows;
    float spill[kTileTokens][16];

    float *place(int64_t token) const {
        const int64_t at = m.out_index ? m.out_index[token] : token;
        return m.out + at * m.out_stride + row;
    }
    void begin(int64_t token, int n, float **out, bool fresh) {
        for (int t = 0; t < kTileTokens; ++t) {
            out[t] = n_rows == 16 && t < n ? place(token + t) : spill[t];
            if (n_rows < 16 && t < n && !fresh) {
                std::memcpy(spill[t], place(token + t), n_rows * sizeof(float));
            }
        }
    }
    void end(int64_t token, int n) {
        for (int t = 0; t < n && n_rows < 16; ++t) {
            std::memcpy(place(token + t), spill[t], n_rows * sizeof(float));
        }
    }
};

const uint8_t *group_bytes(const QuantMatmul &m, int64_t row, int n_rows, uint8_t *scratch) {
    if (n_rows == 16 && m.packed && *m.packed) {
        return m.weights + row * row_bytes(m.type, m.k);
    }
    const uint8_t *rows[16];
    for (int r = 0; r < n_rows; ++r) {
        rows[r] = m.weights + (row + r) * m.row_stride;
    }
    pack_group(m.type, m.k, rows, n_rows, scratch);
    return scratch;
}

template <class F>
void direct_tokens(const uint8_t *group, const QuantMatmul &m, int64_t tile, Outputs &outputs) {
    const int64_t first = tile * m.x.tile;
    const int n = static_cast<int>(m.n_tokens - first < m.x.tile ? m.n_tokens - first : m.x.tile);
    float *out[kTileTokens];
    outputs.begin(first, n, out, true);
    const Tile x = tile_at(m.x, tile, 0);
    if (m.x.tile == 1) {
        direct<F, 1, 1>(group, m.k, x, out);
    } else {
        direct<F, 4, kTileTokens>(group, m.k, x, out);
    }
    outputs.end(first, n);
}

template <class K>
void panel_tokens(const Panel &panel, int64_t first_block, int64_t n_blocks, const QuantMatmul &m, int64_t tile,
                  Outputs &outputs) {
    const int64_t first = tile * m.x.tile;
    const int n = static_cast<int>(m.n_tokens - first < m.x.tile ? m.n_tokens - first : m.x.tile);
    const bool fresh = first_block == 0;
    float *out[kTileTokens];
    outputs.begin(first, n, out, fresh);
    const Tile x = tile_at(m.x, tile, first_block);
    if (m.x.tile == 1) {
        panel_tiles<K, 1, 1>(panel, n_blocks, {x}, out, fresh);
    } else if (n <= 4) {
        panel_tiles<K, 4, kTileTokens>(panel, n_blocks, {x}, out, fresh);
    } else {
        panel_tiles<K, 8, kTileTokens>(panel, n_blocks, {x}, out, fresh);
    }
    outputs.end(first, n);
}

// Two full tiles at once.
template <class K>
void panel_tile_pair(const Panel &panel, int64_t first_block, int64_t n_blocks, const QuantMatmul &m, int64_t tile,
                     Outputs &outputs) {
    const bool fresh = first_block == 0;
    float *out[2 * kTileTokens];
    outputs.begin(tile * kTileTokens, kTileTokens, out, fresh);
    outputs.begin((tile + 1) * kTileTokens, kTileTokens, out + kTileTokens, fresh);
    panel_tiles<K, kTileTokens, kTileTokens>(
        panel, n_blocks, {tile_at(m.x, tile, first_block), tile_at(m.x, tile + 1, first_block)}, out, fresh);
}

// The types without an interleaved form: rows are unpacked into the panel one block after the other.
struct Unpacked {
    using Kind = ::tandem::TANDEM_ISA::Kind<128, 0, false, 16, 1, false>;
};

void unpack_panel(const QuantMatmul &m, int64_t row, int n_rows, int64_t first, int64_t n, const Panel &panel) {
    const Traits t = traits(m.type);
    std::memset(panel.w, 0, 16 * n);
    std::memset(panel.d, 0, 4 * n);
    for (int r = 0; r < n_rows; ++r) {
        const uint8_t *in = m.weights + (row + r) * m.row_stride + first / t.block_elements * t.block_bytes;
        for (int64_t at = 0; at < n; at += t.block_elements, in += t.block_bytes) {
            Block block;
            decode_block(m.type, in, block);
            for (int e = 0; e < t.block_elements; ++e) {
                const int64_t k = at + e;
                panel.w[k / 4 * 64 + 4 * r + k % 4] = static_cast<uint8_t>(block.q[e]) ^ (kSignedNeedsInit ? 0x80 : 0);
            }
            for (int b = 0; b < t.block_elements / 16; ++b) {
                panel.d[(at / 16 + b) * 16 + r] = block.d[b];
            }
        }
    }
}

struct Span {
    int64_t group_begin, group_end, tile_begin, tile_end;
};

// Bytes that the next panel will be decoded from. They are asked for in pieces while this one is multiplied: decoding by
// itself would wait for memory.
struct Ahead {
    const uint8_t *bytes;
    int64_t n_bytes;

    void ask(int64_t piece, int64_t n_pieces) const {
        for (int64_t at = n_bytes * piece / n_pieces; at < n_bytes * (piece + 1) / n_pieces; at += 64) {
            __builtin_prefetch(bytes + at, 0, 2);
        }
    }
};

// A panel times all tokens of a span.
template <class K>
void run_panel(const Panel &panel, int64_t first, int64_t n, const QuantMatmul &m, const Span &span, const Ahead &ahead,
               Outputs &outputs) {
    const int64_t n_tiles = span.tile_end - span.tile_begin;
    int64_t tile = span.tile_begin;
    if constexpr (kPairsOfTiles && K::kSpan == 1) {
        const int64_t full = outputs.n_rows == 16 ? m.n_tokens / kTileTokens : 0;
        for (; tile + 2 <= span.tile_end && tile + 2 <= full; tile += 2) {
            ahead.ask((tile - span.tile_begin) / 2, (n_tiles + 1) / 2);
            panel_tile_pair<K>(panel, first / 32, n / 32, m, tile, outputs);
        }
    }
    for (; tile < span.tile_end; ++tile) {
        ahead.ask(tile - span.tile_begin, n_tiles);
        panel_tokens<K>(panel, first / 32, n / 32, m, tile, outputs);
    }
}

template <class F>
void run(const QuantMatmul &m, const Span &span, char *scratch) {
    auto *group_scratch = reinterpret_cast<uint8_t *>(scratch);
    const int64_t group_size = (16 * row_bytes(m.type, m.k) + 63) / 64 * 64;
    Panel panel;
    panel.w = group_scratch + group_size;
    panel.d = reinterpret_cast<float *>(panel.w + 16 * kPanelElements);
    panel.m = panel.d + kPanelElements;  // sixteen scales per half block of sixteen
    for (int64_t g = span.group_begin; g < span.group_end; ++g) {
        const int64_t row = g * 16;
        const int n_rows = static_cast<int>(m.n_rows - row < 16 ? m.n_rows - row : 16);
        Outputs outputs{m, row, n_rows, {}};
        const uint8_t *group = nullptr;
        if constexpr (!std::is_same_v<F, Unpacked>) {
            group = group_bytes(m, row, n_rows, group_scratch);
            // A panel pays from about five tokens on.
            if (m.x.tile == 1 ||
                (span.tile_end - span.tile_begin == 1 && m.n_tokens - span.tile_begin * kTileTokens <= 4)) {
                for (int64_t tile = span.tile_begin; tile < span.tile_end; ++tile) {
                    direct_tokens<F>(group, m, tile, outputs);
                }
                continue;
            }
        }
        for (int64_t at = 0; at < m.k; at += kPanelElements) {
            const int64_t n = m.k - at < kPanelElements ? m.k - at : kPanelElements;
            Ahead ahead{nullptr, 0};
            if constexpr (std::is_same_v<F, Unpacked>) {
                unpack_panel(m, row, n_rows, at, n, panel);
            } else {
                decode_panel<F>(group, at / F::kElements, n / F::kElements, panel);
                ahead = {group + (at + n) / F::kElements * F::kBlockBytes, n / F::kElements * F::kBlockBytes};
            }
            run_panel<PanelKind<typename F::Kind>>(panel, at, n, m, span, ahead, outputs);
        }
    }
}

}  // namespace

void matmul_quant(const QuantMatmul &m, int64_t group_begin, int64_t group_end, int64_t tile_begin, int64_t tile_end,
                  char *scratch) {
    const Span span{group_begin, group_end, tile_begin, tile_end};
    switch (m.type) {
        case Type::Q4_0: return run<Q4_0>(m, span, scratch);
        case Type::Q4_1: return run<Q4_1>(m, span, scratch);
        case Type::Q5_0: return run<Q5_0>(m, span, scratch);
        case Type::Q5_1: return run<Q5_1>(m, span, scratch);
        case Type::Q8_0: return run<Q8_0>(m, span, scratch);
        case Type::Q2_K: return run<Q2_K>(m, span, scratch);
        case Type::Q3_K: return run<Q3_K>(m, span, scratch);
        case Type::Q4_K: return run<Q4_K>(m, span, scratch);
        case Type::Q5_K: return run<Q5_K>(m, span, scratch);
        case Type::Q6_K: return run<Q6_K>(m, span, scratch);
        case Type::IQ4_NL: return run<IQ4_NL>(m, span, scratch);
        case Type::IQ4_XS: return run<IQ4_XS>(m, span, scratch);
        case Type::MXFP4: return run<MXFP4>(m, span, scratch);
        default: return run<Unpacked>(m, span, scratch);
    }
}

}  // namespace tandem::TANDEM_ISA
