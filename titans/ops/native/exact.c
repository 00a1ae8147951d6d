/* The sequential rule, token by token, for a CPU: the loop of recurrent.py, and its backpropagation by blocks.
 */
#include "common.h"
#include "product.h"

typedef struct {
    int rows, tokens, tile, depth, width_in, width_out, activation, segment;
    int bias, residual, squared, bounded, decay_first, first_order, threads;
    double max_norm; /* 0: no guard */
} Settings;

/* What goes in. momenta, alpha, eta, live, ends (per row and tile) and rest may be NULL. */
typedef struct {
    const int *outs, *ins;
    const REAL *q, *k, *v, *step, *alpha, *eta;
    const unsigned char *live, *ends;
    REAL *const *rest; /* (rows, out, in) a layer: where forgetting returns to */
} Inputs;

static int widest_layer(const Settings *s, const Inputs *in) {
    int widest = s->width_in + 1;
    for (int l = 0; l < s->depth; l++) {
        if (in->outs[l] + 1 > widest) widest = in->outs[l] + 1;
        if (in->ins[l] > widest) widest = in->ins[l];
    }
    return widest;
}

/* What the forward pass leaves of a token for the backward pass: z of every layer at its key; then of every hidden
 * layer what was backpropagated to its output, and z at its query. */
static int trace_width(const Settings *s, const Inputs *in) {
    int width = in->outs[s->depth - 1];
    for (int l = 0; l + 1 < s->depth; l++) width += 3 * in->outs[l];
    return width;
}

/* Matrices that are walked through together must not lie a multiple of a page apart: they would push each other out of
 * the nearest cache. */
static size_t turned_size(const Inputs *in, int l) { return ((size_t)in->outs[l] * in->ins[l] + 95) & ~(size_t)15; }

static const REAL *rest_row(const Inputs *in, int l, int row, int o) {
    return in->rest ? in->rest[l] + ((size_t)row * in->outs[l] + o) * in->ins[l] : NULL;
}

/* No row of w - rest keeps a norm above max_norm; rest may be NULL. Returns whether one had a larger norm. */
static int clip_rows(int rows, int n, REAL *w, const REAL *rest, REAL max_norm) {
    int clipped = 0;
    for (int o = 0; o < rows; o++, w += n) {
        REAL square = 0;
        for (int i = 0; i < n; i++) {
            REAL away = rest ? w[i] - rest[(size_t)o * n + i] : w[i];
            square += away * away;
        }
        REAL norm = SQRT(square);
        if (norm > max_norm) {
            clipped = 1;
            for (int i = 0; i < n; i++) {
                REAL home = rest ? rest[(size_t)o * n + i] : 0;
                w[i] = home + (w[i] - home) * (max_norm / norm);
            }
        }
    }
    return clipped;
}

static int clip_state(const Settings *s, const Inputs *in, int row, REAL *const *weights, REAL *const *momenta) {
    int clipped = 0;
    for (int l = 0; l < s->depth; l++) {
        clipped |= clip_rows(in->outs[l], in->ins[l], weights[l], rest_row(in, l, row, 0), (REAL)s->max_norm);
        if (momenta) clipped |= clip_rows(in->outs[l], in->ins[l], momenta[l], NULL, (REAL)s->max_norm);
    }
    return clipped;
}

/* From the last layer's z at the key to the gradient of the loss there, without the squared loss's factor 2; returns its
 * square. */
static REAL output_error(const Settings *s, const REAL *z, const REAL *key, const REAL *value, REAL *error, REAL *loss) {
    REAL total = 0, lost = 0;
    for (int o = 0; o < s->width_out; o++) {
        REAL m = s->residual ? z[o] + key[o] : z[o];
        error[o] = s->squared ? m - value[o] : -value[o];
        total += error[o] * error[o];
        lost += m * error[o];
    }
    if (loss) *loss = s->squared ? total : lost;
    return total;
}

/* One token's way through M_{t-1} and back, a row per layer, `widest` apart; and the state, turned (in x out). */
typedef struct {
    int widest;
    REAL *x, *z, *slope, *back, *delta, *read_x, *read_z, *state;
    REAL total, loss, kappa, step, keep, drag;
} Token;

static REAL *open_token(const Settings *s, const Inputs *in, Token *at, int groups) {
    size_t w = at->widest = (widest_layer(s, in) + 15) & ~15, layers = s->depth, state = 0;
    for (int l = 0; l < s->depth; l++) state += turned_size(in, l);
    REAL *buffer = NULL;
    if (posix_memalign((void **)&buffer, 64, (w * layers * 7 + state * groups) * sizeof(REAL))) return NULL;
    REAL **parts[] = {&at->x, &at->z, &at->slope, &at->back, &at->delta, &at->read_x, &at->read_z, &at->state};
    for (int i = 0; i < 8; i++) *parts[i] = buffer + w * layers * i;
    return buffer;
}

/* The gradient of a token at the given weights (Eq. 12), and its step. */
static void take_gradient(const Settings *s, const Inputs *in, size_t token, REAL *const *weights, Token *at) {
    int depth = s->depth, w = at->widest;
    const REAL *key = in->k + token * s->width_in, *value = in->v + token * s->width_out;
    at->keep = in->alpha ? 1 - in->alpha[token] : 1;
    at->drag = in->eta ? in->eta[token] : 0;
    REAL decay = s->decay_first ? at->keep : 1;
    memcpy(at->x, key, s->width_in * sizeof(REAL));
    for (int l = 0; l < depth; l++) {
        int out = in->outs[l], inside = in->ins[l];
        REAL *x = at->x + w * l, *z = at->z + w * l;
        if (s->bias) x[inside - 1] = 1;
        row_product(out, inside, plain(x, 0), weights[l], out, z, 1);
        if (s->decay_first)
            for (int o = 0; o < out; o++) z[o] *= decay;
        if (l + 1 < depth) activate(s->activation, out, z, x + w, at->slope + w * l, NULL);
    }
    at->total = output_error(s, at->z + w * (depth - 1), key, value, at->delta + w * (depth - 1), &at->loss);
    REAL below = 0;
    for (int l = depth - 1; l > 0; l--) {
        REAL *delta = at->delta + w * l, *back = at->back + w * (l - 1), *lower = delta - w;
        REAL *slope = at->slope + w * (l - 1), *x = at->x + w * (l - 1);
        int hidden = in->outs[l - 1];
        row_dots(hidden, in->outs[l], weights[l], delta, back);
        for (int i = 0; i < hidden; i++) {
            back[i] *= decay;
            lower[i] = back[i] * slope[i];
        }
        below += dot(hidden, lower, lower) * dot(in->ins[l - 1], x, x);
    }
    REAL *last = at->x + w * (depth - 1);
    at->kappa = dot(in->ins[depth - 1], last, last) + below / (at->total + TINY);
    at->step = s->bounded ? in->step[token] / (1 + at->kappa) : in->step[token];
}

/* What a token writes into a layer: delta is times its step. */
typedef struct {
    const REAL *x, *delta, *read_x;
    REAL keep, drag;
} Write;

/* S_t and M_t (Eq. 14, 13) in place for some columns of a layer, and z = M_t read_x (Eq. 15) on the way. */
#define WRITE_KERNEL(NAME, TYPE, COUNT)                                                                           \
    static inline __attribute__((always_inline)) void NAME(int in, int out, const Write *by, int drags, int rests, \
                                                           int j, REAL *w, REAL *m, const REAL *rest, REAL *z) {  \
        TYPE delta[COUNT], sum[COUNT];                                                                            \
        REAL keep = by->keep, lost = 1 - keep, drag = by->drag;                                                   \
        for (int c = 0; c < COUNT; c++) delta[c] = ((const TYPE *)(by->delta + j))[c], sum[c] = delta[c] - delta[c]; \
        for (int i = 0; i < in; i++) {                                                                            \
            size_t at = (size_t)i * out + j;                                                                      \
            REAL x = -by->x[i], read_x = by->read_x[i];                                                           \
            for (int c = 0; c < COUNT; c++) {                                                                     \
                TYPE next = x * delta[c];                                                                         \
                if (drags) ((TYPE *)(m + at))[c] = next += drag * ((TYPE *)(m + at))[c];                          \
                if (rests) next += lost * ((const TYPE *)(rest + at))[c];                                         \
                ((TYPE *)(w + at))[c] = next += keep * ((TYPE *)(w + at))[c];                                     \
                sum[c] += read_x * next;                                                                          \
            }                                                                                                     \
        }                                                                                                         \
        for (int c = 0; c < COUNT; c++) ((TYPE *)(z + j))[c] = sum[c];                                            \
    }
WRITE_KERNEL(write_4, vec, 4)
WRITE_KERNEL(write_1, vec, 1)
WRITE_KERNEL(write_column, REAL, 1)

static inline __attribute__((always_inline)) void write_columns(int in, int out, const Write *by, int drags, int rests,
                                                                REAL *w, REAL *m, const REAL *rest, REAL *z) {
    int j = 0;
    for (; j + 4 * LANES <= out; j += 4 * LANES) write_4(in, out, by, drags, rests, j, w, m, rest, z);
    for (; j + LANES <= out; j += LANES) write_1(in, out, by, drags, rests, j, w, m, rest, z);
    for (; j < out; j++) write_column(in, out, by, drags, rests, j, w, m, rest, z);
}

/* Writes a token and reads M_t(q). */
static void write_and_read(const Settings *s, const Inputs *in, size_t token, REAL *const *weights, REAL *const *momenta,
                           REAL *const *rest, Token *at, REAL *y) {
    const REAL *query = in->q + token * s->width_in;
    int w = at->widest;
    memcpy(at->read_x, query, s->width_in * sizeof(REAL));
    for (int l = 0; l < s->depth; l++) {
        int inside = in->ins[l], out = in->outs[l];
        REAL *delta = at->delta + w * l, *read_x = at->read_x + w * l, *z = at->read_z + w * l;
        Write by = {at->x + w * l, delta, read_x, at->keep, at->drag};
        if (s->bias) read_x[inside - 1] = 1;
        for (int o = 0; o < out; o++) delta[o] *= at->step;
        if (momenta && rest)
            write_columns(inside, out, &by, 1, 1, weights[l], momenta[l], rest[l], z);
        else if (momenta)
            write_columns(inside, out, &by, 1, 0, weights[l], momenta[l], NULL, z);
        else if (rest)
            write_columns(inside, out, &by, 0, 1, weights[l], NULL, rest[l], z);
        else
            write_columns(inside, out, &by, 0, 0, weights[l], NULL, NULL, z);
        if (l + 1 < s->depth) activate(s->activation, out, z, read_x + w, NULL, NULL);
    }
    const REAL *z = at->read_z + w * (s->depth - 1);
    for (int o = 0; o < s->width_out; o++) y[o] = s->residual ? z[o] + query[o] : z[o];
}

static void turn_state(const Settings *s, const Inputs *in, REAL *const *from, REAL *const *to) {
    for (int l = 0; l < s->depth; l++) transpose(in->outs[l], in->ins[l], from[l], in->ins[l], to[l], in->outs[l]);
}

static void turn_state_back(const Settings *s, const Inputs *in, REAL *const *from, REAL *const *to) {
    for (int l = 0; l < s->depth; l++) transpose(in->ins[l], in->outs[l], from[l], in->outs[l], to[l], in->ins[l]);
}

static int count_tiles(const Settings *s) { return (s->tokens + s->tile - 1) / s->tile; }

/* Whether a tile ends after token t; the last one may be shorter. */
static int ends_tile(const Settings *s, int t) { return (t + 1) % s->tile == 0 || t + 1 == s->tokens; }

static void leave_trace(const Settings *s, const Inputs *in, const Token *at, REAL *to) {
    for (int l = 0; l < s->depth; to += in->outs[l++]) memcpy(to, at->z + at->widest * l, in->outs[l] * sizeof(REAL));
    for (int l = 0; l + 1 < s->depth; to += 2 * in->outs[l++]) {
        memcpy(to, at->back + at->widest * l, in->outs[l] * sizeof(REAL));
        memcpy(to + in->outs[l], at->read_z + at->widest * l, in->outs[l] * sizeof(REAL));
    }
}

/* What a slot without a token leaves behind. */
static void leave_nothing(const Settings *s, const Inputs *in, size_t token, REAL *trace, REAL *y, REAL *gradient,
                          REAL *loss) {
    int width = trace_width(s, in);
    memset(y + token * s->width_out, 0, s->width_out * sizeof(REAL));
    if (trace) memset(trace + token * width, 0, width * sizeof(REAL));
    if (gradient) gradient[token] = 0;
    if (loss) loss[token] = 0;
}

/* One token of a linear memory in a band of its outputs, which do not wait for each other, so that a band's share of the
 * state, (in x band), stays in the nearest cache along all tokens. */
typedef struct {
    const REAL *x, *read_x, *next_x; /* its key and query, and the key of the token after it */
    const REAL *value, *key, *query; /* of the band; key and query only for a residual */
    REAL keep, drag, step;
} Turn;

/* From z = M_{t-1} k_t, in one walk through the band: the error, S_t and M_t (Eq. 14, 13), y = M_t q_t (Eq. 15), and the z
 * of the next token. found, if not NULL: the squared error and <M(k), error>. */
#define TURN_KERNEL(NAME, COUNT)                                                                                   \
    static inline __attribute__((always_inline)) void NAME(const Settings *s, int in, const Turn *by, int drags,   \
                                                           int rests, REAL *w, REAL *m, const REAL *rest, REAL *z, \
                                                           REAL *trace, REAL *y, REAL *found) {                    \
        vec step[COUNT], sum[COUNT], next_sum[COUNT];                                                              \
        REAL keep = by->keep, lost = 1 - keep, drag = by->drag;                                                    \
        for (int c = 0; c < COUNT; c++) {                                                                          \
            vec said = ((vec *)z)[c];                                                                              \
            if (s->decay_first) said *= keep;                                                                      \
            if (trace) ((vec *)trace)[c] = said;                                                                   \
            if (s->residual) said += ((const vec *)by->key)[c];                                                    \
            vec error = -((const vec *)by->value)[c];                                                              \
            if (s->squared) error += said;                                                                         \
            if (found)                                                                                             \
                for (int j = 0; j < LANES; j++) found[0] += error[j] * error[j], found[1] += said[j] * error[j];   \
            step[c] = error * by->step;                                                                            \
            sum[c] = next_sum[c] = (vec){0};                                                                       \
        }                                                                                                          \
        for (int i = 0; i < in; i++) {                                                                             \
            REAL x = -by->x[i], read_x = by->read_x[i], next_x = by->next_x[i];                                    \
            for (int c = 0; c < COUNT; c++) {                                                                      \
                size_t at = (size_t)i * COUNT + c;                                                                 \
                vec next = x * step[c];                                                                            \
                if (drags) ((vec *)m)[at] = next += drag * ((vec *)m)[at];                                         \
                if (rests) next += lost * ((const vec *)rest)[at];                                                 \
                ((vec *)w)[at] = next += keep * ((vec *)w)[at];                                                    \
                sum[c] += read_x * next;                                                                           \
                next_sum[c] += next_x * next;                                                                      \
            }                                                                                                      \
        }                                                                                                          \
        for (int c = 0; c < COUNT; c++) {                                                                          \
            if (s->residual) sum[c] += ((const vec *)by->query)[c];                                                \
            ((vec *)z)[c] = next_sum[c], ((vec *)y)[c] = sum[c];                                                   \
        }                                                                                                          \
    }                                                                                                              \
    static void NAME##_any(const Settings *s, int in, const Turn *by, REAL *w, REAL *m, const REAL *rest, REAL *z, \
                           REAL *trace, REAL *y, REAL *found) {                                                    \
        if (m && rest)                                                                                             \
            NAME(s, in, by, 1, 1, w, m, rest, z, trace, y, found);                                                 \
        else if (m)                                                                                                \
            NAME(s, in, by, 1, 0, w, m, NULL, z, trace, y, found);                                                 \
        else if (rest)                                                                                             \
            NAME(s, in, by, 0, 1, w, NULL, rest, z, trace, y, found);                                              \
        else                                                                                                       \
            NAME(s, in, by, 0, 0, w, NULL, NULL, z, trace, y, found);                                              \
    }
TURN_KERNEL(turn_1, 1)
TURN_KERNEL(turn_2, 2)
TURN_KERNEL(turn_3, 3)
TURN_KERNEL(turn_4, 4)
TURN_KERNEL(turn_5, 5)

/* Vectors, and bytes of the nearest cache for a band's share of the state: for 48 KB and 32 vector registers. Elsewhere it
 * costs speed alone. */
enum { WIDEST_BAND = 5, NEAREST = 46 << 10 };

static void take_turn(int count, const Settings *s, int in, const Turn *by, REAL *w, REAL *m, const REAL *rest, REAL *z,
                      REAL *trace, REAL *y, REAL *found) {
    switch (count) {
        case 1: turn_1_any(s, in, by, w, m, rest, z, trace, y, found); break;
        case 2: turn_2_any(s, in, by, w, m, rest, z, trace, y, found); break;
        case 3: turn_3_any(s, in, by, w, m, rest, z, trace, y, found); break;
        case 4: turn_4_any(s, in, by, w, m, rest, z, trace, y, found); break;
        default: turn_5_any(s, in, by, w, m, rest, z, trace, y, found);
    }
}

/* Rows of (out x in) to (in x band), and back; where there are fewer than `band`, zeros follow. */
static void open_band(int rows, int in, int band, const REAL *from, REAL *to) {
    if (rows < band) memset(to, 0, (size_t)in * band * sizeof(REAL));
    transpose(rows, in, from, in, to, band);
}

static void close_band(int rows, int in, int band, const REAL *from, REAL *to) {
    transpose(in, rows, from, band, to, in);
}

/* clip_rows for a band, whose columns the rows are. */
static int clip_band(int in, int band, REAL *w, const REAL *rest, REAL max_norm) {
    REAL square[WIDEST_BAND * LANES] = {0};
    int clipped = 0;
    for (int i = 0; i < in; i++)
        for (int j = 0; j < band; j++) {
            REAL away = rest ? w[i * band + j] - rest[i * band + j] : w[i * band + j];
            square[j] += away * away;
        }
    for (int j = 0; j < band; j++) {
        REAL norm = SQRT(square[j]);
        if (!(norm > max_norm)) continue;
        clipped = 1;
        for (int i = j; i < in * band; i += band) {
            REAL home = rest ? rest[i] : 0;
            w[i] = home + (w[i] - home) * (max_norm / norm);
        }
    }
    return clipped;
}

/* So many vectors of a linear memory's outputs that the state fits, in bands of about the same width. */
static int choose_band(const Settings *s, const Inputs *in, int groups) {
    int vectors = (in->outs[0] + LANES - 1) / LANES, most = NEAREST / (in->ins[0] * VECTOR_BYTES * groups);
    most = most < 1 ? 1 : most > WIDEST_BAND ? WIDEST_BAND : most;
    int bands = (vectors + most - 1) / most;
    return (vectors + bands - 1) / bands;
}

/* A row of tokens through a linear memory, band by band. The state is this row's, the rest as in titans_exact. */
static int linear_row(const Settings *s, const Inputs *in, int r, REAL *weights, REAL *momenta, REAL *saved_weights,
                      REAL *saved_momenta, REAL *trace, unsigned char *clipped, REAL *y, REAL *gradient, REAL *loss) {
    int inside = in->ins[0], out = in->outs[0], tokens = s->tokens, vectors = (out + LANES - 1) / LANES;
    int groups = 1 + (momenta != NULL) + (in->rest != NULL), widest = choose_band(s, in, groups);
    size_t band = widest * LANES, size = (size_t)inside * band, base = (size_t)r * tokens;
    size_t copied = s->bias ? (size_t)tokens * inside : 0;
    REAL *w = NULL;
    if (posix_memalign((void **)&w, 64, (3 * size + 6 * band + 2 * (tokens + copied)) * sizeof(REAL))) return 1;
    REAL *m = w + size, *home = m + size, *z = home + size, *read = z + band, *left = read + band;
    REAL *value = left + band, *key = value + band, *query = key + band;
    REAL *step = query + band, *kappa = step + tokens, *keys = kappa + tokens, *queries = keys + copied;
    const REAL *xs = in->k + base * s->width_in, *reads = in->q + base * s->width_in, *rest = in->rest ? home : NULL;
    if (!momenta) m = NULL;
    if (s->bias) {
        for (int t = 0; t < tokens; t++) {
            memcpy(keys + (size_t)t * inside, xs + (size_t)t * s->width_in, s->width_in * sizeof(REAL));
            memcpy(queries + (size_t)t * inside, reads + (size_t)t * s->width_in, s->width_in * sizeof(REAL));
            keys[(size_t)(t + 1) * inside - 1] = queries[(size_t)(t + 1) * inside - 1] = 1;
        }
        xs = keys, reads = queries;
    }
    for (int t = 0; t < tokens; t++) {
        kappa[t] = dot(inside, xs + (size_t)t * inside, xs + (size_t)t * inside);
        step[t] = s->bounded ? in->step[base + t] / (1 + kappa[t]) : in->step[base + t];
        leave_nothing(s, in, base + t, in->live && !in->live[base + t] ? trace : NULL, y, gradient, loss);
    }
    for (int done = 0, count; done < vectors; done += count) {
        count = vectors - done < widest ? vectors - done : widest, band = count * LANES;
        int first = done * LANES, width = out - first < (int)band ? out - first : (int)band, whole = width == (int)band;
        size_t from = (size_t)first * inside;
        open_band(width, inside, band, weights + from, w);
        if (m) open_band(width, inside, band, momenta + from, m);
        if (rest) open_band(width, inside, band, rest_row(in, 0, r, first), home);
        memset(value, 0, 3 * (query - key) * sizeof(REAL));
        int seen = -1; /* the token that z belongs to */
        for (int t = 0; t < tokens; t++) {
            size_t token = base + t;
            if (saved_weights && t % s->segment == 0) {
                size_t to = (size_t)(t / s->segment) * out * inside + from;
                close_band(width, inside, band, w, saved_weights + to);
                if (m) close_band(width, inside, band, m, saved_momenta + to);
            }
            if (!in->live || in->live[token]) {
                int next = t + 1;
                while (next < tokens && in->live && !in->live[base + next]) next++;
                const REAL *x = xs + (size_t)t * inside, *read_x = reads + (size_t)t * inside;
                const REAL *next_x = next < tokens ? xs + (size_t)next * inside : x;
                REAL keep = in->alpha ? 1 - in->alpha[token] : 1, drag = in->eta ? in->eta[token] : 0;
                REAL *to_y = y + token * out + first, *to_trace = trace ? trace + token * out + first : NULL;
                Turn by = {x, read_x, next_x, in->v + token * out + first, x + first, read_x + first, keep, drag, step[t]};
                if (seen != t) {
                    memset(z, 0, band * sizeof(REAL));
                    for (int i = 0; i < inside; i++) add(band, x[i], w + i * band, z);
                }
                if (!whole) {
                    memcpy(value, by.value, width * sizeof(REAL));
                    if (s->residual) memcpy(key, by.key, width * sizeof(REAL)), memcpy(query, by.query, width * sizeof(REAL));
                    by.value = value, by.key = key, by.query = query;
                }
                REAL found[2] = {0, 0};
                take_turn(count, s, inside, &by, w, m, rest, z, trace ? (whole ? to_trace : left) : NULL,
                          whole ? to_y : read, gradient ? found : NULL);
                seen = next;
                if (!whole) memcpy(to_y, read, width * sizeof(REAL));
                if (!whole && trace) memcpy(to_trace, left, width * sizeof(REAL));
                if (gradient) gradient[token] += kappa[t] * found[0];
                if (loss) loss[token] += found[!s->squared];
            }
            if (s->max_norm > 0 && in->ends && ends_tile(s, t)) {
                size_t tile = (size_t)r * count_tiles(s) + t / s->tile;
                if (!in->ends[tile]) continue;
                int changed = clip_band(inside, band, w, rest, (REAL)s->max_norm);
                if (m) changed |= clip_band(inside, band, m, NULL, (REAL)s->max_norm);
                if (changed) seen = -1;
                if (clipped) clipped[tile] |= changed;
            }
        }
        close_band(width, inside, band, w, weights + from);
        if (m) close_band(width, inside, band, m, momenta + from);
    }
    free(w);
    return 0;
}

/* weights, momenta: changed in place. For the backward pass, if not NULL: saved_*, the state at the start of every segment;
 * trace (rows, tokens, trace_width); clipped (rows, tiles), whether the guard changed anything after a tile. */
int titans_exact(const Settings *s, const Inputs *in, REAL **weights, REAL **momenta, REAL **saved_weights,
                 REAL **saved_momenta, REAL *trace, unsigned char *clipped, REAL *y, REAL *gradient, REAL *loss) {
    int depth = s->depth, failed = 0, segments = (s->tokens + s->segment - 1) / s->segment, tiles = count_tiles(s);
    if (clipped) memset(clipped, 0, (size_t)s->rows * tiles);
#ifdef _OPENMP
#pragma omp parallel for num_threads(s->threads) schedule(static) if (s->threads > 1 && s->rows > 1)
#endif
    for (int r = 0; r < s->rows; r++) {
        if (depth == 1 && in->outs[0] >= LANES) {
            size_t size = (size_t)in->outs[0] * in->ins[0], kept = (size_t)r * segments * size;
            if (linear_row(s, in, r, weights[0] + r * size, momenta ? momenta[0] + r * size : NULL,
                           saved_weights ? saved_weights[0] + kept : NULL,
                           saved_weights && momenta ? saved_momenta[0] + kept : NULL, trace, clipped, y, gradient, loss))
                failed = 1;
            continue;
        }
        Token at;
        REAL *buffer = open_token(s, in, &at, 1 + (momenta != NULL) + (in->rest != NULL));
        if (!buffer) {
            failed = 1;
            continue;
        }
        REAL *own_w[depth], *own_m[depth], *own_rest[depth], *turned_w[depth], *turned_m[depth], *turned_rest[depth];
        REAL *to_w[depth], *to_m[depth], *next = at.state;
        for (int l = 0; l < depth; l++) {
            size_t size = (size_t)in->outs[l] * in->ins[l];
            own_w[l] = weights[l] + r * size, turned_w[l] = next, next += turned_size(in, l);
            if (momenta) own_m[l] = momenta[l] + r * size, turned_m[l] = next, next += turned_size(in, l);
            if (in->rest) own_rest[l] = in->rest[l] + r * size, turned_rest[l] = next, next += turned_size(in, l);
        }
        turn_state(s, in, own_w, turned_w);
        if (momenta) turn_state(s, in, own_m, turned_m);
        if (in->rest) turn_state(s, in, own_rest, turned_rest);
        for (int t = 0; t < s->tokens; t++) {
            size_t token = (size_t)r * s->tokens + t;
            if (saved_weights && t % s->segment == 0) {
                for (int l = 0; l < depth; l++) {
                    size_t place = ((size_t)r * segments + t / s->segment) * in->outs[l] * in->ins[l];
                    to_w[l] = saved_weights[l] + place;
                    if (momenta) to_m[l] = saved_momenta[l] + place;
                }
                turn_state_back(s, in, turned_w, to_w);
                if (momenta) turn_state_back(s, in, turned_m, to_m);
            }
            if (in->live && !in->live[token]) {
                leave_nothing(s, in, token, trace, y, gradient, loss);
            } else {
                take_gradient(s, in, token, turned_w, &at);
                write_and_read(s, in, token, turned_w, momenta ? turned_m : NULL, in->rest ? turned_rest : NULL, &at,
                               y + token * s->width_out);
                if (gradient) gradient[token] = at.kappa * at.total;
                if (loss) loss[token] = at.loss;
                if (trace) leave_trace(s, in, &at, trace + token * trace_width(s, in));
            }
            if (s->max_norm > 0 && in->ends && ends_tile(s, t)) {
                size_t tile = (size_t)r * tiles + t / s->tile;
                if (!in->ends[tile]) continue;
                turn_state_back(s, in, turned_w, own_w);
                if (momenta) turn_state_back(s, in, turned_m, own_m);
                int changed = clip_state(s, in, r, own_w, momenta ? own_m : NULL);
                if (changed) turn_state(s, in, own_w, turned_w);
                if (changed && momenta) turn_state(s, in, own_m, turned_m);
                if (clipped) clipped[tile] = changed;
            }
        }
        turn_state_back(s, in, turned_w, own_w);
        if (momenta) turn_state_back(s, in, turned_m, own_m);
        free(buffer);
    }
    return failed;
}

/* Pulls a gradient back through clip_rows; w is what was clipped. */
static void clip_rows_back(int rows, int n, const REAL *w, const REAL *rest, REAL *grad, REAL *rest_grad,
                           REAL max_norm) {
    for (int o = 0; o < rows; o++, w += n, grad += n) {
        size_t row = (size_t)o * n;
        REAL square = 0, along = 0;
        for (int i = 0; i < n; i++) {
            REAL away = rest ? w[i] - rest[row + i] : w[i];
            square += away * away;
            along += away * grad[i];
        }
        REAL norm = SQRT(square);
        if (norm > max_norm)
            for (int i = 0; i < n; i++) {
                REAL away = rest ? w[i] - rest[row + i] : w[i];
                REAL pulled = max_norm / norm * (grad[i] - along / square * away);
                if (rest) rest_grad[row + i] += grad[i] - pulled;
                grad[i] = pulled;
            }
    }
}

/* The backward pass takes a block of b tokens at a time, from the state (W, S) before it and the adjoints of the state
 * after it. Every token's x and delta are known from the forward pass, so within a block every state is a sum of known
 * matrices,
 *
 *     W_t = beta_t D + c_t S + R - sum_{i<=t} P[t,i] step_i delta_i x_i^T,     D = W - R,
 *
 * and the adjoint of the momentum that token t writes is the transposed sum over what later tokens ask of W_j,
 *
 *     G_t = drags[b-1,t] S_bar + P[b-1,t] W_bar + sum_{j>=t} P[j,t] (read of j) + sum_{j>t} P[j-1,t] (gradient at j),
 *
 * each of these a product of two vectors: read_bar read_x^T, and decay (z_bar x^T + delta back_bar^T). All that does not
 * wait for z_bar and back_bar, which come one token after the other, is done by products over the block. Squares
 * (b x b) have a row for the later token.
 */
enum { BLOCK = 32, AWAY = 0, PARTS = 3 };

typedef struct {
    int out, in;
    const REAL *part[PARTS]; /* D, S, R as they are there */
    REAL *away, *turned[PARTS];
    REAL *w_bar, *m_bar, *rest_bar;
    REAL *x, *x_columns, *x_step, *read_x, *back_bar, *to_delta;            /* in: to_delta is G^T delta */
    REAL *delta, *delta_columns, *delta_step, *read_bar, *z_bar, *to_x;     /* out: to_x is G x */
    REAL *slope, *curve, *back, *read_slope;                                /* out */
    REAL *x_square, *delta_square, *by_x, *by_delta, *by_back, *by_z;       /* b x b */
} Layer;

typedef struct {
    int b, widest, parts, momentum; /* momentum: which part is S, 0: there is none */
    int live[BLOCK];
    REAL keep[BLOCK], drag[BLOCK], decay[BLOCK], second[BLOCK], step[BLOCK], kappa[BLOCK], total[BLOCK], decay_bar[BLOCK];
    REAL beta[BLOCK + 1], c[BLOCK + 1], fade[BLOCK + 1]; /* what is left of D and S in W, and of S in S; [t]: before t */
    REAL from_away[BLOCK + 1], from_momentum[BLOCK + 1]; /* <D, .> and <S, .> of what is asked of W_t; [t]: before t */
    REAL last_w[BLOCK], last_m[BLOCK];                   /* <delta x^T, W_bar> and <delta x^T, S_bar> */
    REAL momentum_last;
    REAL *products, *drags, *keeps, *meets, *left, *square, *other; /* b x b; meets has one row more */
    REAL *raw[PARTS], *up, *x_bar, *delta_bar, *slope_bar;
    Layer layers[];
} Work;

static REAL *take(REAL **pool, size_t count) {
    REAL *here = *pool;
    *pool += (count + 15) & ~(size_t)15;
    return here;
}

/* Lays a row's buffers out in one allocation: called with pool NULL first, to learn its size. */
static size_t lay_out(const Settings *s, const Inputs *in, Work *w, int has_momentum, REAL *pool) {
    REAL *start = pool;
    w->widest = widest_layer(s, in);
    w->momentum = has_momentum;
    w->parts = 1 + has_momentum + (in->rest != NULL);
    for (int l = 0; l < s->depth; l++) {
        Layer *a = &w->layers[l];
        a->out = in->outs[l], a->in = in->ins[l];
        size_t weight = (size_t)a->out * a->in;
        if (in->rest) a->away = take(&pool, weight);
        for (int p = 0; p < w->parts; p++) a->turned[p] = take(&pool, weight);
        REAL **ins[] = {&a->x, &a->x_columns, &a->x_step, &a->read_x, &a->back_bar, &a->to_delta};
        REAL **outs[] = {&a->delta, &a->delta_columns, &a->delta_step, &a->read_bar, &a->z_bar,
                         &a->to_x,  &a->slope,         &a->curve,      &a->back,     &a->read_slope};
        REAL **squares[] = {&a->x_square, &a->delta_square, &a->by_x, &a->by_delta, &a->by_back, &a->by_z};
        for (size_t i = 0; i < sizeof ins / sizeof *ins; i++) *ins[i] = take(&pool, (size_t)BLOCK * a->in);
        for (size_t i = 0; i < sizeof outs / sizeof *outs; i++) *outs[i] = take(&pool, (size_t)BLOCK * a->out);
        for (size_t i = 0; i < sizeof squares / sizeof *squares; i++) *squares[i] = take(&pool, BLOCK * BLOCK);
    }
    REAL **squares[] = {&w->products, &w->drags, &w->keeps, &w->left, &w->square, &w->other};
    for (size_t i = 0; i < sizeof squares / sizeof *squares; i++) *squares[i] = take(&pool, BLOCK * BLOCK);
    w->meets = take(&pool, BLOCK * (BLOCK + 1));
    for (int p = 0; p < PARTS; p++) w->raw[p] = take(&pool, (size_t)BLOCK * w->widest);
    w->up = take(&pool, (size_t)BLOCK * w->widest);
    w->x_bar = take(&pool, (size_t)w->widest * s->depth);
    w->delta_bar = take(&pool, (size_t)w->widest * s->depth);
    w->slope_bar = take(&pool, (size_t)w->widest * s->depth);
    return pool - start;
}

static Work *open_work(const Settings *s, const Inputs *in, int has_momentum) {
    size_t head = (sizeof(Work) + s->depth * sizeof(Layer) + 63) & ~(size_t)63;
    Work *w = calloc(1, head);
    if (!w) return NULL;
    size_t size = lay_out(s, in, w, has_momentum, NULL);
    free(w);
    char *memory = NULL;
    if (posix_memalign((void **)&memory, 64, head + size * sizeof(REAL))) return NULL;
    memset(memory, 0, head + size * sizeof(REAL));
    lay_out(s, in, (Work *)memory, has_momentum, (REAL *)(memory + head));
    return (Work *)memory;
}

/* The tokens of a block as the forward pass left them, their steps, and how much of each is left at later ones. */
static void load_block(const Settings *s, const Inputs *in, const REAL *trace, size_t first, int b, Work *w) {
    int depth = s->depth, n = trace_width(s, in);
    Layer *top = &w->layers[depth - 1];
    w->b = b;
    w->beta[0] = w->fade[0] = 1, w->c[0] = 0;
    for (int t = 0; t < b; t++) {
        size_t token = first + t;
        const REAL *z = trace + token * n, *hidden = z;
        for (int l = 0; l < depth; l++) hidden += in->outs[l];
        memcpy(w->layers[0].x + (size_t)t * in->ins[0], in->k + token * s->width_in, s->width_in * sizeof(REAL));
        memcpy(w->layers[0].read_x + (size_t)t * in->ins[0], in->q + token * s->width_in, s->width_in * sizeof(REAL));
        for (int l = 0; l < depth; l++) {
            Layer *a = &w->layers[l];
            size_t at = (size_t)t * a->out, end = (size_t)(t + 1) * a->in - 1;
            if (s->bias) a->x[end] = a->read_x[end] = 1;
            if (l + 1 == depth) break;
            size_t next = (size_t)t * a[1].in;
            activate(s->activation, a->out, z, a[1].x + next, a->slope + at, a->curve + at);
            memcpy(a->back + at, hidden, a->out * sizeof(REAL));
            for (int o = 0; o < a->out; o++) a->delta[at + o] = hidden[o] * a->slope[at + o];
            activate(s->activation, a->out, hidden + a->out, a[1].read_x + next, a->read_slope + at, NULL);
            z += a->out, hidden += 2 * a->out;
        }
        const REAL *key = in->k + token * s->width_in, *value = in->v + token * s->width_out;
        REAL *error = top->delta + (size_t)t * top->out, below = 0;
        w->total[t] = output_error(s, z, key, value, error, NULL);
        for (int l = 0; l + 1 < depth; l++) {
            const Layer *a = &w->layers[l];
            const REAL *x = a->x + (size_t)t * a->in, *delta = a->delta + (size_t)t * a->out;
            below += dot(a->out, delta, delta) * dot(a->in, x, x);
        }
        const REAL *x = top->x + (size_t)t * top->in;
        w->kappa[t] = dot(top->in, x, x) + below / (w->total[t] + TINY);
        w->step[t] = s->bounded ? in->step[token] / (1 + w->kappa[t]) : in->step[token];

        int live = w->live[t] = !in->live || in->live[token];
        REAL keep = w->keep[t] = in->alpha ? 1 - in->alpha[token] : 1, drag = w->drag[t] = in->eta ? in->eta[token] : 0;
        w->decay[t] = s->decay_first ? keep : 1;
        w->second[t] = s->first_order ? 0 : w->decay[t];
        for (int l = 0; l < depth; l++) {
            Layer *a = &w->layers[l];
            REAL step = live ? -w->step[t] : 0;
            for (int i = 0; i < a->in; i++) a->x_step[(size_t)t * a->in + i] = step * a->x[(size_t)t * a->in + i];
            for (int o = 0; o < a->out; o++) a->delta_step[(size_t)t * a->out + o] = step * a->delta[(size_t)t * a->out + o];
        }
        if (!live) keep = drag = 1;
        w->beta[t + 1] = keep * w->beta[t];
        w->fade[t + 1] = drag * w->fade[t];
        w->c[t + 1] = keep * w->c[t] + (live ? w->fade[t + 1] : 0);
        REAL *p = w->products + t * BLOCK, *d = w->drags + t * BLOCK, *k = w->keeps + t * BLOCK;
        for (int i = 0; i < t; i++) {
            d[i] = drag * (d - BLOCK)[i];
            p[i] = keep * (p - BLOCK)[i] + (live ? d[i] : 0);
            k[i] = keep * (k - BLOCK)[i];
        }
        p[t] = d[t] = live;
        k[t] = 1;
    }
}

/* The weights before the block as parts, and what of them is needed turned. */
static void split_parts(const Settings *s, Work *w, REAL *const *state, REAL *const *momenta, const Inputs *in, int row) {
    for (int l = 0; l < s->depth; l++) {
        Layer *a = &w->layers[l];
        size_t weight = (size_t)a->out * a->in;
        a->part[AWAY] = state[l];
        if (w->momentum) a->part[1] = momenta[l];
        if (in->rest) {
            const REAL *rest = a->part[w->parts - 1] = in->rest[l] + row * weight;
            REAL *restrict away = a->away;
            for (size_t i = 0; i < weight; i++) away[i] = state[l][i] - rest[i];
            a->part[AWAY] = a->away;
        }
    }
}

/* to = beta D + c S + R for what a token's state makes of a vector, given what each part makes of it */
static void blend(const Work *w, int t, int n, REAL *const *raw, size_t at, REAL *restrict to) {
    const REAL *away = raw[AWAY] + at, *momentum = raw[1] + at, *rest = raw[w->parts - 1] + at;
    REAL beta = w->beta[t], c = w->c[t];
    for (int i = 0; i < n; i++) to[i] = beta * away[i];
    if (w->momentum)
        for (int i = 0; i < n; i++) to[i] += c * momentum[i];
    if (w->parts > 1 + w->momentum)
        for (int i = 0; i < n; i++) to[i] += rest[i];
}

/* square o coefficients up to the diagonal, zeros above it */
static void mask(int b, const REAL *restrict coefficients, REAL *restrict square) {
    for (int t = 0; t < b; t++) {
        for (int i = 0; i <= t; i++) square[t * BLOCK + i] *= coefficients[t * BLOCK + i];
        for (int i = t + 1; i < b; i++) square[t * BLOCK + i] = 0;
    }
}

/* meets += a o b up to the diagonal, in rows that may be scaled */
static void meet(int b, const REAL *restrict a, const REAL *restrict other, const REAL *restrict scale, REAL *restrict to) {
    for (int t = 0; t < b; t++)
        for (int i = 0; i <= t; i++) to[t * BLOCK + i] += (scale ? scale[t] : 1) * a[t * BLOCK + i] * other[t * BLOCK + i];
}

/* What every part makes of the rows z: raw[p] = z part, and <D, z x^T>, <S, z x^T> into the sums behind each token. */
static void ask_parts(Work *w, const Layer *a, const REAL *z, const REAL *x, const REAL *scale, REAL *from_away,
                      REAL *from_momentum) {
    for (int p = 0; p < w->parts; p++)
        product(w->b, a->in, a->out, plain(z, a->out), a->part[p], a->in, w->raw[p], a->in, 1);
    for (int t = 0; t < w->b; t++) {
        size_t at = (size_t)t * a->in;
        REAL by = scale ? scale[t] : 1;
        from_away[t] += by * dot(a->in, x + at, w->raw[AWAY] + at);
        if (w->momentum) from_momentum[t] += by * dot(a->in, x + at, w->raw[1] + at);
    }
}

/* The reads of a block, and all of G x and G^T delta that does not depend on later tokens' gradients. */
static void reads_back(const Settings *s, Work *w, size_t first, const REAL *grad_y, REAL *grad_q) {
    int b = w->b, depth = s->depth;
    Layer *top = &w->layers[depth - 1];
    memcpy(top->read_bar, grad_y + first * s->width_out, (size_t)b * s->width_out * sizeof(REAL));
    for (int l = depth - 1; l >= 0; l--) {
        Layer *a = &w->layers[l];
        int out = a->out, inside = a->in;
        transpose(b, inside, a->x, inside, a->x_columns, BLOCK);
        transpose(b, out, a->delta, out, a->delta_columns, BLOCK);
        transpose(out, inside, a->w_bar, inside, a->turned[0], out);
        product(b, out, inside, plain(a->x, inside), a->turned[0], out, w->raw[0], out, 1);
        product(b, inside, out, plain(a->delta, out), a->w_bar, inside, w->raw[1], inside, 1);
        for (int t = 0; t < b; t++) {
            size_t o = (size_t)t * out, i = (size_t)t * inside;
            REAL by = w->products[(b - 1) * BLOCK + t];
            w->last_w[t] += dot(out, a->delta + o, w->raw[0] + o);
            for (int n = 0; n < out; n++) a->to_x[o + n] = by * w->raw[0][o + n];
            for (int n = 0; n < inside; n++) a->to_delta[i + n] = by * w->raw[1][i + n];
        }
        w->from_away[b] += dot(out * inside, a->part[AWAY], a->w_bar);
        if (w->momentum) {
            w->from_momentum[b] += dot(out * inside, a->part[1], a->w_bar);
            w->momentum_last += dot(out * inside, a->part[1], a->m_bar);
            transpose(out, inside, a->m_bar, inside, a->turned[0], out);
            product(b, out, inside, plain(a->x, inside), a->turned[0], out, w->raw[0], out, 1);
            product(b, inside, out, plain(a->delta, out), a->m_bar, inside, w->raw[1], inside, 1);
            for (int t = 0; t < b; t++) {
                size_t o = (size_t)t * out, i = (size_t)t * inside;
                REAL by = w->drags[(b - 1) * BLOCK + t];
                w->last_m[t] += dot(out, a->delta + o, w->raw[0] + o);
                add(out, by, w->raw[0] + o, a->to_x + o);
                add(inside, by, w->raw[1] + i, a->to_delta + i);
            }
        }
        ask_parts(w, a, a->read_bar, a->read_x, NULL, w->from_away + 1, w->from_momentum + 1);
        product_below(b, 0, out, plain(a->read_bar, out), a->delta_columns, BLOCK, w->square, BLOCK);
        product_below(b, 0, inside, plain(a->read_x, inside), a->x_columns, BLOCK, w->other, BLOCK);
        meet(b, w->square, w->other, NULL, w->meets + BLOCK);
        mask(b, w->products, w->square);
        mask(b, w->products, w->other);
        for (int t = 0; t < b; t++) blend(w, t + 1, inside, w->raw, (size_t)t * inside, w->up + (size_t)t * inside);
        lower_product(b, inside, 0, plain(w->square, BLOCK), a->x_step, inside, w->up, inside, 0);
        lower_transposed_product(b, inside, w->square, BLOCK, a->read_x, inside, a->to_delta, inside);
        lower_transposed_product(b, out, w->other, BLOCK, a->read_bar, out, a->to_x, out);
        for (int t = 0; t < b; t++) {
            const REAL *up = w->up + (size_t)t * inside;
            if (l) {
                REAL *lower = a[-1].read_bar + (size_t)t * a[-1].out, *slope = a[-1].read_slope + (size_t)t * a[-1].out;
                for (int i = 0; i < a[-1].out; i++) lower[i] = up[i] * slope[i];
            } else {
                REAL *to = grad_q + (first + t) * s->width_in;
                memcpy(to, up, s->width_in * sizeof(REAL));
                if (s->residual) add(s->width_in, 1, grad_y + (first + t) * s->width_out, to);
            }
        }
        /* what later gradients will be multiplied by: P[j-1,t], their own factor in it */
        product_below(b, 0, inside, plain(a->x, inside), a->x_columns, BLOCK, a->x_square, BLOCK);
        if (l) product_below(b, 0, out, plain(a->delta, out), a->delta_columns, BLOCK, a->delta_square, BLOCK);
        for (int j = 1; j < b; j++) {
            const REAL *before = w->products + (j - 1) * BLOCK;
            for (int t = 0; t < j; t++) {
                REAL by = w->second[j] * before[t];
                a->by_x[j * BLOCK + t] = by * a->x_square[j * BLOCK + t];
                if (l) a->by_delta[j * BLOCK + t] = by * a->delta_square[j * BLOCK + t];
            }
        }
        if (l)
            for (int p = 0; p < w->parts; p++) transpose(out, inside, a->part[p], inside, a->turned[p], out);
    }
}

/* to += sum over tokens j > t of squares[j,t] rows[j] */
static void gather(const Work *w, int t, int n, const REAL *squares, const REAL *rows, REAL *to) {
    Strided column = {squares + (t + 1) * BLOCK + t, 0, BLOCK};
    row_product(n, w->b - 1 - t, column, rows + (size_t)(t + 1) * n, n, to, 0);
}

/* What W_{t-1} makes of a vector, to `to`: parts are (n x m), steps (b x m). columns (n x b) hold the other side of what
 * earlier tokens wrote; their products with the vector go to `by` with P[t-1,i] and the token's factor, and times
 * `others` to meets. along (m) is the vector that makes <D, .> and <S, .> of it. */
static void ask_before(Work *w, int t, int n, int m, const REAL *vector, const REAL *const *parts, const REAL *columns,
                       const REAL *steps, const REAL *along, const REAL *others, REAL *by, REAL *to) {
    REAL *row = w->square;
    for (int p = 0; p < w->parts; p++) row_product(m, n, plain(vector, n), parts[p], m, w->raw[p], 1);
    w->from_away[t] += w->second[t] * dot(m, along, w->raw[AWAY]);
    if (w->momentum) w->from_momentum[t] += w->second[t] * dot(m, along, w->raw[1]);
    blend(w, t, m, w->raw, 0, to);
    if (!t) return;
    row_product(BLOCK, n, plain(vector, n), columns, BLOCK, row, 1);
    const REAL *before = w->products + (t - 1) * BLOCK;
    REAL *meets = w->meets + t * BLOCK, second = w->second[t];
    for (int i = 0; i < t; i++) {
        meets[i] += second * row[i] * others[i];
        row[i] *= before[i];
        by[i] = second * row[i];
    }
    row_product(m, t, plain(row, BLOCK), steps, m, to, 0);
}

/* What titans_exact left; clipped may be NULL. */
typedef struct {
    REAL *const *weights, *const *momenta;
    const REAL *trace;
    const unsigned char *clipped;
} Saved;

/* Gradients of what came out, and of the tokens; gradient, loss, alpha and eta may be NULL. */
typedef struct {
    const REAL *y, *gradient, *loss;
    REAL *q, *k, *v, *step, *alpha, *eta;
} Gradients;

/* One token's gradient: from the adjoints of what it writes to z_bar and back_bar. */
static void token_back(const Settings *s, const Inputs *in, Work *w, int t, size_t token, const REAL *z,
                       const Gradients *g) {
    int depth = s->depth, W = w->widest;
    Layer *top = &w->layers[depth - 1];
    REAL step_bar = 0, kappa_bar = 0, total_bar = 0, value_bar = 0, total = w->total[t], kappa = w->kappa[t];
    REAL written = w->live[t] ? -w->step[t] : 0, decay = w->decay[t], decay_bar = 0;
    for (int l = 0; l < depth; l++) {
        Layer *a = &w->layers[l];
        REAL *to_x = a->to_x + (size_t)t * a->out, *to_delta = a->to_delta + (size_t)t * a->in;
        REAL *x_bar = w->x_bar + W * l, *delta_bar = w->delta_bar + W * l;
        gather(w, t, a->out, a->by_x, a->z_bar, to_x);
        if (l) {
            gather(w, t, a->out, a->by_back, a->delta, to_x);
            gather(w, t, a->in, a->by_z, a->x, to_delta);
            gather(w, t, a->in, a->by_delta, a->back_bar, to_delta);
        }
        if (w->live[t]) step_bar -= dot(a->out, a->delta + (size_t)t * a->out, to_x);
        for (int o = 0; o < a->out; o++) delta_bar[o] = written * to_x[o];
        for (int i = 0; i < a->in; i++) x_bar[i] = l ? written * to_delta[i] : 0;
    }
    g->step[token] = s->bounded ? step_bar / (1 + kappa) : step_bar;
    if (s->bounded) kappa_bar = -step_bar * w->step[t] / (1 + kappa);
    if (g->gradient) {
        kappa_bar += g->gradient[token] * total;
        total_bar += g->gradient[token] * kappa;
    }
    if (g->loss) {
        if (s->squared)
            total_bar += g->loss[token];
        else
            value_bar = g->loss[token]; /* of the loss -<m, v> */
    }
    if (kappa_bar != 0) {
        REAL share = kappa_bar / (total + TINY), below = 0;
        add(top->in, 2 * kappa_bar, top->x + (size_t)t * top->in, w->x_bar + W * (depth - 1));
        for (int l = 0; l + 1 < depth; l++) {
            Layer *a = &w->layers[l];
            REAL *delta = a->delta + (size_t)t * a->out, *x = a->x + (size_t)t * a->in;
            REAL dd = dot(a->out, delta, delta), xx = dot(a->in, x, x);
            add(a->out, 2 * share * xx, delta, w->delta_bar + W * l);
            add(a->in, 2 * share * dd, x, w->x_bar + W * l);
            below += dd * xx;
        }
        total_bar -= share * below / (total + TINY);
    }
    /* back through the backpropagation */
    for (int l = 1; l < depth; l++) {
        Layer *a = &w->layers[l], *lower = a - 1;
        REAL *back_bar = a->back_bar + (size_t)t * a->in, *delta_bar = w->delta_bar + W * l;
        const REAL *delta = a->delta + (size_t)t * a->out, *along = w->up;
        size_t at = (size_t)t * lower->out;
        for (int i = 0; i < lower->out; i++) {
            REAL bar = (w->delta_bar + W * (l - 1))[i];
            w->slope_bar[W * (l - 1) + i] = bar * lower->back[at + i];
            back_bar[i] = bar * lower->slope[at + i];
        }
        ask_before(w, t, a->in, a->out, back_bar, (const REAL *const *)a->turned, a->x_columns, a->delta_step, delta,
                   a->delta_square + t * BLOCK, a->by_back + t * BLOCK, w->up);
        decay_bar += dot(a->out, delta, along);
        add(a->out, decay, along, delta_bar);
    }
    /* back through the forward pass */
    REAL *error = top->delta + (size_t)t * top->out, *error_bar = w->delta_bar + W * (depth - 1);
    REAL *key_bar = g->k + token * s->width_in, *restrict value_grad = g->v + token * s->width_out;
    REAL *restrict z_bar = top->z_bar + (size_t)t * top->out;
    const REAL *key = in->k + token * s->width_in;
    add(top->out, 2 * total_bar, error, error_bar);
    for (int o = 0; o < top->out; o++) {
        z_bar[o] = s->squared ? error_bar[o] : value_bar * error[o];
        value_grad[o] = -error_bar[o];
    }
    if (value_bar != 0)
        for (int o = 0; o < top->out; o++) value_grad[o] -= value_bar * (s->residual ? z[o] + key[o] : z[o]);
    memset(key_bar, 0, s->width_in * sizeof(REAL));
    if (s->residual) add(top->out, 1, z_bar, key_bar);
    for (int l = depth - 1; l > 0; l--) {
        Layer *a = &w->layers[l], *lower = a - 1;
        REAL *x_bar = w->x_bar + W * l, *x = a->x + (size_t)t * a->in;
        ask_before(w, t, a->out, a->in, a->z_bar + (size_t)t * a->out, a->part, a->delta_columns, a->x_step, x,
                   a->x_square + t * BLOCK, a->by_z + t * BLOCK, w->up);
        decay_bar += dot(a->in, x, w->up);
        add(a->in, decay, w->up, x_bar);
        size_t at = (size_t)t * lower->out;
        for (int i = 0; i < lower->out; i++)
            lower->z_bar[at + i] = x_bar[i] * lower->slope[at + i] + w->slope_bar[W * (l - 1) + i] * lower->curve[at + i];
    }
    add(s->width_in, 1, w->x_bar, key_bar);
    w->decay_bar[t] = decay_bar;
}

/* The first layer's share of the keys, for which no other token waits. */
static void keys_back(const Settings *s, Work *w, size_t first, REAL *grad_k) {
    Layer *a = &w->layers[0];
    int b = w->b, inside = a->in;
    ask_parts(w, a, a->z_bar, a->x, w->second, w->from_away, w->from_momentum);
    product_below(b, 0, a->out, plain(a->z_bar, a->out), a->delta_columns, BLOCK, w->square, BLOCK);
    meet(b, w->square, a->x_square, w->second, w->meets);
    memset(w->other, 0, BLOCK * BLOCK * sizeof(REAL));
    for (int j = 0; j < b; j++)
        for (int t = 0; t < b; t++) {
            REAL by = t < j ? w->products[(j - 1) * BLOCK + t] * w->square[j * BLOCK + t] : 0;
            w->square[j * BLOCK + t] = by;
            w->other[j * BLOCK + t] = w->second[j] * by;
        }
    for (int t = 0; t < b; t++) blend(w, t, inside, w->raw, (size_t)t * inside, w->up + (size_t)t * inside);
    lower_product(b, inside, 0, plain(w->square, BLOCK), a->x_step, inside, w->up, inside, 0);
    lower_transposed_product(b, inside, w->other, BLOCK, a->x, inside, a->to_delta, inside);
    for (int t = 0; t < b; t++) {
        size_t at = (size_t)t * inside;
        REAL *key_bar = grad_k + (first + t) * s->width_in;
        w->decay_bar[t] += dot(inside, a->x + at, w->up + at);
        add(s->width_in, w->decay[t], w->up + at, key_bar);
        if (w->live[t]) add(s->width_in, -w->step[t], a->to_delta + at, key_bar);
    }
}

/* keep_bar = <adjoint of W_t, W_{t-1} - R> and drag_bar = <G_t, S_{t-1}>, from how the sums meet. */
static void gates_back(const Settings *s, Work *w, size_t first, REAL *grad_alpha, REAL *grad_eta) {
    int b = w->b;
    REAL sums[BLOCK] = {0}, *meets = w->meets + BLOCK, *written = w->square;
    /* what is asked of W_t by its read and by the next token's gradient; after the last one, by the block's end */
    add(b, 1, w->last_w, w->meets + b * BLOCK);
    for (int of_momentum = 0; of_momentum < 2; of_momentum++) {
        REAL *grad = of_momentum ? grad_eta : grad_alpha;
        if (!grad) continue;
        const REAL *kept = of_momentum ? w->drags : w->products, *reach = of_momentum ? w->products : w->keeps;
        for (int i = 0; i < b; i++)
            for (int t = 0; t < b; t++) written[i * BLOCK + t] = i < t ? -w->step[i] * kept[(t - 1) * BLOCK + i] : 0;
        product(b, b, b, plain(meets, BLOCK), written, BLOCK, w->left, BLOCK, 1);
        memset(sums, 0, sizeof sums);
        for (int j = 0; j < b; j++)
            for (int t = 0; t <= j; t++) {
                REAL met = w->left[j * BLOCK + t];
                if (of_momentum)
                    met += w->fade[t] * w->from_momentum[j + 1];
                else
                    met += w->beta[t] * w->from_away[j + 1] + (w->momentum ? w->c[t] * w->from_momentum[j + 1] : 0);
                sums[t] += reach[j * BLOCK + t] * met;
            }
        for (int t = 0; t < b; t++) {
            REAL bar = sums[t];
            if (of_momentum) {
                REAL met = w->fade[t] * w->momentum_last;
                for (int i = 0; i < t; i++) met += written[i * BLOCK + t] * w->last_m[i];
                bar += w->drags[(b - 1) * BLOCK + t] * met;
            }
            if (!w->live[t]) bar = 0;
            if (!of_momentum && s->decay_first && !s->first_order) bar += w->decay_bar[t];
            grad[first + t] = of_momentum ? bar : -bar;
        }
    }
}

/* to += sum over tokens of by[t] left_t right_t^T */
static void add_outer(const Work *w, int out, int in, const REAL *by, const REAL *also, const REAL *left,
                      const REAL *right, REAL *to) {
    REAL *scaled = w->raw[0];
    for (int t = 0; t < w->b; t++) {
        REAL factor = (by ? by[t] : 1) * (also ? also[t] : 1);
        for (int o = 0; o < out; o++) scaled[(size_t)t * out + o] = factor * left[(size_t)t * out + o];
    }
    product(out, in, w->b, turned(scaled, out), right, in, to, in, 0);
}

/* to += what the block asks of its first W, or S, or R, by how much of it is left at every token; NULL: all. */
static void add_asked(const Settings *s, const Work *w, int l, const REAL *left, REAL *to) {
    const Layer *a = &w->layers[l];
    add_outer(w, a->out, a->in, left ? left + 1 : NULL, NULL, a->read_bar, a->read_x, to);
    if (s->first_order) return;
    add_outer(w, a->out, a->in, left, w->second, a->z_bar, a->x, to);
    if (l) add_outer(w, a->out, a->in, left, w->second, a->delta, a->back_bar, to);
}

/* From the adjoints of the state after the block to those of the state before it. */
static void state_back(const Settings *s, Work *w) {
    int b = w->b;
    for (int l = 0; l < s->depth; l++) {
        Layer *a = &w->layers[l];
        size_t weight = (size_t)a->out * a->in;
        if (w->momentum) {
            for (size_t i = 0; i < weight; i++) a->m_bar[i] = w->fade[b] * a->m_bar[i] + w->c[b] * a->w_bar[i];
            add_asked(s, w, l, w->c, a->m_bar);
        }
        if (a->rest_bar) { /* of R there is 1 - beta */
            add(weight, 1, a->w_bar, a->rest_bar);
            add_asked(s, w, l, NULL, a->rest_bar);
        }
        for (size_t i = 0; i < weight; i++) a->w_bar[i] *= w->beta[b];
        add_asked(s, w, l, w->beta, a->w_bar);
        if (a->rest_bar) add(weight, -1, a->w_bar, a->rest_bar);
    }
}

/* The state after a block, before any clipping. */
static void advance(const Settings *s, const Work *w, const Inputs *in, int row, REAL *const *state,
                    REAL *const *momenta, REAL *const *next, REAL *const *next_momenta) {
    int b = w->b;
    const REAL *kept = w->products + (b - 1) * BLOCK, *fading = w->drags + (b - 1) * BLOCK;
    for (int l = 0; l < s->depth; l++) {
        const Layer *a = &w->layers[l];
        size_t weight = (size_t)a->out * a->in;
        const REAL *rest = in->rest ? in->rest[l] + row * weight : NULL;
        for (size_t i = 0; i < weight; i++) {
            next[l][i] = w->beta[b] * state[l][i] + (rest ? (1 - w->beta[b]) * rest[i] : 0);
            if (!w->momentum) continue;
            next[l][i] += w->c[b] * momenta[l][i];
            next_momenta[l][i] = w->fade[b] * momenta[l][i];
        }
        add_outer(w, a->out, a->in, kept, NULL, a->delta_step, a->x, next[l]);
        if (w->momentum) add_outer(w, a->out, a->in, fading, NULL, a->delta_step, a->x, next_momenta[l]);
    }
}

static int clipped_before(const Settings *s, const Saved *saved, int row, int t) {
    return saved->clipped && ends_tile(s, t - 1) && saved->clipped[(size_t)row * count_tiles(s) + (t - 1) / s->tile];
}

/* Nothing is asked of slots without tokens. */
static void no_gradients(const Settings *s, const Gradients *g, size_t first, size_t count) {
    memset(g->q + first * s->width_in, 0, count * s->width_in * sizeof(REAL));
    memset(g->k + first * s->width_in, 0, count * s->width_in * sizeof(REAL));
    memset(g->v + first * s->width_out, 0, count * s->width_out * sizeof(REAL));
    REAL *gates[] = {g->step, g->alpha, g->eta};
    for (int i = 0; i < 3; i++)
        if (gates[i]) memset(gates[i] + first, 0, count * sizeof(REAL));
}

static int is_dead(const Inputs *in, size_t first, size_t stop) {
    while (in->live && first < stop && !in->live[first]) first++;
    return first == stop;
}

/* The tokens from first to stop, from the state before them; adjoints of the state are changed in place. */
static void block_back(const Settings *s, const Inputs *in, const Saved *saved, const Gradients *g, int row, int first,
                       int stop, REAL *const *weights, REAL *const *momenta, Work *w) {
    size_t start = (size_t)row * s->tokens + first;
    int width = trace_width(s, in), z = 0;
    for (int l = 0; l + 1 < s->depth; l++) z += in->outs[l];
    split_parts(s, w, weights, momenta, in, row);
    memset(w->meets, 0, BLOCK * (BLOCK + 1) * sizeof(REAL));
    memset(w->from_away, 0, sizeof w->from_away);
    memset(w->from_momentum, 0, sizeof w->from_momentum);
    memset(w->last_w, 0, sizeof w->last_w);
    memset(w->last_m, 0, sizeof w->last_m);
    w->momentum_last = 0;
    reads_back(s, w, start, g->y, g->q);
    for (int t = stop - first - 1; t >= 0; t--)
        token_back(s, in, w, t, start + t, saved->trace + (start + t) * width + z, g);
    keys_back(s, w, start, g->k);
    gates_back(s, w, start, g->alpha, g->eta);
    state_back(s, w);
}

/* The tokens of a row between two kept states, block after block; blocks end where the guard clipped. */
static int segment_back(const Settings *s, const Inputs *in, const Saved *saved, const Gradients *g, int row,
                        int segment, Work *w) {
    int depth = s->depth, segments = (s->tokens + s->segment - 1) / s->segment, blocks = 0, clips = 0;
    int first = segment * s->segment, last = first + s->segment < s->tokens ? first + s->segment : s->tokens;
    int *stops = malloc((last - first) * sizeof(int));
    if (!stops) return 1;
    for (int t = first + 1, start = first; t <= last; t++) {
        int clipped = clipped_before(s, saved, row, t);
        clips += clipped;
        if (clipped || t - start == BLOCK || t == last) stops[blocks++] = start = t;
    }
    /* the state before every block, and one after it */
    size_t total = 0;
    for (int l = 0; l < depth; l++) total += (size_t)in->outs[l] * in->ins[l];
    REAL *states = blocks + clips > 1 ? malloc(total * 2 * blocks * sizeof(REAL)) : NULL;
    REAL *(*weights)[depth] = malloc((blocks + 1) * 2 * sizeof *weights), *(*momenta)[depth] = weights + blocks + 1;
    if (!weights || (blocks + clips > 1 && !states)) {
        free(stops), free(states), free(weights);
        return 1;
    }
    size_t base = (size_t)row * s->tokens, at = 0;
    for (int l = 0; l < depth; l++) {
        size_t size = (size_t)in->outs[l] * in->ins[l], from = ((size_t)row * segments + segment) * size;
        weights[0][l] = saved->weights[l] + from;
        momenta[0][l] = w->momentum ? saved->momenta[l] + from : NULL;
        for (int i = 1; i <= blocks && states; i++) {
            weights[i][l] = states + total * 2 * (i - 1) + at;
            momenta[i][l] = weights[i][l] + total;
        }
        at += size;
    }
    for (int i = 0; i + 1 < blocks; i++) {
        int start = i ? stops[i - 1] : first;
        load_block(s, in, saved->trace, base + start, stops[i] - start, w);
        advance(s, w, in, row, weights[i], momenta[i], weights[i + 1], momenta[i + 1]);
        if (clipped_before(s, saved, row, stops[i]))
            clip_state(s, in, row, weights[i + 1], w->momentum ? momenta[i + 1] : NULL);
    }
    for (int i = blocks - 1; i >= 0; i--) {
        int start = i ? stops[i - 1] : first;
        load_block(s, in, saved->trace, base + start, stops[i] - start, w);
        if (clipped_before(s, saved, row, stops[i])) {
            advance(s, w, in, row, weights[i], momenta[i], weights[i + 1], momenta[i + 1]);
            for (int l = 0; l < depth; l++) {
                Layer *a = &w->layers[l];
                clip_rows_back(a->out, a->in, weights[i + 1][l], rest_row(in, l, row, 0), a->w_bar, a->rest_bar,
                               (REAL)s->max_norm);
                if (w->momentum)
                    clip_rows_back(a->out, a->in, momenta[i + 1][l], NULL, a->m_bar, NULL, (REAL)s->max_norm);
            }
        }
        if (is_dead(in, base + start, base + stops[i]))
            no_gradients(s, g, base + start, stops[i] - start);
        else
            block_back(s, in, saved, g, row, start, stops[i], weights[i], momenta[i], w);
    }
    free(stops), free(states), free(weights);
    return 0;
}

/* Gradients of everything that went in. grad_weights, grad_momenta hold those of the final state on entry and those of
 * the initial state on exit; grad_rest is added to. saved_*, trace and clipped are what titans_exact left. grad_gradient
 * and grad_loss may be NULL. */
int titans_exact_backward(const Settings *s, const Inputs *in, REAL **saved_weights, REAL **saved_momenta,
                          const REAL *trace, const unsigned char *clipped, const REAL *grad_y,
                          const REAL *grad_gradient, const REAL *grad_loss, REAL **grad_weights, REAL **grad_momenta,
                          REAL *grad_q, REAL *grad_k, REAL *grad_v, REAL *grad_step, REAL *grad_alpha, REAL *grad_eta,
                          REAL **grad_rest) {
    int failed = 0, segments = (s->tokens + s->segment - 1) / s->segment;
    Saved saved = {saved_weights, saved_momenta, trace, clipped};
    Gradients g = {grad_y, grad_gradient, grad_loss, grad_q, grad_k, grad_v, grad_step, grad_alpha, grad_eta};
#ifdef _OPENMP
#pragma omp parallel num_threads(s->threads) if (s->threads > 1 && s->rows > 1)
#endif
    {
        Work *w = open_work(s, in, saved_momenta != NULL);
#ifdef _OPENMP
#pragma omp for schedule(static)
#endif
        for (int r = 0; r < s->rows; r++) {
            int fine = w != NULL;
            for (int l = 0; l < s->depth && fine; l++) {
                Layer *a = &w->layers[l];
                size_t at = (size_t)r * a->out * a->in;
                a->w_bar = grad_weights[l] + at;
                a->m_bar = saved_momenta ? grad_momenta[l] + at : NULL;
                a->rest_bar = in->rest ? grad_rest[l] + at : NULL;
            }
            for (int segment = segments - 1; segment >= 0 && fine; segment--)
                fine = !segment_back(s, in, &saved, &g, r, segment, w);
            if (!fine) failed = 1;
        }
        free(w);
    }
    return failed;
}
