/* The sequential rule, token by token: the loop of recurrent.py with its backpropagation written out, for a CPU.
 */
#include "common.h"

/* No row of w - rest keeps a norm above max_norm; rest may be NULL. */
static void clip_rows(int rows, int n, REAL *w, const REAL *rest, REAL max_norm) {
    for (int o = 0; o < rows; o++, w += n) {
        REAL square = 0;
        for (int i = 0; i < n; i++) {
            REAL away = rest ? w[i] - rest[(size_t)o * n + i] : w[i];
            square += away * away;
        }
        REAL norm = SQRT(square);
        if (norm > max_norm)
            for (int i = 0; i < n; i++) {
                REAL home = rest ? rest[(size_t)o * n + i] : 0;
                w[i] = home + (w[i] - home) * (max_norm / norm);
            }
    }
}

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

/* One token's way through M_{t-1} and back: filled by study(). */
typedef struct {
    int widest;
    REAL *x, *slope, *curve, *delta, *back; /* a layer each */
    REAL *z, *ask, *told;
    REAL total, lost, kappa, step, keep, drag, decay;
} Study;

static int widest_layer(const Settings *s, const Inputs *in) {
    int widest = s->width_in + 1;
    for (int l = 0; l < s->depth; l++) {
        if (in->outs[l] + 1 > widest) widest = in->outs[l] + 1;
        if (in->ins[l] > widest) widest = in->ins[l];
    }
    return widest;
}

static REAL *open_study(const Settings *s, const Inputs *in, Study *at) {
    size_t w = at->widest = widest_layer(s, in), layers = s->depth + 1;
    REAL *buffer = calloc(w * (5 * layers + 3), sizeof(REAL));
    if (!buffer) return NULL;
    at->x = buffer;
    at->slope = at->x + w * layers;
    at->curve = at->slope + w * layers;
    at->delta = at->curve + w * layers;
    at->back = at->delta + w * layers;
    at->z = at->back + w * layers;
    at->ask = at->z + w;
    at->told = at->ask + w;
    return buffer;
}

/* The gradient of token `at` at the given weights (Eq. 12), and its step. */
static void study(const Settings *s, const Inputs *in, size_t token, REAL *const *weights, Study *at) {
    int depth = s->depth, w = at->widest;
    const REAL *key = in->k + token * s->width_in, *value = in->v + token * s->width_out;
    at->keep = in->alpha ? 1 - in->alpha[token] : 1;
    at->drag = in->eta ? in->eta[token] : 0;
    at->decay = s->decay_first ? at->keep : 1;
    memcpy(at->x, key, s->width_in * sizeof(REAL));
    for (int l = 0; l < depth; l++) {
        int out = in->outs[l], inside = in->ins[l];
        REAL *x = at->x + w * l;
        if (s->bias) x[inside - 1] = 1;
        for (int o = 0; o < out; o++) at->z[o] = at->decay * dot(inside, weights[l] + (size_t)o * inside, x);
        if (l + 1 < depth) activate(s->activation, out, at->z, x + w, at->slope + w * l, at->curve + w * l);
    }
    REAL *error = at->delta + w * (depth - 1);
    at->total = at->lost = 0;
    for (int o = 0; o < s->width_out; o++) {
        REAL m = s->residual ? at->z[o] + key[o] : at->z[o];
        error[o] = s->squared ? m - value[o] : -value[o];
        at->total += error[o] * error[o];
        at->lost += (s->squared ? error[o] : m) * error[o];
    }
    REAL below = 0;
    for (int l = depth - 1; l > 0; l--) {
        REAL *delta = at->delta + w * l, *back = at->back + w * (l - 1), *lower = delta - w;
        int hidden = in->outs[l - 1];
        memset(back, 0, hidden * sizeof(REAL));
        for (int o = 0; o < in->outs[l]; o++)
            add(hidden, at->decay * delta[o], weights[l] + (size_t)o * in->ins[l], back);
        for (int i = 0; i < hidden; i++) lower[i] = back[i] * at->slope[w * (l - 1) + i];
        REAL *x = at->x + w * (l - 1);
        below += dot(hidden, lower, lower) * dot(in->ins[l - 1], x, x);
    }
    REAL *last = at->x + w * (depth - 1);
    at->kappa = dot(in->ins[depth - 1], last, last) + below / (at->total + TINY);
    at->step = s->bounded ? in->step[token] / (1 + at->kappa) : in->step[token];
}

static int ends_here(const Settings *s, const Inputs *in, int row, int t) {
    int tiles = s->tokens / s->tile;
    return s->max_norm > 0 && in->ends && (t + 1) % s->tile == 0 && in->ends[(size_t)row * tiles + t / s->tile];
}

static const REAL *rest_row(const Inputs *in, int l, int row, int o) {
    return in->rest ? in->rest[l] + ((size_t)row * in->outs[l] + o) * in->ins[l] : NULL;
}

/* S_t and M_t (Eq. 14, 13) in place for one row of a layer. */
static void write_row(int n, REAL d, const Study *at, const REAL *restrict x, const REAL *restrict rest,
                      REAL *restrict w, REAL *restrict m) {
    if (rest) {
        REAL lost = 1 - at->keep;
        for (int i = 0; i < n; i++) w[i] = at->keep * w[i] + lost * rest[i];
    }
    REAL keep = rest ? 1 : at->keep;
    if (m)
        for (int i = 0; i < n; i++) {
            m[i] = at->drag * m[i] - d * x[i];
            w[i] = keep * w[i] + m[i];
        }
    else
        for (int i = 0; i < n; i++) w[i] = keep * w[i] - d * x[i];
}

/* weights, momenta: changed in place; saved_*: if not NULL, the state at the start of every segment. */
int titans_exact(const Settings *s, const Inputs *in, REAL **weights, REAL **momenta, REAL **saved_weights,
                 REAL **saved_momenta, REAL *y, REAL *gradient, REAL *loss) {
    int depth = s->depth, failed = 0, segments = (s->tokens + s->segment - 1) / s->segment;
#ifdef _OPENMP
#pragma omp parallel for num_threads(s->threads) schedule(static) if (s->threads > 1 && s->rows > 1)
#endif
    for (int r = 0; r < s->rows; r++) {
        Study at;
        REAL *buffer = open_study(s, in, &at), *w[depth], *m[depth];
        if (!buffer) {
            failed = 1;
            continue;
        }
        for (int l = 0; l < depth; l++) {
            size_t size = (size_t)in->outs[l] * in->ins[l];
            w[l] = weights[l] + r * size;
            m[l] = momenta ? momenta[l] + r * size : NULL;
        }
        for (int t = 0; t < s->tokens; t++) {
            size_t token = (size_t)r * s->tokens + t;
            int there = !in->live || in->live[token];
            if (saved_weights && t % s->segment == 0)
                for (int l = 0; l < depth; l++) {
                    size_t size = (size_t)in->outs[l] * in->ins[l], to = ((size_t)r * segments + t / s->segment) * size;
                    memcpy(saved_weights[l] + to, w[l], size * sizeof(REAL));
                    if (momenta) memcpy(saved_momenta[l] + to, m[l], size * sizeof(REAL));
                }
            study(s, in, token, w, &at);
            if (gradient) gradient[token] = at.kappa * at.total;
            if (loss) loss[token] = at.lost;
            /* write, and read M_t(q) while each row is at hand (Eq. 15) */
            const REAL *query = in->q + token * s->width_in;
            memcpy(at.ask, query, s->width_in * sizeof(REAL));
            for (int l = 0; l < depth; l++) {
                int inside = in->ins[l];
                REAL *delta = at.delta + at.widest * l, *x = at.x + at.widest * l;
                if (s->bias) at.ask[inside - 1] = 1;
                for (int o = 0; o < in->outs[l]; o++) {
                    REAL *row = w[l] + (size_t)o * inside;
                    if (there)
                        write_row(inside, at.step * delta[o], &at, x, rest_row(in, l, r, o), row,
                                  momenta ? m[l] + (size_t)o * inside : NULL);
                    at.z[o] = dot(inside, row, at.ask);
                }
                if (l + 1 < depth) activate(s->activation, in->outs[l], at.z, at.ask, at.told, NULL);
            }
            REAL *out = y + token * s->width_out;
            for (int o = 0; o < s->width_out; o++) out[o] = s->residual ? at.z[o] + query[o] : at.z[o];
            if (ends_here(s, in, r, t))
                for (int l = 0; l < depth; l++) {
                    clip_rows(in->outs[l], in->ins[l], w[l], rest_row(in, l, r, 0), (REAL)s->max_norm);
                    if (momenta) clip_rows(in->outs[l], in->ins[l], m[l], NULL, (REAL)s->max_norm);
                }
        }
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

/* Gradients of everything that went in. grad_weights, grad_momenta hold those of the final state on entry and those of
 * the initial state on exit; grad_rest is added to. saved_* are what titans_exact left. grad_gradient and grad_loss may be NULL. */
int titans_exact_backward(const Settings *s, const Inputs *in, REAL **saved_weights, REAL **saved_momenta,
                          const REAL *grad_y, const REAL *grad_gradient, const REAL *grad_loss, REAL **grad_weights,
                          REAL **grad_momenta, REAL *grad_q, REAL *grad_k, REAL *grad_v, REAL *grad_step,
                          REAL *grad_alpha, REAL *grad_eta, REAL **grad_rest) {
    int depth = s->depth, failed = 0, segments = (s->tokens + s->segment - 1) / s->segment;
    size_t total = 0;
    for (int l = 0; l < depth; l++) total += (size_t)in->outs[l] * in->ins[l];
    int has_momentum = saved_momenta != NULL;
#ifdef _OPENMP
#pragma omp parallel for num_threads(s->threads) schedule(static) if (s->threads > 1 && s->rows > 1)
#endif
    for (int r = 0; r < s->rows; r++) {
        Study at;
        REAL *buffer = open_study(s, in, &at);
        /* the states before every token of a segment, and the one after the token at hand */
        REAL *states = malloc(total * 2 * (s->segment + 1) * sizeof(REAL));
        int W = widest_layer(s, in);
        REAL *extra = calloc((size_t)W * (5 * depth + 6), sizeof(REAL));
        if (!buffer || !states || !extra) {
            failed = 1;
            free(buffer), free(states), free(extra);
            continue;
        }
        REAL *read_x = extra, *read_slope = read_x + W * (depth + 1), *x_bar = read_slope + W * (depth + 1);
        REAL *delta_bar = x_bar + W * (depth + 1), *slope_bar = delta_bar + W * (depth + 1), *z_bar = slope_bar + W * depth;
        REAL *w[depth], *m[depth], *w_bar[depth], *m_bar[depth];
        for (int l = 0; l < depth; l++) {
            size_t size = (size_t)in->outs[l] * in->ins[l];
            w_bar[l] = grad_weights[l] + r * size;
            m_bar[l] = has_momentum ? grad_momenta[l] + r * size : NULL;
        }
        for (int segment = segments - 1; segment >= 0; segment--) {
            int first = segment * s->segment, stop = first + s->segment < s->tokens ? first + s->segment : s->tokens;
            /* forward once more, keeping every state */
            for (int t = first; t < stop; t++) {
                REAL *state = states + total * 2 * (t - first), *next = state + total * 2;
                if (t == first) {
                    REAL *to = state;
                    for (int l = 0; l < depth; l++) {
                        size_t size = (size_t)in->outs[l] * in->ins[l], from = ((size_t)r * segments + segment) * size;
                        memcpy(to, saved_weights[l] + from, size * sizeof(REAL));
                        if (has_momentum) memcpy(to + total, saved_momenta[l] + from, size * sizeof(REAL));
                        to += size;
                    }
                }
                if (t + 1 == stop) break; /* the state after the last token is not needed */
                memcpy(next, state, total * 2 * sizeof(REAL));
                size_t token = (size_t)r * s->tokens + t, at_layer = 0;
                for (int l = 0; l < depth; l++) {
                    w[l] = next + at_layer;
                    m[l] = w[l] + total;
                    at_layer += (size_t)in->outs[l] * in->ins[l];
                }
                if (in->live && !in->live[token]) continue;
                study(s, in, token, w, &at);
                for (int l = 0; l < depth; l++) {
                    for (int o = 0; o < in->outs[l]; o++) {
                        size_t row = (size_t)o * in->ins[l];
                        write_row(in->ins[l], at.step * at.delta[at.widest * l + o], &at, at.x + at.widest * l,
                                  rest_row(in, l, r, o), w[l] + row, has_momentum ? m[l] + row : NULL);
                    }
                    if (ends_here(s, in, r, t)) {
                        clip_rows(in->outs[l], in->ins[l], w[l], rest_row(in, l, r, 0), (REAL)s->max_norm);
                        if (has_momentum) clip_rows(in->outs[l], in->ins[l], m[l], NULL, (REAL)s->max_norm);
                    }
                }
            }
            for (int t = stop - 1; t >= first; t--) {
                size_t token = (size_t)r * s->tokens + t, at_layer = 0;
                REAL *state = states + total * 2 * (t - first), *next = states + total * 2 * s->segment;
                int there = !in->live || in->live[token], end = ends_here(s, in, r, t);
                const REAL *query = in->q + token * s->width_in;
                REAL *after[depth], *after_m[depth];
                for (int l = 0; l < depth; l++) {
                    w[l] = state + at_layer;
                    m[l] = w[l] + total;
                    after[l] = there ? next + at_layer : w[l];
                    after_m[l] = there ? after[l] + total : m[l];
                    at_layer += (size_t)in->outs[l] * in->ins[l];
                }
                study(s, in, token, w, &at);
                /* M_t and S_t before any clipping, then the read */
                if (there) {
                    memcpy(next, state, total * 2 * sizeof(REAL));
                    for (int l = 0; l < depth; l++)
                        for (int o = 0; o < in->outs[l]; o++) {
                            size_t row = (size_t)o * in->ins[l];
                            write_row(in->ins[l], at.step * at.delta[W * l + o], &at, at.x + W * l,
                                      rest_row(in, l, r, o), after[l] + row, has_momentum ? after_m[l] + row : NULL);
                        }
                }
                if (end)
                    for (int l = 0; l < depth; l++) {
                        REAL *rest_bar = in->rest ? grad_rest[l] + (size_t)r * in->outs[l] * in->ins[l] : NULL;
                        clip_rows_back(in->outs[l], in->ins[l], after[l], rest_row(in, l, r, 0), w_bar[l], rest_bar,
                                       (REAL)s->max_norm);
                        if (has_momentum)
                            clip_rows_back(in->outs[l], in->ins[l], after_m[l], NULL, m_bar[l], NULL, (REAL)s->max_norm);
                    }
                memcpy(read_x, query, s->width_in * sizeof(REAL));
                for (int l = 0; l < depth; l++) {
                    REAL *x = read_x + W * l;
                    if (s->bias) x[in->ins[l] - 1] = 1;
                    if (l + 1 == depth) break;
                    for (int o = 0; o < in->outs[l]; o++) at.z[o] = dot(in->ins[l], after[l] + (size_t)o * in->ins[l], x);
                    activate(s->activation, in->outs[l], at.z, x + W, read_slope + W * l, NULL);
                }
                memcpy(z_bar, grad_y + token * s->width_out, s->width_out * sizeof(REAL));
                for (int l = depth - 1; l >= 0; l--) {
                    int inside = in->ins[l];
                    REAL *up = at.told;
                    memset(up, 0, inside * sizeof(REAL));
                    for (int o = 0; o < in->outs[l]; o++) {
                        size_t row = (size_t)o * inside;
                        add(inside, z_bar[o], after[l] + row, up);
                        add(inside, z_bar[o], read_x + W * l, w_bar[l] + row);
                    }
                    if (l)
                        for (int i = 0; i < in->outs[l - 1]; i++) z_bar[i] = up[i] * read_slope[W * (l - 1) + i];
                    else
                        memcpy(grad_q + token * s->width_in, up, s->width_in * sizeof(REAL));
                }
                if (s->residual) add(s->width_in, 1, grad_y + token * s->width_out, grad_q + token * s->width_in);

                REAL *key_bar = grad_k + token * s->width_in, *value_bar = grad_v + token * s->width_out;
                memset(key_bar, 0, s->width_in * sizeof(REAL));
                memset(value_bar, 0, s->width_out * sizeof(REAL));
                REAL keep_bar = 0, drag_bar = 0, step_bar = 0, decay_bar = 0;
                memset(x_bar, 0, (size_t)W * (depth + 1) * sizeof(REAL));
                memset(delta_bar, 0, (size_t)W * (depth + 1) * sizeof(REAL));
                memset(slope_bar, 0, (size_t)W * depth * sizeof(REAL));
                if (there)
                    /* M = keep M + S, S = drag S - step delta x^T */
                    for (int l = 0; l < depth; l++) {
                        int inside = in->ins[l];
                        REAL *x = at.x + W * l, *xb = x_bar + W * l;
                        for (int o = 0; o < in->outs[l]; o++) {
                            size_t row = (size_t)o * inside;
                            REAL *wb = w_bar[l] + row, *old = w[l] + row, d = at.delta[W * l + o], *g = wb;
                            keep_bar += dot(inside, wb, old);
                            if (in->rest) {
                                keep_bar -= dot(inside, wb, rest_row(in, l, r, o));
                                add(inside, 1 - at.keep, wb, grad_rest[l] + (size_t)r * in->outs[l] * inside + row);
                            }
                            if (has_momentum) {
                                g = m_bar[l] + row;
                                add(inside, 1, wb, g);
                                drag_bar += dot(inside, g, m[l] + row);
                            }
                            REAL along = dot(inside, g, x);
                            step_bar -= d * along;
                            delta_bar[W * l + o] -= at.step * along;
                            add(inside, -at.step * d, g, xb);
                            if (has_momentum)
                                for (int i = 0; i < inside; i++) g[i] *= at.drag;
                            for (int i = 0; i < inside; i++) wb[i] *= at.keep;
                        }
                    }
                REAL kappa_bar = 0, total_bar = 0;
                if (s->bounded) {
                    grad_step[token] = step_bar / (1 + at.kappa);
                    kappa_bar = -step_bar * at.step / (1 + at.kappa);
                } else
                    grad_step[token] = step_bar;
                REAL *error = at.delta + W * (depth - 1), *error_bar = delta_bar + W * (depth - 1);
                REAL m_out_bar = 0; /* of the dot loss */
                if (grad_gradient) {
                    kappa_bar += grad_gradient[token] * at.total;
                    total_bar += grad_gradient[token] * at.kappa;
                }
                if (grad_loss) {
                    if (s->squared)
                        total_bar += grad_loss[token];
                    else
                        m_out_bar = grad_loss[token];
                }
                if (kappa_bar != 0) {
                    add(in->ins[depth - 1], 2 * kappa_bar, at.x + W * (depth - 1), x_bar + W * (depth - 1));
                    REAL share = kappa_bar / (at.total + TINY), below = 0;
                    for (int l = 0; l + 1 < depth; l++) {
                        REAL *d = at.delta + W * l, *x = at.x + W * l;
                        REAL dd = dot(in->outs[l], d, d), xx = dot(in->ins[l], x, x);
                        add(in->outs[l], 2 * share * xx, d, delta_bar + W * l);
                        add(in->ins[l], 2 * share * dd, x, x_bar + W * l);
                        below += dd * xx;
                    }
                    total_bar -= share * below / (at.total + TINY);
                }
                /* back through the backpropagation */
                for (int l = 1; l < depth; l++) {
                    int hidden = in->outs[l - 1];
                    REAL *db = delta_bar + W * (l - 1), *slope = at.slope + W * (l - 1), *back = at.back + W * (l - 1);
                    REAL *back_bar = at.ask;
                    for (int i = 0; i < hidden; i++) {
                        slope_bar[W * (l - 1) + i] += db[i] * back[i];
                        back_bar[i] = db[i] * slope[i];
                    }
                    for (int o = 0; o < in->outs[l]; o++) {
                        size_t row = (size_t)o * in->ins[l];
                        REAL d = at.delta[W * l + o], along = dot(hidden, back_bar, w[l] + row);
                        delta_bar[W * l + o] += at.decay * along;
                        decay_bar += d * along;
                        if (!s->first_order) add(hidden, at.decay * d, back_bar, w_bar[l] + row);
                    }
                }
                add(s->width_out, 2 * total_bar, error, error_bar);
                /* back through the forward pass */
                for (int o = 0; o < s->width_out; o++) {
                    REAL output = 0;
                    if (s->squared)
                        output = error_bar[o];
                    else
                        output = m_out_bar * error[o];
                    z_bar[o] = output;
                    if (s->residual) key_bar[o] += output;
                    value_bar[o] -= error_bar[o];
                }
                if (!s->squared && m_out_bar != 0) { /* the loss -<m, v> also moves with v */
                    for (int o = 0; o < s->width_out; o++) {
                        const REAL *x = at.x + W * (depth - 1);
                        REAL out = at.decay * dot(in->ins[depth - 1], w[depth - 1] + (size_t)o * in->ins[depth - 1], x);
                        if (s->residual) out += in->k[token * s->width_in + o];
                        value_bar[o] -= m_out_bar * out;
                    }
                }
                for (int l = depth - 1; l >= 0; l--) {
                    int inside = in->ins[l];
                    REAL *xb = x_bar + W * l, *x = at.x + W * l;
                    for (int o = 0; o < in->outs[l]; o++) {
                        size_t row = (size_t)o * inside;
                        decay_bar += z_bar[o] * dot(inside, w[l] + row, x);
                        add(inside, at.decay * z_bar[o], w[l] + row, xb);
                        if (!s->first_order) add(inside, at.decay * z_bar[o], x, w_bar[l] + row);
                    }
                    if (l)
                        for (int i = 0; i < in->outs[l - 1]; i++)
                            z_bar[i] = xb[i] * at.slope[W * (l - 1) + i] + slope_bar[W * (l - 1) + i] * at.curve[W * (l - 1) + i];
                }
                add(s->width_in, 1, x_bar, key_bar);
                if (s->decay_first && !s->first_order) keep_bar += decay_bar;
                if (grad_alpha) grad_alpha[token] = -keep_bar;
                if (grad_eta) grad_eta[token] = drag_bar;
            }
        }
        free(buffer), free(states), free(extra);
    }
    return failed;
}
