// A decoder layer for the many rows of a prompt: products of tiles, and everything on the way but attention.
//
// project_many: x -> norm -> q k v, q and k turned.    finish_many: o, residual, norm, gated MLP, residual.
//
// Letters: m rows of x, h heads over g of keys and values, d the width of a head.

#include "panels.h"

namespace {

void normalised(const bf16 *x, const bf16 *weight, float eps, long width, bf16 *out) {
    __m512 square = _mm512_setzero_ps();
    for (long c = 0; c < width; c += 16) {
        const __m512 one = wide(live(width - c), x + c);
        square = _mm512_fmadd_ps(one, one, square);
    }
    const __m512 inverse = _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(square) / width + eps));
    for (long c = 0; c < width; c += 16) {
        const __mmask16 lanes = live(width - c);
        narrow(lanes, _mm512_mul_ps(_mm512_mul_ps(wide(lanes, x + c), inverse), wide(lanes, weight + c)), out + c);
    }
}

void turned(bf16 *head, const bf16 *cosine, const bf16 *sine, float scale, long half) {
    const __m512 by = _mm512_set1_ps(scale);
    for (long c = 0; c < half; c += 16) {
        const __mmask16 lanes = live(half - c);
        const __m512 left = wide(lanes, head + c), right = wide(lanes, head + half + c);
        const __m512 cs = _mm512_mul_ps(by, wide(lanes, cosine + c)), sn = _mm512_mul_ps(by, wide(lanes, sine + c));
        narrow(lanes, _mm512_fmsub_ps(left, cs, _mm512_mul_ps(right, sn)), head + c);
        narrow(lanes, _mm512_fmadd_ps(right, cs, _mm512_mul_ps(left, sn)), head + half + c);
    }
}

}  // namespace

extern "C" {

// out[m, n] = x[m, k] a^T + bias.
void product_many(const Matrix *a, const bf16 *x, bf16 *out, long m) {
    const long n = a->rows;
#pragma omp parallel
    {
        Tiles tiles(16);
        multiply(*a, x, m, tiles_of(n), in_order, rounded(out, n));
    }
}

// out[m, h + 2 g, d] from the stream x[m, width]; cosine and sine are [m, d / 2].
void project_many(const Layer *layer, const bf16 *x, const bf16 *cosine, const bf16 *sine, bf16 *out, long m) {
    static thread_local Kept<bf16> kept;
    const long width = layer->width, d = layer->head_dim, turning = layer->heads + layer->kv_heads, n = (turning + layer->kv_heads) * d;
    bf16 *normed = kept.of(std::min(m, MOST) * width);
    for (long begin = 0; begin < m; begin += MOST) {
        const long rows = std::min(MOST, m - begin);
        bf16 *to = out + begin * n;
#pragma omp parallel
        {
            Tiles tiles(16);
#pragma omp for schedule(static)
            for (long i = 0; i < rows; i++) normalised(x + (begin + i) * width, layer->norm1, layer->eps, width, normed + i * width);
            multiply(layer->qkv, normed, rows, tiles_of(n), in_order, rounded(to, n));
#pragma omp for schedule(static)
            for (long i = 0; i < rows; i++)
                for (long head = 0; head < turning; head++) {
                    bf16 *values = to + i * n + head * d;
                    const bool asks = head < layer->heads;
                    const bf16 *norm = asks ? layer->q_norm : layer->k_norm;
                    if (norm) normalised(values, norm, layer->eps, d, values);
                    turned(values, cosine + (begin + i) * d / 2, sine + (begin + i) * d / 2, asks ? layer->query_scale : 1, d / 2);
                }
        }
    }
}

// out[m, width] = y + mlp(norm2(y)), y = x + o(seen).
void finish_many(const Layer *layer, const bf16 *x, const bf16 *seen, bf16 *out, long m) {
    static thread_local Kept<bf16> kept;
    const long width = layer->width, inner = layer->inner, from = layer->heads * layer->head_dim, most = std::min(m, MOST);
    const long a_row = up(width, 32);
    bf16 *stream = kept.of(most * (2 * a_row + inner)), *normed = stream + most * a_row, *gated = normed + most * a_row;
    const bool gelu = layer->gelu;
    for (long begin = 0; begin < m; begin += MOST) {
        const long rows = std::min(MOST, m - begin);
        const bf16 *before = x + begin * width;
        bf16 *after = out + begin * width;
        const auto added = [=](const bf16 *to, bf16 *sum) {
            return [=](long i, const Columns &left, const Columns &right, __m512 one, __m512 two) {
                narrow(left.lanes, _mm512_add_ps(one, wide(left.lanes, to + i * width + left.at)), sum + i * width + left.at);
                narrow(right.lanes, _mm512_add_ps(two, wide(right.lanes, to + i * width + right.at)), sum + i * width + right.at);
            };
        };
#pragma omp parallel
        {
            Tiles tiles(16);
            multiply(layer->o, seen + begin * from, rows, tiles_of(width), in_order, added(before, stream));
#pragma omp for schedule(static)
            for (long i = 0; i < rows; i++) normalised(stream + i * width, layer->norm2, layer->eps, width, normed + i * width);
            // A tile of gate stands beside the same of up.
            multiply(layer->gate_up, normed, rows, 2 * inner / TILE, [=](long t) { return t / 2 * TILE + t % 2 * inner; },
                     [=](long i, const Columns &left, const Columns &, __m512 gate, __m512 up) {
                         narrow(0xffff, _mm512_mul_ps(active(gate, gelu), up), gated + i * inner + left.at);
                     });
            multiply(layer->down, gated, rows, tiles_of(width), in_order, added(stream, after));
        }
    }
}

}
