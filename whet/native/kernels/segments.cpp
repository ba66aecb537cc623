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
    int64_t key_blocks, query_blocks, room_keys;  // tokens of all blocks of keys, with room
    const Segment* segments;
    const Block *keys, *queries;
    const int64_t* stripe_ends;  // [stripes]: last block of queries of each, plus 1
    Tensor q, k, v, out, grad, d_q, d_k, d_v;
    float* sums;  // [T, H]: log of the sum of exponentials
    float* room;
};

// ---- where things lie in `room` --------------------------------------------------------------------------------------

template <class T> struct Plan {
    typedef typename Multiplied<T>::C C;
    const Call& c;
    const int64_t d = up(c.size, PANEL), e = up(c.value_size, PANEL);  // columns, with padding
    const int64_t g = c.heads / c.kv;

    int64_t of(int64_t numbers) const { return up(numbers * int64_t(sizeof(C)), 64) / 4; }  // as floats
    // keys turned and values laid (forward); keys turned, values turned and keys laid (backward)
    float* forms(int64_t head, const Block& b, bool back) const {
        return c.room + of(back ? 2 * d + e : d + e) * (head * c.room_keys + b.ahead);
    }
    C* keys(float* forms) const { return (C*)forms; }
    C* values(float* forms, const Block& b) const { return (C*)forms + d * up(b.count, WIDE); }
    C* laid_keys(float* forms, const Block& b) const { return (C*)forms + (d + e) * up(b.count, WIDE); }
    // gradients of a block of keys and of its values
    float* gradients(float* of_head, const Block& b) const { return of_head + (d + e) * b.ahead; }
    // a thread's own
    int64_t rows() const { return of(QUERIES * LONG); }
    int64_t forward_own() const { return std::max(rows(), of(KEYS * LONG)) + QUERIES * e + of(DEEP * KEYS); }
    int64_t backward_own() const {
        return read_room() + QUERIES * d + of(3 * QUERIES * KEYS);
    }
    int64_t read_room() const { return std::max(2 * rows() + of(QUERIES * d) + of(QUERIES * e), of(KEYS * LONG)); }
    int64_t shared(bool back) const { return of(back ? 2 * d + e : d + e) * c.kv * c.room_keys; }
    int64_t gradients_of_head() const { return (d + e) * c.room_keys; }
    int64_t room(bool back) const {
        if (!back) return shared(false) + c.threads * forward_own();
        return shared(true) + c.stripes * c.kv * gradients_of_head() + c.threads * backward_own();
    }
};

template <class T> inline const T* head_of(const Tensor& x, int64_t token, int64_t head) {
    return (const T*)x.data + token * x.token + head * x.head;
}
template <class T> inline T* head_to(const Tensor& x, int64_t token, int64_t head) {
    return (T*)x.data + token * x.token + head * x.head;
}

// The rows of a block of keys of one head, with zeros below.
template <class T, class C>
inline void read_keys(const Tensor& x, const Block& b, int64_t head, int size, C* rows) {
    const int wide = int(up(size, PANEL));
    for (int i = 0; i < b.count; i++) copied(head_of<T>(x, b.first + i, head), rows + int64_t(i) * LONG, size, wide);
    for (int64_t i = b.count; i < up(b.count, W); i++) std::memset(rows + i * LONG, 0, sizeof(C) * wide);
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
// They, with a row of zeros below where there is room.
template <class T, class C>
inline void read_queries(const Tensor& x, const Rows& rows, int size, C* to) {
    const int wide = int(up(size, PANEL));
    for (int r = 0; r < rows.count; r++)
        copied(head_of<T>(x, rows.token[r], rows.head[r]), to + int64_t(r) * LONG, size, wide);
    if (rows.count < QUERIES) std::memset(to + int64_t(rows.count) * LONG, 0, sizeof(C) * wide);
}

// ---- visible keys ----------------------------------------------------------------------------------------------------

// Which keys of a block the rows of a strip see: row r those from begin[r] to end[r] - 1.
struct Sight {
    int begin[DEEP], end[DEEP];
    int most;  // the largest end
    bool whole(int r, int columns) const { return begin[r] == 0 && end[r] == columns; }
};
inline Sight sight(const Call& c, const int64_t* places, int rows, const Block& keys) {
    Sight s;
    s.most = 0;
    for (int r = 0; r < rows; r++) {
        const int64_t ahead = places[r] - keys.place;  // places from the block's first key
        const int64_t hidden = c.window ? ahead - c.window + 1 : 0;
        s.begin[r] = int(std::min(std::max<int64_t>(hidden, 0), keys.count));
        s.end[r] = int(std::min(std::max<int64_t>(ahead + 1, 0), keys.count));
        s.most = std::max(s.most, s.end[r]);
    }
    return s;
}
inline bool sees(const Call& c, const Block& queries, const Block& keys) {
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
            if (sees(c, queries, c.keys[b])) visit(b);
    }
}

// ---- forward ---------------------------------------------------------------------------------------------------------

template <int half, size_t... i>
inline vec larger(vec x, vec y, std::index_sequence<i...>) {
    constexpr int b = 2 * half;
    vec low = __builtin_shufflevector(x, y, ((int(i) % b < half) ? int(i) : W + int(i) - half)...);
    vec high = __builtin_shufflevector(x, y, ((int(i) % b < half) ? int(i) + half : W + int(i))...);
    return pick(low > high, low, high);
}
// Lane r of a[0] becomes the largest lane of a[r].
template <int half = W / 2> inline void largest_of(vec* a) {
    for (int j = 0; j < half; j++) a[j] = larger<half>(a[j], a[j + half], std::make_index_sequence<W>());
    if constexpr (half > 1) largest_of<half / 2>(a);
}

// What a strip of queries has seen: weighted values, sums of weights by lanes, the largest score of each row.
struct Seen {
    float* values;
    vec sums[DEEP];
    vec tops;
};

// Scores of a strip become weights, and what was seen before is scaled to the largest scores so far.
template <class C>
inline void weigh(float (*s)[KEYS], C (*p)[KEYS], int rows, int columns, const Sight& sight, float scale, int e,
                  Seen& seen) {
    vec tops[W];
    const vec lane = lanes(), nothing = all(-INFINITY);
    for (int r = 0; r < W; r++) tops[r] = nothing;
    for (int r = 0; r < rows; r++) {
        const bool whole = sight.whole(r, columns);
        for (int j = 0; j < columns; j += W) {
            vec x = load(s[r] + j) * scale;
            if (!whole) x = pick(inside(lane, j, sight.begin[r], sight.end[r]), x, nothing);
            store(s[r] + j, x);
            tops[r] = pick(x > tops[r], x, tops[r]);
        }
    }
    largest_of(tops);
    const vec now = pick(tops[0] > seen.tops, tops[0], seen.tops);
    const vec less = pick(now == nothing, all(1), exponential(seen.tops - now));
    const vec base = pick(now == nothing, vec{}, now);
    seen.tops = now;
    for (int r = 0; r < rows; r++) {
        if (less[r] != 1) {
            for (int c = 0; c < e; c += W) store(seen.values + r * e + c, load(seen.values + r * e + c) * less[r]);
            seen.sums[r] *= less[r];
        }
        const vec top = all(base[r]);
        for (int j = 0; j < columns; j += W) {
            vec x = exponential(load(s[r] + j) - top);
            seen.sums[r] += x;
            store(p[r] + j, x);
        }
    }
}

template <class T>
void forward_queries(const Call& c, const Plan<T>& plan, const Block& b, int64_t head, float* own) {
    typedef typename Plan<T>::C C;
    const Rows row(b, head, int(plan.g));
    const int rows = row.count, e = int(plan.e);
    const int steps = int(up(c.size, STEP<C>) / STEP<C>);
    C* q = (C*)own;
    float* values = own + std::max(plan.rows(), plan.of(KEYS * LONG));
    C(*p)[KEYS] = (C(*)[KEYS])(values + QUERIES * e);
    alignas(64) float s[DEEP][KEYS];
    Seen seen[QUERIES / DEEP];
    read_queries<T>(c.q, row, int(c.size), q);
    std::memset(values, 0, sizeof(float) * rows * e);
    for (int i = 0; i * DEEP < rows; i++) {
        seen[i].values = values + i * DEEP * e;
        seen[i].tops = all(-INFINITY);
        for (vec& x : seen[i].sums) x = vec{};
    }
    each_block(c, b, [&](int64_t at) {
        float* forms = plan.forms(head, c.keys[at], false);
        const C *k = plan.keys(forms), *v = plan.values(forms, c.keys[at]);
        const int64_t wide = up(c.keys[at].count, WIDE);
        for (int i = 0; i * DEEP < rows; i++) {
            const int n = std::min(DEEP, rows - i * DEEP);
            const Sight view = sight(c, row.place + i * DEEP, n, c.keys[at]);
            const int columns = int(up(view.most, W));
            if (!columns) continue;
            product<C, LONG>(n, columns, q + i * DEEP * LONG, STEP<C>, k, wide * STEP<C>, steps, s[0], KEYS, false);
            weigh(s, p, n, columns, view, float(c.scale), e, seen[i]);
            product<C, KEYS>(n, e, p[0], STEP<C>, v, e * STEP<C>, up(view.most, STEP<C>) / STEP<C>, seen[i].values, e,
                             true);
        }
    });
    for (int r = 0; r < rows; r++) {
        const Seen& x = seen[r / DEEP];
        const float sum_of = sum(x.sums[r % DEEP]), share = 1 / sum_of;
        c.sums[row.token[r] * c.heads + row.head[r]] = x.tops[r % DEEP] + std::log(sum_of);
        float* from = values + r * e;
        for (int i = 0; i < e; i += W) store(from + i, load(from + i) * share);
        rounded(from, head_to<T>(c.out, row.token[r], row.head[r]), int(c.value_size));
    }
}

template <class T> void forward(const Call& c) {
    typedef typename Plan<T>::C C;
    const Plan<T> plan{c};
    float* own = c.room + plan.shared(false);
#pragma omp parallel num_threads(int(c.threads)) if (c.threads > 1)
    {
        float* mine = own + omp_get_thread_num() * plan.forward_own();
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < c.kv * c.key_blocks; task++) {
            const int64_t head = task / c.key_blocks;
            const Block& b = c.keys[task % c.key_blocks];
            const int n = int(b.count), wide = int(up(n, WIDE));
            float* forms = plan.forms(head, b, false);
            read_keys<T>(c.k, b, head, int(c.size), (C*)mine);
            turned((const C*)mine, plan.keys(forms), n, int(up(c.size, STEP<C>)), wide);
            read_keys<T>(c.v, b, head, int(c.value_size), (C*)mine);
            laid((const C*)mine, plan.values(forms, b), int(up(n, STEP<C>)), int(plan.e));
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < c.kv * c.query_blocks; task++)
            forward_queries<T>(c, plan, c.queries[task % c.query_blocks], task / c.query_blocks, mine);
    }
}

// ---- backward --------------------------------------------------------------------------------------------------------

// Words of pairs: numbers of one row, and below each the number of the next row.
inline void store_turned(float* to, const vec* x) { store(to, x[0]); }
#if defined(__AVX512BF16__)
inline __m512i halves(vec x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)); }
inline void store_turned(bf16* to, const vec* x) {
    _mm512_storeu_si512(to, _mm512_or_si512(halves(x[0]), _mm512_slli_epi32(halves(x[1]), 16)));
}
#endif

// What goes into the products with a strip's scores s and the gradients dp of its weights:
// p = exp(scale s - sum), turned; ds = scale p (dp - delta), turned and, where that is another form, as rows.
template <class C>
inline void slopes(const float (*s)[KEYS], const float (*dp)[KEYS], int rows, int columns, const Sight& sight,
                   const float* sums, const float* deltas, float scale, C* p, C* ds, C* ds_rows) {
    constexpr int step = STEP<C>;
    const vec lane = lanes();
    for (int r = 0; r < rows; r += step) {
        C *to_p = p + r * KEYS, *to_ds = ds + r * KEYS;
        for (int j = 0; j < columns; j += W) {
            vec weight[step] = {}, slope[step] = {};
            for (int k = 0; k < step && r + k < rows; k++) {
                vec x = exponential(load(s[r + k] + j) * scale - sums[r + k]);  // rounded as in the forward pass
                if (!sight.whole(r + k, columns)) x = pick(inside(lane, j, sight.begin[r + k], sight.end[r + k]), x, vec{});
                weight[k] = x;
                slope[k] = x * (load(dp[r + k] + j) - deltas[r + k]) * scale;
                if (step > 1) store(ds_rows + (r + k) * KEYS + j, slope[k]);
            }
            store_turned(to_p + j * step, weight);
            store_turned(to_ds + j * step, slope);
        }
        std::memset(to_p + columns * step, 0, sizeof(C) * (KEYS - columns) * step);
        std::memset(to_ds + columns * step, 0, sizeof(C) * (KEYS - columns) * step);
    }
}

// Queries of a block, and their gradients, in the forms that products take.
template <class T> struct Asking {
    typedef typename Plan<T>::C C;
    Rows row;
    const C *q, *grad;            // rows
    const C *q_laid, *grad_laid;  // right factors
    int64_t q_down, grad_down;    // numbers from a step of theirs to the next
    float sums[QUERIES], deltas[QUERIES];
    float* d_q;
    C *p, *ds, *ds_rows;

    Asking(const Call& c, const Plan<T>& plan, const Block& b, int64_t head, float* own) : row(b, head, int(plan.g)) {
        C *rows = (C*)own, *grads = (C*)(own + plan.rows());
        float* at = own + 2 * plan.rows();
        read_queries<T>(c.q, row, int(c.size), rows);
        read_queries<T>(c.grad, row, int(c.value_size), grads);
        q = q_laid = rows, grad = grad_laid = grads, q_down = grad_down = LONG;
        if constexpr (STEP<C> > 1) {
            C *pairs = (C*)at, *grad_pairs = (C*)(at + plan.of(QUERIES * plan.d));
            const int count = int(up(row.count, STEP<C>));
            laid(rows, pairs, count, int(plan.d));
            laid(grads, grad_pairs, count, int(plan.e));
            q_laid = pairs, grad_laid = grad_pairs, q_down = STEP<C> * plan.d, grad_down = STEP<C> * plan.e;
        }
        d_q = own + plan.read_room();
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
void backward_blocks(const Call& c, const Plan<T>& plan, Asking<T>& a, const Block& block, float* forms, float* sums) {
    typedef typename Plan<T>::C C;
    constexpr int step = STEP<C>;
    const C *keys = plan.keys(forms), *values = plan.values(forms, block), *laid_keys = plan.laid_keys(forms, block);
    const int64_t down = up(block.count, WIDE) * step;
    const int d = int(plan.d), e = int(plan.e), rows = a.row.count;
    const int64_t q_steps = up(c.size, step) / step, v_steps = up(c.value_size, step) / step;
    alignas(64) float s[DEEP][KEYS], dp[DEEP][KEYS];
    int most[QUERIES / DEEP], all_most = 0;
    for (int i = 0; i * DEEP < rows; i++) {
        const int first = i * DEEP, n = std::min(DEEP, rows - first);
        const Sight view = sight(c, a.row.place + first, n, block);
        const int columns = int(up(view.most, W));
        most[i] = view.most;
        all_most = std::max(all_most, view.most);
        product<C, LONG>(n, columns, a.q + first * LONG, step, keys, down, q_steps, s[0], KEYS, false);
        product<C, LONG>(n, columns, a.grad + first * LONG, step, values, down, v_steps, dp[0], KEYS, false);
        C* ds_rows = step > 1 ? a.ds_rows : a.ds + first * KEYS;
        slopes(s, dp, n, columns, view, a.sums + first, a.deltas + first, float(c.scale), a.p + first * KEYS,
               a.ds + first * KEYS, ds_rows);
        product<C, KEYS>(n, d, ds_rows, step, laid_keys, d * step, up(view.most, step) / step, a.d_q + first * d, d, true);
    }
    float *d_k = sums, *d_v = sums + block.count * d;
    for (int j = 0; j < all_most; j += DEEP) {
        int from = 0;  // rows before it see none of these keys
        while (most[from / DEEP] <= j) from += DEEP;
        const int n = std::min(DEEP, all_most - j);
        const int64_t steps = up(rows - from, step) / step, at = from * KEYS + j * step;
        product<C, step>(n, e, a.p + at, KEYS * step, a.grad_laid + from / step * a.grad_down, a.grad_down, steps,
                         d_v + j * e, e, true);
        product<C, step>(n, d, a.ds + at, KEYS * step, a.q_laid + from / step * a.q_down, a.q_down, steps, d_k + j * d, d,
                         true);
    }
}

// A stripe of queries of one KV head; its own sums of the gradients of keys and values.
template <class T>
void backward_stripe(const Call& c, const Plan<T>& plan, int64_t head, int64_t stripe, float* sums, float* own) {
    std::memset(sums, 0, sizeof(float) * plan.gradients_of_head());
    for (int64_t i = stripe ? c.stripe_ends[stripe - 1] : 0; i < c.stripe_ends[stripe]; i++) {
        Asking<T> a(c, plan, c.queries[i], head, own);
        each_block(c, c.queries[i], [&](int64_t at) {
            const Block& b = c.keys[at];
            backward_blocks(c, plan, a, b, plan.forms(head, b, true), plan.gradients(sums, b));
        });
        for (int r = 0; r < a.row.count; r++)
            rounded(a.d_q + r * plan.d, head_to<T>(c.d_q, a.row.token[r], a.row.head[r]), int(c.size));
    }
}

// Gradients of a block of keys and their values: the stripes' sums together.
template <class T>
void gathered(const Call& c, const Plan<T>& plan, int64_t head, int64_t at, float* sums) {
    const Block& b = c.keys[at];
    const int64_t next = c.kv * plan.gradients_of_head(), numbers = b.count * (plan.d + plan.e);
    float* first = plan.gradients(sums + head * plan.gradients_of_head(), b);
    for (int64_t s = 1; s < c.stripes; s++)
        for (int64_t i = 0; i < numbers; i += W) store(first + i, load(first + i) + load(first + s * next + i));
    for (int64_t i = 0; i < b.count; i++) {
        rounded(first + i * plan.d, head_to<T>(c.d_k, b.first + i, head), int(c.size));
        rounded(first + b.count * plan.d + i * plan.e, head_to<T>(c.d_v, b.first + i, head), int(c.value_size));
    }
}

template <class T> void backward(const Call& c) {
    typedef typename Plan<T>::C C;
    const Plan<T> plan{c};
    const int64_t blocks = c.kv * c.key_blocks;
    float *sums = c.room + plan.shared(true), *own = sums + c.stripes * c.kv * plan.gradients_of_head();
#pragma omp parallel num_threads(int(c.threads)) if (c.threads > 1)
    {
        float* mine = own + omp_get_thread_num() * plan.backward_own();
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < blocks; task++) {
            const Block& b = c.keys[task % c.key_blocks];
            const int64_t head = task / c.key_blocks;
            const int n = int(b.count), wide = int(up(n, WIDE));
            float* forms = plan.forms(head, b, true);
            read_keys<T>(c.k, b, head, int(c.size), (C*)mine);
            turned((const C*)mine, plan.keys(forms), n, int(up(c.size, STEP<C>)), wide);
            laid((const C*)mine, plan.laid_keys(forms, b), int(up(n, STEP<C>)), int(plan.d));
            read_keys<T>(c.v, b, head, int(c.value_size), (C*)mine);
            turned((const C*)mine, plan.values(forms, b), n, int(up(c.value_size, STEP<C>)), wide);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < c.kv * c.stripes; task++) {
            backward_stripe<T>(c, plan, task % c.kv, task / c.kv, sums + task * plan.gradients_of_head(), mine);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < blocks; task++)
            gathered<T>(c, plan, task / c.key_blocks, task % c.key_blocks, sums);
    }
}

}  // namespace

extern "C" {

// Constants for segments.py: rows of a block of queries, keys of a block and what their room is a
// multiple of, the largest head size, bytes of the tables.
int64_t whet_constant(int64_t which) {
    const int64_t facts[] = {QUERIES, KEYS, WIDE, MAX_HEAD_SIZE, sizeof(Call), sizeof(Segment), sizeof(Block)};
    return facts[which];
}

// Floats that `room` must hold.
int64_t whet_room(const Call* call, int64_t back, int64_t half) {
    return half ? Plan<bf16>{*call}.room(back) : Plan<float>{*call}.room(back);
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
