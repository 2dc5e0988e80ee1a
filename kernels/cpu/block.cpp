// A block of a vision transformer for the many rows of its pictures: everything but attention.
//
// block_project: x -> norm -> q k v.    block_add: x + s o(seen).    block_feed: x + s down(act(up(norm(x)))), s a scale for each channel.
//
// Norms take the mean away, and have a weight and a bias. Letters: m rows of x, width and inner of them.

#include "panels.h"

struct Block {
    Matrix qkv, o, up, down;
    const bf16 *norm1, *bias1, *norm2, *bias2, *scale1, *scale2;
    float eps;
    long width, inner, activation;
};

namespace {

enum Activation : long { GELU, GELU_TANH, QUICK_GELU, SILU };

void centred_rows(const bf16 *x, const bf16 *weight, const bf16 *bias, float eps, long width, bf16 *out) {
    __m512 sum = _mm512_setzero_ps(), square = sum;
    for (long c = 0; c < width; c += 16) sum = _mm512_add_ps(sum, wide(live(width - c), x + c));
    const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / width);
    for (long c = 0; c < width; c += 16) {
        const __mmask16 lanes = live(width - c);
        const __m512 apart = _mm512_maskz_sub_ps(lanes, wide(lanes, x + c), mean);
        square = _mm512_fmadd_ps(apart, apart, square);
    }
    const __m512 inverse = _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(square) / width + eps));
    for (long c = 0; c < width; c += 16) {
        const __mmask16 lanes = live(width - c);
        const __m512 apart = _mm512_mul_ps(_mm512_sub_ps(wide(lanes, x + c), mean), inverse);
        narrow(lanes, _mm512_fmadd_ps(apart, wide(lanes, weight + c), wide(lanes, bias + c)), out + c);
    }
}

// x (1 + erf(x / sqrt 2)) / 2, erf within 1.5e-7 (Abramowitz and Stegun, 7.1.26).
__m512 gelu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1), size = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.70710678f));
    const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(_mm512_set1_ps(0.3275911f), size, one));
    __m512 y = _mm512_set1_ps(1.061405429f);
    for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(c));
    // what is left of one, for a number of this size, on its side
    const __m512 rest = _mm512_mul_ps(_mm512_mul_ps(y, t), exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(size, size))));
    const __m512 half = _mm512_mul_ps(_mm512_set1_ps(0.5f), x), less = _mm512_mul_ps(half, rest);
    const __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mask_mov_ps(_mm512_sub_ps(x, less), below, less);
}

__m512 activated(__m512 x, long activation) {
    if (activation == GELU) return gelu(x);
    if (activation != QUICK_GELU) return active(x, activation == GELU_TANH);
    const __m512 below = _mm512_mul_ps(_mm512_set1_ps(-1.702f), x);
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1), exponential(below)));
}

// Products scaled by channel, where there is a scale, and added to x[m, n].
auto added(const bf16 *x, const bf16 *scale, bf16 *out, long n) {
    const auto add = [=](long i, const Columns &columns, __m512 update) {
        const __m512 by = scale ? wide(columns.lanes, scale + columns.at) : _mm512_set1_ps(1);
        narrow(columns.lanes, _mm512_fmadd_ps(by, update, wide(columns.lanes, x + i * n + columns.at)), out + i * n + columns.at);
    };
    return [=](long i, const Columns &left, const Columns &right, __m512 one, __m512 two) {
        add(i, left, one);
        add(i, right, two);
    };
}

}  // namespace

extern "C" {

// out[m, 3 width].
void block_project(const Block *block, const bf16 *x, bf16 *out, long m) {
    static thread_local Kept<bf16> kept;
    const long width = block->width, n = block->qkv.rows;
    bf16 *normed = kept.of(std::min(m, MOST) * width);
    for (long begin = 0; begin < m; begin += MOST) {
        const long rows = std::min(MOST, m - begin);
#pragma omp parallel
        {
            Tiles tiles(16);
#pragma omp for schedule(dynamic, 8)
            for (long i = 0; i < rows; i++)
                centred_rows(x + (begin + i) * width, block->norm1, block->bias1, block->eps, width, normed + i * width);
            multiply(block->qkv, normed, rows, tiles_of(n), in_order, {nullptr, out + begin * n, n}, rounded(out + begin * n, n));
        }
    }
}

// out[m, width] from x and what its heads saw, side by side.
void block_add(const Block *block, const bf16 *x, const bf16 *seen, bf16 *out, long m) {
#pragma omp parallel
    {
        Tiles tiles(16);
        multiply(block->o, seen, m, tiles_of(block->width), in_order, {x, out, block->width}, added(x, block->scale1, out, block->width));
    }
}

// out[m, width].
void block_feed(const Block *block, const bf16 *x, bf16 *out, long m) {
    static thread_local Kept<bf16> kept;
    const long width = block->width, inner = block->inner, most = std::min(m, MOST), activation = block->activation;
    bf16 *normed = kept.of(most * (up(width, 32) + inner)), *hidden = normed + most * up(width, 32);
    for (long begin = 0; begin < m; begin += MOST) {
        const long rows = std::min(MOST, m - begin);
        const bf16 *before = x + begin * width;
#pragma omp parallel
        {
            Tiles tiles(16);
#pragma omp for schedule(dynamic, 8)
            for (long i = 0; i < rows; i++)
                centred_rows(before + i * width, block->norm2, block->bias2, block->eps, width, normed + i * width);
            multiply(block->up, normed, rows, tiles_of(inner), in_order, {nullptr, hidden, inner},
                     [=](long i, const Columns &left, const Columns &right, __m512 one, __m512 two) {
                         narrow(left.lanes, activated(one, activation), hidden + i * inner + left.at);
                         narrow(right.lanes, activated(two, activation), hidden + i * inner + right.at);
                     });
            bf16 *after = out + begin * width;
            multiply(block->down, hidden, rows, tiles_of(width), in_order, {before, after, width}, added(before, block->scale2, after, width));
        }
    }
}

}
