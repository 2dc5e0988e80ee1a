// Attention of many queries at one time, as what asks for it describes it.

#pragma once

#include "numbers.h"

// Where one side of attention lies: strides from row to row of the batch, from head to head, and from token to token, in elements.
struct Strides {
    long row, head, token;
};

// `behind`: query i sees the entries up to i + behind, unless there is a bias [s, t] for it, which then says it all.
struct Attention {
    const bf16 *queries, *keys, *values, *bias;
    Strides query, key, value, biased;
    long b, h, g, s, t, d, behind, tiles;
    float scale;
};

// out[b, s, h, d]: softmax(q k^T scale) v. What sees nothing becomes 0.
extern "C" void attend_many(const Attention *given, bf16 *out);
