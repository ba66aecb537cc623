// What layers do number by number in training, each in one pass over memory: RMSNorms and gates, forward and backward.
//
// Called from whet/native/elementwise.py, which builds this file with the machine's own compiler. Numbers are stored as
// T, float or bfloat16 (here its bits), rounded where transformers rounds going forward, and summed in fp32. A row's
// bits depend on nothing but the row; sums over rows are made part by part, the same parts for any number of threads.
// Dim legend: n rows, d numbers of a row, a multiple of W.

#include "vectors.h"

namespace {

constexpr int64_t PART = 128;    // rows summed together
constexpr int64_t SMALL = 8192;  // numbers that are not worth a second thread

// r = 1 / sqrt(mean(x²) + epsilon), y = x r w.
template <class T>
void norm(const T* x, const T* w, T* y, float* r, int64_t n, int64_t d, float epsilon, int threads) {
    const T* kind = nullptr;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && n * d > SMALL)
    for (int64_t i = 0; i < n; i++) {
        const T* a = x + i * d;
        vec squares{};
        for (int64_t c = 0; c < d; c += W) squares = fused(load(a + c), load(a + c), squares);
        r[i] = 1 / std::sqrt(sum(squares) / d + epsilon);
        for (int64_t c = 0; c < d; c += W) store(y + i * d + c, round_as(load(a + c) * r[i], kind) * load(w + c));
    }
}

// d_x = r g w - x r³ mean(g w x), d_w = sum over rows of g x r, by parts. d_x or d_w null: not wanted.
template <class T>
void norm_back(const T* x, const T* w, const float* r, const T* g, T* d_x, float* d_w, int64_t n, int64_t d, int threads) {
    const int64_t parts = (n + PART - 1) / PART;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && n * d > SMALL)
    for (int64_t p = 0; p < parts; p++) {
        float* of_part = d_w ? d_w + p * d : nullptr;
        if (d_w) std::memset(of_part, 0, sizeof(float) * d);
        for (int64_t i = p * PART; i < std::min(n, (p + 1) * PART); i++) {
            const T *a = x + i * d, *b = g + i * d;
            vec dots{};
            for (int64_t c = 0; d_x && c < d; c += W) dots = fused(load(b + c) * load(w + c), load(a + c), dots);
            const float share = r[i], slope = -sum(dots) * share * share * share / d;
            for (int64_t c = 0; d_x && c < d; c += W)
                store(d_x + i * d + c, fused(load(a + c), all(slope), load(b + c) * load(w + c) * share));
            for (int64_t c = 0; d_w && c < d; c += W)
                store(of_part + c, fused(load(b + c) * share, load(a + c), load(of_part + c)));
        }
    }
}

// y = silu(gate) up.
template <class T> void gated(const T* gate, const T* up, T* y, int64_t numbers, int threads) {
    const T* kind = nullptr;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && numbers > SMALL)
    for (int64_t c = 0; c < numbers; c += W) store(y + c, round_as(silu(load(gate + c)), kind) * load(up + c));
}

// Of y = silu(gate) up, from its gradient g: y again, d_gate, and d_up in the place of g. y null: not wanted.
template <class T> void gated_back(const T* gate, const T* up, T* g, T* y, T* d_gate, int64_t numbers, int threads) {
    const T* kind = nullptr;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && numbers > SMALL)
    for (int64_t c = 0; c < numbers; c += W) {
        const vec a = load(gate + c), b = load(up + c), slope = load(g + c);
        const vec s = pick(a < all(-88.0f), vec{}, 1.0f / (1.0f + exponential(-a))), open = round_as(a * s, kind);
        if (y) store(y + c, open * b);
        store(d_gate + c, slope * b * s * fused(a, 1.0f - s, all(1.0f)));
        store(g + c, slope * open);
    }
}

}  // namespace

extern "C" {

// What elementwise.py must know: numbers of one SIMD register, rows summed together.
int64_t whet_fact(int64_t which) {
    const int64_t facts[] = {W, PART};
    return facts[which];
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
void whet_gated(const void* gate, const void* up, void* y, int64_t numbers, int64_t threads, int64_t half) {
    if (half) gated((const bf16*)gate, (const bf16*)up, (bf16*)y, numbers, int(threads));
    else gated((const float*)gate, (const float*)up, (float*)y, numbers, int(threads));
}
void whet_gated_back(const void* gate, const void* up, void* g, void* y, void* d_gate, int64_t numbers, int64_t threads,
                     int64_t half) {
    const int t = int(threads);
    if (half) gated_back((const bf16*)gate, (const bf16*)up, (bf16*)g, (bf16*)y, (bf16*)d_gate, numbers, t);
    else gated_back((const float*)gate, (const float*)up, (float*)g, (float*)y, (float*)d_gate, numbers, t);
}
}
