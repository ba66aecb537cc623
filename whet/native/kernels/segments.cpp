// Attention of training on a CPU, forward and backward, over a row of segments: each sees its ancestors, and itself
// causally.
//
// Called from whet/native/segments.py, which builds this file with the machine's own compiler. Queries go through in
// blocks of the tokens of one segment, with all heads that share a KV head; keys in blocks of one segment. Scores are
// never held beyond a block. Sums are in fp32; T is what is stored, float or bfloat16, and C what is multiplied
// (blocks.h): bf16 where the processor multiplies it, and then weights and their gradients are rounded as torch's operator
// rounds them; else all but the inputs and outputs stays in fp32. Each sum has an order
// that depends on the number of stripes alone. Dim legend: T tokens, H query heads, K KV heads, g = H / K, D head size,
// E of values.
// Left out on purpose: soft-capped scores and sinks, which the path written in torch has.

#include "blocks.h"

extern "C" int omp_get_thread_num(void);

namespace {

constexpr int QUERIES = 96;  // of a block: tokens times g
constexpr int KEYS = 96;     // of a block
constexpr int WIDE = 16;     // blocks of keys have room for a multiple of this
static_assert(DEEP <= W && DEEP % 2 == 0 && QUERIES % DEEP == 0 && WIDE % W == 0 && KEYS % WIDE == 0);

struct Tensor {
    void* data;           // T, heads of one token, numbers of one head side by side
    int64_t token, head;  // numbers from one to the next
};
struct Segment {
    int64_t parent, above, block;  // -1 = root; tokens before its first; its first block of keys
};
struct Block {
    int64_t segment, first, place, count;  // token of its first key, or query, in the row; its place in the chain
    int64_t ahead;                         // tokens of the blocks before it, each up to a multiple of WIDE
};

struct Call {
    int64_t heads, kv, size, value_size, threads, stripes, window;  // places back that are seen; 0 = all
    double scale;
    int64_t key_blocks, query_blocks, padded_keys;  // tokens of all blocks of keys, with room
    const Segment* segments;
    const Block *keys, *queries;
    const int64_t* stripe_ends;  // [stripes]: last block of queries of each, plus 1
    Tensor q, k, v, out, grad, d_q, d_k, d_v;
    float* sums;  // [T, H]: log of the sum of exponentials
    float* workspace;
};

// ---- the parts of `workspace`
// ----------------------------------------------------------------------------------------

template <class T> struct Plan {
    typedef typename Multiplied<T>::C C;
    const Call& c;
    const int64_t d = round_up(c.size, PANEL), e = round_up(c.value_size, PANEL);  // columns, with padding
    const int64_t g = c.heads / c.kv;

    int64_t floats(int64_t numbers) const { return round_up(numbers * int64_t(sizeof(C)),
            64) / 4; }  // that hold so many C
    // keys transposed and values paired (forward); keys and values transposed, and keys paired (backward)
    float* packed(int64_t head, const Block& b, bool back) const {
        return c.workspace + floats(back ? 2 * d + e : d + e) * (head * c.padded_keys + b.ahead);
    }
    C* keys(float* packed) const { return (C*)packed; }
    C* values(float* packed, const Block& b) const { return (C*)packed + d * round_up(b.count, WIDE); }
    C* paired_keys(float* packed, const Block& b) const { return (C*)packed + (d + e) * round_up(b.count, WIDE); }
    // gradients of a block of keys and of its values
    float* gradients(float* head_gradients, const Block& b) const { return head_gradients + (d + e) * b.ahead; }
    // a thread's own
    int64_t rows() const { return floats(QUERIES * LONG); }
    int64_t forward_workspace() const { return std::max(rows(),
            floats(KEYS * LONG)) + QUERIES * e + floats(DEEP * KEYS); }
    int64_t backward_workspace() const {
        return queries_workspace() + QUERIES * d + floats(3 * QUERIES * KEYS);
    }
    int64_t queries_workspace() const { return std::max(2 * rows() + floats(QUERIES * d) + floats(QUERIES * e),
            floats(KEYS * LONG)); }
    int64_t shared(bool back) const { return floats(back ? 2 * d + e : d + e) * c.kv * c.padded_keys; }
    int64_t gradients_of_head() const { return (d + e) * c.padded_keys; }
    int64_t workspace_size(bool back) const {
        if (!back) return shared(false) + c.threads * forward_workspace();
        return shared(true) + c.stripes * c.kv * gradients_of_head() + c.threads * backward_workspace();
    }
};

template <class T> inline const T* head_of(const Tensor& x, int64_t token, int64_t head) {
    return (const T*)x.data + token * x.token + head * x.head;
}
template <class T> inline T* mutable_head(const Tensor& x, int64_t token, int64_t head) {
    return (T*)x.data + token * x.token + head * x.head;
}

// The rows of a block of keys of one head, with zeros below.
template <class T, class C>
inline void read_keys(const Tensor& x, const Block& b, int64_t head, int size, C* rows) {
    const int wide = int(round_up(size, PANEL));
    for (int i = 0; i < b.count; i++) copy_padded(head_of<T>(x, b.first + i, head), rows + int64_t(i) * LONG, size,
            wide);
    for (int64_t i = b.count; i < round_up(b.count, W); i++) std::memset(rows + i * LONG, 0, sizeof(C) * wide);
}
// The rows of a block of queries: all heads of a token, then the next token's.
struct Rows {
    int count;
    int64_t token[QUERIES], head[QUERIES], place[QUERIES];
    Rows(const Block& b, int64_t kv_head, int g) : count(int(b.count) * g) {
        for (int r = 0; r < count; r++) {
            token[r] = b.first + r / g;
            head[r] = kv_head * g + r % g;
            place[r] = b.place + r / g;
        }
    }
};
// Reads the rows, with a row of zeros below where there is room.
template <class T, class C>
inline void read_queries(const Tensor& x, const Rows& rows, int size, C* to) {
    const int wide = int(round_up(size, PANEL));
    for (int r = 0; r < rows.count; r++)
        copy_padded(head_of<T>(x, rows.token[r], rows.head[r]), to + int64_t(r) * LONG, size, wide);
    if (rows.count < QUERIES) std::memset(to + int64_t(rows.count) * LONG, 0, sizeof(C) * wide);
}

// ---- visible keys ----------------------------------------------------------------------------------------------------

// Which keys of a block the rows of a strip see: row r those from begin[r] to end[r] - 1.
struct VisibleKeys {
    int begin[DEEP], end[DEEP];
    int max_end;  // the largest end
    bool whole(int r, int columns) const { return begin[r] == 0 && end[r] == columns; }
};
inline VisibleKeys visible_keys(const Call& c, const int64_t* places, int rows, const Block& keys) {
    VisibleKeys s;
    s.max_end = 0;
    for (int r = 0; r < rows; r++) {
        const int64_t ahead = places[r] - keys.place;  // places from the block's first key
        const int64_t hidden = c.window ? ahead - c.window + 1 : 0;
        s.begin[r] = int(std::min(std::max<int64_t>(hidden, 0), keys.count));
        s.end[r] = int(std::min(std::max<int64_t>(ahead + 1, 0), keys.count));
        s.max_end = std::max(s.max_end, s.end[r]);
    }
    return s;
}
inline bool is_visible(const Call& c, const Block& queries, const Block& keys) {
    const int64_t last = queries.place + queries.count - 1;
    return keys.place <= last && (!c.window || keys.place + keys.count > queries.place - c.window + 1);
}
inline vec lanes() {
    vec x;
    for (int i = 0; i < W; i++) x[i] = float(i);
    return x;
}
inline ints inside(vec lane, int at, int begin, int end) {
    return (lane >= all(float(begin - at))) & (lane < all(float(end - at)));
}

// Calls back with each block of keys that a block of queries sees, its own segment's first.
template <class F> inline void each_block(const Call& c, const Block& queries, F&& visit) {
    for (int64_t s = queries.segment; s >= 0; s = c.segments[s].parent) {
        for (int64_t b = c.segments[s].block; b < c.key_blocks && c.keys[b].segment == s; b++)
            if (is_visible(c, queries, c.keys[b])) visit(b);
    }
}

// ---- forward ---------------------------------------------------------------------------------------------------------

template <int half, size_t... i>
inline vec fold_max(vec x, vec y, std::index_sequence<i...>) {
    constexpr int b = 2 * half;
    vec low = __builtin_shufflevector(x, y, ((int(i) % b < half) ? int(i) : W + int(i) - half)...);
    vec high = __builtin_shufflevector(x, y, ((int(i) % b < half) ? int(i) + half : W + int(i))...);
    return pick(low > high, low, high);
}
// Lane r of a[0] becomes the largest lane of a[r].
template <int half = W / 2> inline void lane_maxima(vec* a) {
    for (int j = 0; j < half; j++) a[j] = fold_max<half>(a[j], a[j + half], std::make_index_sequence<W>());
    if constexpr (half > 1) lane_maxima<half / 2>(a);
}

// Online softmax of a strip of queries: weighted values, sums of weights by lanes, the largest score of each row.
struct OnlineSoftmax {
    float* values;
    vec sums[DEEP];
    vec row_max;
};

// Scores of a strip become weights, and what was seen before is scaled to the largest scores so far.
template <class C>
inline void softmax_strip(float (*s)[KEYS], C (*p)[KEYS], int rows, int columns, const VisibleKeys& visible,
        float scale, int e,
                  OnlineSoftmax& state) {
    vec maxima[W];
    const vec lane = lanes(), nothing = all(-INFINITY);
    for (int r = 0; r < W; r++) maxima[r] = nothing;
    for (int r = 0; r < rows; r++) {
        const bool whole = visible.whole(r, columns);
        for (int j = 0; j < columns; j += W) {
            vec x = load(s[r] + j) * scale;
            if (!whole) x = pick(inside(lane, j, visible.begin[r], visible.end[r]), x, nothing);
            store(s[r] + j, x);
            maxima[r] = pick(x > maxima[r], x, maxima[r]);
        }
    }
    lane_maxima(maxima);
    const vec now = pick(maxima[0] > state.row_max, maxima[0], state.row_max);
    const vec less = pick(now == nothing, all(1), exponential(state.row_max - now));
    const vec base = pick(now == nothing, vec{}, now);
    state.row_max = now;
    for (int r = 0; r < rows; r++) {
        if (less[r] != 1) {
            for (int c = 0; c < e; c += W) store(state.values + r * e + c, load(state.values + r * e + c) * less[r]);
            state.sums[r] *= less[r];
        }
        const vec top = all(base[r]);
        for (int j = 0; j < columns; j += W) {
            vec x = exponential(load(s[r] + j) - top);
            state.sums[r] += x;
            store(p[r] + j, x);
        }
    }
}

template <class T>
void forward_queries(const Call& c, const Plan<T>& plan, const Block& b, int64_t head, float* workspace) {
    typedef typename Plan<T>::C C;
    const Rows row(b, head, int(plan.g));
    const int rows = row.count, e = int(plan.e);
    const int steps = int(round_up(c.size, STEP<C>) / STEP<C>);
    C* q = (C*)workspace;
    float* values = workspace + std::max(plan.rows(), plan.floats(KEYS * LONG));
    C(*p)[KEYS] = (C(*)[KEYS])(values + QUERIES * e);
    alignas(64) float s[DEEP][KEYS];
    OnlineSoftmax state[QUERIES / DEEP];
    read_queries<T>(c.q, row, int(c.size), q);
    std::memset(values, 0, sizeof(float) * rows * e);
    for (int i = 0; i * DEEP < rows; i++) {
        state[i].values = values + i * DEEP * e;
        state[i].row_max = all(-INFINITY);
        for (vec& x : state[i].sums) x = vec{};
    }
    each_block(c, b, [&](int64_t at) {
        float* packed = plan.packed(head, c.keys[at], false);
        const C *k = plan.keys(packed), *v = plan.values(packed, c.keys[at]);
        const int64_t wide = round_up(c.keys[at].count, WIDE);
        for (int i = 0; i * DEEP < rows; i++) {
            const int n = std::min(DEEP, rows - i * DEEP);
            const VisibleKeys view = visible_keys(c, row.place + i * DEEP, n, c.keys[at]);
            const int columns = int(round_up(view.max_end, W));
            if (!columns) continue;
            product<C, LONG>(n, columns, q + i * DEEP * LONG, STEP<C>, k, wide * STEP<C>, steps, s[0], KEYS, false);
            softmax_strip(s, p, n, columns, view, float(c.scale), e, state[i]);
            product<C, KEYS>(n, e, p[0], STEP<C>, v, e * STEP<C>, round_up(view.max_end, STEP<C>) / STEP<C>,
                    state[i].values, e,
                             true);
        }
    });
    for (int r = 0; r < rows; r++) {
        const OnlineSoftmax& x = state[r / DEEP];
        const float total = sum(x.sums[r % DEEP]), share = 1 / total;
        c.sums[row.token[r] * c.heads + row.head[r]] = x.row_max[r % DEEP] + std::log(total);
        float* from = values + r * e;
        for (int i = 0; i < e; i += W) store(from + i, load(from + i) * share);
        store_rounded(from, mutable_head<T>(c.out, row.token[r], row.head[r]), int(c.value_size));
    }
}

template <class T> void forward(const Call& c) {
    typedef typename Plan<T>::C C;
    const Plan<T> plan{c};
    float* workspace = c.workspace + plan.shared(false);
#pragma omp parallel num_threads(int(c.threads)) if (c.threads > 1)
    {
        float* thread_workspace = workspace + omp_get_thread_num() * plan.forward_workspace();
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < c.kv * c.key_blocks; task++) {
            const int64_t head = task / c.key_blocks;
            const Block& b = c.keys[task % c.key_blocks];
            const int n = int(b.count), wide = int(round_up(n, WIDE));
            float* packed = plan.packed(head, b, false);
            read_keys<T>(c.k, b, head, int(c.size), (C*)thread_workspace);
            transpose((const C*)thread_workspace, plan.keys(packed), n, int(round_up(c.size, STEP<C>)), wide);
            read_keys<T>(c.v, b, head, int(c.value_size), (C*)thread_workspace);
            pair_rows((const C*)thread_workspace, plan.values(packed, b), int(round_up(n, STEP<C>)), int(plan.e));
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < c.kv * c.query_blocks; task++)
            forward_queries<T>(c, plan, c.queries[task % c.query_blocks], task / c.query_blocks, thread_workspace);
    }
}

// ---- backward --------------------------------------------------------------------------------------------------------

// Words of pairs: numbers of one row, and below each the number of the next row.
inline void store_transposed(float* to, const vec* x) { store(to, x[0]); }
#if defined(__AVX512BF16__)
inline __m512i halves(vec x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)); }
inline void store_transposed(bf16* to, const vec* x) {
    _mm512_storeu_si512(to, _mm512_or_si512(halves(x[0]), _mm512_slli_epi32(halves(x[1]), 16)));
}
#endif

// What goes into the products with a strip's scores s and the gradients dp of its weights:
// p = exp(scale s - sum), transposed; ds = scale p (dp - delta), transposed and, where that is another form, as rows.
template <class C>
inline void softmax_gradient(const float (*s)[KEYS], const float (*dp)[KEYS], int rows, int columns,
        const VisibleKeys& visible,
                   const float* sums, const float* deltas, float scale, C* p, C* ds, C* ds_rows) {
    constexpr int step = STEP<C>;
    const vec lane = lanes();
    for (int r = 0; r < rows; r += step) {
        C *to_p = p + r * KEYS, *to_ds = ds + r * KEYS;
        for (int j = 0; j < columns; j += W) {
            vec weight[step] = {}, slope[step] = {};
            for (int k = 0; k < step && r + k < rows; k++) {
                vec x = exponential(load(s[r + k] + j) * scale - sums[r + k]);  // rounded as in the forward pass
                if (!visible.whole(r + k, columns)) x = pick(inside(lane, j, visible.begin[r + k],
                        visible.end[r + k]), x, vec{});
                weight[k] = x;
                slope[k] = x * (load(dp[r + k] + j) - deltas[r + k]) * scale;
                if (step > 1) store(ds_rows + (r + k) * KEYS + j, slope[k]);
            }
            store_transposed(to_p + j * step, weight);
            store_transposed(to_ds + j * step, slope);
        }
        std::memset(to_p + columns * step, 0, sizeof(C) * (KEYS - columns) * step);
        std::memset(to_ds + columns * step, 0, sizeof(C) * (KEYS - columns) * step);
    }
}

// Queries of a block, and their gradients, in the layouts that products take.
template <class T> struct QueryBlock {
    typedef typename Plan<T>::C C;
    Rows row;
    const C *q, *grad;            // rows
    const C *q_paired, *grad_paired;  // right factors
    int64_t q_down, grad_down;    // numbers from a step of theirs to the next
    float sums[QUERIES], deltas[QUERIES];
    float* d_q;
    C *p, *ds, *ds_rows;

    QueryBlock(const Call& c, const Plan<T>& plan, const Block& b, int64_t head, float* workspace) : row(b, head,
            int(plan.g)) {
        C *rows = (C*)workspace, *grads = (C*)(workspace + plan.rows());
        float* at = workspace + 2 * plan.rows();
        read_queries<T>(c.q, row, int(c.size), rows);
        read_queries<T>(c.grad, row, int(c.value_size), grads);
        q = q_paired = rows, grad = grad_paired = grads, q_down = grad_down = LONG;
        if constexpr (STEP<C> > 1) {
            C *pairs = (C*)at, *grad_pairs = (C*)(at + plan.floats(QUERIES * plan.d));
            const int count = int(round_up(row.count, STEP<C>));
            pair_rows(rows, pairs, count, int(plan.d));
            pair_rows(grads, grad_pairs, count, int(plan.e));
            q_paired = pairs, grad_paired = grad_pairs, q_down = STEP<C> * plan.d, grad_down = STEP<C> * plan.e;
        }
        d_q = workspace + plan.queries_workspace();
        p = (C*)(d_q + QUERIES * plan.d), ds = p + QUERIES * KEYS, ds_rows = ds + QUERIES * KEYS;
        std::memset(d_q, 0, sizeof(float) * row.count * plan.d);
        for (int r = 0; r < row.count; r++) {
            sums[r] = c.sums[row.token[r] * c.heads + row.head[r]];
            deltas[r] = dot(head_of<T>(c.grad, row.token[r], row.head[r]), head_of<T>(c.out, row.token[r], row.head[r]),
                            int(c.value_size));
        }
    }
};

// Gradients that one block of keys gives to a block of queries, and takes from it.
template <class T>
void backward_blocks(const Call& c, const Plan<T>& plan, QueryBlock<T>& a, const Block& block, float* packed,
        float* sums) {
    typedef typename Plan<T>::C C;
    constexpr int step = STEP<C>;
    const C *keys = plan.keys(packed), *values = plan.values(packed, block), *paired_keys = plan.paired_keys(packed,
            block);
    const int64_t down = round_up(block.count, WIDE) * step;
    const int d = int(plan.d), e = int(plan.e), rows = a.row.count;
    const int64_t q_steps = round_up(c.size, step) / step, v_steps = round_up(c.value_size, step) / step;
    alignas(64) float s[DEEP][KEYS], dp[DEEP][KEYS];
    int max_ends[QUERIES / DEEP], max_end = 0;
    for (int i = 0; i * DEEP < rows; i++) {
        const int first = i * DEEP, n = std::min(DEEP, rows - first);
        const VisibleKeys view = visible_keys(c, a.row.place + first, n, block);
        const int columns = int(round_up(view.max_end, W));
        max_ends[i] = view.max_end;
        max_end = std::max(max_end, view.max_end);
        product<C, LONG>(n, columns, a.q + first * LONG, step, keys, down, q_steps, s[0], KEYS, false);
        product<C, LONG>(n, columns, a.grad + first * LONG, step, values, down, v_steps, dp[0], KEYS, false);
        C* ds_rows = step > 1 ? a.ds_rows : a.ds + first * KEYS;
        softmax_gradient(s, dp, n, columns, view, a.sums + first, a.deltas + first, float(c.scale), a.p + first * KEYS,
               a.ds + first * KEYS, ds_rows);
        product<C, KEYS>(n, d, ds_rows, step, paired_keys, d * step, round_up(view.max_end, step) / step,
                a.d_q + first * d, d, true);
    }
    float *d_k = sums, *d_v = sums + block.count * d;
    for (int j = 0; j < max_end; j += DEEP) {
        int from = 0;  // rows before it see none of these keys
        while (max_ends[from / DEEP] <= j) from += DEEP;
        const int n = std::min(DEEP, max_end - j);
        const int64_t steps = round_up(rows - from, step) / step, at = from * KEYS + j * step;
        product<C, step>(n, e, a.p + at, KEYS * step, a.grad_paired + from / step * a.grad_down, a.grad_down, steps,
                         d_v + j * e, e, true);
        product<C, step>(n, d, a.ds + at, KEYS * step, a.q_paired + from / step * a.q_down, a.q_down, steps,
                d_k + j * d, d,
                         true);
    }
}

// A stripe of queries of one KV head; its own sums of the gradients of keys and values.
template <class T>
void backward_stripe(const Call& c, const Plan<T>& plan, int64_t head, int64_t stripe, float* sums, float* workspace) {
    std::memset(sums, 0, sizeof(float) * plan.gradients_of_head());
    for (int64_t i = stripe ? c.stripe_ends[stripe - 1] : 0; i < c.stripe_ends[stripe]; i++) {
        QueryBlock<T> a(c, plan, c.queries[i], head, workspace);
        each_block(c, c.queries[i], [&](int64_t at) {
            const Block& b = c.keys[at];
            backward_blocks(c, plan, a, b, plan.packed(head, b, true), plan.gradients(sums, b));
        });
        for (int r = 0; r < a.row.count; r++)
            store_rounded(a.d_q + r * plan.d, mutable_head<T>(c.d_q, a.row.token[r], a.row.head[r]), int(c.size));
    }
}

// Gradients of a block of keys and their values: the stripes' sums together.
template <class T>
void sum_stripes(const Call& c, const Plan<T>& plan, int64_t head, int64_t at, float* sums) {
    const Block& b = c.keys[at];
    const int64_t next = c.kv * plan.gradients_of_head(), numbers = b.count * (plan.d + plan.e);
    float* first = plan.gradients(sums + head * plan.gradients_of_head(), b);
    for (int64_t s = 1; s < c.stripes; s++)
        for (int64_t i = 0; i < numbers; i += W) store(first + i, load(first + i) + load(first + s * next + i));
    for (int64_t i = 0; i < b.count; i++) {
        store_rounded(first + i * plan.d, mutable_head<T>(c.d_k, b.first + i, head), int(c.size));
        store_rounded(first + b.count * plan.d + i * plan.e, mutable_head<T>(c.d_v, b.first + i, head),
                int(c.value_size));
    }
}

template <class T> void backward(const Call& c) {
    typedef typename Plan<T>::C C;
    const Plan<T> plan{c};
    const int64_t blocks = c.kv * c.key_blocks;
    float *sums = c.workspace + plan.shared(true), *workspace = sums + c.stripes * c.kv * plan.gradients_of_head();
#pragma omp parallel num_threads(int(c.threads)) if (c.threads > 1)
    {
        float* thread_workspace = workspace + omp_get_thread_num() * plan.backward_workspace();
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < blocks; task++) {
            const Block& b = c.keys[task % c.key_blocks];
            const int64_t head = task / c.key_blocks;
            const int n = int(b.count), wide = int(round_up(n, WIDE));
            float* packed = plan.packed(head, b, true);
            read_keys<T>(c.k, b, head, int(c.size), (C*)thread_workspace);
            transpose((const C*)thread_workspace, plan.keys(packed), n, int(round_up(c.size, STEP<C>)), wide);
            pair_rows((const C*)thread_workspace, plan.paired_keys(packed, b), int(round_up(n, STEP<C>)), int(plan.d));
            read_keys<T>(c.v, b, head, int(c.value_size), (C*)thread_workspace);
            transpose((const C*)thread_workspace, plan.values(packed, b), n, int(round_up(c.value_size, STEP<C>)),
                    wide);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < c.kv * c.stripes; task++) {
            backward_stripe<T>(c, plan, task % c.kv, task / c.kv, sums + task * plan.gradients_of_head(),
                    thread_workspace);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < blocks; task++)
            sum_stripes<T>(c, plan, task / c.key_blocks, task % c.key_blocks, sums);
    }
}

}  // namespace

extern "C" {

// Constants for segments.py: rows of a block of queries, keys of a block and what their room is a
// multiple of, the largest head size, bytes of the tables.
int64_t whet_constant(int64_t which) {
    const int64_t constants[] = {QUERIES, KEYS, WIDE, MAX_HEAD_SIZE, sizeof(Call), sizeof(Segment), sizeof(Block)};
    return constants[which];
}

// Floats that `workspace` must hold.
int64_t whet_workspace(const Call* call, int64_t back, int64_t half) {
    return half ? Plan<bf16>{*call}.workspace_size(back) : Plan<float>{*call}.workspace_size(back);
}

// q, k, v -> out, sums.
void whet_forward(const Call* call, int64_t half) {
    if (half) forward<bf16>(*call);
    else forward<float>(*call);
}

// q, k, v, out, sums, grad -> d_q, d_k, d_v.
void whet_backward(const Call* call, int64_t half) {
    if (half) backward<bf16>(*call);
    else backward<float>(*call);
}
}
