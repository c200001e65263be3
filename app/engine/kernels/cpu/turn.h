// One turn of a program without a step of Python in it: bytes into its inputs, the run, rows out of its results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"

namespace tandem {

// Memory that a caller knows by addresses of its own.
struct Window {
    uint64_t base;  // what the caller calls the first byte
    char *bytes;
    uint64_t size;
};

class Turn {
public:
    // `wishes` as RowSelection packs them; `rows` are float32[wishes][n_columns]. Throws std::invalid_argument.
    Turn(std::shared_ptr<Engine> engine, std::shared_ptr<Program> program, Window inputs, const char *rows,
         std::size_t n_columns, const std::string &wishes);
    std::size_t n_bytes() const;
    // `items` is a sequence of `address u64 | size u32 | data`. False, and nothing was done, if any of it lies outside.
    bool fits(const uint8_t *items, std::size_t size) const;
    // Writes items that fit, runs, and puts what is wanted of the rows into `out`, which has room for `n_bytes`. What
    // failed, or empty. In lane order.
    std::string run(const uint8_t *items, std::size_t size, uint8_t *out);

private:
    std::shared_ptr<Engine> engine_;
    std::shared_ptr<Program> program_;
    Window inputs_;
    const char *rows_;
    std::size_t n_columns_;
    std::string wishes_;
    std::vector<int32_t> maxima_;
};

}  // namespace tandem
