// Interleaved weights: sixteen rows together, in the same bytes.
//
// A packed matrix is cut into groups of sixteen rows; the rows that are left over stay as they were. A group holds block
// after block; a block holds its sixteen rows' scales and then their quants, next to each other in units of four bytes,
// so that one vector holds the same elements of sixteen rows. Everything stands in the order in which a kernel reads it:
// one ascending stream is what memory delivers fastest, and any other order cost half of its bandwidth or more.
// It is a permutation of bits: unpacking gives back the original bytes.
#pragma once

#include <cstdint>

#include "types.h"

namespace tandem {

constexpr int kGroupRows = 16;

// Whether kernels know an interleaved form of this type.
bool is_packable(Type type);

// Interleave `n_rows` (1 to 16) rows of `k` elements into `group`; missing rows become zero bytes.
void pack_group(Type type, int64_t k, const uint8_t *const *rows, int n_rows, uint8_t *group);
// One row of a packed group, as it was.
void unpack_row(Type type, int64_t k, const uint8_t *group, int row, uint8_t *out);

// A group in place. `scratch` holds a group (16 * row_bytes).
void pack_group_in_place(Type type, int64_t k, uint8_t *group, uint8_t *scratch);
void unpack_group_in_place(Type type, int64_t k, uint8_t *group, uint8_t *scratch);

}  // namespace tandem
