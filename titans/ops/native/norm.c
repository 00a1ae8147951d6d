/* RMSNorm over the last dimension. */
#include "common.h"

static REAL root(int width, const REAL *x, double eps) { return 1 / SQRT(dot(width, x, x) / width + (REAL)eps); }

int titans_rms_norm(long rows, int width, int threads, double eps, const REAL *x, const REAL *weight, REAL *y) {
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 64)
#endif
    for (long r = 0; r < rows; r++) {
        const REAL *in = x + r * width;
        REAL *out = y + r * width, scale = root(width, in, eps);
        for (int i = 0; i < width; i++) out[i] = in[i] * scale * weight[i];
    }
    return 0;
}

/* grad_weight is summed in blocks of rows and then block after block, whatever the number of threads. */
int titans_rms_norm_backward(long rows, int width, int threads, double eps, const REAL *x, const REAL *weight,
                             const REAL *grad, REAL *grad_x, REAL *grad_weight) {
    long size = rows > 64 * 64 ? (rows + 63) / 64 : 64, blocks = (rows + size - 1) / size;
    REAL *sums = calloc((size_t)blocks * width, sizeof(REAL));
    if (!sums) return 1;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && blocks > 1)
#endif
    for (long block = 0; block < blocks; block++) {
        long stop = (block + 1) * size < rows ? (block + 1) * size : rows;
        REAL *sum = sums + block * width;
        for (long r = block * size; r < stop; r++) {
            const REAL *in = x + r * width, *bar = grad + r * width;
            REAL *in_bar = grad_x + r * width, scale = root(width, in, eps), along = 0;
            for (int i = 0; i < width; i++) {
                REAL through = bar[i] * weight[i];
                sum[i] += bar[i] * in[i] * scale;
                along += through * in[i];
                in_bar[i] = through * scale;
            }
            add(width, -along * scale * scale * scale / width, in, in_bar);
        }
    }
    memset(grad_weight, 0, width * sizeof(REAL));
    for (long block = 0; block < blocks; block++) add(width, 1, sums + block * width, grad_weight);
    free(sums);
    return 0;
}
