// What layers do in training beside products of their weights: RMSNorms and gates, forward and backward, each in one
// pass over memory; and the gradients of weights in fp32.
//
// Called from whet/native/layers.py, which builds this file with the machine's own compiler. Numbers are stored as T,
// float or bfloat16 (here its bits), rounded where transformers rounds going forward, and summed in fp32. A row's bits
// depend on nothing but the row; sums over rows have an order that does not depend on the number of threads.
// Dim legend: n rows, d numbers of a row, a multiple of W.

#include "blocks.h"

extern "C" int omp_get_thread_num(void);

namespace {

constexpr int64_t PART = 128;    // rows summed together
constexpr int64_t SMALL = 8192;  // numbers that are not worth a second thread

inline int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

// r = 1 / sqrt(mean(x²) + epsilon), y = x r w.
template <class T>
void norm(const T* x, const T* w, T* y, float* r, int64_t n, int64_t d, float epsilon, int threads) {
    const T* rounding = nullptr;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && n * d > SMALL)
    for (int64_t i = 0; i < n; i++) {
        const T* a = x + i * d;
        vec squares{};
        for (int64_t c = 0; c < d; c += W) squares = fused(load(a + c), load(a + c), squares);
        r[i] = 1 / std::sqrt(sum(squares) / d + epsilon);
        for (int64_t c = 0; c < d; c += W) store(y + i * d + c, round_as(load(a + c) * r[i], rounding) * load(w + c));
    }
}

// d_x = r g w - x r³ mean(g w x), d_w = sum over rows of g x r, by parts. d_x or d_w null: not computed.
template <class T>
void norm_back(const T* x, const T* w, const float* r, const T* g, T* d_x, float* d_w, int64_t n, int64_t d, int threads) {
    const int64_t count = parts(n, PART);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && n * d > SMALL)
    for (int64_t p = 0; p < count; p++) {
        float* part_sums = d_w ? d_w + p * d : nullptr;
        if (d_w) std::memset(part_sums, 0, sizeof(float) * d);
        for (int64_t i = p * PART; i < std::min(n, (p + 1) * PART); i++) {
            const T *a = x + i * d, *b = g + i * d;
            vec dots{};
            for (int64_t c = 0; d_x && c < d; c += W) dots = fused(load(b + c) * load(w + c), load(a + c), dots);
            const float share = r[i], slope = -sum(dots) * share * share * share / d;
            for (int64_t c = 0; d_x && c < d; c += W)
                store(d_x + i * d + c, fused(load(a + c), all(slope), load(b + c) * load(w + c) * share));
            for (int64_t c = 0; d_w && c < d; c += W)
                store(part_sums + c, fused(load(b + c) * share, load(a + c), load(part_sums + c)));
        }
    }
}

// y = silu(gate) up.
template <class T> void silu_mul(const T* gate, const T* up, T* y, int64_t numbers, int threads) {
    const T* rounding = nullptr;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && numbers > SMALL)
    for (int64_t c = 0; c < numbers; c += W) store(y + c, round_as(silu(load(gate + c)), rounding) * load(up + c));
}

// Of y = silu(gate) up, from its gradient g: y again, d_gate, and d_up in the place of g. y null: not wanted.
template <class T> void silu_mul_back(const T* gate, const T* up, T* g, T* y, T* d_gate, int64_t numbers, int threads) {
    const T* rounding = nullptr;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && numbers > SMALL)
    for (int64_t c = 0; c < numbers; c += W) {
        const vec a = load(gate + c), b = load(up + c), slope = load(g + c);
        const vec s = sigmoid(a), activated = round_as(silu(a), rounding);
        if (y) store(y + c, activated * b);
        store(d_gate + c, slope * b * s * fused(a, 1.0f - s, all(1.0f)));
        store(g + c, slope * activated);
    }
}

// ---- gradients of weights --------------------------------------------------------------------------------------------

constexpr int64_t DEPTH = 128;         // rows of a chunk: a panel of them stays in the nearest cache
constexpr int64_t MAX_BLOCK_ROWS = 40 * DEEP;    // most outputs of a block,
constexpr int64_t MAX_BLOCK_COLUMNS = 16 * PANEL;  // and inputs: a chunk of both stays in the cache of a core
static_assert(MAX_BLOCK_ROWS % DEEP == 0 && MAX_BLOCK_COLUMNS % PANEL == 0);

// Columns first to end - 1 of a chunk of rows, `wide` of them side by side, with zeros behind the last.
template <int wide>
inline void gather_columns(const float* x, int64_t next, int64_t rows, int64_t first, int64_t end, float* to) {
    for (int64_t at = first; at < end; at += wide) {
        const float* from = x + at;
        if (at + wide <= end) {
            for (int64_t i = 0; i < rows; i++, from += next, to += wide) std::memcpy(to, from, sizeof(float) * wide);
            continue;
        }
        for (int64_t i = 0; i < rows; i++, from += next, to += wide)
            for (int c = 0; c < wide; c++) to[c] = at + c < end ? from[c] : 0;
    }
}

// One block of sums[o][i] = sum over n of g[n][o] x[n][i]. workspace: MAX_BLOCK_ROWS + MAX_BLOCK_COLUMNS times DEPTH.
inline void weight_block(const float* g, const float* x, float* sums, int64_t n, int64_t out, int64_t in, int64_t o,
                         int64_t o_end, int64_t i, int64_t i_end, bool add, float* workspace) {
    float* panels = workspace + MAX_BLOCK_ROWS * DEPTH;
    for (int64_t from = 0; from < n; from += DEPTH) {
        const int64_t rows = std::min(DEPTH, n - from);
        gather_columns<DEEP>(g + from * out, out, rows, o, o_end, workspace);
        gather_columns<PANEL>(x + from * in, in, rows, i, i_end, panels);
        for (int64_t c = i; c < i_end; c += PANEL)
            for (int64_t r = o; r < o_end; r += DEEP) {
                const int count = int(std::min<int64_t>(DEEP, o_end - r)), columns = int(std::min<int64_t>(PANEL, i_end - c));
                const float *a = workspace + (r - o) * rows, *b = panels + (c - i) * rows;
                float* to = sums + r * in + c;
                if (columns == PANEL) {
                    tile_of<float, 1, 2>(count, a, DEEP, b, PANEL, rows, to, in, add || from > 0);
                    continue;
                }
                float ends[DEEP][PANEL];
                for (int k = 0; k < count; k++) std::memcpy(ends[k], to + k * in, sizeof(float) * columns);
                tile_of<float, 1, 2>(count, a, DEEP, b, PANEL, rows, ends[0], PANEL, add || from > 0);
                for (int k = 0; k < count; k++) std::memcpy(to + k * in, ends[k], sizeof(float) * columns);
            }
    }
}

// The size, a multiple, of parts of n that are nearly the same and none over `most`.
inline int64_t even_size(int64_t n, int64_t most, int64_t multiple) {
    return round_up(parts(n, parts(n, std::max(most, multiple))), multiple);
}
// sums [out, in] = gT x of g [n, out], x [n, in].
inline void weight_grad(const float* g, const float* x, float* sums, int64_t n, int64_t out, int64_t in, bool add,
                        int threads, float* workspace) {
    int64_t block_rows = even_size(out, MAX_BLOCK_ROWS, DEEP), block_columns = even_size(in, MAX_BLOCK_COLUMNS, PANEL);
    while (parts(out, block_rows) * parts(in, block_columns) < 3 * threads &&
            (block_rows > 5 * DEEP || block_columns > PANEL)) {
        if (block_rows > block_columns) block_rows = even_size(out, block_rows / 2, DEEP);
        else block_columns = even_size(in, std::max<int64_t>(block_columns / 2, PANEL), PANEL);
    }
    const int64_t across = parts(in, block_columns);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1 && n * out * in > 64 * SMALL)
    for (int64_t task = 0; task < parts(out, block_rows) * across; task++) {
        const int64_t o = task / across * block_rows, i = task % across * block_columns;
        weight_block(g, x, sums, n, out, in, o, std::min(out, o + block_rows), i, std::min(in, i + block_columns), add,
                     workspace + omp_get_thread_num() * (MAX_BLOCK_ROWS + MAX_BLOCK_COLUMNS) * DEPTH);
    }
}

}  // namespace

extern "C" {

// Constants for layers.py: numbers of one SIMD register, rows summed together, a thread's
// workspace for gradients of weights.
int64_t whet_constant(int64_t which) {
    const int64_t constants[] = {W, PART, (MAX_BLOCK_ROWS + MAX_BLOCK_COLUMNS) * DEPTH};
    return constants[which];
}

// x, g, d_x: T [n, d]. w: T [d]. r: [n]. d_w: [parts, d].
void whet_norm(const void* x, const void* w, void* y, float* r, int64_t n, int64_t d, double epsilon, int64_t threads,
               int64_t half) {
    if (half) norm((const bf16*)x, (const bf16*)w, (bf16*)y, r, n, d, float(epsilon), int(threads));
    else norm((const float*)x, (const float*)w, (float*)y, r, n, d, float(epsilon), int(threads));
}
void whet_norm_back(const void* x, const void* w, const float* r, const void* g, void* d_x, float* d_w, int64_t n,
                    int64_t d, int64_t threads, int64_t half) {
    if (half) norm_back((const bf16*)x, (const bf16*)w, r, (const bf16*)g, (bf16*)d_x, d_w, n, d, int(threads));
    else norm_back((const float*)x, (const float*)w, r, (const float*)g, (float*)d_x, d_w, n, d, int(threads));
}

// All T, as many numbers, a multiple of W.
void whet_silu_mul(const void* gate, const void* up, void* y, int64_t numbers, int64_t threads, int64_t half) {
    if (half) silu_mul((const bf16*)gate, (const bf16*)up, (bf16*)y, numbers, int(threads));
    else silu_mul((const float*)gate, (const float*)up, (float*)y, numbers, int(threads));
}
void whet_silu_mul_back(const void* gate, const void* up, void* g, void* y, void* d_gate, int64_t numbers,
        int64_t threads,
                     int64_t half) {
    const int t = int(threads);
    if (half) silu_mul_back((const bf16*)gate, (const bf16*)up, (bf16*)g, (bf16*)y, (bf16*)d_gate, numbers, t);
    else silu_mul_back((const float*)gate, (const float*)up, (float*)g, (float*)y, (float*)d_gate, numbers, t);
}

// g [n, out], x [n, in] -> sums [out, in], all fp32; add: to what is there. workspace: for each thread.
void whet_weight_grad(const float* g, const float* x, float* sums, int64_t n, int64_t out, int64_t in, int64_t add,
                      int64_t threads, float* workspace) {
    weight_grad(g, x, sums, n, out, in, add, int(threads), workspace);
}
}
