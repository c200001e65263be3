// Attention over cached keys and values: which kernel takes a tile, and what the two share. See attention.h.
#include "attention.h"
#include "half.h"

namespace tandem::TANDEM_ISA {

namespace {

// Sixteen elements of a row from element i on.
struct Halves {
    static Wide load(const char *row, int64_t i) { return wide_load_f16(reinterpret_cast<const uint16_t *>(row) + i); }
};
struct Brains {
    static Wide load(const char *row, int64_t i) { return wide_load_bf16(reinterpret_cast<const uint16_t *>(row) + i); }
};
struct Bytes {  // Q8_0: blocks of a half float and thirty-two bytes
    static Wide load(const char *row, int64_t i) {
        const char *block = row + i / 32 * 34;
        uint16_t scale;
        std::memcpy(&scale, block, sizeof(scale));
        const Wide q = to_float(wide_widen(reinterpret_cast<const int8_t *>(block + 2 + i % 32)));
        return wide(half_to_float(scale)) * q + wide(0.0f);  // as row_to_float adds a minimum of zero
    }
};

template <class Row>
void unpack_rows(const char *row, int64_t stride, int64_t n_cells, int64_t n, float *out) {
    for (int64_t c = 0; c < n_cells; ++c, row += stride, out += n) {
        for (int64_t i = 0; i < n; i += kWide) {
            wide_store(out + i, Row::load(row, i));
        }
    }
}

}  // namespace

void unpack_cells(const Attention &a, Type type, const char *base, int64_t stride, int64_t first, int64_t n_cells,
                  int64_t n, float *out) {
    const char *row = base + first * stride;
    if (n % kWide == 0) {
        switch (type) {
            case Type::F16: return unpack_rows<Halves>(row, stride, n_cells, n, out);
            case Type::BF16: return unpack_rows<Brains>(row, stride, n_cells, n, out);
            case Type::Q8_0: return unpack_rows<Bytes>(row, stride, n_cells, n, out);
            default: break;
        }
    }
    const int64_t width = padded(n);
    for (int64_t c = 0; c < n_cells; ++c, row += stride, out += width) {
        a.to_float(type, row, out, n);
        for (int64_t i = n; i < width; ++i) {
            out[i] = 0.0f;
        }
    }
}

float final_scale(const Attention &a, const Softmax &state, int64_t head) {
    if (!a.sinks) {
        return 1.0f / state.sum;
    }
    const float sink = a.sinks[head];
    const float largest = state.largest > sink ? state.largest : sink;
    const float fade = exp_one(state.largest - largest);
    return fade / (state.sum * fade + exp_one(sink - largest));
}

namespace {

// Whether lanes are worth it: rows that see a block fill a good part of the lanes that would be computed for it.
bool lanes_pay(const Attention &a, const AttentionTile &at) {
    const int n_rows = at.n_tokens * at.n_heads;
    if (at.segment >= 0 || n_rows < kGroupRows / 4) {
        return false;
    }
    int64_t useful = 0, computed = 0;
    for (int first = 0; first < n_rows; first += kGroupRows) {
        const int last = first + kGroupRows < n_rows ? first + kGroupRows : n_rows;
        // Heads of a token share its mask: one row of each token stands for all.
        const MaskRow *masks[kGroupRows];
        int64_t next[kGroupRows] = {};
        int n = 0;
        for (int row = first; row < last; ++row) {
            const MaskRow &mask = mask_of(a, at, row);
            if (n == 0 || masks[n - 1] != &mask) {
                masks[n++] = &mask;
            }
            useful += mask.n_visible;
        }
        for (;;) {
            uint32_t block = UINT32_MAX;
            for (int i = 0; i < n; ++i) {
                if (next[i] < masks[i]->n_visible && masks[i]->visible[next[i]] < block) {
                    block = masks[i]->visible[next[i]];
                }
            }
            if (block == UINT32_MAX) {
                break;
            }
            for (int i = 0; i < n; ++i) {
                next[i] += next[i] < masks[i]->n_visible && masks[i]->visible[next[i]] == block;
            }
            computed += kGroupRows;
        }
    }
    // A row alone takes about one and a half times what its lane takes.
    return 3 * useful >= 2 * computed;
}

}  // namespace

int64_t attention_scratch_bytes(int64_t dk, int64_t dv) {
    const int64_t rows = rows_scratch_floats(dk, dv), lanes = lanes_scratch_floats(dk, dv);
    return (rows > lanes ? rows : lanes) * static_cast<int64_t>(sizeof(float));
}

void attention_tile(const Attention &a, const AttentionTile &at, char *scratch, float *partial) {
    if (lanes_pay(a, at)) {
        attend_lanes(a, at, scratch);
    } else {
        attend_rows(a, at, scratch, partial);
    }
}

// Which cells of each block a row of the mask shows, and in which blocks it shows any.
void reduce_mask_row(const uint16_t *mask, int64_t n_kv, MaskRow &out, uint32_t *visible, uint64_t *seen) {
    int64_t n = 0;
    bool biased = false;
    for (int64_t first = 0; first < n_kv; first += kCells) {
        const int64_t n_cells = n_kv - first < kCells ? n_kv - first : kCells;
        uint64_t bits = 0;
        uint16_t any = 0;
        for (int64_t c = 0; c < n_cells; ++c) {
            const uint16_t value = mask[first + c];
            const bool shown = value != 0xfc00;  // minus infinity
            bits |= static_cast<uint64_t>(shown) << c;
            any |= shown ? value & 0x7fff : 0;
        }
        if (bits) {
            visible[n] = static_cast<uint32_t>(first / kCells);
            seen[n++] = bits;
            biased = biased || any != 0;
        }
    }
    out.n_visible = n;
    out.visible = visible;
    out.seen = seen;
    out.values = mask;
    out.biased = biased;
}

}  // namespace tandem::TANDEM_ISA
