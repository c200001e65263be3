// Weights that are kept interleaved while programs use them as matrices.
//
// A matrix is an exact range of bytes with a type and a shape. It is interleaved when a program that multiplies by it
// begins to run, and put back before anyone else touches its bytes. Bytes that anyone uses in another way (a view, a
// cache, a second shape) are never interleaved.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "pool.h"
#include "types.h"

namespace tandem {

struct Matrix {
    Type type;
    uint8_t *data;
    int64_t k;
    int64_t n_rows;      // of one matrix
    int64_t n_matrices;  // stacked behind each other
    bool packed = false;  // changed in lane order only
    bool wanted = true;   // false: someone needs the bytes as they are

    int64_t bytes() const { return row_bytes(type, k) * n_rows * n_matrices; }
    bool same_as(const Matrix &other) const {
        return type == other.type && k == other.k && n_rows == other.n_rows && n_matrices == other.n_matrices;
    }
};

struct Range {
    const char *begin;
    const char *end;
};

class Matrices {
public:
    // The matrix at these bytes; one object for all programs. Never null.
    std::shared_ptr<Matrix> add(const Matrix &like);
    // These bytes are used as they are by someone, until `release` gets the same ranges. A program that claims them
    // and uses `used` settles what comes back: besides those, all matrices that lie in the way.
    std::vector<std::shared_ptr<Matrix>> claim(const std::vector<Range> &ranges,
                                               const std::vector<std::shared_ptr<Matrix>> &used);
    void release(const std::vector<Range> &ranges);
    // Puts back what overlaps [begin, end), or forgets that it was interleaved when all of it is to be overwritten.
    // In lane order.
    void touch(const char *begin, const char *end, bool replaced, Pool &pool);
    // Forgets what overlaps [begin, end): the memory goes away.
    void forget(const char *begin, const char *end);
    // Interleaves what is wanted and puts back what is not; in lane order, before a program runs.
    void settle(const std::vector<std::shared_ptr<Matrix>> &matrices, Pool &pool);

private:
    using Map = std::map<uintptr_t, std::shared_ptr<Matrix>>;
    std::vector<std::shared_ptr<Matrix>> overlapping(const char *begin, const char *end) const;

    mutable std::mutex lock_;
    Map map_;  // by first byte; ranges may overlap, so lookups go by the longest one
    int64_t longest_ = 0;
    std::vector<Range> claims_;
};

}  // namespace tandem
