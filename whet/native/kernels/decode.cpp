// The decoder layers of a decode step on a CPU: products of few rows, attention over prompts and own tokens, norms.
//
// Called from whet/native/decode.py, built with the machine's own compiler. Every result of a row is computed from
// that row alone, in an order that depends on nothing else: a row gives the same bits alone, in a batch, and with any
// number of threads. Sums are in fp32; T is what is stored, float or bfloat16 (here its bits), rounded where
// transformers rounds but for the second product of a rotation. Dim legend: n rows, H query heads, K KV heads,
// g = H / K, D head size, L places of a KV row, d hidden size, m width of the MLP.
// Left out on purpose: soft-capped scores, sinks, partial rotary; the layout written in torch has them.

#include "attention.h"
#include "products.h"

namespace {

template <class T>
void norm(T* h, const T* residual, const T* weight, T* out, int64_t rows, int64_t width, float epsilon, int threads) {
    const T* rounding = nullptr;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * width > 16384)
    for (int64_t row = 0; row < rows; row++) {
        T *x = h + row * width, *y = out + row * width;
        vec squares{};
        for (int64_t c = 0; c < width; c += W) {
            vec a = load(x + c);
            if (residual) {
                a = round_as(a + load(residual + row * width + c), rounding);
                store(x + c, a);
            }
            squares = fused(a, a, squares);
        }
        float share = 1 / std::sqrt(sum(squares) / width + epsilon);
        for (int64_t c = 0; c < width; c += W) {
            vec a = round_as(load(x + c) * share, rounding);
            store(y + c, weight ? a * load(weight + c) : a);
        }
    }
}

template <class T>
void silu_mul(const T* x, T* out, int64_t rows, int64_t width, int threads) {
    const T* rounding = nullptr;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows * width > 8192)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = x + 2 * row * width, *up = gate + width;
        for (int64_t c = 0; c < width; c += W) {
            vec a = load(gate + c);
            vec activated = round_as(silu(a), rounding);
            store(out + row * width + c, activated * load(up + c));
        }
    }
}

// Runs all layers for one token per row; the result is `hidden` + `residual`.
template <class T>
void run(const Step& s, const Layer* layers, int64_t count) {
    const int threads = int(s.threads);
    T *h = (T*)s.hidden, *residual = (T*)s.residual, *x = (T*)s.narrow, *y = (T*)s.wide;
    for (int64_t i = 0; i < count; i++) {
        const Layer& l = layers[i];
        const int64_t d = l.qkv.in, m = l.down.in;
        norm(h, i ? residual : (T*)nullptr, (const T*)l.before, x, s.rows, d, float(l.before_epsilon), threads);
        multiply(l.qkv, x, y, s.rows, threads);
        attend(s, l, y, x);
        multiply(l.output, x, residual, s.rows, threads);
        norm(h, residual, (const T*)l.after, x, s.rows, d, float(l.after_epsilon), threads);
        multiply(l.gate_up, x, y, s.rows, threads);
        silu_mul(y, x, s.rows, m, threads);
        multiply(l.down, x, residual, s.rows, threads);
    }
}

}  // namespace

extern "C" {

// Constants for decode.py: numbers of one SIMD register (widths must be multiples of it), the largest head size, bytes
// of the tables.
int64_t whet_constant(int64_t which) {
    const int64_t constants[] = {W, MAX_HEAD_SIZE, sizeof(Product), sizeof(Step), sizeof(Layer)};
    return constants[which];
}

// All layers of a decode step.
void whet_run(const Step* step, const Layer* layers, int64_t count, int64_t half) {
    if (half) run<bf16>(*step, layers, count);
    else run<float>(*step, layers, count);
}

// qkv T [n, (H + 2 K) D] -> out T [n, H D]; the new keys and values go behind each row's own tokens.
void whet_attend(const Step* step, const Layer* layer, const void* qkv, void* out, int64_t half) {
    if (half) attend(*step, *layer, (const bf16*)qkv, (bf16*)out);
    else attend(*step, *layer, (const float*)qkv, (float*)out);
}

// Weights [out, in] into panels; `to` has room for `out` rounded up to a multiple of 2 W.
void whet_pack(const void* weight, void* to, int64_t in, int64_t out, int64_t threads, int64_t half) {
    if (half) pack_panels((const bf16*)weight, (bf16*)to, in, out, int(threads));
    else pack_panels((const float*)weight, (float*)to, in, out, int(threads));
}

// x T [n, in] -> y T [n, out].
void whet_multiply(const Product* product, const void* x, void* y, int64_t rows, int64_t threads, int64_t half) {
    if (half) multiply(*product, (const bf16*)x, (bf16*)y, rows, int(threads));
    else multiply(*product, (const float*)x, (float*)y, rows, int(threads));
}

// h += residual (null = nothing); out = h / rms(h) * weight (null = 1). T [n, width].
void whet_norm(void* h, const void* residual, const void* weight, void* out, int64_t rows, int64_t width,
        double epsilon,
               int64_t threads, int64_t half) {
    const float e = float(epsilon);
    const int t = int(threads);
    if (half) norm((bf16*)h, (const bf16*)residual, (const bf16*)weight, (bf16*)out, rows, width, e, t);
    else norm((float*)h, (const float*)residual, (const float*)weight, (float*)out, rows, width, e, t);
}

// silu(x[:, :width]) * x[:, width:]: T [n, 2 width] -> [n, width].
void whet_silu_mul(const void* x, void* out, int64_t rows, int64_t width, int64_t threads, int64_t half) {
    if (half) silu_mul((const bf16*)x, (bf16*)out, rows, width, int(threads));
    else silu_mul((const float*)x, (float*)out, rows, width, int(threads));
}
}
