// Merging by score, for vocabularies without a merge table: the best-scored pair of neighbours first, ties to the left.
// The same as `merge_long` in app/engine/text/spm.py, with the GIL released.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;

namespace {

constexpr std::uint64_t kBase = 0x9e3779b97f4a7c15;
constexpr std::uint32_t kNone = UINT32_MAX;

// The code points of a Python string. Lone surrogates are allowed.
std::vector<Py_UCS4> code_points(nb::handle text) {
    const Py_ssize_t size = PyUnicode_GetLength(text.ptr());
    if (size < 0) {
        throw nb::python_error();
    }
    std::vector<Py_UCS4> points(static_cast<std::size_t>(size) + 1);
    if (PyUnicode_AsUCS4(text.ptr(), points.data(), size + 1, 1) == nullptr) {
        throw nb::python_error();
    }
    points.pop_back();
    return points;
}

std::uint64_t step(std::uint64_t hash, Py_UCS4 point) { return hash * kBase + point + 1; }

std::size_t spread(std::uint64_t hash) { return static_cast<std::size_t>((hash * kBase) >> 32); }

// A set of pairs of code points.
class Pairs {
public:
    explicit Pairs(std::size_t expected) {
        std::size_t capacity = 1024;
        while (capacity < 2 * expected) {
            capacity *= 2;
        }
        slots_.resize(capacity, kFree);
    }

    void add(Py_UCS4 a, Py_UCS4 b) {
        std::uint64_t &slot = slots_[place(a, b)];
        if (slot == kFree) {
            slot = key(a, b);
            if (2 * ++size_ > slots_.size()) {
                grow();
            }
        }
    }

    bool has(Py_UCS4 a, Py_UCS4 b) const { return slots_[place(a, b)] != kFree; }

private:
    static constexpr std::uint64_t kFree = UINT64_MAX;

    static std::uint64_t key(Py_UCS4 a, Py_UCS4 b) { return std::uint64_t{a} << 32 | b; }

    std::size_t place(Py_UCS4 a, Py_UCS4 b) const {
        const std::uint64_t wanted = key(a, b);
        const std::size_t mask = slots_.size() - 1;
        std::size_t at = spread(wanted * kBase) & mask;
        while (slots_[at] != wanted && slots_[at] != kFree) {
            at = (at + 1) & mask;
        }
        return at;
    }

    void grow() {
        std::vector<std::uint64_t> old(2 * slots_.size(), kFree);
        old.swap(slots_);
        for (const std::uint64_t pair : old) {
            if (pair != kFree) {
                slots_[place(static_cast<Py_UCS4>(pair >> 32), static_cast<Py_UCS4>(pair))] = pair;
            }
        }
    }

    std::vector<std::uint64_t> slots_;
    std::size_t size_ = 0;
};

// Texts and their scores: open addressing over one array of code points.
class Scores {
public:
    explicit Scores(nb::dict scores) : inner_(nb::len(scores)) {
        std::size_t capacity = 16;
        while (capacity < 2 * nb::len(scores)) {
            capacity *= 2;
        }
        slots_.resize(capacity);
        for (auto [text, score] : scores) {
            add(code_points(text), nb::cast<double>(score));
        }
    }

    std::size_t longest() const { return longest_; }

    // Whether these two stand side by side in some text. Where they do not, nothing can ever merge across.
    bool are_inner(Py_UCS4 a, Py_UCS4 b) const { return inner_.has(a, b); }

    // The score of a text of this hash, or null.
    const double *find(std::uint64_t hash, const Py_UCS4 *text, std::size_t size) const {
        for (std::size_t at = spread(hash) & mask();; at = (at + 1) & mask()) {
            const Slot &slot = slots_[at];
            if (slot.size == kNone) {
                return nullptr;
            }
            if (slot.hash == hash && slot.size == size &&
                std::memcmp(points_.data() + slot.start, text, size * sizeof(Py_UCS4)) == 0) {
                return &slot.score;
            }
        }
    }

private:
    struct Slot {
        std::uint64_t hash = 0;
        double score = 0;
        std::size_t start = 0;
        std::uint32_t size = kNone;
    };

    std::size_t mask() const { return slots_.size() - 1; }

    void add(const std::vector<Py_UCS4> &text, double score) {
        std::uint64_t hash = 0;
        for (std::size_t i = 0; i < text.size(); ++i) {
            hash = step(hash, text[i]);
            if (i > 0) {
                inner_.add(text[i - 1], text[i]);
            }
        }
        std::size_t at = spread(hash) & mask();
        while (slots_[at].size != kNone) {
            at = (at + 1) & mask();
        }
        slots_[at] = {hash, score, points_.size(), static_cast<std::uint32_t>(text.size())};
        points_.insert(points_.end(), text.begin(), text.end());
        longest_ = std::max(longest_, text.size());
    }

    Pairs inner_;
    std::vector<Slot> slots_;
    std::vector<Py_UCS4> points_;
    std::size_t longest_ = 0;
};

struct Candidate {
    double score;
    std::uint32_t left;  // where the pair begins
    std::uint32_t size;  // code points of both; another sum there means that one of them has changed
};

bool later(const Candidate &a, const Candidate &b) {
    return a.score != b.score ? a.score < b.score : a.left > b.left;
}

// One text on its way from characters to symbols. A symbol is known by the place of its first character.
class Merging {
public:
    Merging(const Scores &scores, const std::vector<Py_UCS4> &text)
        : scores_(scores), text_(text), hashes_(text.size() + 1), powers_(scores.longest() + 1),
          sizes_(text.size(), 1), previous_(text.size()) {
        powers_[0] = 1;
        for (std::size_t i = 1; i < powers_.size(); ++i) {
            powers_[i] = powers_[i - 1] * kBase;
        }
        for (std::size_t i = 0; i < text.size(); ++i) {
            hashes_[i + 1] = step(hashes_[i], text[i]);
            previous_[i] = i == 0 ? kNone : static_cast<std::uint32_t>(i - 1);
        }
    }

    // Part by part, cut where nothing can merge: small heaps stay in the cache.
    std::vector<std::uint32_t> run() {
        for (std::uint32_t left = 0; left + 1 < text_.size(); ++left) {
            if (scores_.are_inner(text_[left], text_[left + 1])) {
                offer(left);
            } else {
                merge_all();
            }
        }
        merge_all();
        std::vector<std::uint32_t> sizes;
        for (std::size_t at = 0; at < text_.size(); at += sizes_[at]) {
            sizes.push_back(sizes_[at]);
        }
        return sizes;
    }

private:
    void merge_all() {
        std::make_heap(heap_.begin(), heap_.end(), later);
        while (!heap_.empty()) {
            std::pop_heap(heap_.begin(), heap_.end(), later);
            const Candidate best = heap_.back();
            heap_.pop_back();
            if (is_current(best)) {
                merge(best.left);
            }
        }
    }

    bool is_current(const Candidate &pair) const {
        const std::uint32_t left_size = sizes_[pair.left];
        const std::size_t right = std::size_t{pair.left} + left_size;
        return left_size != 0 && right < text_.size() && left_size + sizes_[right] == pair.size;
    }

    void merge(std::uint32_t left) {
        const std::uint32_t right = left + sizes_[left];
        sizes_[left] += sizes_[right];
        sizes_[right] = 0;
        const std::size_t next = std::size_t{left} + sizes_[left];
        if (next < text_.size()) {
            previous_[next] = left;
            push(left);
        }
        if (previous_[left] != kNone) {
            push(previous_[left]);
        }
    }

    void push(std::uint32_t left) {
        if (offer(left)) {
            std::push_heap(heap_.begin(), heap_.end(), later);
        }
    }

    // Put the pair that begins here at the end of the heap's array, if it may merge.
    bool offer(std::uint32_t left) {
        const std::size_t size = std::size_t{sizes_[left]} + sizes_[left + sizes_[left]];
        if (size > scores_.longest()) {
            return false;
        }
        const std::uint64_t hash = hashes_[left + size] - hashes_[left] * powers_[size];
        const double *score = scores_.find(hash, text_.data() + left, size);
        if (score == nullptr) {
            return false;
        }
        heap_.push_back({*score, left, static_cast<std::uint32_t>(size)});
        return true;
    }

    const Scores &scores_;
    const std::vector<Py_UCS4> &text_;
    std::vector<std::uint64_t> hashes_;  // of every beginning of the text
    std::vector<std::uint64_t> powers_;
    std::vector<std::uint32_t> sizes_;  // 0: no symbol begins here any more
    std::vector<std::uint32_t> previous_;
    std::vector<Candidate> heap_;
};

std::vector<std::uint32_t> merge(const Scores &scores, nb::str text) {
    const std::vector<Py_UCS4> points = code_points(text);
    if (points.size() >= kNone) {
        throw nb::value_error("the text has too many characters to merge");
    }
    const nb::gil_scoped_release nogil;
    return Merging(scores, points).run();
}

}  // namespace

NB_MODULE(_merge, m) {
    nb::set_leak_warnings(false);  // a tokenizer that something holds to the end is no leak
    nb::class_<Scores>(m, "Scores").def(nb::init<nb::dict>()).def("merge", &merge);
}
