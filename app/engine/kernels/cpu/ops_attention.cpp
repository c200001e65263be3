// FLASH_ATTN_EXT: the mask reduced to bits once per program, then tiles of rows.
#include <algorithm>
#include <cstring>

#include "compile.h"
#include "quants.h"

namespace tandem {
namespace {

constexpr int64_t kMostPartialBytes = 64 << 20;

class AttentionStep final : public Step {
public:
    AttentionStep(const Node &node, int64_t mask_offset, int64_t partial_offset, bool split, const Kernels &kernels)
        : mask_offset_(mask_offset), partial_offset_(partial_offset), split_(split) {
        const Tensor &q = node.a(), &k = node.b(), &v = *node.src[2];
        a_ = Attention{};
        a_.q = q.data;
        a_.q_token_stride = q.nb[1];
        a_.q_head_stride = q.nb[2];
        a_.q_sequence_stride = q.nb[3];
        a_.k = k.data;
        a_.k_stride = k.nb[1];
        a_.k_head_stride = k.nb[2];
        a_.k_sequence_stride = k.nb[3];
        a_.v = v.data;
        a_.v_stride = v.nb[1];
        a_.v_head_stride = v.nb[2];
        a_.v_sequence_stride = v.nb[3];
        a_.k_type = k.type;
        a_.v_type = v.type;
        a_.k_row_bytes = row_bytes(k.type, k.ne[0]);
        a_.v_row_bytes = row_bytes(v.type, v.ne[0]);
        a_.dk = q.ne[0];
        a_.dv = v.ne[0];
        a_.n_tokens = q.ne[1];
        a_.n_heads = q.ne[2];
        a_.n_kv = k.ne[1];
        a_.scale = node.param_f32(0);
        a_.max_bias = node.param_f32(1);
        a_.softcap = node.param_f32(2);
        slopes_ = alibi_slopes(a_.n_heads, a_.max_bias);
        a_.slopes = slopes_.data();
        a_.sinks = node.src[4] ? reinterpret_cast<const float *>(node.src[4]->data) : nullptr;
        const Tensor *mask = node.src[3];
        a_.mask_tokens = mask ? mask->ne[1] : 1;
        a_.mask_heads = mask ? mask->ne[2] : 1;
        a_.mask_sequences = mask ? mask->ne[3] : 1;
        a_.out = reinterpret_cast<float *>(node.out->data);
        a_.to_float = row_to_float;
        n_sequences_ = q.ne[3];
        n_kv_heads_ = k.ne[2];
        group_ = a_.n_heads / n_kv_heads_;
        // Heads of a group share the tile as long as they share the mask.
        tile_heads_ = a_.mask_heads > 1 ? 1 : std::min<int64_t>(group_, kAttentionRows);
        tile_tokens_ = split ? 1 : std::max<int64_t>(1, kAttentionRows / tile_heads_);
        head_tiles_ = (group_ + tile_heads_ - 1) / tile_heads_;
        token_tiles_ = (a_.n_tokens + tile_tokens_ - 1) / tile_tokens_;
        segments_ = split ? max_segments(a_.n_kv) : 1;
        row_floats_ = partial_row_floats(a_.dv);
        scratch_ = kernels.attention_scratch_bytes(a_.dk, a_.dv);
    }

    static int64_t max_segments(int64_t n_kv) {
        const int64_t cells = kAttentionBlock * kSegmentBlocks;
        return (n_kv + cells - 1) / cells;
    }
    static int64_t partial_row_floats(int64_t dv) { return 2 + (dv + 15) / 16 * 16; }

    bool parallel() const override { return true; }
    int64_t scratch_bytes() const override { return scratch_; }
    int64_t tasks(const Context &) const override {
        return n_sequences_ * n_kv_heads_ * head_tiles_ * token_tiles_ * segments_;
    }

    void run(Context &context, int64_t task, int thread) override {
        Attention a = a_;
        a.mask_rows = context.at<MaskRow>(mask_offset_);
        AttentionTile tile;
        // The longest tiles, those of the last tokens, come first.
        // Segments are outermost: heads of one cell lie side by side in memory.
        const int64_t of_a_segment = n_sequences_ * n_kv_heads_ * head_tiles_ * token_tiles_;
        const int64_t segment = task / of_a_segment;
        int64_t rest = task % of_a_segment;
        const int64_t head_tile = rest % head_tiles_;
        rest /= head_tiles_;
        tile.kv_head = rest % n_kv_heads_;
        rest /= n_kv_heads_;
        tile.sequence = rest % n_sequences_;
        tile.first_token = (token_tiles_ - 1 - rest / n_sequences_) * tile_tokens_;
        tile.n_tokens = static_cast<int32_t>(std::min(tile_tokens_, a.n_tokens - tile.first_token));
        tile.first_head = tile.kv_head * group_ + head_tile * tile_heads_;
        tile.n_heads = static_cast<int32_t>(std::min(tile_heads_, group_ - head_tile * tile_heads_));
        tile.segment = -1;
        if (!split_) {
            context.kernels.attention_tile(a, tile, context.scratch(thread), nullptr);
            return;
        }
        const MaskRow &mask = a.mask_rows[a.mask_row_index(tile.first_token, tile.first_head, tile.sequence)];
        if (segment * kSegmentBlocks >= mask.n_visible) {
            return;
        }
        tile.segment = segment;
        context.kernels.attention_tile(a, tile, context.scratch(thread), partial(context, tile, 0, segment));
    }

    // After all segments: one row after the other.
    void fold(Context &context, int64_t row, int thread) {
        Attention a = a_;
        a.mask_rows = context.at<MaskRow>(mask_offset_);
        const int64_t head = row % a.n_heads;
        const int64_t token = row / a.n_heads % a.n_tokens;
        const int64_t sequence = row / (a.n_heads * a.n_tokens);
        const MaskRow &mask = a.mask_rows[a.mask_row_index(token, head, sequence)];
        const int64_t in_group = head % group_;
        AttentionTile tile{};
        tile.sequence = sequence;
        tile.kv_head = head / group_;
        tile.first_token = token;
        tile.first_head = head - in_group % tile_heads_;
        context.kernels.attention_fold(a, partial(context, tile, in_group % tile_heads_, 0),
                                       tile_heads_ * row_floats_,
                                       (mask.n_visible + kSegmentBlocks - 1) / kSegmentBlocks, token, head, sequence,
                                       context.scratch(thread));
    }
    int64_t rows() const { return a_.n_heads * a_.n_tokens * n_sequences_; }

private:
    // Partial sums lie by (sequence, token, head tile, segment, row of the tile).
    float *partial(Context &context, const AttentionTile &tile, int64_t row, int64_t segment) const {
        const int64_t head_tile = tile.kv_head * head_tiles_ + tile.first_head % group_ / tile_heads_;
        const int64_t at =
            ((tile.sequence * a_.n_tokens + tile.first_token) * n_kv_heads_ * head_tiles_ + head_tile) * segments_;
        return context.at<float>(partial_offset_) + ((at + segment) * tile_heads_ + row) * row_floats_;
    }

    Attention a_;
    std::vector<float> slopes_;
    int64_t mask_offset_, partial_offset_;
    bool split_;
    int64_t n_sequences_, n_kv_heads_, group_, tile_heads_, tile_tokens_, head_tiles_, token_tiles_, segments_;
    int64_t row_floats_, scratch_;
};

}  // namespace

// The arena's offset of MaskRow [rows of the mask], reduced where the step list stands.
int64_t Compiler::mask_rows(const Tensor *mask, int64_t n_kv) {
    const int64_t rows = mask ? mask->rows() : 1;
    const int64_t blocks = (n_kv + kAttentionBlock - 1) / kAttentionBlock;
    const int64_t key[12] = {3, mask ? reinterpret_cast<int64_t>(mask->data) : 0, rows, n_kv};
    const Range source{mask ? mask->data : nullptr, mask ? mask->data + mask->span_bytes() : nullptr};
    if (const Cached *found = find(key)) {
        return found->offset;
    }
    const int64_t offset = reserve(rows * static_cast<int64_t>(sizeof(MaskRow)));
    const int64_t visible = reserve(rows * blocks * static_cast<int64_t>(sizeof(uint32_t)));
    const int64_t seen = reserve(rows * blocks * static_cast<int64_t>(sizeof(uint64_t)));
    const char *data = mask ? mask->data : nullptr;
    const int64_t stride = n_kv * 2;
    add(rows_step(rows, rows_per_task(n_kv / 8), 0, [=](Context &context, int64_t begin, int64_t end, char *) {
        for (int64_t r = begin; r < end; ++r) {
            MaskRow &row = context.at<MaskRow>(offset)[r];
            uint32_t *blocks_of = context.at<uint32_t>(visible) + r * blocks;
            uint64_t *cells_of = context.at<uint64_t>(seen) + r * blocks;
            if (data) {
                context.kernels.reduce_mask_row(reinterpret_cast<const uint16_t *>(data + r * stride), n_kv, row,
                                                blocks_of, cells_of);
                continue;
            }
            row = MaskRow{blocks, blocks_of, cells_of, nullptr, false};
            for (int64_t b = 0; b < blocks; ++b) {
                const int64_t left = n_kv - b * kAttentionBlock;
                blocks_of[b] = static_cast<uint32_t>(b);
                cells_of[b] = left >= kAttentionBlock ? ~uint64_t{0} : (uint64_t{1} << left) - 1;
            }
        }
    }));
    remember(key, source, offset);
    return offset;
}

void make_attention(Compiler &c, const Node &node) {
    const Tensor &q = node.a(), &k = node.b(), &v = *node.src[2];
    const int64_t mask = c.mask_rows(node.src[3], k.ne[1]);
    // Few tokens over many cells: segments become tasks of their own, and their sums are folded afterwards.
    // Where their sums would be large, the heads are tasks enough; either way folds the same sums in the same order.
    const int64_t segments = AttentionStep::max_segments(k.ne[1]);
    // Tiles of heads may be padded, at most twofold.
    const int64_t partial_bytes = 2 * q.ne[1] * q.ne[2] * q.ne[3] * segments *
                                  AttentionStep::partial_row_floats(v.ne[0]) * static_cast<int64_t>(sizeof(float));
    const bool split = q.ne[1] * q.ne[3] <= 4 && segments > 1 && partial_bytes <= kMostPartialBytes;
    const int64_t partial = split ? c.reserve(partial_bytes) : 0;
    auto step = std::make_unique<AttentionStep>(node, mask, partial, split, c.kernels());
    AttentionStep *attention = step.get();
    c.add(std::move(step));
    if (split) {
        c.add(rows_step(attention->rows(), 16, attention->scratch_bytes(),
                        [attention](Context &context, int64_t begin, int64_t end, char *scratch) {
                            const int thread = static_cast<int>((scratch - context.private_) / context.private_bytes);
                            for (int64_t row = begin; row < end; ++row) {
                                attention->fold(context, row, thread);
                            }
                        }));
    }
}

}  // namespace tandem
