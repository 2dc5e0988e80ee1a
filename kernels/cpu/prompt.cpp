// A decoder layer for the many rows of a prompt: products of tiles, and everything on the way but attention.
//
// project_many: x -> norm -> q k v, q and k turned.    finish_many: o, residual, norm, gated MLP, residual.    read_many: layer after layer,
// of several prompts, and of a step of others beside them.
//
// Letters: m rows of x, h heads over g of keys and values, d the width of a head.

#include <vector>

#include "attend_many.h"
#include "panels.h"
#include "rounded.h"

// Those of decode.cpp, of at most so many rows.
constexpr long FEW = 16;
extern "C" void finish(const Layer *layer, const bf16 *x, const bf16 *seen, bf16 *out, long m);
extern "C" void run(const Layer *const *layers, long count, const bf16 *x, const bf16 *cosine, const bf16 *sine, bf16 *const *keys,
                    bf16 *const *values, long head, long token, const long *newest, const long *pieces, long parts, const Aged *aged,
                    const long *columns, long old, bf16 *before, bf16 *out, long m);

// Where keys and values of tokens lie: strides of the heads, and, where there are tokens `behind` the new ones, from which element on those
// and the new ones stand together.
struct Memory {
    Strides strides;
    long start, behind;
};

// A prompt's pass: s new tokens in each of b rows, x[b, s, width]; token i of all leaves its key and value at element places[i] of every
// layer's keys and values. Each sees what stands before it in its row, the new ones and those that lie there already. `before` is the
// stream in front of the last layer, `out` the one behind it, of the `last` so many tokens of every row. `work` has room for qkv and for
// what heads saw of all tokens, and for the stream of the last ones.
struct Read {
    const bf16 *x, *cosine, *sine;
    bf16 *const *keys, *const *values;
    const long *places;
    Memory memory;
    bf16 *work, *before, *out;
    long b, s, last;
};

// What `run` is told of a step.
struct Said {
    const bf16 *x, *cosine, *sine;
    bf16 *const *keys, *const *values;
    long head, token;
    const long *newest, *pieces;
    long parts;
    const Aged *aged;
    const long *columns;
    long old;
    bf16 *before, *out;
    long m;
};

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

// out[m, h + 2 g, d] from the stream x[m, width]; cosine and sine are [m, d / 2]. What becomes of each key and value, 2 g a row, `keep` is
// told: (row, which, values).
template <class Keep>
void project_rows(const Layer *layer, const bf16 *x, const bf16 *cosine, const bf16 *sine, bf16 *out, long m, Keep keep) {
    static thread_local Kept<bf16> kept;
    const long width = layer->width, d = layer->head_dim, h = layer->heads, turning = h + layer->kv_heads, all = turning + layer->kv_heads;
    const long n = all * d;
    bf16 *normed = kept.of(std::min(m, MOST) * width);
    for (long begin = 0; begin < m; begin += MOST) {
        const long rows = std::min(MOST, m - begin);
        bf16 *to = out + begin * n;
#pragma omp parallel
        {
            Tiles tiles(16);
#pragma omp for schedule(dynamic, 8)
            for (long i = 0; i < rows; i++) normalised(x + (begin + i) * width, layer->norm1, layer->eps, width, normed + i * width);
            multiply(layer->qkv, normed, rows, tiles_of(n), in_order, {nullptr, to, n}, rounded(to, n));
#pragma omp for schedule(dynamic, 8)
            for (long i = 0; i < rows; i++)
                for (long head = 0; head < all; head++) {
                    bf16 *values = to + i * n + head * d;
                    const bf16 *norm = head < h ? layer->q_norm : layer->k_norm;
                    if (head < turning && norm) normalised(values, norm, layer->eps, d, values);
                    const long at = (begin + i) * d / 2;
                    if (head < turning) turned(values, cosine + at, sine + at, head < h ? layer->query_scale : 1, d / 2);
                    if (head >= h) keep(begin + i, head - h, values);
                }
        }
    }
}

}  // namespace

extern "C" {

// out[m, n] = x[m, k] a^T + bias.
void product_many(const Matrix *a, const bf16 *x, bf16 *out, long m) {
    const long n = a->rows;
    for (long begin = 0; begin < m; begin += MOST) {
        bf16 *to = out + begin * n;
#pragma omp parallel
        {
            Tiles tiles(16);
            multiply(*a, x + begin * a->columns, std::min(MOST, m - begin), tiles_of(n), in_order, {nullptr, to, n}, rounded(to, n));
        }
    }
}

// out[m, h + 2 g, d].
void project_many(const Layer *layer, const bf16 *x, const bf16 *cosine, const bf16 *sine, bf16 *out, long m) {
    project_rows(layer, x, cosine, sine, out, m, [](long, long, const bf16 *) {});
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
            multiply(layer->o, seen + begin * from, rows, tiles_of(width), in_order, {before, stream, width}, added(before, stream));
#pragma omp for schedule(dynamic, 8)
            for (long i = 0; i < rows; i++) normalised(stream + i * width, layer->norm2, layer->eps, width, normed + i * width);
            // A tile of gate stands beside the same of up.
            multiply(layer->gate_up, normed, rows, 2 * inner / TILE, [=](long t) { return t / 2 * TILE + t % 2 * inner; }, {nullptr, gated, inner},
                     [=](long i, const Columns &left, const Columns &, __m512 gate, __m512 up) {
                         narrow(0xffff, _mm512_mul_ps(active(gate, gelu), up), gated + i * inner + left.at);
                     });
            multiply(layer->down, gated, rows, tiles_of(width), in_order, {stream, after, width}, added(stream, after));
        }
    }
}

}

namespace {

// One layer of a prompt's pass, which stands in `one.x` from then on, unless it is the `end`.
void read_layer(const Layer *layer, long l, bool end, Read &one) {
    const long b = one.b, s = one.s, last = one.last, m = b * s, width = layer->width, d = layer->head_dim, h = layer->heads;
    const long g = layer->kv_heads, all = (h + 2 * g) * d, behind = one.memory.behind, step = one.memory.strides.head;
    bf16 *qkv = one.work, *seen = qkv + m * all, *keys = one.keys[l], *values = one.values[l];
    const long *places = one.places;
    project_rows(layer, one.x, one.cosine, one.sine, qkv, m, [=](long i, long which, const bf16 *from) {
        std::copy_n(from, d, which < g ? keys + places[i] + which * step : values + places[i] + (which - g) * step);
    });
    const Strides own = {s * all, d, all};
    Attention asked = {qkv, nullptr, nullptr, nullptr, own, own, own, {0, 0, 0}, b, h, g, s, behind + s, d, behind, layer->qkv.tiles,
                       1 / std::sqrt((float)d)};
    if (behind) asked.key = asked.value = one.memory.strides;
    asked.keys = behind ? keys + one.memory.start : qkv + h * d;
    asked.values = behind ? values + one.memory.start : qkv + (h + g) * d;
    if (!end) {
        attend_many(&asked, seen);
        finish_many(layer, one.x, seen, one.before, m);
        one.x = one.before;
        return;
    }
    if (one.x != one.before) std::copy_n(one.x, m * width, one.before);
    // Of the other tokens only keys and values are wanted any more.
    bf16 *stream = seen + m * h * d;
    asked.queries += (s - last) * all, asked.behind += s - last, asked.s = last;
    attend_many(&asked, seen);
    for (long row = 0; row < b; row++) std::copy_n(one.x + (row * s + s - last) * width, last * width, stream + row * last * width);
    // Where all are wanted there may be more layers in another call, and they go on as they would in this one.
    (last < s && b * last <= FEW ? finish : finish_many)(layer, stream, seen, one.out, b * last);
}

}  // namespace

extern "C" {

// Some layers one after the other, of several prompts and, where there is one, of a step of others: all of them go through a layer before
// the next, so that its weights come from memory once.
void read_many(const Layer *const *layers, long count, const Read *given, long n, const Said *step) {
    static thread_local Kept<bf16> kept;
    std::vector<Read> reads(given, given + n);
    const long size = step ? step->m * layers[0]->width : 0;
    bf16 *streams = kept.of(2 * size);
    const bf16 *x = step ? step->x : nullptr;
    for (long l = 0; l < count; l++) {
        const bool end = l + 1 == count;
        for (Read &one : reads) read_layer(layers[l], l, end, one);
        if (!step) continue;
        bf16 *after = end ? step->out : streams + l % 2 * size;
        run(layers + l, 1, x, step->cosine, step->sine, step->keys + l, step->values + l, step->head, step->token, step->newest, step->pieces,
            step->parts, step->old ? step->aged + l : nullptr, step->columns, step->old, step->before, after, step->m);
        x = after;
    }
}

}
