/* What stands around the memory, head by head: convolution, SiLU and unit norm before it; norm and gate behind it.
 *
 * A head's `width` channels lie together, so each head of each projection is one unit of work.
 */
#include "common.h"

static REAL sigmoid(REAL x) { return 1 / (1 + EXP(-x)); }

/* One token's channels after the convolution: sum over o of kernel_o x_{t+o-reach}; past holds what came before x. */
static void convolve(int width, int reach, int t, const REAL *past, const REAL *x, size_t stride, const REAL *kernel,
                     REAL *restrict z) {
    if (!kernel) {
        memcpy(z, x + t * stride, width * sizeof(REAL));
        return;
    }
    const REAL *now = x + t * stride, *last = kernel + reach * stride;
    for (int i = 0; i < width; i++) z[i] = last[i] * now[i];
    for (int o = 0; o < reach; o++) {
        int from = t + o - reach;
        const REAL *row = from < 0 ? past + (from + reach) * stride : x + from * stride, *weight = kernel + o * stride;
        for (int i = 0; i < width; i++) z[i] += weight[i] * row[i];
    }
}

/* x (batch, time, parts * heads * width), past (batch, reach, the same), kernel (reach + 1, the same) or NULL ->
 * result (parts, batch, heads, time, width). Each part is divided by the root of its square plus its eps; below 0: not. */
int titans_project(int batch, int time, int parts, int heads, int width, int reach, int threads, const double *eps,
                   const REAL *x, const REAL *past, const REAL *kernel, REAL *result) {
    size_t stride = (size_t)parts * heads * width;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
#endif
    for (int unit = 0; unit < parts * heads; unit++)
        for (int b = 0; b < batch; b++) {
            int part = unit / heads, head = unit % heads, scaled = eps[part] >= 0;
            size_t channel = (size_t)unit * width;
            REAL *out = result + (((size_t)part * batch + b) * heads + head) * time * width;
            const REAL *here = x + (size_t)b * time * stride + channel, *weight = kernel ? kernel + channel : NULL;
            const REAL *before = past ? past + (size_t)b * reach * stride + channel : NULL;
            REAL z[width];
            for (int t = 0; t < time; t++, out += width) {
                convolve(width, reach, t, before, here, stride, weight, z);
                REAL square = (REAL)eps[part];
                for (int i = 0; i < width; i++) out[i] = z[i] * sigmoid(z[i]);
                square += dot(width, out, out);
                REAL scale = scaled ? 1 / SQRT(square) : 1;
                for (int i = 0; i < width; i++) out[i] *= scale;
            }
        }
    return 0;
}

/* grad_x, grad_past and grad_kernel are added to. */
int titans_project_backward(int batch, int time, int parts, int heads, int width, int reach, int threads,
                            const double *eps, const REAL *x, const REAL *past, const REAL *kernel, const REAL *grad,
                            REAL *grad_x, REAL *grad_past, REAL *grad_kernel) {
    size_t stride = (size_t)parts * heads * width;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
#endif
    for (int unit = 0; unit < parts * heads; unit++)
        for (int b = 0; b < batch; b++) {
            int part = unit / heads, head = unit % heads, scaled = eps[part] >= 0;
            size_t channel = (size_t)unit * width, row = (size_t)b * time * stride + channel;
            const REAL *out_bar = grad + (((size_t)part * batch + b) * heads + head) * time * width;
            const REAL *weight = kernel ? kernel + channel : NULL;
            const REAL *before = past ? past + (size_t)b * reach * stride + channel : NULL;
            REAL *before_bar = grad_past ? grad_past + (size_t)b * reach * stride + channel : NULL;
            REAL z[width], value[width], slope[width];
            for (int t = 0; t < time; t++, out_bar += width) {
                convolve(width, reach, t, before, x + row, stride, weight, z);
                activate(SILU, width, z, value, slope, NULL);
                REAL square = (REAL)eps[part] + dot(width, value, value);
                REAL scale = scaled ? 1 / SQRT(square) : 1;
                REAL along = scaled ? dot(width, value, out_bar) / square : 0;
                for (int i = 0; i < width; i++) z[i] = scale * (out_bar[i] - along * value[i]) * slope[i];
                if (!kernel) {
                    add(width, 1, z, grad_x + row + t * stride);
                    continue;
                }
                for (int o = 0; o <= reach; o++) {
                    int from = t + o - reach;
                    const REAL *taken = from < 0 ? before + (from + reach) * stride : x + row + from * stride;
                    REAL *taken_bar = from < 0 ? before_bar + (from + reach) * stride : grad_x + row + from * stride;
                    REAL *weight_bar = grad_kernel + o * stride + channel;
                    const REAL *by = weight + o * stride;
                    for (int i = 0; i < width; i++) {
                        taken_bar[i] += by[i] * z[i];
                        weight_bar[i] += taken[i] * z[i];
                    }
                }
            }
        }
    return 0;
}

/* result (batch, time, heads * width) = RMSNorm(y (batch, heads, time, width)) weight * silu(gate, shaped like result) */
int titans_gate(int batch, int time, int heads, int width, int threads, double eps, const REAL *y, const REAL *weight,
                const REAL *gate, REAL *result) {
    size_t stride = (size_t)heads * width;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
#endif
    for (int unit = 0; unit < batch * heads; unit++) {
        size_t at = (size_t)(unit / heads) * time * stride + (size_t)(unit % heads) * width;
        const REAL *in = y + (size_t)unit * time * width;
        for (int t = 0; t < time; t++, in += width, at += stride) {
            REAL scale = 1 / SQRT(dot(width, in, in) / width + (REAL)eps);
            for (int i = 0; i < width; i++)
                result[at + i] = in[i] * scale * weight[i] * gate[at + i] * sigmoid(gate[at + i]);
        }
    }
    return 0;
}

/* grad_weight (heads, width) is added to: its rows belong together. */
int titans_gate_backward(int batch, int time, int heads, int width, int threads, double eps, const REAL *y,
                         const REAL *weight, const REAL *gate, const REAL *grad, REAL *grad_y, REAL *grad_weight,
                         REAL *grad_gate) {
    size_t stride = (size_t)heads * width;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
#endif
    for (int head = 0; head < heads; head++)
        for (int b = 0; b < batch; b++) {
            size_t at = (size_t)b * time * stride + (size_t)head * width, row = ((size_t)b * heads + head) * time * width;
            REAL open[width], slope[width], *weight_bar = grad_weight + (size_t)head * width;
            for (int t = 0; t < time; t++, row += width, at += stride) {
                const REAL *in = y + row, *bar = grad + at;
                REAL *in_bar = grad_y + row, *gate_bar = grad_gate + at;
                REAL square = dot(width, in, in) / width + (REAL)eps, scale = 1 / SQRT(square);
                activate(SILU, width, gate + at, open, slope, NULL);
                for (int i = 0; i < width; i++) {
                    REAL unit = in[i] * scale, both = bar[i] * unit;
                    gate_bar[i] = both * weight[i] * slope[i];
                    weight_bar[i] += both * open[i];
                    in_bar[i] = bar[i] * open[i] * weight[i] * scale;
                }
                add(width, -dot(width, in, in_bar) / (width * square), in, in_bar);
            }
        }
    return 0;
}
