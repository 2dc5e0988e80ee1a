// What single queries see of cached tokens, in parts that are merged: for each a weighted sum of values, the largest score, and the sum of
// weights relative to it, d + 2 numbers in this order.

#pragma once

#include <omp.h>

#include "numbers.h"

namespace {

// Tokens of a part at most.
constexpr long CHUNK = 256;

// Tokens of a row that lie side by side, from an element on.
struct Part {
    long row, offset, count;
};

// One head over some cached tokens: the weighted sum of values, its largest score and the sum of weights.
void over(const bf16 *q, const bf16 *keys, const bf16 *values, long token, long t, long d, float scale, float *out) {
    alignas(64) float scores[CHUNK];
    __m512bh query[8];
    for (long c = 0; c < d; c += 32) query[c / 32] = pair(_mm512_loadu_si512(q + c));
    float most = -INFINITY;
    for (long j = 0; j < t; j++) {
        __m512 sum = _mm512_setzero_ps();
        for (long c = 0; c < d; c += 32) sum = _mm512_dpbf16_ps(sum, pair(_mm512_loadu_si512(keys + j * token + c)), query[c / 32]);
        scores[j] = scale * _mm512_reduce_add_ps(sum);
        most = std::max(most, scores[j]);
    }
    float all = 0;
    for (long j = 0; j < t; j += 16) {
        const __mmask16 lanes = live(t - j);
        const __m512 below = _mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, scores + j), _mm512_set1_ps(most));
        const __m512 e = _mm512_maskz_mov_ps(lanes, exponential(below));
        _mm512_mask_storeu_ps(scores + j, lanes, e);
        all += _mm512_reduce_add_ps(e);
    }
    for (long c = 0; c < d; c += 32) {
        __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
        for (long j = 0; j < t; j++) {
            const __m512 weight = _mm512_set1_ps(scores[j]);
            low = _mm512_fmadd_ps(weight, wide(values + j * token + c), low);
            high = _mm512_fmadd_ps(weight, wide(values + j * token + c + 16), high);
        }
        _mm512_storeu_ps(out + c, low);
        _mm512_storeu_ps(out + c + 16, high);
    }
    out[d] = most;
    out[d + 1] = all;
}

// out[m, h, d] of the parts of each of m rows, begins[row] to begins[row + 1], each of h heads. In a parallel region, for all its threads.
void merge(const float *found, const long *begins, long m, long h, long d, bf16 *out) {
    const long size = d + 2;
#pragma omp for schedule(static)
    for (long task = 0; task < m * h; task++) {
        const long row = task / h, which = task % h;
        float most = -INFINITY, all = 0;
        for (long p = begins[row]; p < begins[row + 1]; p++) most = std::max(most, found[(p * h + which) * size + d]);
        floats sum(d);
        for (long p = begins[row]; p < begins[row + 1]; p++) {
            const float *part = found + (p * h + which) * size;
            const float share = std::exp(part[d] - most);
            all += share * part[d + 1];
            for (long c = 0; c < d; c++) sum[c] += share * part[c];
        }
        for (long c = 0; c < d; c++) out[task * d + c] = narrow(sum[c] / all);
    }
}

}  // namespace
