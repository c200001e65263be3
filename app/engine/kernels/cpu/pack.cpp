#include "pack.h"

#include <cstring>
#include <vector>

namespace tandem {
namespace {

// A run of bytes of a block. `high_bits`: 32 bits, one per element, regrouped so that shifting by c brings the bits of
// elements 4c to 4c + 3 to the lowest bits of four bytes.
struct Field {
    int16_t offset;
    int16_t bytes;
    int16_t unit;
    bool high_bits = false;
};

using Layout = std::vector<Field>;
constexpr int kMostBlockBytes = 210;  // of the types with a layout

// Units of two fields in turn, as a kernel that joins them reads them.
void alternate(Layout &layout, int first, int second, int n) {
    for (int i = 0; i < n; ++i) {
        layout.push_back({static_cast<int16_t>(first + 4 * i), 4, 4});
        layout.push_back({static_cast<int16_t>(second + 4 * i), 4, 4});
    }
}

Layout make_layout(Type type) {
    switch (type) {
        case Type::Q4_0:
        case Type::IQ4_NL: return {{0, 2, 2}, {2, 16, 4}};
        case Type::MXFP4: return {{0, 1, 1}, {1, 16, 4}};
        case Type::Q4_1: return {{0, 2, 2}, {2, 2, 2}, {4, 16, 4}};
        case Type::Q5_0: return {{0, 2, 2}, {2, 4, 4, true}, {6, 16, 4}};
        case Type::Q5_1: return {{0, 2, 2}, {2, 2, 2}, {4, 4, 4, true}, {8, 16, 4}};
        case Type::Q8_0: return {{0, 2, 2}, {2, 32, 4}};
        case Type::Q2_K: return {{80, 2, 2}, {82, 2, 2}, {0, 16, 1}, {16, 64, 4}};
        case Type::Q4_K: return {{0, 2, 2}, {2, 2, 2}, {4, 12, 1}, {16, 128, 4}};
        case Type::IQ4_XS: return {{0, 2, 2}, {2, 2, 2}, {4, 4, 1}, {8, 128, 4}};
        case Type::Q3_K: {
            Layout layout{{108, 2, 2}, {96, 12, 1}};
            alternate(layout, 32, 0, 8);  // quants, high bits
            layout.push_back({64, 32, 4});
            return layout;
        }
        case Type::Q5_K: {
            Layout layout{{0, 2, 2}, {2, 2, 2}, {4, 12, 1}};
            alternate(layout, 48, 16, 8);
            layout.push_back({80, 96, 4});
            return layout;
        }
        case Type::Q6_K: {
            Layout layout{{208, 2, 2}, {192, 16, 1}};
            for (int pair = 0; pair < 4; ++pair) {  // of runs of 32 elements
                for (int c = 0; c < 4; ++c) {
                    for (const int offset : {32 * pair + 4 * c, 32 * pair + 4 * c + 16, 128 + 16 * pair + 4 * c}) {
                        layout.push_back({static_cast<int16_t>(offset), 4, 4});
                    }
                }
            }
            return layout;
        }
        default: return {};
    }
}

const Layout &layout_of(Type type) {
    static const std::vector<Layout> layouts = [] {
        std::vector<Layout> all;
        for (int t = 0; t <= static_cast<int>(Type::MXFP4); ++t) {
            all.push_back(make_layout(static_cast<Type>(t)));
        }
        return all;
    }();
    static const Layout none;
    const auto index = static_cast<size_t>(type);
    return index < layouts.size() ? layouts[index] : none;
}

uint32_t group_bits(uint32_t bits) {
    uint32_t out = 0;
    for (int e = 0; e < 32; ++e) {
        out |= ((bits >> e) & 1u) << (8 * (e % 4) + e / 4);
    }
    return out;
}

uint32_t ungroup_bits(uint32_t bits) {
    uint32_t out = 0;
    for (int e = 0; e < 32; ++e) {
        out |= ((bits >> (8 * (e % 4) + e / 4)) & 1u) << e;
    }
    return out;
}

void copy_unit(const uint8_t *from, uint8_t *to, int bytes) {
    switch (bytes) {
        case 4: std::memcpy(to, from, 4); break;
        case 2: std::memcpy(to, from, 2); break;
        default: *to = *from;
    }
}

// Of n bytes and the n bytes behind them, those of the same place exchange the high half of the one for the low half of
// the other. Done twice it is undone.
void exchange_halves(uint8_t *bytes, int n) {
    for (int i = 0; i < n; ++i) {
        const uint8_t a = bytes[i], b = bytes[n + i];
        bytes[i] = static_cast<uint8_t>((a & 15) | (b << 4));
        bytes[n + i] = static_cast<uint8_t>((a >> 4) | (b & 0xf0));
    }
}

// Q6_K keeps together bits of runs of 32 elements that lie far apart: afterwards bytes hold neighbours. Undoes itself.
void regroup(Type type, uint8_t *block) {
    if (type == Type::Q6_K) {
        for (int half = 0; half < 2; ++half) {
            exchange_halves(block + 64 * half, 32);
            exchange_halves(block + 128 + 32 * half, 16);
        }
    }
}

// Visits (byte of the block, place in the group) of one row of a block whose sixteen rows begin at `group`.
template <class Visit>
void each_unit(const Layout &layout, uint8_t *group, int row, Visit visit) {
    for (const Field &field : layout) {
        for (int u = 0; u < field.bytes / field.unit; ++u) {
            visit(field.offset + u * field.unit, group + (u * kGroupRows + row) * field.unit, field);
        }
        group += field.bytes * kGroupRows;
    }
}

void put_block(Type type, const Traits &t, const uint8_t *in, uint8_t *group, int row) {
    uint8_t block[kMostBlockBytes];
    std::memcpy(block, in, t.block_bytes);
    regroup(type, block);
    each_unit(layout_of(type), group, row, [&block](int at, uint8_t *place, const Field &field) {
        if (field.high_bits) {
            uint32_t bits;
            std::memcpy(&bits, block + at, 4);
            bits = group_bits(bits);
            std::memcpy(place, &bits, 4);
        } else {
            copy_unit(block + at, place, field.unit);
        }
    });
}

void take_block(Type type, uint8_t *group, int row, uint8_t *out) {
    each_unit(layout_of(type), group, row, [out](int at, const uint8_t *place, const Field &field) {
        if (field.high_bits) {
            uint32_t bits;
            std::memcpy(&bits, place, 4);
            bits = ungroup_bits(bits);
            std::memcpy(out + at, &bits, 4);
        } else {
            copy_unit(place, out + at, field.unit);
        }
    });
    regroup(type, out);
}

void put_row(Type type, int64_t k, const uint8_t *in, uint8_t *group, int row) {
    const Traits t = traits(type);
    for (int64_t b = 0; b < k / t.block_elements; ++b) {
        put_block(type, t, in + b * t.block_bytes, group + b * t.block_bytes * kGroupRows, row);
    }
}

}  // namespace

bool is_packable(Type type) { return !layout_of(type).empty(); }

void pack_group(Type type, int64_t k, const uint8_t *const *rows, int n_rows, uint8_t *group) {
    if (n_rows < kGroupRows) {
        std::memset(group, 0, kGroupRows * row_bytes(type, k));
    }
    for (int r = 0; r < n_rows; ++r) {
        put_row(type, k, rows[r], group, r);
    }
}

void unpack_row(Type type, int64_t k, const uint8_t *group, int row, uint8_t *out) {
    const Traits t = traits(type);
    for (int64_t b = 0; b < k / t.block_elements; ++b) {
        // Only read through this pointer.
        take_block(type, const_cast<uint8_t *>(group) + b * t.block_bytes * kGroupRows, row, out + b * t.block_bytes);
    }
}

void pack_group_in_place(Type type, int64_t k, uint8_t *group, uint8_t *scratch) {
    const int64_t bytes = row_bytes(type, k);
    std::memcpy(scratch, group, kGroupRows * bytes);
    const uint8_t *rows[kGroupRows];
    for (int r = 0; r < kGroupRows; ++r) {
        rows[r] = scratch + r * bytes;
    }
    pack_group(type, k, rows, kGroupRows, group);
}

void unpack_group_in_place(Type type, int64_t k, uint8_t *group, uint8_t *scratch) {
    const int64_t bytes = row_bytes(type, k);
    std::memcpy(scratch, group, kGroupRows * bytes);
    for (int r = 0; r < kGroupRows; ++r) {
        unpack_row(type, k, scratch, r, group + r * bytes);
    }
}

}  // namespace tandem
