#include "pack.h"

#include <cstring>

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

struct Layout {
    Type type;
    int n_main;
    int n_fields;
    Field fields[6];
};

// The fields of the main part come first; the rest is the tail.
constexpr Layout kLayouts[] = {
    {Type::Q4_0, 1, 2, {{2, 16, 4}, {0, 2, 2}}},
    {Type::IQ4_NL, 1, 2, {{2, 16, 4}, {0, 2, 2}}},
    {Type::MXFP4, 1, 2, {{1, 16, 4}, {0, 1, 1}}},
    {Type::Q4_1, 1, 3, {{4, 16, 4}, {0, 2, 2}, {2, 2, 2}}},
    {Type::Q5_0, 2, 3, {{6, 16, 4}, {2, 4, 4, true}, {0, 2, 2}}},
    {Type::Q5_1, 2, 4, {{8, 16, 4}, {4, 4, 4, true}, {0, 2, 2}, {2, 2, 2}}},
    {Type::Q8_0, 1, 2, {{2, 32, 4}, {0, 2, 2}}},
    {Type::Q2_K, 2, 4, {{16, 64, 4}, {0, 16, 1}, {80, 2, 2}, {82, 2, 2}}},
    {Type::Q3_K, 3, 4, {{32, 64, 4}, {0, 32, 4}, {96, 12, 1}, {108, 2, 2}}},
    {Type::Q4_K, 2, 4, {{16, 128, 4}, {4, 12, 1}, {0, 2, 2}, {2, 2, 2}}},
    {Type::Q5_K, 3, 5, {{48, 128, 4}, {16, 32, 4}, {4, 12, 1}, {0, 2, 2}, {2, 2, 2}}},
    {Type::Q6_K, 3, 4, {{0, 128, 4}, {128, 64, 4}, {192, 16, 1}, {208, 2, 2}}},
    {Type::IQ4_XS, 2, 4, {{8, 128, 4}, {4, 4, 1}, {0, 2, 2}, {2, 2, 2}}},
};

const Layout *layout_of(Type type) {
    for (const Layout &layout : kLayouts) {
        if (layout.type == type) {
            return &layout;
        }
    }
    return nullptr;
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

// Visits (bytes in the row's block, bytes in the group) for one row.
template <class Visit>
void each_unit(const Layout &layout, int64_t k, uint8_t *group, int row, Visit visit) {
    const Traits t = traits(layout.type);
    const GroupLayout sizes = group_layout(layout.type);
    const int64_t n_blocks = k / t.block_elements;
    uint8_t *tail = group + n_blocks * sizes.main_bytes;
    for (int64_t b = 0; b < n_blocks; ++b) {
        uint8_t *place = group + b * sizes.main_bytes;
        for (int f = 0; f < layout.n_fields; ++f) {
            const Field &field = layout.fields[f];
            if (f == layout.n_main) {
                place = tail + b * sizes.tail_bytes;
            }
            for (int u = 0; u < field.bytes / field.unit; ++u) {
                visit(b * t.block_bytes + field.offset + u * field.unit,
                      place + (u * kGroupRows + row) * field.unit, field);
            }
            place += field.bytes * kGroupRows;
        }
    }
}

void put_row(const Layout &layout, int64_t k, const uint8_t *in, uint8_t *group, int row) {
    each_unit(layout, k, group, row, [in](int64_t at, uint8_t *place, const Field &field) {
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

bool is_packable(Type type) { return layout_of(type) != nullptr; }

GroupLayout group_layout(Type type) {
    const Layout *layout = layout_of(type);
    int main = 0;
    int tail = 0;
    for (int f = 0; f < layout->n_fields; ++f) {
        (f < layout->n_main ? main : tail) += layout->fields[f].bytes;
    }
    return {main * kGroupRows, tail * kGroupRows};
}

void pack_group(Type type, int64_t k, const uint8_t *const *rows, int n_rows, uint8_t *group) {
    const Layout &layout = *layout_of(type);
    if (n_rows < kGroupRows) {
        std::memset(group, 0, kGroupRows * row_bytes(type, k));
    }
    for (int r = 0; r < n_rows; ++r) {
        put_row(layout, k, rows[r], group, r);
    }
}

void unpack_row(Type type, int64_t k, const uint8_t *group, int row, uint8_t *out) {
    // The visitor only reads through the group's pointer.
    each_unit(*layout_of(type), k, const_cast<uint8_t *>(group), row,
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
