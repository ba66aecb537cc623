// Tables that whet/native/decode.py fills in; it declares the same structures, field by field.
#pragma once

#include <cstdint>

// Linear layers of one input: weights in panels of 2 W outputs, those of an input side by side (bfloat16: of a pair).
// Low-rank adapters add s (x A) B: `first` holds A of each layer side by side, `second` B of each below one another.
struct Product {
    const void *weight, *bias;  // T; bias null = none
    int64_t in, out;
    int64_t rank;               // of all adapters together; 0 = none, and nothing below is read
    const void *first, *second; // T, in panels: [rank, in] and [out, rank]
    const float* scale;         // s of each output, up to a whole panel
    const int64_t* spans;       // [panels, 2]: which of the ranks a panel has; those outside are 0
};

// Data of a step, for all layers. Pointers are to int64 unless noted.
struct Step {
    int64_t rows, heads, kv, size, threads;
    const int64_t* position;       // [n]
    const int64_t* num_drawn;      // [n], drawn tokens before this one
    const void *cos, *sin;         // T [positions, D]; the first half of sin with a minus
    int64_t groups;                // rows that share a prompt
    const int64_t* group_ends;     // [groups + 1]: where each begins in `query_rows`
    const int64_t* query_rows;     // [n]: rows, group by group
    const int64_t* prompt_tokens;  // [groups]
    float* workspace;                   // [n, H, 2 D + 2]: workspace of queries and their partial attention
    void *hidden, *residual;           // T [n, d]: what goes through the layers, and what is to be added to it
    void *wide, *narrow;           // T [n, the widest]: inputs and outputs of products
};

// Data of one layer.
struct Layer {
    void *keys, *values;             // T [rows, K, L, D], of drawn tokens
    int64_t places;                  // L
    const void* const* prompt_keys;  // [groups]: T [K, L, D], first place of each prompt
    const void* const* prompt_values;
    const int64_t* prompt_places;    // [groups]: L
    const void* norm;                // T [H + K, D], weights of the norms of queries and keys; null = none
    double query_epsilon, key_epsilon;
    double scale;
    int64_t window;                  // attention window in tokens; 0 = none
    const void *before, *after;      // T [d], weights of the norms; null = 1
    double before_epsilon, after_epsilon;
    Product qkv, output, gate_up, down;
};
