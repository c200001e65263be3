#include "matrix.h"

#include <algorithm>

#include "pack.h"

namespace tandem {
namespace {

// Interleaving or putting back, group by group.
class Rearrange final : public Job {
public:
    // All memory is taken here: a weight that is half rearranged could not be put right again.
    Rearrange(Matrix &matrix, bool pack, int n_threads) : m_(matrix), pack_(pack), scratch_(n_threads) {
        groups_ = m_.n_rows / kGroupRows;
        for (std::vector<uint8_t> &scratch : scratch_) {
            scratch.resize(kGroupRows * row_bytes(m_.type, m_.k));
        }
    }
    int64_t phases() const override { return groups_ > 0 ? 1 : 0; }
    int64_t tasks(int64_t) const override { return m_.n_matrices * groups_; }
    void run(int64_t, int64_t task, int thread) override {
        const int64_t row = row_bytes(m_.type, m_.k);
        uint8_t *group = m_.data + task / groups_ * m_.n_rows * row + task % groups_ * kGroupRows * row;
        std::vector<uint8_t> &scratch = scratch_[thread];
        if (pack_) {
            pack_group_in_place(m_.type, m_.k, group, scratch.data());
        } else {
            unpack_group_in_place(m_.type, m_.k, group, scratch.data());
        }
    }
    void finish(int64_t) override {}

private:
    Matrix &m_;
    bool pack_;
    int64_t groups_;
    std::vector<std::vector<uint8_t>> scratch_;
};

void arrange(Matrix &matrix, bool packed, Pool &pool) {
    if (matrix.packed != packed) {
        Rearrange job(matrix, packed, pool.threads());
        pool.run(job);
        matrix.packed = packed;
    }
}

}  // namespace

std::vector<std::shared_ptr<Matrix>> Matrices::overlapping(const char *begin, const char *end) const {
    std::vector<std::shared_ptr<Matrix>> found;
    const auto first = reinterpret_cast<uintptr_t>(begin);
    const auto last = reinterpret_cast<uintptr_t>(end);
    const uintptr_t reach = static_cast<uintptr_t>(longest_);
    for (auto it = map_.lower_bound(first > reach ? first - reach : 0); it != map_.end() && it->first < last; ++it) {
        if (it->first + it->second->bytes() > first) {
            found.push_back(it->second);
        }
    }
    return found;
}

std::shared_ptr<Matrix> Matrices::add(const Matrix &like) {
    const std::lock_guard<std::mutex> guard(lock_);
    const char *begin = reinterpret_cast<const char *>(like.data);
    const char *end = begin + like.bytes();
    bool wanted = true;
    for (const Range &claim : claims_) {
        wanted = wanted && (claim.end <= begin || claim.begin >= end);
    }
    const auto here = map_.find(reinterpret_cast<uintptr_t>(like.data));
    for (const std::shared_ptr<Matrix> &other : overlapping(begin, end)) {
        if (here != map_.end() && other == here->second && other->same_as(like)) {
            continue;
        }
        other->wanted = false;
        wanted = false;
    }
    if (here != map_.end()) {
        here->second->wanted = here->second->wanted && wanted;
        if (here->second->same_as(like)) {
            return here->second;
        }
        // The same first byte with another shape: neither may be interleaved, and the map knows the first one.
        auto other = std::make_shared<Matrix>(like);
        other->wanted = false;
        return other;
    }
    auto matrix = std::make_shared<Matrix>(like);
    matrix->wanted = wanted;
    longest_ = std::max(longest_, matrix->bytes());
    map_.emplace(reinterpret_cast<uintptr_t>(like.data), matrix);
    return matrix;
}

std::vector<std::shared_ptr<Matrix>> Matrices::claim(const std::vector<Range> &ranges,
                                                     const std::vector<std::shared_ptr<Matrix>> &used) {
    const std::lock_guard<std::mutex> guard(lock_);
    std::vector<std::shared_ptr<Matrix>> settled = used;
    for (const Range &range : ranges) {
        claims_.push_back(range);
        for (const std::shared_ptr<Matrix> &matrix : overlapping(range.begin, range.end)) {
            matrix->wanted = false;
            settled.push_back(matrix);
        }
    }
    for (const std::shared_ptr<Matrix> &matrix : used) {
        const char *begin = reinterpret_cast<const char *>(matrix->data);
        for (const std::shared_ptr<Matrix> &other : overlapping(begin, begin + matrix->bytes())) {
            settled.push_back(other);
        }
    }
    std::sort(settled.begin(), settled.end());
    settled.erase(std::unique(settled.begin(), settled.end()), settled.end());
    return settled;
}

void Matrices::release(const std::vector<Range> &ranges) {
    const std::lock_guard<std::mutex> guard(lock_);
    for (const Range &range : ranges) {
        const auto same = [&](const Range &claim) { return claim.begin == range.begin && claim.end == range.end; };
        const auto it = std::find_if(claims_.begin(), claims_.end(), same);
        if (it != claims_.end()) {
            claims_.erase(it);
        }
    }
}

void Matrices::touch(const char *begin, const char *end, bool replaced, Pool &pool) {
    std::vector<std::shared_ptr<Matrix>> found;
    {
        const std::lock_guard<std::mutex> guard(lock_);
        found = overlapping(begin, end);
    }
    for (const std::shared_ptr<Matrix> &matrix : found) {
        const char *first = reinterpret_cast<const char *>(matrix->data);
        if (replaced && begin <= first && first + matrix->bytes() <= end) {
            matrix->packed = false;
        } else {
            arrange(*matrix, false, pool);
        }
    }
}

void Matrices::forget(const char *begin, const char *end) {
    const std::lock_guard<std::mutex> guard(lock_);
    for (const std::shared_ptr<Matrix> &matrix : overlapping(begin, end)) {
        map_.erase(reinterpret_cast<uintptr_t>(matrix->data));
    }
    longest_ = 0;
    for (const auto &entry : map_) {
        longest_ = std::max(longest_, entry.second->bytes());
    }
}

void Matrices::settle(const std::vector<std::shared_ptr<Matrix>> &matrices, Pool &pool) {
    std::vector<std::shared_ptr<Matrix>> to_pack, to_unpack;
    {
        const std::lock_guard<std::mutex> guard(lock_);
        for (const std::shared_ptr<Matrix> &matrix : matrices) {
            if (matrix->packed != matrix->wanted) {
                (matrix->wanted ? to_pack : to_unpack).push_back(matrix);
            }
        }
    }
    for (const std::shared_ptr<Matrix> &matrix : to_unpack) {
        arrange(*matrix, false, pool);
    }
    for (const std::shared_ptr<Matrix> &matrix : to_pack) {
        arrange(*matrix, true, pool);
    }
}

}  // namespace tandem
