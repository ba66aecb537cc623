// Products of few rows and a packed weight.
#pragma once

#include "tables.h"
#include "vectors.h"

namespace {

constexpr int64_t ROWS = 10 * DEEP;  // rows whose inputs stay in the cache

// Sums of R rows for one panel: y[r][o] = sum over i of x[r][i] w[i][o], in the order of i.
template <int R>
inline void tile(const float* x, const float* w, int64_t in, vec (*sums)[2]) {
    vec a[R][2] = {};
    for (int64_t i = 0; i < in; i++) {
        vec low = load(w + i * PANEL), high = load(w + i * PANEL + W);
        for (int r = 0; r < R; r++) {
            vec one = all(x[r * in + i]);
            a[r][0] = fused(low, one, a[r][0]);
            a[r][1] = fused(high, one, a[r][1]);
        }
    }
    for (int r = 0; r < R; r++) sums[r][0] = a[r][0], sums[r][1] = a[r][1];
}
#if defined(__AVX512BF16__)
template <int R>
inline void tile(const bf16* x, const bf16* w, int64_t in, vec (*sums)[2]) {  // two inputs at a time
    __m512 a[R][2] = {};
    for (int64_t i = 0; i < in; i += 2) {
        __m512bh low = (__m512bh)_mm512_loadu_si512(w + i * PANEL);
        __m512bh high = (__m512bh)_mm512_loadu_si512(w + i * PANEL + 2 * W);
        for (int r = 0; r < R; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * in + i, 4);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            a[r][0] = _mm512_dpbf16_ps(a[r][0], low, both);
            a[r][1] = _mm512_dpbf16_ps(a[r][1], high, both);
        }
    }
    for (int r = 0; r < R; r++) sums[r][0] = (vec)a[r][0], sums[r][1] = (vec)a[r][1];
}
#else
template <int R>
inline void tile(const bf16* x, const bf16* w, int64_t in, vec (*sums)[2]) {
    vec a[R][2] = {};
    for (int64_t i = 0; i < in; i += 2) {  // a pair of inputs, each a word: its low half comes first
        words low = *reinterpret_cast<const loose_words*>(w + i * PANEL);
        words high = *reinterpret_cast<const loose_words*>(w + i * PANEL + 2 * W);
        vec first[2] = {(vec)(low << 16), (vec)(high << 16)};
        vec second[2] = {(vec)(low & 0xffff0000u), (vec)(high & 0xffff0000u)};
        for (int r = 0; r < R; r++) {
            uint32_t bits[2] = {uint32_t(x[r * in + i]) << 16, uint32_t(x[r * in + i + 1]) << 16};
            float one[2];
            std::memcpy(one, bits, 8);
            for (int c = 0; c < 2; c++) a[r][c] = fused(second[c], all(one[1]), fused(first[c], all(one[0]), a[r][c]));
        }
    }
    for (int r = 0; r < R; r++) sums[r][0] = a[r][0], sums[r][1] = a[r][1];
}
#endif

// Rows of a panel's outputs, with the bias; columns beyond the last are not written.
template <class T, int R>
void tile_out(const T* x, const T* w, const T* bias, T* y, int64_t in, int64_t out, int columns) {
    vec sums[R][2];
    tile<R>(x, w, in, sums);
    for (int r = 0; r < R; r++) {
        if (columns == PANEL) {
            for (int c = 0; c < 2; c++) store(y + r * out + c * W, bias ? sums[r][c] + load(bias + c * W) : sums[r][c]);
            continue;
        }
        T ends[PANEL], shift[PANEL] = {};
        if (bias) std::memcpy(shift, bias, sizeof(T) * columns);
        for (int c = 0; c < 2; c++) store(ends + c * W, sums[r][c] + load(shift + c * W));
        std::memcpy(y + r * out, ends, sizeof(T) * columns);
    }
}
template <class T, int R = DEEP>
void tile_of(int rows, const T* x, const T* w, const T* bias, T* y, int64_t in, int64_t out, int columns) {
    if (rows == R) return tile_out<T, R>(x, w, bias, y, in, out, columns);
    if constexpr (R > 1) tile_of<T, R - 1>(rows, x, w, bias, y, in, out, columns);
}

// y [n, out] of x [n, in].
template <class T>
void multiply(const Product& p, const T* x, T* y, int64_t n, int threads) {
    if (n == 0) return;
    const int64_t panels = (p.out + PANEL - 1) / PANEL, least = std::min<int64_t>(n, ROWS);
    // few panels and many threads: rows are shared out too
    const int64_t deep = (least + DEEP - 1) / DEEP, wanted = (2 * threads + panels - 1) / panels;
    const int64_t parts = panels >= 2 * threads ? 1 : std::min(deep, wanted);
    const int64_t block = parts == 1 ? ROWS : ((least + parts - 1) / parts + DEEP - 1) / DEEP * DEEP;
    const int64_t blocks = (n + block - 1) / block;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && n * p.in * p.out > 32768)
    for (int64_t task = 0; task < blocks * panels; task++) {
        const int64_t first = task / panels * block, rows = std::min(block, n - first), o = task % panels * PANEL;
        const T* w = (const T*)p.weight + o * p.in;
        const T* bias = p.bias ? (const T*)p.bias + o : nullptr;
        const int64_t tiles = (rows + DEEP - 1) / DEEP;
        const int columns = int(std::min<int64_t>(PANEL, p.out - o));
        for (int64_t t = 0; t < tiles; t++) {  // of nearly the same height
            const int64_t from = first + rows * t / tiles, to = first + rows * (t + 1) / tiles;
            tile_of<T>(int(to - from), x + from * p.in, w, bias, y + from * p.out + o, p.in, p.out, columns);
        }
    }
}

// Panels of a weight [out, in].
template <class T>
void packed(const T* weight, T* to, int64_t in, int64_t out, int threads) {
    constexpr int deep = sizeof(T) == 2 ? 2 : 1;  // inputs that lie together
    const int64_t panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && in * out > 32768)
    for (int64_t p = 0; p < panels; p++) {
        T* panel = to + p * PANEL * in;
        const int64_t columns = std::min<int64_t>(PANEL, out - p * PANEL);
        for (int64_t i = 0; i < in; i += deep)
            for (int64_t o = 0; o < PANEL; o++)
                for (int k = 0; k < deep; k++)
                    panel[i * PANEL + o * deep + k] = o < columns ? weight[(p * PANEL + o) * in + i + k] : T(0);
    }
}

}  // namespace
