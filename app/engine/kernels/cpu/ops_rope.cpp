// ROPE: angles once per program and set of parameters, then rows.
#include <cmath>
#include <cstring>

#include "angles.h"
#include "compile.h"

namespace tandem {
namespace {

enum Mode { kNormal = 0, kNeox = 2, kMrope = 8, kVision = 24, kImrope = 40 };

// Everything about the pairs of a head that does not depend on positions.
struct Rotation {
    std::vector<double> frequency;  // per position, extrapolated
    std::vector<int> run;           // which of the runs of positions
    std::vector<double> mix;        // how much of the extrapolated angle YaRN keeps
    double scale;
    double magnitude;
};

Rotation rotation_of(const Node &node) {
    const int n_dims = node.param(1), mode = node.param(2), n_ctx = node.param(4);
    const double base = node.param_f32(5), scale = node.param_f32(6), extension = node.param_f32(7);
    const int pairs = mode == kVision ? n_dims : n_dims / 2;
    const int *sections = &node.out->params[11];
    const int all = sections[0] + sections[1] + sections[2] + sections[3];
    Rotation r{std::vector<double>(pairs), std::vector<int>(pairs, 0), std::vector<double>(pairs, 0.0), scale,
               node.param_f32(8)};
    for (int i = 0; i < pairs; ++i) {
        int exponent = i;
        if (mode == kImrope) {
            const int sector = i % all;
            r.run[i] = sector % 3 == 1 && sector < 3 * sections[1]   ? 1
                       : sector % 3 == 2 && sector < 3 * sections[2] ? 2
                       : sector % 3 == 0 && sector < 3 * sections[0] ? 0
                                                                     : 3;
        } else if (mode == kMrope || mode == kVision) {
            int sector = i % all;
            int run = 0;
            while (run < 3 && sector >= sections[run]) {
                sector -= sections[run++];
            }
            r.run[i] = run;
            exponent = mode == kVision ? sector : i;  // every section of vision counts its own
        }
        r.frequency[i] = power(base, -2.0 * exponent / n_dims);
    }
    if (extension != 0) {
        const auto corrected = [&](double rotations) {
            return n_dims * natural_log(n_ctx / (rotations * 2 * 3.14159265358979323846)) / (2 * natural_log(base));
        };
        const double low = std::fmax(0, std::floor(corrected(node.param_f32(9))));
        const double high = std::fmin(n_dims - 1, std::ceil(corrected(node.param_f32(10))));
        for (int i = 0; i < pairs; ++i) {
            const double ramp = (i - low) / std::fmax(0.001, high - low);
            r.mix[i] = (1 - std::fmin(std::fmax(ramp, 0), 1)) * extension;
        }
        r.magnitude *= 1 + 0.1 * natural_log(1 / scale);
    }
    return r;
}

}  // namespace

// A table [tokens][2 * pairs]: cosines, then sines, both times the magnitude. The offset in the arena.
int64_t Compiler::rope_table(const Node &node) {
    const Tensor positions = node.b();
    const Tensor *factors = node.src[2];
    const int64_t tokens = node.out->ne[2];
    const Rotation r = rotation_of(node);
    const int64_t pairs = static_cast<int64_t>(r.frequency.size());
    int64_t key[12] = {2, node.param(1), node.param(2), node.param(4), tokens};
    std::memcpy(key + 5, &node.out->params[5], 6 * sizeof(int32_t));
    std::memcpy(key + 8, &node.out->params[11], 4 * sizeof(int32_t));
    key[10] = factors ? reinterpret_cast<int64_t>(factors->data) : 0;
    key[11] = reinterpret_cast<int64_t>(positions.data);
    const Range source{positions.data, positions.data + positions.span_bytes()};
    const Range second = factors ? Range{factors->data, factors->data + factors->span_bytes()} : Range{nullptr, nullptr};
    if (const Cached *found = find(key)) {
        return found->offset;
    }
    const int64_t offset = reserve(tokens * 2 * pairs * static_cast<int64_t>(sizeof(float)));
    const float *ff = factors ? reinterpret_cast<const float *>(factors->data) : nullptr;
    add(rows_step(tokens, 8192 / (pairs * 16) + 1, 0, [=](Context &context, int64_t begin, int64_t end, char *) {
        const auto *where = reinterpret_cast<const int32_t *>(positions.data);
        for (int64_t t = begin; t < end; ++t) {
            float *table = context.at<float>(offset) + t * 2 * pairs;
            for (int64_t i = 0; i < pairs; ++i) {
                double raw = static_cast<double>(where[r.run[i] * tokens + t]) * r.frequency[i];
                raw = ff ? raw / static_cast<double>(ff[i]) : raw;
                const SinCos turn = sin_cos(raw * r.scale * (1 - r.mix[i]) + raw * r.mix[i]);
                table[i] = static_cast<float>(turn.cosine * r.magnitude);
                table[pairs + i] = static_cast<float>(turn.sine * r.magnitude);
            }
        }
    }));
    remember(key, source, offset, 0, second);
    return offset;
}

void make_rope(Compiler &c, const Node &node) {
    const Tensor x = node.a(), y = *node.out;
    const int mode = node.param(2);
    const int64_t pairs = mode == kVision ? node.param(1) : node.param(1) / 2;
    const int64_t first = node.param(15);
    const int64_t offset = c.rope_table(node);
    const int64_t width = (x.ne[0] + 15) / 16 * 16;
    c.add(rows_step(y.rows(), rows_per_task(y.ne[0]), 2 * width * 4,
                    [=](Context &context, int64_t begin, int64_t end, char *scratch) {
                        auto *room = reinterpret_cast<float *>(scratch);
                        for (int64_t r = begin; r < end; ++r) {
                            const int64_t token = r / y.ne[1] % y.ne[2];
                            const float *table = context.at<float>(offset) + token * 2 * pairs;
                            const float *in = read_row(context, x, x.row(r), room);
                            float *out = row_target(y, y.row(r), room + width);
                            context.kernels.rope_row(in, out, table, 2 * pairs, y.ne[0], first, mode == kNormal, pairs);
                            write_row(context, y, y.row(r), out);
                        }
                    }));
}

}  // namespace tandem
