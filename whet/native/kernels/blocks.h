// Products of blocks that lie in the cache, and the forms in which they lie there.
//
// out [rows, columns] += a [rows, depth] b [depth, columns]. C is what is multiplied: float, or bfloat16 where the
// processor sums products of pairs; STEP<C> numbers of the depth then lie together. Three forms of a block x [n, d]:
//   rows    [n][LONG]             left factor; for floats also a right factor, of depth n
//   paired  [n / STEP][d][STEP]   right factor, of depth n
//   transposed  [d / STEP][n][STEP]   right factor, of depth d; left factor too, of n rows and depth d
#pragma once

#include "vectors.h"

namespace {

constexpr int LONG = MAX_HEAD_SIZE + W;  // an odd number of cache lines, so that rows of floats don't share their sets

template <class T> struct Multiplied { typedef float C; };
#if defined(__AVX512BF16__)
template <> struct Multiplied<bf16> { typedef bf16 C; };
#endif
template <class C> constexpr int STEP = sizeof(C) == 2 ? 2 : 1;

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Sums of R rows and V registers of columns. NEXT: numbers from a row of a to the next; across, down: from a step of the
// depth to the next, of a and of b.
template <int R, int V, int NEXT>
inline void tile(const float* a, int64_t across, const float* b, int64_t down, int64_t steps, vec (&sums)[R][V]) {
    for (; steps; steps--, a += across, b += down) {
        vec x[V];
        for (int c = 0; c < V; c++) x[c] = load(b + c * W);
        for (int r = 0; r < R; r++) {
            vec one = all(a[r * NEXT]);
            for (int c = 0; c < V; c++) sums[r][c] = fused(x[c], one, sums[r][c]);
        }
    }
}
#if defined(__AVX512BF16__)
template <int R, int V, int NEXT>
inline void tile(const bf16* a, int64_t across, const bf16* b, int64_t down, int64_t steps, vec (&sums)[R][V]) {
    for (; steps; steps--, a += across, b += down) {
        __m512bh x[V];
        for (int c = 0; c < V; c++) x[c] = (__m512bh)_mm512_loadu_si512(b + 2 * c * W);
        for (int r = 0; r < R; r++) {
            int32_t pair;
            std::memcpy(&pair, a + r * NEXT, 4);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int c = 0; c < V; c++) sums[r][c] = (vec)_mm512_dpbf16_ps((__m512)sums[r][c], x[c], both);
        }
    }
}
#endif

template <class C, int NEXT, int V, int R>
void tile_into(const C* a, int64_t across, const C* b, int64_t down, int64_t steps, float* out, int64_t next, bool add) {
    vec sums[R][V] = {};  // a sum of its own, added at the end: long sums are made of short ones, and round less
    tile<R, V, NEXT>(a, across, b, down, steps, sums);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < V; c++) {
            float* to = out + r * next + c * W;
            store(to, add ? load(to) + sums[r][c] : sums[r][c]);
        }
}
template <class C, int NEXT, int V, int R = DEEP>
inline void tile_of(int rows, const C* a, int64_t across, const C* b, int64_t down, int64_t steps, float* out,
                    int64_t next, bool add) {
    if (rows == R) return tile_into<C, NEXT, V, R>(a, across, b, down, steps, out, next, add);
    if constexpr (R > 1) tile_of<C, NEXT, V, R - 1>(rows, a, across, b, down, steps, out, next, add);
}

// At most DEEP rows; columns a multiple of W.
template <class C, int NEXT>
inline void product(int rows, int columns, const C* a, int64_t across, const C* b, int64_t down, int64_t steps,
                    float* out, int64_t next, bool add) {
    int c = 0;
    for (; c + PANEL <= columns; c += PANEL)
        tile_of<C, NEXT, 2>(rows, a, across, b + c * STEP<C>, down, steps, out + c, next, add);
    if (c < columns) tile_of<C, NEXT, 1>(rows, a, across, b + c * STEP<C>, down, steps, out + c, next, add);
}

// A row of numbers as C, with zeros behind them up to `padded`.
template <class T, class C>
inline void copy_padded(const T* x, C* y, int count, int padded) {
    int i = 0;
    if constexpr (sizeof(T) == sizeof(C)) {
        std::memcpy(y, x, sizeof(T) * count);
        i = count;
    } else {
        for (; i + W <= count; i += W) store(y + i, load(x + i));
        if (i < count) {
            T ends[W] = {};
            std::memcpy(ends, x + i, sizeof(T) * (count - i));
            float wide[W];
            store(wide, load(ends));
            for (; i < count; i++) y[i] = wide[i % W];
        }
    }
    for (; i < padded; i++) y[i] = 0;
}

// Floats as a row of numbers.
template <class T> inline void store_rounded(const float* x, T* y, int count) {
    int i = 0;
    for (; i + W <= count; i += W) store(y + i, load(x + i));
    if (i < count) {
        T ends[W];
        store(ends, load(x + i));  // x has room for a whole register
        std::memcpy(y + i, ends, sizeof(T) * (count - i));
    }
}
template <class T> inline float dot(const T* x, const T* y, int count) {
    vec sums{};
    int i = 0;
    for (; i + W <= count; i += W) sums = fused(load(x + i), load(y + i), sums);
    if (i < count) {
        T ends[2][W] = {};
        std::memcpy(ends[0], x + i, sizeof(T) * (count - i));
        std::memcpy(ends[1], y + i, sizeof(T) * (count - i));
        sums = fused(load(ends[0]), load(ends[1]), sums);
    }
    return sum(sums);
}

// Converts rows to pairs of rows. n: a multiple of STEP.
inline void pair_rows(const float* x, float* y, int n, int width) {
    for (int i = 0; i < n; i++) std::memcpy(y + int64_t(i) * width, x + int64_t(i) * LONG, sizeof(float) * width);
}
inline void pair_rows(const bf16* x, bf16* y, int n, int width) {
    for (int i = 0; i < n; i += 2) {
        const bf16 *low = x + int64_t(i) * LONG, *high = low + LONG;
        uint32_t* to = (uint32_t*)(y + int64_t(i) * width);
        for (int c = 0; c < width; c++) to[c] = low[c] | uint32_t(high[c]) << 16;
    }
}

// Transposes rows into `wide` columns: words (a float, or a pair) of a square change places with those across it.
template <int half, size_t... i>
inline void swap_across(words& x, words& y, std::index_sequence<i...>) {
    words low = __builtin_shufflevector(x, y, ((int(i) & half) ? W + int(i) - half : int(i))...);
    words high = __builtin_shufflevector(x, y, ((int(i) & half) ? W + int(i) : int(i) + half)...);
    x = low, y = high;
}
template <int half = W / 2>
inline void transpose_square(words* x) {
    for (int i = 0; i < W; i++)
        if (!(i & half)) swap_across<half>(x[i], x[i + half], std::make_index_sequence<W>());
    if constexpr (half > 1) transpose_square<half / 2>(x);
}
template <class C>
inline void transpose(const C* x, C* y, int n, int width, int wide) {
    for (int c = 0; c < width; c += W * STEP<C>)
        for (int i = 0; i < n; i += W) {
            words block[W];
            for (int j = 0; j < W; j++) block[j] = *(const loose_words*)(x + int64_t(i + j) * LONG + c);
            transpose_square(block);
            for (int j = 0; j < W && c + j * STEP<C> < width; j++)
                *(loose_words*)(y + (int64_t(c / STEP<C> + j) * wide + i) * STEP<C>) = block[j];
        }
}

}  // namespace
