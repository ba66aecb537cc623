// Attention of one new token per row over a shared prompt and the row's drawn tokens.
#pragma once

#include "tables.h"
#include "vectors.h"

namespace {

constexpr int BLOCK = 64;  // keys scored together
constexpr int TILE = 16;   // queries that share them

// Lanes of x and y summed in pairs, blocks of 2 * half lanes at a time: x's sums first in each block, then y's.
template <int half, size_t... i>
inline vec fold_sums(vec x, vec y, std::index_sequence<i...>) {
    constexpr int b = 2 * half;
    return __builtin_shufflevector(x, y, ((int(i) % b < half) ? int(i) : W + int(i) - half)...) +
           __builtin_shufflevector(x, y, ((int(i) % b < half) ? int(i) + half : W + int(i))...);
}
template <int half>
inline void fold(vec* a) {
    for (int j = 0; j < half; j++) a[j] = fold_sums<half>(a[j], a[j + half], std::make_index_sequence<W>());
    if constexpr (half > 1) fold<half / 2>(a);
}

// W scores of one query: the sums of its products with W keys that lie one behind the other.
template <class T>
inline vec scores_of(const float* q, const T* k, int size) {
    vec a[W] = {};
    for (int c = 0; c < size; c += W) {
        vec x = load(q + c);
        for (int j = 0; j < W; j++) a[j] = fused(x, load(k + j * size + c), a[j]);
    }
    fold<W / 2>(a);
    return a[0];
}

// Adds to Q outputs the values of a block, weighted; C vectors of each at a time.
template <int Q, int C, class T>
inline void add_values(float* const* out, const float (*p)[BLOCK], const T* v, int count, int size, int at) {
    vec sums[Q][C];
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) sums[q][c] = load(out[q] + at + c * W);
    for (int j = 0; j < count; j++) {
        const T* row = v + j * size + at;
        for (int c = 0; c < C; c++) {
            vec x = load(row + c * W);
            for (int q = 0; q < Q; q++) sums[q][c] = fused(x, all(p[q][j]), sums[q][c]);
        }
    }
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) store(out[q] + at + c * W, sums[q][c]);
}
template <int Q, class T>
inline void add_values_all(float* const* out, const float (*p)[BLOCK], const T* v, int count, int size) {
    int at = 0;
    for (; at + 4 * W <= size; at += 4 * W) add_values<Q, 4>(out, p, v, count, size, at);
    for (; at + 2 * W <= size; at += 2 * W) add_values<Q, 2>(out, p, v, count, size, at);
    for (; at < size; at += W) add_values<Q, 1>(out, p, v, count, size, at);
}

// Partial attention of a query: the sum of exp-weighted values, the sum of the weights, the largest score.
struct OnlineSoftmax {
    float *sums, *weight, *top;
};

// Scores of a block for one query; keys that it may not see, and those beyond the end, get -inf.
template <class T>
inline void score(const float* q, const T* k, int count, int hidden, int size, float* p) {
    const int whole = count / W * W;
    for (int j = 0; j < whole; j += W) store(p + j, scores_of(q, k + j * size, size));
    if (whole < count) {
        alignas(64) T padded[W * MAX_HEAD_SIZE];
        std::memcpy(padded, k + whole * size, sizeof(T) * (count - whole) * size);
        std::memset(padded + (count - whole) * size, 0, sizeof(T) * (W - count + whole) * size);
        store(p + whole, scores_of(q, padded, size));
        for (int j = count; j < whole + W; j++) p[j] = -INFINITY;
    }
    for (int j = 0; j < hidden; j++) p[j] = -INFINITY;
}

// Turns scores into weights in place, and rescales the earlier partial sums to the new largest score.
inline void softmax_block(float* p, int count, int size, OnlineSoftmax& state) {
    vec top = all(-INFINITY), total{};
    for (int j = 0; j < count; j += W) {
        vec s = load(p + j);
        top = pick(s > top, s, top);
    }
    const float old = *state.top, now = std::max(old, largest(top));
    if (now == -INFINITY) {  // nothing seen yet
        for (int j = 0; j < count; j += W) store(p + j, vec{});
        return;
    }
    for (int j = 0; j < count; j += W) {
        vec weights = exponential(load(p + j) - now);
        total += weights;
        store(p + j, weights);
    }
    if (old != now) {
        const float less = exponential(all(old - now))[0];
        *state.weight *= less;
        for (int c = 0; c < size; c += W) store(state.sums + c, load(state.sums + c) * less);
        *state.top = now;
    }
    *state.weight += sum(total);
}

// Adds one block of keys to the partial attention of queries.
template <class T>
inline void attend_block(const float* const* q, OnlineSoftmax* state, int queries, const int* hidden, const T* k,
        const T* v,
                    int count, int size) {
    alignas(64) float p[TILE][BLOCK];
    float* out[TILE];
    for (int i = 0; i < queries; i++) {
        score(q[i], k, count, hidden[i], size, p[i]);
        softmax_block(p[i], count, size, state[i]);
        out[i] = state[i].sums;
    }
    int i = 0;
    for (; i + 4 <= queries; i += 4) add_values_all<4>(out + i, p + i, v, count, size);
    for (; i + 2 <= queries; i += 2) add_values_all<2>(out + i, p + i, v, count, size);
    for (; i < queries; i++) add_values_all<1>(out + i, p + i, v, count, size);
}

// Adds keys begin..end-1 of one KV head, for each query from its `first` on.
template <class T>
void attend_keys(const float* const* q, OnlineSoftmax* state, int queries, const int64_t* first, const T* k,
        const T* v, int64_t begin,
          int64_t end, int size) {
    alignas(64) float keys[BLOCK * MAX_HEAD_SIZE], values[BLOCK * MAX_HEAD_SIZE];
    for (int64_t at = begin; at < end; at += BLOCK) {
        const int count = int(std::min<int64_t>(BLOCK, end - at));
        int hidden[TILE];
        for (int i = 0; i < queries; i++)
            hidden[i] = int(std::min<int64_t>(std::max<int64_t>(first[i] - at, 0), count));
        if (sizeof(T) == 2 && queries >= 4) {  // widened once for all of them
            for (int i = 0; i < count * size; i += W) {
                store(keys + i, load(k + at * size + i));
                store(values + i, load(v + at * size + i));
            }
            attend_block(q, state, queries, hidden, keys, values, count, size);
        } else {
            attend_block(q, state, queries, hidden, k + at * size, v + at * size, count, size);
        }
    }
}

// Norm and rotation of one head of one row: x [D] -> out [D] as floats.
template <class T>
void normed_and_rotated(const T* x, const T* weight, float epsilon, const T* cos, const T* sin, int size, float* out) {
    alignas(64) float y[MAX_HEAD_SIZE + MAX_HEAD_SIZE / 2];  // its first half once more behind it
    const T* rounding = nullptr;
    if (weight) {
        vec squares{};
        for (int c = 0; c < size; c += W) {
            vec a = load(x + c);
            squares = fused(a, a, squares);
        }
        float share = 1 / std::sqrt(sum(squares) / size + epsilon);
        for (int c = 0; c < size; c += W)
            store(y + c, round_as(round_as(load(x + c) * share, rounding) * load(weight + c), rounding));
    } else {
        for (int c = 0; c < size; c += W) store(y + c, load(x + c));
    }
    std::memcpy(y + size, y, sizeof(float) * size / 2);
    for (int c = 0; c < size; c += W) {
        vec product = round_as(load(y + c) * load(cos + c), rounding);
        store(out + c, round_as(fused(load(y + c + size / 2), load(sin + c), product), rounding));
    }
}

template <class T>
void attend(const Step& s, const Layer& layer, const T* qkv, T* out) {
    const int size = int(s.size), g = int(s.heads / s.kv), each = int(2 * s.size + 2);
    const T *cos = (const T*)s.cos, *sin = (const T*)s.sin, *norm = (const T*)layer.norm;
    T *keys = (T*)layer.keys, *values = (T*)layer.values;
    const int64_t width = (s.heads + 2 * s.kv) * size, window = layer.window ? layer.window : INT64_MAX / 2;
#pragma omp parallel num_threads(int(s.threads)) if (s.threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < s.rows; row++) {
            const T* x = qkv + row * width;
            const T *c = cos + s.position[row] * size, *n = sin + s.position[row] * size;
            for (int64_t h = 0; h < s.heads; h++) {
                float* q = s.workspace + (row * s.heads + h) * each;
                normed_and_rotated(x + h * size, norm ? norm + h * size : nullptr, float(layer.query_epsilon), c, n,
                        size, q);
                for (int i = 0; i < size; i += W) store(q + i, load(q + i) * float(layer.scale));
                std::memset(q + size, 0, sizeof(float) * (size + 1));
                q[2 * size + 1] = -INFINITY;
            }
            for (int64_t h = 0; h < s.kv; h++) {
                alignas(64) float k[MAX_HEAD_SIZE];
                const T* weight = norm ? norm + (s.heads + h) * size : nullptr;
                normed_and_rotated(x + (s.heads + h) * size, weight, float(layer.key_epsilon), c, n, size, k);
                int64_t at = ((row * s.kv + h) * layer.places + s.num_drawn[row]) * size;
                for (int i = 0; i < size; i += W) store(keys + at + i, load(k + i));
                std::memcpy(values + at, x + (s.heads + s.kv + h) * size, sizeof(T) * size);
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < s.groups * s.kv; task++) {
            const int64_t group = task / s.kv, h = task % s.kv, begin = s.group_ends[group];
            const int64_t queries = (s.group_ends[group + 1] - begin) * g, tokens = s.prompt_tokens[group];
            const T* k = (const T*)layer.prompt_keys[group] + h * layer.prompt_places[group] * size;
            const T* v = (const T*)layer.prompt_values[group] + h * layer.prompt_places[group] * size;
            for (int64_t from = 0; from < queries; from += TILE) {
                const float* q[TILE];
                OnlineSoftmax state[TILE];
                int64_t first[TILE], first_visible = tokens;
                int count = int(std::min<int64_t>(TILE, queries - from));
                for (int i = 0; i < count; i++) {
                    int64_t row = s.query_rows[begin + (from + i) / g];
                    float* entry = s.workspace + (row * s.heads + h * g + (from + i) % g) * each;
                    q[i] = entry;
                    state[i] = {entry + size, entry + 2 * size, entry + 2 * size + 1};
                    first[i] = std::max<int64_t>(0, s.position[row] - window + 1);
                    first_visible = std::min(first_visible, first[i]);
                }
                attend_keys(q, state, count, first, k, v, first_visible / BLOCK * BLOCK, tokens, size);
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < s.rows * s.kv; task++) {
            const int64_t row = task / s.kv, h = task % s.kv, num_drawn = s.num_drawn[row];
            const int64_t base = task * layer.places * size;
            const int64_t first_visible = std::max<int64_t>(0, num_drawn - window + 1);
            for (int from = 0; from < g; from += TILE) {
                const float* q[TILE];
                OnlineSoftmax state[TILE];
                int64_t first[TILE];
                int count = std::min(TILE, g - from);
                for (int i = 0; i < count; i++) {
                    float* entry = s.workspace + (row * s.heads + h * g + from + i) * each;
                    q[i] = entry;
                    state[i] = {entry + size, entry + 2 * size, entry + 2 * size + 1};
                    first[i] = first_visible;
                }
                attend_keys(q, state, count, first, keys + base, values + base, first_visible / BLOCK * BLOCK,
                        num_drawn + 1, size);
                for (int i = 0; i < count; i++) {
                    T* to = out + (row * s.heads + h * g + from + i) * size;
                    float share = 1 / *state[i].weight;
                    for (int c = 0; c < size; c += W) store(to + c, load(state[i].sums + c) * share);
                }
            }
        }
    }
}

}  // namespace
