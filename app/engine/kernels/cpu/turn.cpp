#include "turn.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "../sampling/records.h"

namespace tandem {
namespace {

struct Item {
    uint64_t address;
    uint32_t size;
    const uint8_t *data;
};

constexpr std::size_t kHeadBytes = sizeof(uint64_t) + sizeof(uint32_t);

// The item at `at`, which moves behind it. False where the bytes end before it does.
bool next_item(const uint8_t *&at, const uint8_t *end, Item &item) {
    if (static_cast<std::size_t>(end - at) < kHeadBytes) {
        return false;
    }
    std::memcpy(&item.address, at, sizeof item.address);
    std::memcpy(&item.size, at + sizeof item.address, sizeof item.size);
    item.data = at + kHeadBytes;
    if (item.size > static_cast<std::size_t>(end - item.data)) {
        return false;
    }
    at = item.data + item.size;
    return true;
}

}  // namespace

Turn::Turn(std::shared_ptr<Engine> engine, std::shared_ptr<Program> program, Window inputs, const char *rows,
           std::size_t n_columns, const std::string &wishes)
    : engine_(std::move(engine)),
      program_(std::move(program)),
      inputs_(inputs),
      rows_(rows),
      n_columns_(n_columns),
      wishes_(wishes) {
    if (wishes.size() % sizeof(RowWish) != 0 || n_bytes() == SIZE_MAX) {
        throw std::invalid_argument("these rows cannot be wished for");
    }
}

std::size_t Turn::n_bytes() const { return selected_bytes(wishes_in(wishes_.data(), wishes_.size()), n_columns_); }

bool Turn::fits(const uint8_t *items, std::size_t size) const {
    const uint8_t *at = items, *end = items + size;
    for (Item item; at != end;) {
        if (!next_item(at, end, item) || item.address < inputs_.base) {
            return false;
        }
        const uint64_t offset = item.address - inputs_.base;
        if (offset > inputs_.size || item.size > inputs_.size - offset) {
            return false;
        }
    }
    return true;
}

std::string Turn::run(const uint8_t *items, std::size_t size, uint8_t *out) {
    const uint8_t *at = items, *end = items + size;
    for (Item item; at != end && next_item(at, end, item);) {
        char *target = inputs_.bytes + (item.address - inputs_.base);
        engine_->touch(target, target + item.size, true);
        std::memcpy(target, item.data, item.size);
    }
    std::string failure = program_->execute();
    if (failure.empty()) {
        const std::vector<RowWish> wishes = wishes_in(wishes_.data(), wishes_.size());
        engine_->touch(rows_, rows_ + wishes.size() * n_columns_ * sizeof(float), false);
        select_rows(reinterpret_cast<const float *>(rows_), n_columns_, wishes, maxima_, out);
    }
    return failure;
}

}  // namespace tandem
