// Products of few rows and a packed weight, with what a low-rank adapter adds.
#pragma once

#include <vector>

#include "tables.h"
#include "vectors.h"

namespace {

constexpr int64_t ROWS = 10 * DEEP;  // rows whose inputs stay in the cache

// Sums of R rows for one panel: y[r][o] = sum over i of x[r][i] w[i][o], in the order of i. step: from row to row of x.
template <int R>
inline void tile(const float* x, int64_t step, const float* w, int64_t in, vec (*sums)[2]) {
    vec a[R][2] = {};
    for (int64_t i = 0; i < in; i++) {
        vec low = load(w + i * PANEL), high = load(w + i * PANEL + W);
        for (int r = 0; r < R; r++) {
            vec one = all(x[r * step + i]);
            a[r][0] = fused(low, one, a[r][0]);
            a[r][1] = fused(high, one, a[r][1]);
        }
    }
    for (int r = 0; r < R; r++) sums[r][0] = a[r][0], sums[r][1] = a[r][1];
}
#if defined(__AVX512BF16__)
template <int R>
inline void tile(const bf16* x, int64_t step, const bf16* w, int64_t in, vec (*sums)[2]) {  // two inputs at a time
    __m512 a[R][2] = {};
    for (int64_t i = 0; i < in; i += 2) {
        __m512bh low = (__m512bh)_mm512_loadu_si512(w + i * PANEL);
        __m512bh high = (__m512bh)_mm512_loadu_si512(w + i * PANEL + 2 * W);
        for (int r = 0; r < R; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * step + i, 4);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            a[r][0] = _mm512_dpbf16_ps(a[r][0], low, both);
            a[r][1] = _mm512_dpbf16_ps(a[r][1], high, both);
        }
    }
    for (int r = 0; r < R; r++) sums[r][0] = (vec)a[r][0], sums[r][1] = (vec)a[r][1];
}
#else
template <int R>
inline void tile(const bf16* x, int64_t step, const bf16* w, int64_t in, vec (*sums)[2]) {
    vec a[R][2] = {};
    for (int64_t i = 0; i < in; i += 2) {  // a pair of inputs, each a word: its low half comes first
        words low = *reinterpret_cast<const loose_words*>(w + i * PANEL);
        words high = *reinterpret_cast<const loose_words*>(w + i * PANEL + 2 * W);
        vec first[2] = {(vec)(low << 16), (vec)(high << 16)};
        vec second[2] = {(vec)(low & 0xffff0000u), (vec)(high & 0xffff0000u)};
        for (int r = 0; r < R; r++) {
            uint32_t bits[2] = {uint32_t(x[r * step + i]) << 16, uint32_t(x[r * step + i + 1]) << 16};
            float one[2];
            std::memcpy(one, bits, 8);
            for (int c = 0; c < 2; c++) a[r][c] = fused(second[c], all(one[1]), fused(first[c], all(one[0]), a[r][c]));
        }
    }
    for (int r = 0; r < R; r++) sums[r][0] = a[r][0], sums[r][1] = a[r][1];
}
#endif

// Rows of a panel's outputs, y = x W + b + s (z B), rounded after each sum as the module rounds; columns beyond the last
// are not written. z, of `rank` columns, is what the adapters' first matrices make of x; the panel has the part `span`.
template <class T, int R>
void tile_out(const Product& p, const T* x, const T* z, T* y, int64_t panel) {
    const T* rounding = nullptr;
    const int columns = int(std::min<int64_t>(PANEL, p.out - panel * PANEL));
    vec sums[R][2];
    tile<R>(x, p.in, (const T*)p.weight + panel * PANEL * p.in, p.in, sums);
    if (p.bias) {
        T shift[PANEL] = {};
        std::memcpy(shift, (const T*)p.bias + panel * PANEL, sizeof(T) * columns);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < 2; c++) sums[r][c] += load(shift + c * W);
    }
    if (p.rank) {
        const int64_t *span = p.spans + 2 * panel, from = span[0];
        const float* scale = p.scale + panel * PANEL;
        vec adapter[R][2];
        tile<R>(z + from, p.rank, (const T*)p.second + (panel * p.rank + from) * PANEL, span[1] - from, adapter);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < 2; c++)
                sums[r][c] = round_as(sums[r][c], rounding) +
                             round_as(round_as(adapter[r][c], rounding) * load(scale + c * W), rounding);
    }
    for (int r = 0; r < R; r++) {
        if (columns == PANEL) {
            for (int c = 0; c < 2; c++) store(y + r * p.out + c * W, sums[r][c]);
            continue;
        }
        T ends[PANEL];
        for (int c = 0; c < 2; c++) store(ends + c * W, sums[r][c]);
        std::memcpy(y + r * p.out, ends, sizeof(T) * columns);
    }
}
template <class T, int R = DEEP>
void tile_of(int rows, const Product& p, const T* x, const T* z, T* y, int64_t panel) {
    if (rows == R) return tile_out<T, R>(p, x, z, y, panel);
    if constexpr (R > 1) tile_of<T, R - 1>(rows, p, x, z, y, panel);
}

// y [n, out] of x [n, in].
template <class T>
void multiply(const Product& p, const T* x, T* y, int64_t n, int threads) {
    if (n == 0) return;
    std::vector<T> rank_outputs(n * p.rank);
    T* z = rank_outputs.data();
    if (p.rank) multiply(Product{p.first, nullptr, p.in, p.rank}, x, z, n, threads);
    const int64_t panels = (p.out + PANEL - 1) / PANEL, cached_rows = std::min<int64_t>(n, ROWS);
    // few panels and many threads: rows are shared out too
    const int64_t row_tiles = (cached_rows + DEEP - 1) / DEEP, wanted_parts = (2 * threads + panels - 1) / panels;
    const int64_t parts = panels >= 2 * threads ? 1 : std::min(row_tiles, wanted_parts);
    const int64_t block = parts == 1 ? ROWS : ((cached_rows + parts - 1) / parts + DEEP - 1) / DEEP * DEEP;
    const int64_t blocks = (n + block - 1) / block;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && n * p.in * p.out > 32768)
    for (int64_t task = 0; task < blocks * panels; task++) {
        const int64_t first = task / panels * block, rows = std::min(block, n - first), panel = task % panels;
        const int64_t tiles = (rows + DEEP - 1) / DEEP;
        for (int64_t t = 0; t < tiles; t++) {  // of nearly the same height
            const int64_t from = first + rows * t / tiles, to = first + rows * (t + 1) / tiles;
            tile_of<T>(int(to - from), p, x + from * p.in, z + from * p.rank, y + from * p.out + panel * PANEL, panel);
        }
    }
}

// Panels of a weight [out, in].
template <class T>
void pack_panels(const T* weight, T* to, int64_t in, int64_t out, int threads) {
    constexpr int step = sizeof(T) == 2 ? 2 : 1;  // inputs that lie together
    const int64_t panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && in * out > 32768)
    for (int64_t p = 0; p < panels; p++) {
        T* panel = to + p * PANEL * in;
        const int64_t columns = std::min<int64_t>(PANEL, out - p * PANEL);
        for (int64_t i = 0; i < in; i += step)
            for (int64_t o = 0; o < PANEL; o++)
                for (int k = 0; k < step; k++)
                    panel[i * PANEL + o * step + k] = o < columns ? weight[(p * PANEL + o) * in + i + k] : T(0);
    }
}

}  // namespace
