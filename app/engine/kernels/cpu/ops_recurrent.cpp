// SSM_CONV, SSM_SCAN, GATED_DELTA_NET and GATED_LINEAR_ATTN as steps: rows of states are shared among threads, and each
// goes through its tokens in order, so that cutting a sequence into ubatches changes nothing.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "angles.h"
#include "compile.h"

namespace tandem {
namespace {

const float *floats(const char *p) { return reinterpret_cast<const float *>(p); }

// y[c, t, b] = sum over k of x[t + k, c, b] * kernel[k, c]
void make_conv(Compiler &c, const Node &node) {
    const Tensor x = node.a(), kernel = node.b(), y = *node.out;
    constexpr int64_t kChannels = 16;  // neighbours in the result's rows
    const int64_t blocks = (x.ne[1] + kChannels - 1) / kChannels;
    const int64_t width = kernel.ne[0], channels = y.ne[0], tokens = y.ne[1];
    c.add(rows_step(blocks * y.ne[2], rows_per_task(kChannels * tokens * width), 0,
                    [=](Context &, int64_t begin, int64_t end, char *) {
                        for (int64_t block = begin; block < end; ++block) {
                            const int64_t first = block % blocks * kChannels, b = block / blocks;
                            const int64_t last = std::min(first + kChannels, channels);
                            for (int64_t t = 0; t < tokens; ++t) {
                                auto *out = reinterpret_cast<float *>(y.at(t, b, 0));
                                for (int64_t ch = first; ch < last; ++ch) {
                                    const float *in = floats(x.at(ch, b, 0)) + t;
                                    const float *taps = floats(kernel.at(ch, 0, 0));
                                    float total = 0.0f;
                                    for (int64_t k = 0; k < width; ++k) {
                                        total += in[k] * taps[k];
                                    }
                                    out[ch] = total;
                                }
                            }
                        }
                    }));
}

void make_delta_net(Compiler &c, const Node &node) {
    const Tensor q = node.a(), k = node.b(), v = *node.src[2], g = *node.src[3], beta = *node.src[4],
                 state = *node.src[5], y = *node.out;
    const int64_t n = v.ne[0], heads = v.ne[1], tokens = v.ne[2], sequences = v.ne[3];
    const int64_t snapshots = node.param(0);
    const bool per_key = g.ne[0] > 1;
    const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(n)));
    const int64_t decay_n = per_key ? n : 1;
    // e^g once for all rows.
    const int64_t decays = c.reserve(decay_n * heads * tokens * sequences * 4);
    c.add(rows_step(heads * tokens * sequences, rows_per_task(decay_n * 8), 0,
                    [=](Context &context, int64_t begin, int64_t end, char *) {
                        context.kernels.exp_row(floats(g.data) + begin * decay_n,
                                                context.at<float>(decays) + begin * decay_n, (end - begin) * decay_n);
                    }));
    constexpr int64_t kRows = 16;
    const int64_t blocks = (n + kRows - 1) / kRows;
    c.add(rows_step(
        blocks * heads * sequences, std::max<int64_t>(1, rows_per_task(kRows * n * tokens)), n * 4,
        [=](Context &context, int64_t begin, int64_t end, char *scratch) {
            auto *row = reinterpret_cast<float *>(scratch);
            auto *out = reinterpret_cast<float *>(y.data);
            float *saved = out + n * heads * tokens * sequences;
            for (int64_t task = begin; task < end; ++task) {
                const int64_t h = task / blocks % heads, b = task / blocks / heads;
                const int64_t kh = h % q.ne[1], kb = b / (sequences / q.ne[3]);
                for (int64_t j = task % blocks * kRows; j < std::min(n, task % blocks * kRows + kRows); ++j) {
                    const int64_t place = ((b * heads + h) * n + j) * n;
                    std::memcpy(row, floats(state.data) + place, n * 4);
                    for (int64_t t = 0; t < tokens; ++t) {
                        const int64_t at = (b * tokens + t) * heads + h;
                        context.kernels.delta_row(row, n, context.at<float>(decays) + at * decay_n, per_key,
                                                  floats(k.at(kh, t, kb)), floats(q.at(kh, t, kb)),
                                                  floats(v.at(h, t, b))[j], floats(beta.data)[at], scale,
                                                  out + at * n + j);
                        const int64_t slot = tokens - 1 - t;
                        if (slot < snapshots) {
                            std::memcpy(saved + slot * n * n * heads * sequences + place, row, n * 4);
                        }
                    }
                }
            }
        }));
}

float softplus(float x) {
    return x > 20.0f ? x : static_cast<float>(natural_log(1.0 + power(2.71828182845904523536, x)));
}

void make_scan(Compiler &c, const Node &node) {
    const Tensor state = node.a(), x = node.b(), dt = *node.src[2], a = *node.src[3], bb = *node.src[4],
                 cc = *node.src[5], y = *node.out;
    const int64_t n = state.ne[0], head = state.ne[1], heads = state.ne[2];
    const int64_t tokens = x.ne[2], sequences = x.ne[3], groups = bb.ne[1];
    const int64_t snapshots = std::max(1, node.param(0));
    const bool per_element = a.ne[0] > 1;
    const int64_t decay_n = per_element ? n : 1;
    const Ids ids = check_ids(c, *node.src[6], state.ne[3], "SSM_SCAN");
    // The step of each head and token, and how much of the state it leaves.
    const int64_t steps = c.reserve(heads * tokens * sequences * 4);
    const int64_t decays = c.reserve(decay_n * heads * tokens * sequences * 4);
    c.add(rows_step(heads * tokens * sequences, rows_per_task(decay_n * 16), 0,
                    [=](Context &context, int64_t begin, int64_t end, char *) {
                        for (int64_t i = begin; i < end; ++i) {
                            const float step = softplus(floats(dt.data)[i]);
                            context.at<float>(steps)[i] = step;
                            float *decay = context.at<float>(decays) + i * decay_n;
                            context.kernels.scale_row(floats(a.at(i % heads, 0, 0)), decay, decay_n, step, 0.0f);
                            context.kernels.exp_row(decay, decay, decay_n);
                        }
                    }));
    c.add(rows_step(
        head * heads * sequences, rows_per_task(n * tokens), n * 4,
        [=](Context &context, int64_t begin, int64_t end, char *scratch) {
            auto *row = reinterpret_cast<float *>(scratch);
            auto *out = reinterpret_cast<float *>(y.data);
            float *saved = out + head * heads * tokens * sequences;
            for (int64_t task = begin; task < end; ++task) {
                const int64_t r = task % head, h = task / head % heads, b = task / head / heads;
                const int64_t group = h / (heads / groups);
                const int64_t slot = ids.at(context, b, 0, 0);
                std::memcpy(row, state.at(r, h, slot), n * 4);
                for (int64_t t = 0; t < tokens; ++t) {
                    const int64_t at = (b * tokens + t) * heads + h;
                    const float input = floats(x.at(h, t, b))[r] * context.at<float>(steps)[at];
                    out[at * head + r] =
                        context.kernels.scan_row(row, n, context.at<float>(decays) + at * decay_n, per_element,
                                                 floats(bb.at(group, t, b)), input, floats(cc.at(group, t, b)));
                    const int64_t kept = tokens - 1 - t;
                    if (kept < snapshots) {
                        std::memcpy(saved + (((kept * sequences + b) * heads + h) * head + r) * n, row, n * 4);
                    }
                }
            }
        }));
}

// S[i, j] = S[i, j] * g[i] + k[i] v[j]; y[j] = scale * sum over i of q[i] S[i, j]
void make_linear(Compiler &c, const Node &node) {
    const Tensor k = node.a(), v = node.b(), q = *node.src[2], g = *node.src[3], state = *node.src[4], y = *node.out;
    const int64_t n = k.ne[0], heads = k.ne[1];
    const int64_t sequences = state.elements() / (n * n * heads), tokens = k.ne[2] / sequences;
    const float scale = node.param_f32(0);
    c.add(rows_step(heads * sequences, 1, 0, [=](Context &context, int64_t begin, int64_t end, char *) {
        auto *out = reinterpret_cast<float *>(y.data);
        for (int64_t task = begin; task < end; ++task) {
            const int64_t h = task % heads, b = task / heads;
            float *s = out + n * heads * tokens * sequences + task * n * n;
            std::memcpy(s, floats(state.data) + task * n * n, n * n * 4);
            for (int64_t t = 0; t < tokens; ++t) {
                const int64_t at = ((b * tokens + t) * heads + h) * n;
                const float *keys = floats(k.data) + at, *values = floats(v.data) + at, *queries = floats(q.data) + at,
                            *decay = floats(g.data) + at;
                float *answer = out + at;
                std::fill(answer, answer + n, 0.0f);
                for (int64_t i = 0; i < n; ++i) {
                    for (int64_t j = 0; j < n; ++j) {
                        s[i * n + j] = s[i * n + j] * decay[i] + keys[i] * values[j];
                        answer[j] += queries[i] * s[i * n + j];
                    }
                }
                context.kernels.scale_row(answer, answer, n, scale, 0.0f);
            }
        }
    }));
}

}  // namespace

void make_recurrent(Compiler &c, const Node &node) {
    switch (node.out->op) {
        case Op::SSM_CONV: return make_conv(c, node);
        case Op::SSM_SCAN: return make_scan(c, node);
        case Op::GATED_DELTA_NET: return make_delta_net(c, node);
        default: return make_linear(c, node);
    }
}

}  // namespace tandem
