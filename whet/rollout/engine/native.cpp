// The small kernels of a decode step on a CPU: attention over shared prompts and own tokens, norms, the MLP's gate.
//
// Called from native.py, which builds this file with the machine's own compiler. Every result of a row is computed from
// that row alone, in an order that depends on nothing else: a row gives the same bits alone and in a crowd, and with any
// number of threads. Sums are in fp32; T is what is stored, float or bfloat16 (here its bits), rounded where
// transformers rounds. Dim legend: n rows, H query heads, K KV heads, g = H / K, D head size, L places of a KV row.
// Left out on purpose: soft-capped scores, sinks, partial rotary; the layout written in torch has them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
constexpr int BLOCK = 64;     // keys scored together
constexpr int TILE = 16;      // queries that share them
constexpr int MOST = 256;     // head size
typedef float vec __attribute__((vector_size(4 * W)));
typedef float loose_vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * W)));
typedef uint32_t words __attribute__((vector_size(4 * W)));
typedef uint16_t loose_halves __attribute__((vector_size(2 * W), aligned(2), may_alias));
typedef uint16_t bf16;

inline vec load(const float* p) { return *reinterpret_cast<const loose_vec*>(p); }
inline vec load(const bf16* p) {
    return (vec)(__builtin_convertvector(*reinterpret_cast<const loose_halves*>(p), words) << 16);
}
inline void store(float* p, vec x) { *reinterpret_cast<loose_vec*>(p) = x; }
inline void store(bf16* p, vec x) {  // to the nearest, ties to even; NaN stays NaN
    words bits = (words)x;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words quiet = (bits >> 16) | 0x40;
    ints whole = x == x;
    rounded = (rounded & (words)whole) | (quiet & ~(words)whole);
    *reinterpret_cast<loose_halves*>(p) = __builtin_convertvector(rounded, loose_halves);
}
inline vec all(float x) { return vec{} + x; }
inline vec round_as(vec x, const float*) { return x; }
inline vec round_as(vec x, const bf16*) {
    bf16 bits[W];
    store(bits, x);
    return load(bits);
}
inline vec pick(ints mask, vec yes, vec no) { return mask ? yes : no; }
inline float sum(vec x) {
    float lanes[W], s = 0;
    store(lanes, x);
    for (int width = W / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return s + lanes[0];
}
inline float largest(vec x) {
    float lanes[W];
    store(lanes, x);
    for (int width = W / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = std::max(lanes[i], lanes[i + width]);
    return lanes[0];
}

// exp to about one unit in the last place; 0 below -87.3, and not more than exp(88.3).
inline vec exponential(vec x) {
    vec y = pick(x < all(-87.3f), all(-87.3f), pick(x > all(88.3f), all(88.3f), x));
    vec turns = y * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the rounded product
    ints n = (ints)turns - (ints)all(12582912.0f);
    vec whole = turns - 12582912.0f;
    vec r = y - whole * 0.693145752f;
    r = r - whole * 1.42860677e-6f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vec out = (vec)((ints)p + (n << 23));
    return pick(x < all(-87.3f), vec{}, out);
}

// ---- attention -------------------------------------------------------------------------------------------------------

// Lanes of x and y summed in pairs, blocks of 2 * half lanes at a time: x's sums first in each block, then y's.
template <int half, size_t... i>
inline vec folded(vec x, vec y, std::index_sequence<i...>) {
    constexpr int b = 2 * half;
    return __builtin_shufflevector(x, y, ((int(i) % b < half) ? int(i) : W + int(i) - half)...) +
           __builtin_shufflevector(x, y, ((int(i) % b < half) ? int(i) + half : W + int(i))...);
}
template <int half>
inline void fold(vec* a) {
    for (int j = 0; j < half; j++) a[j] = folded<half>(a[j], a[j + half], std::make_index_sequence<W>());
    if constexpr (half > 1) fold<half / 2>(a);
}

// W scores of one query: the sums of its products with W keys that lie one behind the other.
inline vec scores_of(const float* q, const float* k, int size) {
    vec a[W] = {};
    for (int c = 0; c < size; c += W) {
        vec x = load(q + c);
        for (int j = 0; j < W; j++) a[j] += x * load(k + j * size + c);
    }
    fold<W / 2>(a);
    return a[0];
}

// Adds to Q outputs the values of a block, weighted; C vectors of each at a time.
template <int Q, int C>
inline void weigh(float* const* out, const float (*p)[BLOCK], const float* v, int count, int size, int at) {
    vec sums[Q][C];
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) sums[q][c] = load(out[q] + at + c * W);
    for (int j = 0; j < count; j++) {
        const float* row = v + j * size + at;
        for (int c = 0; c < C; c++) {
            vec x = load(row + c * W);
            for (int q = 0; q < Q; q++) sums[q][c] += x * p[q][j];
        }
    }
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) store(out[q] + at + c * W, sums[q][c]);
}
template <int Q>
inline void weigh_all(float* const* out, const float (*p)[BLOCK], const float* v, int count, int size) {
    int at = 0;
    for (; at + 4 * W <= size; at += 4 * W) weigh<Q, 4>(out, p, v, count, size, at);
    for (; at + 2 * W <= size; at += 2 * W) weigh<Q, 2>(out, p, v, count, size, at);
    for (; at < size; at += W) weigh<Q, 1>(out, p, v, count, size, at);
}

// What a query has seen so far: exp-weighted values, the sum of the weights, the largest score.
struct Seen {
    float *sums, *weight, *top;
};

// A block of keys or values as floats: itself, or a copy in `room`, zeros behind its end.
inline const float* widened(const float* x, int count, int size, float* room) {
    if (count % W == 0) return x;
    std::memcpy(room, x, sizeof(float) * count * size);
    std::memset(room + count * size, 0, sizeof(float) * (W - count % W) * size);
    return room;
}
inline const float* widened(const bf16* x, int count, int size, float* room) {
    for (int i = 0; i < count * size; i += W) store(room + i, load(x + i));
    if (count % W) std::memset(room + count * size, 0, sizeof(float) * (W - count % W) * size);
    return room;
}

// Lets queries see keys begin..end-1 of one KV head, each query those from its `first` on.
template <class T>
void look(const float* const* q, Seen* seen, int queries, const int64_t* first, const T* k, const T* v, int64_t begin,
          int64_t end, int size) {
    alignas(64) float key_room[BLOCK * MOST], value_room[BLOCK * MOST];
    alignas(64) float p[TILE][BLOCK];
    for (int64_t at = begin; at < end; at += BLOCK) {
        int count = int(std::min<int64_t>(BLOCK, end - at));
        const float* keys = widened(k + at * size, count, size, key_room);
        const float* values = widened(v + at * size, count, size, value_room);
        float* out[TILE];
        for (int i = 0; i < queries; i++) {
            vec top = all(-INFINITY);
            int hidden = int(std::min<int64_t>(std::max<int64_t>(first[i] - at, 0), count));
            for (int j = 0; j < count; j += W) store(&p[i][j], scores_of(q[i], keys + j * size, size));
            for (int j = 0; j < hidden; j++) p[i][j] = -INFINITY;
            for (int j = count; j % W; j++) p[i][j] = -INFINITY;
            for (int j = 0; j < count; j += W) {
                vec s = load(&p[i][j]);
                top = pick(s > top, s, top);
            }
            float old = *seen[i].top, now = std::max(old, largest(top));
            out[i] = seen[i].sums;
            if (now == -INFINITY) {  // nothing seen yet
                for (int j = 0; j < count; j += W) store(&p[i][j], vec{});
                continue;
            }
            vec total{};
            for (int j = 0; j < count; j += W) {
                vec weights = exponential(load(&p[i][j]) - now);
                total += weights;
                store(&p[i][j], weights);
            }
            if (old != now) {
                vec less = exponential(all(old - now));
                *seen[i].weight *= less[0];
                for (int c = 0; c < size; c += W) store(out[i] + c, load(out[i] + c) * less);
                *seen[i].top = now;
            }
            *seen[i].weight += sum(total);
        }
        int i = 0;
        for (; i + 4 <= queries; i += 4) weigh_all<4>(out + i, p + i, values, count, size);
        for (; i + 2 <= queries; i += 2) weigh_all<2>(out + i, p + i, values, count, size);
        for (; i < queries; i++) weigh_all<1>(out + i, p + i, values, count, size);
    }
}

}  // namespace

// What all layers of a step share. All pointers to Long unless said.
struct Step {
    int64_t rows, heads, kv, size, threads;
    const int64_t* position;      // [n]
    const int64_t* made;          // [n], own tokens before this one
    const void *cos, *sin;        // T [positions, D]; the first half of sin with a minus
    int64_t groups;               // rows that share a prompt
    const int64_t* group_ends;    // [groups + 1]: where each begins in `asking`
    const int64_t* asking;        // [n]: rows, group by group
    const int64_t* prompt_tokens; // [groups]
    float* room;                  // [n, H, 2 D + 2]: queries, then what they have seen
};

// A layer's own.
struct Layer {
    void *keys, *values;             // T [rows, K, L, D], own tokens
    int64_t places;                  // L
    const void* const* prompt_keys;  // [groups]: T [K, L, D], first place of each prompt
    const void* const* prompt_values;
    const int64_t* prompt_places;    // [groups]: L
    const void* norm;                // T [H + K, D], weights of the norms of queries and keys; null = none
    double query_epsilon, key_epsilon;
    double scale;
    int64_t window;                  // places back that are seen; 0 = all
};

namespace {

// Norm, rotation and place of one head of one row: x [D] -> out [D] as floats.
template <class T>
void turned(const T* x, const T* weight, float epsilon, const T* cos, const T* sin, int size, float* out) {
    alignas(64) float y[MOST + MOST / 2];  // its first half once more behind it
    const T* kind = nullptr;
    if (weight) {
        vec squares{};
        for (int c = 0; c < size; c += W) {
            vec a = load(x + c);
            squares += a * a;
        }
        float share = 1 / std::sqrt(sum(squares) / size + epsilon);
        for (int c = 0; c < size; c += W)
            store(y + c, round_as(round_as(load(x + c) * share, kind) * load(weight + c), kind));
    } else {
        for (int c = 0; c < size; c += W) store(y + c, load(x + c));
    }
    std::memcpy(y + size, y, sizeof(float) * size / 2);
    for (int c = 0; c < size; c += W) {
        vec straight = round_as(load(y + c) * load(cos + c), kind);
        store(out + c, round_as(straight + load(y + c + size / 2) * load(sin + c), kind));
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
                float* q = s.room + (row * s.heads + h) * each;
                turned(x + h * size, norm ? norm + h * size : nullptr, float(layer.query_epsilon), c, n, size, q);
                for (int i = 0; i < size; i += W) store(q + i, load(q + i) * float(layer.scale));
                std::memset(q + size, 0, sizeof(float) * (size + 1));
                q[2 * size + 1] = -INFINITY;
            }
            for (int64_t h = 0; h < s.kv; h++) {
                alignas(64) float k[MOST];
                const T* weight = norm ? norm + (s.heads + h) * size : nullptr;
                turned(x + (s.heads + h) * size, weight, float(layer.key_epsilon), c, n, size, k);
                int64_t at = ((row * s.kv + h) * layer.places + s.made[row]) * size;
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
                Seen seen[TILE];
                int64_t first[TILE], least = tokens;
                int count = int(std::min<int64_t>(TILE, queries - from));
                for (int i = 0; i < count; i++) {
                    int64_t row = s.asking[begin + (from + i) / g];
                    float* mine = s.room + (row * s.heads + h * g + (from + i) % g) * each;
                    q[i] = mine;
                    seen[i] = {mine + size, mine + 2 * size, mine + 2 * size + 1};
                    first[i] = std::max<int64_t>(0, s.position[row] - window + 1);
                    least = std::min(least, first[i]);
                }
                look(q, seen, count, first, k, v, least / BLOCK * BLOCK, tokens, size);
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < s.rows * s.kv; task++) {
            const int64_t row = task / s.kv, h = task % s.kv, made = s.made[row];
            const int64_t base = task * layer.places * size;
            const int64_t least = std::max<int64_t>(0, made - window + 1);
            for (int from = 0; from < g; from += TILE) {
                const float* q[TILE];
                Seen seen[TILE];
                int64_t first[TILE];
                int count = std::min(TILE, g - from);
                for (int i = 0; i < count; i++) {
                    float* mine = s.room + (row * s.heads + h * g + from + i) * each;
                    q[i] = mine;
                    seen[i] = {mine + size, mine + 2 * size, mine + 2 * size + 1};
                    first[i] = least;
                }
                look(q, seen, count, first, keys + base, values + base, least / BLOCK * BLOCK, made + 1, size);
                for (int i = 0; i < count; i++) {
                    T* to = out + (row * s.heads + h * g + from + i) * size;
                    float share = 1 / *seen[i].weight;
                    for (int c = 0; c < size; c += W) store(to + c, load(seen[i].sums + c) * share);
                }
            }
        }
    }
}

template <class T>
void norm(T* h, const T* more, const T* weight, T* out, int64_t rows, int64_t width, float epsilon, int threads) {
    const T* kind = nullptr;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * width > 16384)
    for (int64_t row = 0; row < rows; row++) {
        T *x = h + row * width, *y = out + row * width;
        vec squares{};
        for (int64_t c = 0; c < width; c += W) {
            vec a = load(x + c);
            if (more) {
                a = round_as(a + load(more + row * width + c), kind);
                store(x + c, a);
            }
            squares += a * a;
        }
        float share = 1 / std::sqrt(sum(squares) / width + epsilon);
        for (int64_t c = 0; c < width; c += W) {
            vec a = round_as(load(x + c) * share, kind);
            store(y + c, weight ? a * load(weight + c) : a);
        }
    }
}

template <class T>
void gated(const T* x, T* out, int64_t rows, int64_t width, int threads) {
    const T* kind = nullptr;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * width > 8192)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = x + 2 * row * width, *up = gate + width;
        for (int64_t c = 0; c < width; c += W) {
            vec a = load(gate + c);
            vec open = round_as(pick(a < all(-88.0f), vec{}, a / (1.0f + exponential(-a))), kind);
            store(out + row * width + c, open * load(up + c));
        }
    }
}

}  // namespace

extern "C" {

// Rows of one SIMD register: widths must be multiples of it. Also the version of this interface.
int64_t whet_lanes() { return W; }

// qkv T [n, (H + 2 K) D] -> out T [n, H D]; the new keys and values go behind each row's own tokens.
void whet_attend(const Step* step, const Layer* layer, const void* qkv, void* out, int64_t half) {
    if (half) attend(*step, *layer, (const bf16*)qkv, (bf16*)out);
    else attend(*step, *layer, (const float*)qkv, (float*)out);
}

// h += more (null = nothing); out = h / rms(h) * weight (null = 1). T [n, width].
void whet_norm(void* h, const void* more, const void* weight, void* out, int64_t rows, int64_t width, double epsilon,
               int64_t threads, int64_t half) {
    if (half) norm((bf16*)h, (const bf16*)more, (const bf16*)weight, (bf16*)out, rows, width, float(epsilon), int(threads));
    else norm((float*)h, (const float*)more, (const float*)weight, (float*)out, rows, width, float(epsilon), int(threads));
}

// silu(x[:, :width]) * x[:, width:]: T [n, 2 width] -> [n, width].
void whet_gated(const void* x, void* out, int64_t rows, int64_t width, int64_t threads, int64_t half) {
    if (half) gated((const bf16*)x, (bf16*)out, rows, width, int(threads));
    else gated((const float*)x, (float*)out, rows, width, int(threads));
}
}
