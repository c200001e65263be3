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
            for (int half = 0; half < 2; ++half) {
                alternate(layout, 64 * half, 128 + 32 * half, 8);
                layout.push_back({static_cast<int16_t>(64 * half + 32), 32, 4});
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

// Visits (bytes in the row, bytes in the group) for one row.
template <class Visit>
void each_unit(Type type, int64_t k, uint8_t *group, int row, Visit visit) {
    const Layout &layout = layout_of(type);
    const Traits t = traits(type);
    uint8_t *place = group;
    for (int64_t b = 0; b < k / t.block_elements; ++b) {
        for (const Field &field : layout) {
            for (int u = 0; u < field.bytes / field.unit; ++u) {
                visit(b * t.block_bytes + field.offset + u * field.unit,
                      place + (u * kGroupRows + row) * field.unit, field);
            }
            place += field.bytes * kGroupRows;
        }
    }
}

void put_row(Type type, int64_t k, const uint8_t *in, uint8_t *group, int row) {
    each_unit(type, k, group, row, [in](int64_t at, uint8_t *place, const Field &field) {
        if (field.high_bits) {
            uint32_t bits;
            std::memcpy(&bits, in + at, 4);
            bits = group_bits(bits);
            std::memcpy(place, &bits, 4);
        } else {
            copy_unit(in + at, place, field.unit);
        }
    });
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
    // The visitor only reads through the group's pointer.
    each_unit(type, k, const_cast<uint8_t *>(group), row,
              [out](int64_t at, const uint8_t *place, const Field &field) {
                  if (field.high_bits) {
                      uint32_t bits;
                      std::memcpy(&bits, place, 4);
                      bits = ungroup_bits(bits);
                      std::memcpy(out + at, &bits, 4);
                  } else {
                      copy_unit(place, out + at, field.unit);
                  }
              });
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
