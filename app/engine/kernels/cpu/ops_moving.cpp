// Ops that copy rows: CPY and its kin, GET_ROWS, SET_ROWS.
#include <cstring>

#include "compile.h"
#include "pack.h"
#include "quants.h"

namespace tandem {
namespace {

int64_t floats_bytes(int64_t n) { return (n + 15) / 16 * 64; }

// Rows of the same shape on both sides, converted where types differ.
void copy_rows(Compiler &c, const Tensor &from, const Tensor &to) {
    const bool bytewise = from.type == to.type && from.packed_rows() && to.packed_rows();
    const int64_t bytes = bytewise ? row_bytes(from.type, from.ne[0]) : 0;
    c.add(rows_step(to.rows(), rows_per_task(to.ne[0]), floats_bytes(to.ne[0]),
                    [=](Context &context, int64_t begin, int64_t end, char *scratch) {
                        for (int64_t r = begin; r < end; ++r) {
                            if (bytewise) {
                                std::memmove(to.row(r), from.row(r), bytes);
                            } else {
                                write_row(context, to, to.row(r),
                                          read_row(context, from, from.row(r), reinterpret_cast<float *>(scratch)));
                            }
                        }
                    }));
}

// Walks a plain tensor in logical order.
class Walk {
public:
    explicit Walk(const Tensor &t, int64_t at) : t_(t) {
        for (int d = 0; d < 4; ++d) {
            i_[d] = at % t.ne[d];
            at /= t.ne[d];
        }
    }
    char *place() const { return t_.data + i_[0] * t_.nb[0] + i_[1] * t_.nb[1] + i_[2] * t_.nb[2] + i_[3] * t_.nb[3]; }
    void next() {
        for (int d = 0; d < 4 && ++i_[d] == t_.ne[d]; ++d) {
            i_[d] = 0;
        }
    }

private:
    const Tensor &t_;
    int64_t i_[4];
};

// Any folding of the same elements, one by one.
void copy_elements(Compiler &c, const Tensor &from, const Tensor &to) {
    const int64_t bytes = traits(from.type).block_bytes;
    const bool convert = from.type != to.type;
    c.add(rows_step(to.elements(), 8192, 0, [=](Context &context, int64_t begin, int64_t end, char *) {
        Tensor source = from, target = to;  // one element of each
        source.ne[0] = target.ne[0] = 1;
        Walk in(from, begin), out(to, begin);
        for (int64_t i = begin; i < end; ++i, in.next(), out.next()) {
            if (!convert) {
                std::memcpy(out.place(), in.place(), bytes);
                continue;
            }
            float value;
            const float *read = read_row(context, source, in.place(), &value);
            write_row(context, target, out.place(), read);
        }
    }));
}

bool same_shape(const Tensor &a, const Tensor &b) {
    return a.ne[0] == b.ne[0] && a.ne[1] == b.ne[1] && a.ne[2] == b.ne[2] && a.ne[3] == b.ne[3];
}

// A contiguous tensor as one of another shape with the same rows, if that is possible.
bool fold_like(Tensor &t, const Tensor &like) {
    if (!t.contiguous() || t.elements() != like.elements()) {
        return false;
    }
    t.nb[0] = traits(t.type).block_bytes;
    t.nb[1] = row_bytes(t.type, like.ne[0]);
    t.nb[2] = t.nb[1] * like.ne[1];
    t.nb[3] = t.nb[2] * like.ne[2];
    std::memcpy(t.ne, like.ne, sizeof(t.ne));
    return true;
}

}  // namespace

namespace {

int64_t id_at(const Tensor &ids, int64_t i0, int64_t i1, int64_t i2) {
    const char *p = ids.data + i0 * ids.nb[0] + i1 * ids.nb[1] + i2 * ids.nb[2];
    if (ids.type == Type::I64) {
        int64_t value;
        std::memcpy(&value, p, 8);
        return value;
    }
    int32_t value;
    std::memcpy(&value, p, 4);
    return value;
}

// Of equal ids only the last stays. `seen` has a bit for every row, in any state.
void keep_last(int64_t *ids, int64_t n, uint64_t *seen) {
    bool rising = true;
    for (int64_t i = 1; i < n; ++i) {
        rising = rising && ids[i - 1] < ids[i];
    }
    if (rising) {
        return;
    }
    for (int64_t i = 0; i < n; ++i) {
        seen[ids[i] / 64] &= ~(uint64_t{1} << ids[i] % 64);
    }
    for (int64_t i = n - 1; i >= 0; --i) {
        uint64_t &word = seen[ids[i] / 64];
        const uint64_t bit = uint64_t{1} << ids[i] % 64;
        ids[i] = word & bit ? kLaterWins : ids[i];
        word |= bit;
    }
}

}  // namespace

Ids check_ids(Compiler &c, const Tensor &ids, int64_t n_rows, const char *what, bool last_wins) {
    const int64_t n = ids.ne[0];
    const Ids out{c.reserve(n * ids.ne[1] * ids.ne[2] * 8), {n, ids.ne[1], ids.ne[2]}};
    const bool may_repeat = last_wins && n > 1;
    const int64_t seen_bytes = may_repeat ? (n_rows + 63) / 64 * 8 : 0;
    c.add(rows_step(1, 1, seen_bytes, [=](Context &context, int64_t, int64_t, char *scratch) {
        auto *checked = context.at<int64_t>(out.offset);
        for (int64_t i2 = 0; i2 < ids.ne[2]; ++i2) {
            for (int64_t i1 = 0; i1 < ids.ne[1]; ++i1, checked += n) {
                for (int64_t i0 = 0; i0 < n; ++i0) {
                    const int64_t id = id_at(ids, i0, i1, i2);
                    if (id < 0 || id >= n_rows) {
                        context.fail(std::string(what) + ": row id " + std::to_string(id) + " is out of range, the table has " +
                                     std::to_string(n_rows) + " rows");
                        return;
                    }
                    checked[i0] = id;
                }
                if (may_repeat) {
                    keep_last(checked, n, reinterpret_cast<uint64_t *>(scratch));
                }
            }
        }
    }));
    return out;
}

void make_copy(Compiler &c, const Node &node) {
    Tensor from = node.a(), to = *node.out;
    if (from.data == to.data && from.type == to.type && same_shape(from, to) &&
        std::memcmp(from.nb, to.nb, sizeof(from.nb)) == 0) {
        return;  // onto itself
    }
    if (same_shape(from, to) || fold_like(from, to) || fold_like(to, from)) {
        const bool rows_pay = to.ne[0] >= 4 || !is_plain(to.type) || !is_plain(from.type);
        const bool plain_bytes = from.type == to.type || (from.type != Type::I32 && to.type != Type::I32);
        if (rows_pay && plain_bytes && (from.type != to.type || (from.packed_rows() && to.packed_rows()))) {
            return copy_rows(c, from, to);
        }
    }
    copy_elements(c, from, to);
}

void make_get_rows(Compiler &c, const Node &node) {
    const Tensor table = node.a(), out = *node.out;
    const Ids ids = check_ids(c, node.b(), table.ne[1], "GET_ROWS");
    const std::shared_ptr<Matrix> matrix = c.matrix_of(node.a());
    const int64_t bytes = row_bytes(table.type, table.ne[0]);
    c.add(rows_step(out.rows(), rows_per_task(out.ne[0]), floats_bytes(out.ne[0]) + bytes,
                    [=](Context &context, int64_t begin, int64_t end, char *scratch) {
                        for (int64_t r = begin; r < end; ++r) {
                            const int64_t i1 = r % out.ne[1], rest = r / out.ne[1];
                            const int64_t i2 = rest % out.ne[2], i3 = rest / out.ne[2];
                            const int64_t id = ids.at(context, i1, i2, i3);
                            const char *row = table.at(id, i2, i3);
                            if (table.type == Type::I32) {
                                std::memcpy(out.row(r), row, bytes);
                                continue;
                            }
                            if (matrix && matrix->packed && id < table.ne[1] / kGroupRows * kGroupRows) {
                                const int64_t first = id / kGroupRows * kGroupRows;
                                unpack_row(table.type, table.ne[0],
                                           reinterpret_cast<const uint8_t *>(table.at(first, i2, i3)),
                                           static_cast<int>(id - first), reinterpret_cast<uint8_t *>(scratch));
                                row = scratch;
                            }
                            auto *to = reinterpret_cast<float *>(out.row(r));
                            const float *values = read_row(context, table, row, to);
                            if (values != to) {
                                std::memcpy(to, values, out.ne[0] * sizeof(float));
                            }
                        }
                    }));
}

void make_set_rows(Compiler &c, const Node &node) {
    const Tensor data = node.a(), out = *node.out;
    const Ids ids = check_ids(c, node.b(), out.ne[1], "SET_ROWS", true);
    const int64_t n = data.ne[0];
    c.add(rows_step(data.rows(), rows_per_task(n), floats_bytes(n),
                    [=](Context &context, int64_t begin, int64_t end, char *scratch) {
                        for (int64_t r = begin; r < end; ++r) {
                            const int64_t i1 = r % data.ne[1], rest = r / data.ne[1];
                            const int64_t i2 = rest % data.ne[2], i3 = rest / data.ne[2];
                            const int64_t id = ids.at(context, i1, i2 % ids.ne[1], i3 % ids.ne[2]);
                            if (id == kLaterWins) {
                                continue;
                            }
                            char *to = out.at(id, i2, i3);
                            if (data.type == out.type) {
                                std::memcpy(to, data.row(r), row_bytes(data.type, n));
                            } else {
                                write_row(context, out, to,
                                          read_row(context, data, data.row(r), reinterpret_cast<float *>(scratch)));
                            }
                        }
                    }));
}

}  // namespace tandem
