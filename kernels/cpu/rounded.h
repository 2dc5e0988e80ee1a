// What is kept of aged tokens, and attention to them.

#pragma once

#include "numbers.h"

enum Form : long { LEVELS8, LEVELS4, LEVELS2, E4M3, TURNED4, TURNED2 };

// Codes [blocks, page, g, d in bits] of keys and of values. Scales and lows are float16: [blocks, g, d] of keys, or [blocks, page, g] where
// they are turned, and [blocks, page, g] of values. table [16] and rotation [d, d] are float32, of turned ones alone.
struct Aged {
    long form, page;
    const uint8_t *keys, *values;
    const uint16_t *key_scale, *key_low, *value_scale, *value_low;
    const float *table, *rotation;
};

// As `attend`, of tokens among which some lie in blocks that have aged: `columns` are (row, block). All of a row lie side by side.
extern "C" void attend_aged(const Layer *layer, const bf16 *q, long q_row, const bf16 *keys, const bf16 *values, long head, long token,
                            const long *pieces, long count, const Aged *aged, const long *columns, long old, bf16 *out, long m);
